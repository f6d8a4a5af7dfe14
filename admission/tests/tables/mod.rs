//! Helpers for the tables of rules and defaults.

use api::{KubeVirt, config::ClusterConfig};
use serde_json::{Value, json};

/// Merges a change into an object (RFC 7386); keys of the change that begin with `$` are not part of it.
pub(crate) fn merge(into: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *into = change.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    let Value::Object(fields) = into else { return };
    for (key, value) in change.iter().filter(|(key, _)| !key.starts_with('$')) {
        if value.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// The configuration that a change is about: its `$config`, or the defaults.
pub(crate) fn configuration(change: &Value) -> ClusterConfig {
    let object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {},
        "spec": {"configuration": change.get("$config").unwrap_or(&json!({}))},
    });
    ClusterConfig::from_kubevirt(&serde_json::from_value::<KubeVirt>(object).unwrap()).unwrap()
}
