//! `check-uninstall`: VMIs that run.

use api::VirtualMachineInstance;
use kube::{Api, ResourceExt};

use super::{HookError, for_each};

/// Most VMIs named in the error.
const MAX_NAMED: usize = 10;

/// Fails while VMIs run. `keep` is the command that reverts the attempt to uninstall: Helm marks a release before it runs the
/// hooks, and only a rollback to the revision removes the mark.
pub async fn check_uninstall(keep: String) -> Result<(), HookError> {
    let client = daemon::client::connect().await?;
    let mut running = Vec::new();
    for_each(&Api::<VirtualMachineInstance>::all(client), |vmi| {
        if is_running(vmi) {
            running.push(format!("{}/{}", vmi.namespace().unwrap_or_default(), vmi.name_any()));
        }
    })
    .await?;
    if running.is_empty() {
        return Ok(());
    }
    let count = running.len();
    running.truncate(MAX_NAMED);
    Err(HookError::Running { count, named: running, keep })
}

fn is_running(vmi: &VirtualMachineInstance) -> bool {
    !vmi.status.as_ref().and_then(|status| status.phase.as_ref()).is_some_and(api::enums::VmiPhase::is_final)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn vmi_runs_until_it_ends() {
        let vmi = |status: Value| -> VirtualMachineInstance {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"},
                "spec": {"domain": {"devices": {}}}, "status": status,
            }))
            .unwrap()
        };
        for (phase, running) in
            [("Pending", true), ("Running", true), ("Unknown", true), ("Succeeded", false), ("Failed", false)]
        {
            assert_eq!(is_running(&vmi(json!({"phase": phase}))), running, "{phase}");
        }
        assert!(is_running(&vmi(json!({}))));
    }

    #[test]
    fn error_names_some_vmis_and_the_alternatives() {
        let error =
            HookError::Running { count: 12, named: vec!["a/b".into(), "a/c".into()], keep: "helm rollback r 1".into() };
        let text = error.to_string();
        assert!(text.starts_with("12 virtual machines are running"), "{text}");
        assert!(text.contains("a/b, a/c, ..."), "{text}");
        assert!(text.contains("--no-hooks"), "{text}");
        assert!(text.contains("`helm rollback r 1`"), "{text}");
    }
}
