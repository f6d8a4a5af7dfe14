//! Tests of decisions about VMIs, by behaviour. Here are the objects that they share.

mod data_volumes;
mod end;
mod hotplug;
mod migration;
mod networks;
mod resize;
mod running;
mod start;
mod state;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;
use crate::runtime::Failure;

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn vmi(change: &Value) -> VirtualMachineInstance {
    let mut vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "m", "namespace": "d", "uid": "u", "resourceVersion": "3",
            "finalizers": ["kubevirt.io/foregroundDeleteVirtualMachine"],
        },
        "spec": {"domain": {"devices": {}, "memory": {"guest": "64Mi"}}},
        "status": {"phase": "Pending"},
    });
    json_patch::merge(&mut vmi, change);
    serde_json::from_value(vmi).unwrap()
}

fn in_phase(phase: &str) -> VirtualMachineInstance {
    vmi(&json!({
        "metadata": {"labels": {"kubevirt.io/nodeName": "n"}},
        "status": {
            "phase": phase, "nodeName": "n", "activePods": {"p": "n"}, "launcherContainerImageVersion": "launcher:1",
            "conditions": [{"type": "Ready", "status": "False", "reason": "GuestNotRunning",
                "message": "Guest VM is not reported as running"}],
        },
    }))
}

fn pod(change: &Value) -> CachedPod {
    let mut pod = json!({
        "metadata": {"name": "virt-launcher-m-x", "namespace": "d", "uid": "p", "creationTimestamp": "2030-01-01T00:00:00Z"},
        "spec": {"nodeName": "n", "containers": [{"name": "compute", "image": "launcher:1"}]},
        "status": {"phase": "Pending", "qosClass": "Burstable", "conditions": [{"type": "PodScheduled", "status": "True"}]},
    });
    json_patch::merge(&mut pod, change);
    CachedPod::from(serde_json::from_value::<Pod>(pod).unwrap())
}

fn running_pod(ready: &Value) -> CachedPod {
    let metadata = json!({
        "labels": {"kubevirt.io/nodeName": "n"},
        "annotations": {
            "pre.hook.backup.velero.io/container": "compute", "descheduler.alpha.kubernetes.io/request-evict-only": "",
        },
    });
    pod(&json!({"metadata": metadata, "status": {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"},
            ready,
        ],
        "containerStatuses": [{"name": "compute", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": {"running": {}}}],
    }}))
}

fn ended_pod(finished: &str) -> CachedPod {
    pod(&json!({"status": {
        "phase": "Failed",
        "containerStatuses": [{"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 1, "finishedAt": finished}}}],
    }}))
}

/// Returns the time since the last launcher has ended, by clocks that agree.
fn ended_for(pods: &[Arc<CachedPod>]) -> Option<Duration> {
    let last = pods.iter().filter_map(|pod| pod.compute_ended.flatten()).max()?;
    Some(now().duration_since(last).unsigned_abs())
}

/// A VMI without pods.
fn observed(instance: &VirtualMachineInstance) -> Observed {
    Observed {
        instance: Arc::new(instance.clone()),
        pods: Vec::new(),
        held: None,
        temporary: Vec::new(),
        data_volumes: DataVolumes::default(),
        warnings: Vec::new(),
        unoffered: Vec::new(),
        attachments: Vec::new(),
        missing: Vec::new(),
        migrations: Vec::new(),
        config: Arc::default(),
        launcher_images: LauncherImages::of_tests("launcher:1"),
        claims: BTreeMap::new(),
        state: State::default(),
        limits: NamespaceLimits::default(),
        frequency: None,
        cid: None,
        definitions: None,
        ended_for: None,
        failures: Failures::default(),
        now: now(),
    }
}

fn decided_after(instance: &VirtualMachineInstance, pods: &[CachedPod], failure: Option<&Failure>) -> Decision {
    let pods: Vec<Arc<CachedPod>> = pods.iter().cloned().map(Arc::new).collect();
    let ended_for = ended_for(&pods);
    decide(&Observed { pods, ended_for, failures: failure.cloned().into(), ..observed(instance) }).unwrap()
}

fn decided(instance: &VirtualMachineInstance, pods: &[CachedPod]) -> Decision {
    decided_after(instance, pods, None)
}

fn patch_of(decision: &Decision, kind: Kind) -> Option<Value> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: found, patch, .. } if *found == kind => Some(patch.clone()),
        _ => None,
    })
}

fn status_of(decision: &Decision) -> Value {
    patch_of(decision, Kind::Instance).unwrap()["status"].clone()
}

fn condition_in(status: &Value, type_: &str) -> Value {
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == type_).unwrap_or(Value::Null)
}
