//! Reviews.

use std::sync::atomic::{AtomicU32, Ordering};

use admission::WEBHOOKS;
use serde_json::{Value, json};

use crate::objects;

/// A request to a webhook.
#[derive(Clone)]
pub(crate) struct Review {
    pub path: &'static str,
    pub uid: String,
    pub request: Value,
}

impl Review {
    /// Returns an operation on an object for which the webhook at `path` is registered.
    pub(crate) fn new(path: &'static str, operation: &str, object: Value, old: Value) -> Self {
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

    /// Returns the creation of an object.
    pub(crate) fn create(path: &'static str, object: Value) -> Self {
        Self::new(path, "CREATE", object, Value::Null)
    }

    /// Returns the update of an object.
    pub(crate) fn update(path: &'static str, object: Value, old: Value) -> Self {
        Self::new(path, "UPDATE", object, old)
    }

    /// Returns the AdmissionReview.
    pub(crate) fn wire(&self) -> Value {
        json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": self.request})
    }

    /// Returns the body of the call.
    pub(crate) fn body(&self) -> Vec<u8> {
        self.wire().to_string().into_bytes()
    }
}

/// Returns group, version and plural of the webhook at a path.
fn resource(path: &str) -> [&'static str; 3] {
    let webhook = WEBHOOKS.iter().find(|webhook| webhook.path == path);
    if let Some((group, plural)) = webhook.and_then(|webhook| webhook.resource) {
        return [group, "v1", plural];
    }
    // These webhooks check the resource.
    match path {
        "/virtualmachinepool-validate" => ["pool.kubevirt.io", "v1beta1", "virtualmachinepools"],
        "/migration-policy-validate-create" => ["migrations.kubevirt.io", "v1alpha1", "migrationpolicies"],
        "/pod-eviction-validate" => ["", "v1", "pods"],
        path if path.starts_with("/kubevirt-") => ["kubevirt.io", "v1", "kubevirts"],
        path if path.starts_with("/migration-") => ["kubevirt.io", "v1", "virtualmachineinstancemigrations"],
        _ => ["kubevirt.io", "v1", "virtualmachines"],
    }
}

/// Paths of all webhooks.
pub(crate) fn paths() -> impl Iterator<Item = &'static str> {
    WEBHOOKS.iter().map(|webhook| webhook.path)
}

/// Returns requests that are allowed, at least one of each kind.
pub(crate) fn good() -> Vec<Review> {
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

/// Returns requests that are denied.
pub(crate) fn bad() -> Vec<Review> {
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
