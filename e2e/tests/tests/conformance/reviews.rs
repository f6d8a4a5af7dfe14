//! Questions.

use std::sync::atomic::{AtomicU32, Ordering};

use admission::WEBHOOKS;
use serde_json::{Value, json};

use crate::objects;

/// A question to a webhook.
#[derive(Clone)]
pub struct Review {
    pub path: &'static str,
    pub uid: String,
    pub request: Value,
}

impl Review {
    /// An operation on an object, as the webhook at `path` is registered for.
    pub fn new(path: &'static str, operation: &str, object: Value, old: Value) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let uid = format!("6a6b1d6c-0b5e-4c43-9d5c-{:012x}", NEXT.fetch_add(1, Ordering::Relaxed));
        let kind = if object.is_object() { object["kind"].clone() } else { old["kind"].clone() };
        let [group, version, plural] = resource(path);
        let resource = json!({"group": group, "version": version, "resource": plural});
        let kind = json!({"group": group, "version": version, "kind": kind});
        let request = json!({
            "uid": uid,
            "kind": kind, "resource": resource, "requestKind": kind, "requestResource": resource,
            "name": "a", "namespace": "default", "operation": operation,
            "userInfo": {"username": "jane", "uid": "1", "groups": ["system:authenticated"], "extra": {"a.b/c": ["d"]}},
            "object": object, "oldObject": old,
            "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1", "fieldManager": "kubectl"},
        });
        Self { path, uid, request }
    }

    /// The creation of an object.
    pub fn create(path: &'static str, object: Value) -> Self {
        Self::new(path, "CREATE", object, Value::Null)
    }

    /// The change of an object.
    pub fn update(path: &'static str, object: Value, old: Value) -> Self {
        Self::new(path, "UPDATE", object, old)
    }

    /// The question as it is sent.
    pub fn wire(&self) -> Value {
        json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": self.request})
    }

    /// The body of the call.
    pub fn body(&self) -> Vec<u8> {
        self.wire().to_string().into_bytes()
    }
}

/// Group, version and plural that the webhook at a path is registered for.
fn resource(path: &str) -> [&'static str; 3] {
    let webhook = WEBHOOKS.iter().find(|webhook| webhook.path == path);
    if let Some((group, plural)) = webhook.and_then(|webhook| webhook.resources.first()) {
        return [group, "v1", plural];
    }
    // Those that look at the resource themselves.
    match path {
        "/virtualmachinepool-validate" => ["pool.kubevirt.io", "v1beta1", "virtualmachinepools"],
        "/migration-policy-validate-create" => ["migrations.kubevirt.io", "v1alpha1", "migrationpolicies"],
        "/pod-eviction-validate" => ["", "v1", "pods"],
        path if path.starts_with("/kubevirt-") => ["kubevirt.io", "v1", "kubevirts"],
        path if path.starts_with("/migration-") => ["kubevirt.io", "v1", "virtualmachineinstancemigrations"],
        _ => ["kubevirt.io", "v1", "virtualmachines"],
    }
}

/// The paths of all webhooks.
pub fn paths() -> impl Iterator<Item = &'static str> {
    WEBHOOKS.iter().map(|webhook| webhook.path)
}

/// Questions that are answered with yes, at least one for each kind of machine.
pub fn good() -> Vec<Review> {
    use objects::{replica_set, vm, vmi};
    vec![
        Review::create("/virtualmachines-mutate", vm()),
        Review::update("/virtualmachines-mutate", vm(), vm()),
        Review::create("/virtualmachines-validate", vm()),
        Review::update("/virtualmachines-validate", vm(), vm()),
        Review::create("/virtualmachineinstances-mutate", vmi()),
        Review::update("/virtualmachineinstances-mutate", vmi(), vmi()),
        Review::create("/virtualmachineinstances-validate-create", vmi()),
        Review::update("/virtualmachineinstances-validate-update", vmi(), vmi()),
        Review::create("/virtualmachinereplicaset-validate", replica_set()),
        Review::update("/virtualmachinereplicaset-validate", replica_set(), replica_set()),
        Review::update("/status-validate", vm(), vm()),
    ]
}

/// Questions that are answered with no.
pub fn bad() -> Vec<Review> {
    use objects::{impossible_vm, replica_set, vm, vmi};
    let with = |mut object: Value, path: &str, value: Value| {
        if let Some(field) = object.pointer_mut(path) {
            *field = value;
        }
        object
    };
    let lost = |object: Value| with(object, "/spec/domain/devices/disks/0/name", json!("lost"));
    vec![
        Review::create("/virtualmachines-validate", impossible_vm()),
        Review::update("/virtualmachines-validate", impossible_vm(), vm()),
        Review::create("/virtualmachines-validate", with(vm(), "/spec/runStrategy", json!("Sometimes"))),
        Review::create("/virtualmachineinstances-validate-create", lost(vmi())),
        Review::update(
            "/virtualmachineinstances-validate-update",
            with(vmi(), "/spec/domain/memory/guest", json!("1Gi")),
            vmi(),
        ),
        Review::create(
            "/virtualmachinereplicaset-validate",
            with(replica_set(), "/spec/selector/matchLabels/app", json!("b")),
        ),
    ]
}
