//! Snapshots, restores, exports, backups, clones and plugins: cases that the tables of rules do not cover.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use admission::{AdmissionReview, Lookups, handle};
use api::config::ClusterConfig;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

/// Returns the response of the webhook at `path`, with all feature gates on, to a changed object (a new one without old
/// spec).
fn review(path: &str, resource: &str, old: Option<Value>, spec: Value) -> AdmissionReview {
    let (group, plural) = resource.split_once('/').unwrap();
    let object = |spec: Value| {
        json!({
            "apiVersion": format!("{group}/v1"),
            "kind": "Any",
            "metadata": {"name": "new", "namespace": "default"},
            "spec": spec,
        })
    };
    let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u",
        "resource": {"group": group, "version": "v1", "resource": plural},
        "namespace": "default",
        "operation": if old.is_some() { "UPDATE" } else { "CREATE" },
        "object": object(spec),
        "oldObject": old.map(object),
    }});
    let gates = ["IncrementalBackup", "OCIExport", "Plugins"];
    let config = ClusterConfig { feature_gates: gates.map(str::to_owned).to_vec(), ..ClusterConfig::default() };
    handle(path, body.to_string().as_bytes(), &config, "kubevirt", &Lookups::new()).unwrap().review
}

fn vm(name: &str) -> Value {
    json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name})
}

#[test]
fn other_groups_are_refused() {
    for (path, plural, message) in [
        (
            "/virtualmachinesnapshots-validate",
            "virtualmachinesnapshots",
            "unexpected resource {Group:other.io Version:v1 Resource:virtualmachinesnapshots}",
        ),
        (
            "/virtualmachinerestores-validate",
            "virtualmachinerestores",
            "unexpected resource {Group:other.io Version:v1 Resource:virtualmachinerestores}",
        ),
        (
            "/vm-clone-validate-create",
            "virtualmachineclones",
            "unexpected group: other.io. Expected group: clone.kubevirt.io",
        ),
        ("/vm-clone-mutate-create", "virtualmachineclones", "expect resource to be 'virtualmachineclones'"),
        ("/plugin-validate", "plugins", "unexpected group: other.io, expected: plugin.kubevirt.io"),
    ] {
        let status = review(path, &format!("other.io/{plural}"), None, json!({})).response.status.unwrap();
        assert_eq!((status.code, status.message.as_str()), (400, message), "{path}");
    }
}

#[test]
fn changed_backups_and_trackers_are_allowed() {
    for plural in ["virtualmachinebackups", "virtualmachinebackuptrackers"] {
        let path = format!("/{plural}-validate");
        let (old, new) = (json!({"source": vm("a")}), json!({"source": vm("b")}));
        assert!(review(&path, &format!("backup.kubevirt.io/{plural}"), Some(old), new).response.allowed);
    }
}

fn plugin(old: Option<Value>, spec: Value) -> AdmissionReview {
    review("/plugin-validate", "plugin.kubevirt.io/plugins", old, spec)
}

#[test]
fn changed_plugin_without_hooks_warns() {
    let review = plugin(Some(json!({})), json!({}));
    assert!(review.response.allowed);
    assert_eq!(
        review.response.warnings,
        ["no hooks or admission references are defined; this plugin will have no effect"]
    );
    let hooked = json!({"validatingAdmissionPolicies": [{"name": "p"}]});
    assert!(plugin(Some(hooked.clone()), hooked).response.warnings.is_empty());
}

#[test]
fn denial_of_a_plugin_has_the_first_message() {
    let review = plugin(None, json!({"failureStrategy": "a", "domainHooks": [{}]}));
    let status = serde_json::to_value(&review).unwrap()["response"]["status"].clone();
    assert_eq!(status["message"], "failureStrategy must be either 'Fail' or 'Ignore'");
    assert_eq!(status["reason"], "Invalid");
    assert_eq!(status["details"]["causes"].as_array().unwrap().len(), 2);
    assert_eq!(status.get("code"), None);
}

/// Returns the patch of a new clone by its mutating webhook.
fn clone_patch(spec: Value) -> Vec<Value> {
    let review = review("/vm-clone-mutate-create", "clone.kubevirt.io/virtualmachineclones", None, spec);
    assert!(review.response.allowed, "{:?}", review.response.status);
    match review.response.patch {
        Some(patch) => serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap(),
        None => vec![],
    }
}

#[test]
fn clone_targets_without_a_name_get_one() {
    let is_generated = |name: &Value| {
        let suffix = name.as_str().unwrap().strip_prefix("clone-web-").unwrap();
        suffix.len() == 5 && suffix.bytes().all(|byte| b"bcdfghjklmnpqrstvwxz2456789".contains(&byte))
    };
    let patch = clone_patch(json!({"source": vm("web")}));
    assert_eq!((&patch[0]["op"], &patch[0]["path"]), (&json!("add"), &json!("/spec/target")));
    assert_eq!(patch[0]["value"]["kind"], "VirtualMachine");
    assert_eq!(patch[0]["value"]["apiGroup"], "kubevirt.io");
    assert!(is_generated(&patch[0]["value"]["name"]), "{patch:?}");

    let patch = clone_patch(json!({"source": vm("web"), "target": {"kind": "VirtualMachine", "name": ""}}));
    assert_eq!((&patch[0]["op"], &patch[0]["path"]), (&json!("replace"), &json!("/spec/target/name")));
    assert!(is_generated(&patch[0]["value"]), "{patch:?}");

    assert!(clone_patch(json!({"source": vm("web"), "target": vm("copy")})).is_empty());
    assert!(clone_patch(json!({"target": {"kind": "VirtualMachine", "name": ""}})).is_empty());
}
