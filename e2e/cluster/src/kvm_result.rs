//! The result of the check of KVM, which is valid until the host reboots.

use std::fs;

use serde_json::{Value, json};

use crate::plan::Plan;

const FILE: &str = "kvm.json";

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Returns the result of a former check on this boot of the host.
pub(crate) fn read(plan: &Plan) -> Option<bool> {
    parse(&fs::read_to_string(plan.build().join(FILE)).ok()?, &boot())
}

/// Keeps a result. Without it the check runs again.
pub(crate) fn write(plan: &Plan, usable: bool) {
    let _ = fs::write(plan.build().join(FILE), json!({"boot": boot(), "usable": usable}).to_string());
}

fn parse(text: &str, boot: &str) -> Option<bool> {
    let value: Value = serde_json::from_str(text).ok()?;
    (value["boot"].as_str()? == boot).then(|| value["usable"].as_bool()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_is_cached_for_the_same_boot_only() {
        let text = json!({"boot": "one", "usable": true}).to_string();
        assert_eq!(parse(&text, "one"), Some(true));
        assert_eq!(parse(&text, "two"), None);
        assert_eq!(parse("not json", "one"), None);
    }
}
