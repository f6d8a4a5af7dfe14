//! Tests of decisions about migrations, by behaviour. Here are the objects that they share.

mod end;
mod gate;
mod limits;
mod phases;
mod state_claim;
mod target;
mod waits;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;

fn now() -> Timestamp {
    "2030-01-01T00:10:00Z".parse().unwrap()
}

/// A VMI that runs on node `a` in pod `p`.
fn vmi(change: &Value) -> VirtualMachineInstance {
    let mut vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "d", "uid": "u", "resourceVersion": "3",
            "labels": {"kubevirt.io/nodeName": "a"}},
        "spec": {"domain": {"devices": {}, "cpu": {"model": "Haswell"}, "memory": {"guest": "64Mi"}}},
        "status": {"phase": "Running", "nodeName": "a", "activePods": {"p": "a"}},
    });
    json_patch::merge(&mut vmi, change);
    serde_json::from_value(vmi).unwrap()
}

/// A VMI whose migration was handed over.
fn handed(state: &Value) -> VirtualMachineInstance {
    let mut all = json!({"migrationUid": "g", "sourceNode": "a", "targetNode": "b", "sourcePod": "virt-launcher-m-p",
        "targetPod": "virt-launcher-m-t"});
    json_patch::merge(&mut all, state);
    vmi(&json!({
        "metadata": {"labels": {"kubevirt.io/migrationTargetNodeName": "b"}},
        "status": {"migrationState": all, "activePods": {"t": "b"}},
    }))
}

fn migration(phase: &str, change: &Value) -> VirtualMachineInstanceMigration {
    let mut migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "mig", "namespace": "d", "uid": "g", "resourceVersion": "5",
            "creationTimestamp": "2030-01-01T00:09:00Z", "finalizers": ["kubevirt.io/migrationJobFinalize"]},
        "spec": {"vmiName": "m"},
    });
    if !phase.is_empty() {
        migration["status"] = json!({"phase": phase, "migrationState": {"sourcePod": "virt-launcher-m-p"},
            "phaseTransitionTimestamps": [{"phase": phase, "phaseTransitionTimestamp": "2030-01-01T00:09:30Z"}]});
    }
    json_patch::merge(&mut migration, change);
    serde_json::from_value(migration).unwrap()
}

fn deleted() -> Value {
    json!({"metadata": {"deletionTimestamp": "2030-01-01T00:09:50Z"}})
}

fn pod(name: &str, node: &str, change: &Value) -> Arc<CachedPod> {
    changed_pod(name, node, &[change])
}

fn changed_pod(name: &str, node: &str, changes: &[&Value]) -> Arc<CachedPod> {
    let mut pod = json!({
        "metadata": {"name": format!("virt-launcher-m-{name}"), "namespace": "d", "uid": name,
            "creationTimestamp": "2030-01-01T00:00:00Z"},
        "spec": {"nodeName": node, "containers": [{"name": "compute", "image": "launcher:1"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "compute", "ready": true, "restartCount": 0,
            "image": "", "imageID": "", "state": {"running": {}}}]},
    });
    for change in changes {
        json_patch::merge(&mut pod, change);
    }
    Arc::new(CachedPod::from(serde_json::from_value::<Pod>(pod).unwrap()))
}

fn source() -> Arc<CachedPod> {
    pod("p", "a", &json!({}))
}

fn target(change: &Value) -> Arc<CachedPod> {
    let all = json!({"metadata": {"creationTimestamp": "2030-01-01T00:09:30Z",
        "labels": {"kubevirt.io/migrationJobUID": "g"},
        "annotations": {"kubevirt.io/memory-overhead-bytes": "1000"}}});
    changed_pod("t", "b", &[&all, change])
}

fn pending_target() -> Arc<CachedPod> {
    target(&json!({"spec": {"nodeName": null}, "status": {"phase": "Pending", "containerStatuses": null}}))
}

fn observed(
    migration: &VirtualMachineInstanceMigration,
    vmi: Option<&VirtualMachineInstance>,
    pods: &[Arc<CachedPod>],
) -> Observed {
    Observed {
        migration: Arc::new(migration.clone()),
        vmi: vmi.cloned().map(Arc::new),
        all: Vec::new(),
        pods: pods.to_vec(),
        warnings: Vec::new(),
        unoffered: Vec::new(),
        attachments: Vec::new(),
        is_admitted: true,
        by_status: false,
        full: None,
        held: None,
        held_since: None,
        is_reported: false,
        source_node: None,
        is_target_drained: false,
        policies: Vec::new(),
        namespace: BTreeMap::new(),
        claims: BTreeMap::new(),
        claims_of_state: State::default(),
        recovery: None,
        tolerations: Vec::new(),
        limits: NamespaceLimits::default(),
        definitions: None,
        config: Arc::default(),
        launcher_images: LauncherImages::of_tests("launcher:1"),
        failures: Failures::default(),
        silence: None,
        now: now(),
    }
}

fn decided(
    migration: &VirtualMachineInstanceMigration,
    vmi: Option<&VirtualMachineInstance>,
    pods: &[Arc<CachedPod>],
) -> Decision {
    decide(&observed(migration, vmi, pods)).unwrap()
}

fn patch_of(decision: &Decision, wanted: Kind) -> Option<Value> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind, patch, .. } if *kind == wanted => Some(patch.clone()),
        _ => None,
    })
}

/// Returns the phases that a decision enters.
fn entered(decision: &Decision, before: usize) -> Vec<String> {
    let patch = patch_of(decision, Kind::Migration).unwrap_or_default();
    let times = patch["status"]["phaseTransitionTimestamps"].as_array().cloned().unwrap_or_default();
    times.iter().skip(before).map(|entry| entry["phase"].as_str().unwrap().to_owned()).collect()
}

/// Returns the messages of all events of a decision.
fn messages(decision: &Decision) -> Vec<String> {
    let of = |effect: &Effect| match effect {
        Effect::Event(event) => Some(event.message.clone()),
        Effect::Create { options, .. } | Effect::Patch { options, .. } | Effect::Delete { options, .. } => {
            options.success.as_ref().map(|event| event.message.clone())
        }
        _ => None,
    };
    decision.effects.iter().filter_map(of).collect()
}

fn deleted_pods(decision: &Decision) -> Vec<String> {
    let name = |effect: &Effect| match effect {
        Effect::Delete { kind: Kind::Pod, name, .. } => Some(name.clone()),
        _ => None,
    };
    decision.effects.iter().filter_map(name).collect()
}

fn created_pod(decision: &Decision) -> Option<Value> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::Create { kind: Kind::Pod, object, .. } => Some(object.clone()),
        _ => None,
    })
}
