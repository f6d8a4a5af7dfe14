//! The chart registers exactly the webhooks that are served: an unregistered one checks nothing, and a registered one that is
//! not served fails every request.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use std::{collections::BTreeSet, fs, path::Path};

use admission::WEBHOOKS;

#[test]
fn chart_registers_all_webhooks() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/ferrovirt/templates/webhooks.yaml");
    let text = fs::read_to_string(file).unwrap();
    let registered: BTreeSet<&str> =
        text.split("\"path\" \"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let served: BTreeSet<&str> = WEBHOOKS.iter().map(|webhook| webhook.path).collect();
    assert_eq!(registered, served);
}
