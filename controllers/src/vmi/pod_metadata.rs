//! Updates of a running launcher pod: readiness gate, labels, annotations.

use api::{
    StartStrategy, VirtualMachineInstance, VmiPhase,
    constants::{annotation, condition, label, reason},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::{Observed, conditions, networks};
use crate::{
    launcher_pod,
    resources::pods::{ANNOTATION_LIMIT, CachedPod, CreatedFor},
    runtime::{Decision, Effect, Kind},
};

/// Updates the pod's readiness gate: a paused VMI gets no traffic. It opens when the pod is bound, since kubelet would notice a later
/// change only at its next sync. The same write has the label of the node. Returns true if there is one.
pub(super) fn readiness_gate(
    instance: &VirtualMachineInstance,
    pod: &CachedPod,
    now: Timestamp,
    decision: &mut Decision,
) -> bool {
    let Some(node) = pod.node_name.as_deref() else { return false };
    let starts = *instance.phase() != VmiPhase::Running;
    let must_wait = starts && (instance.is_deleting() || instance.spec.start_strategy == Some(StartStrategy::Paused));
    if pod.is_going_down() || instance.is_final() || must_wait {
        return false;
    }
    let paused = instance.condition(condition::PAUSED).is_some_and(api::Condition::is_true);
    let (status, reason, message) = if paused {
        ("False", reason::PAUSED, "the virtual machine is paused")
    } else {
        ("True", reason::NOT_PAUSED, "the virtual machine is not paused")
    };
    if pod.unpaused.as_ref().is_some_and(|known| known.status == status) {
        return false;
    }
    let mut patch = json!({"status": {"conditions": [{
        "type": condition::POD_UNPAUSED,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": Time(now),
    }]}});
    if pod.metadata.labels.as_ref().and_then(|labels| labels.get(label::NODE_NAME)).is_none_or(|known| known != node) {
        patch["metadata"] = json!({"labels": {label::NODE_NAME: node}});
    }
    // The kubelet writes pod status often; the list is merged by type, so no lock is needed.
    decision.push(Effect::merge(Kind::Pod, &pod.metadata, patch).by_keys().of_subresource("status").of_any_version());
    true
}

/// Updates labels of the pod about its node and an outdated launcher, and annotations for backups, deschedulers and networks.
/// Only while the VMI runs: nothing needs them before, and they must not delay the start. `labelled`: another write of the decision
/// has the label of the node.
pub(super) fn pod_metadata(observed: &Observed, pod: &CachedPod, labelled: bool, decision: &mut Decision) {
    if pod.is_going_down() || *observed.instance.phase() != VmiPhase::Running {
        return;
    }
    let current = observed.launcher_images.of(&observed.instance.spec);
    let outdated = pod.image.as_deref().is_some_and(|image| image != current);
    let node = (label::NODE_NAME, pod.node_name.as_deref());
    let wanted = [node, (label::OUTDATED_LAUNCHER_IMAGE, outdated.then_some(""))];
    let known = |key: &str| pod.metadata.labels.as_ref()?.get(key).map(String::as_str);
    let labels: serde_json::Map<String, serde_json::Value> = wanted
        .into_iter()
        .filter(|&(key, value)| known(key) != value && !(labelled && key == label::NODE_NAME))
        .map(|(key, value)| (key.to_owned(), json!(value)))
        .collect();
    let mut annotations = backup_annotations(observed, pod);
    annotations.extend(eviction_annotations(&observed.instance, pod));
    if let Some(request) = networks::request(&observed.instance, pod) {
        annotations.extend(other_networks(pod, &request));
        annotations.insert(annotation::NETWORKS.to_owned(), json!(request));
    }
    let mut metadata = serde_json::Map::new();
    for (name, changes) in [("labels", labels), ("annotations", annotations)] {
        if !changes.is_empty() {
            metadata.insert(name.to_owned(), json!(changes));
        }
    }
    if metadata.is_empty() {
        return;
    }
    decision.push(Effect::merge(Kind::Pod, &pod.metadata, json!({"metadata": metadata})).of_any_version());
}

/// Returns the changes of a pod's annotations for backups. All of them change together, so one is compared.
fn backup_annotations(observed: &Observed, pod: &CachedPod) -> serde_json::Map<String, serde_json::Value> {
    let instance = &*observed.instance;
    let hooked = launcher_pod::hooks_backups(instance, &observed.config);
    // Annotations that users set on the VMI stay where ours are turned off.
    let own = |key: &str| {
        instance.metadata.annotations.as_ref()?.get(key).filter(|own| own.len() <= ANNOTATION_LIMIT).cloned()
    };
    let wanted = launcher_pod::backup_hooks(instance)
        .map(|(key, value)| (key.to_owned(), if hooked { Some(value) } else { own(key) }));
    let known = pod.metadata.annotations.as_ref().and_then(|all| all.get(annotation::BACKUP_PRE_CONTAINER));
    if wanted.iter().any(|(key, value)| key == annotation::BACKUP_PRE_CONTAINER && value.as_ref() == known) {
        return serde_json::Map::new();
    }
    wanted.into_iter().map(|(key, value)| (key, json!(value))).collect()
}

/// Returns the changes of a pod's annotations for deschedulers: those of the VMI, and the mark of an eviction.
fn eviction_annotations(
    instance: &VirtualMachineInstance,
    pod: &CachedPod,
) -> serde_json::Map<String, serde_json::Value> {
    let said = |key: &str| {
        let value = instance.metadata.annotations.as_ref()?.get(key).map(String::as_str);
        // A longer one of the pod is not kept, so it would be written again and again.
        value.filter(|value| value.len() <= ANNOTATION_LIMIT)
    };
    let leaves = conditions::is_marked_for_eviction(instance);
    let wanted = [
        (annotation::DESCHEDULER_EVICT, said(annotation::DESCHEDULER_EVICT)),
        (annotation::DESCHEDULER_PREFER_NO_EVICTION, said(annotation::DESCHEDULER_PREFER_NO_EVICTION)),
        (annotation::DESCHEDULER_EVICTION_IN_PROGRESS, leaves.then_some("true")),
        // Without it the descheduler does not wait for the migration.
        (annotation::DESCHEDULER_REQUEST_EVICT_ONLY, Some("")),
    ];
    let known = |key: &str| pod.metadata.annotations.as_ref()?.get(key).map(String::as_str);
    let changes = wanted.into_iter().filter(|&(key, value)| known(key) != value);
    changes.map(|(key, value)| (key.to_owned(), json!(value))).collect()
}

/// Returns the annotation of a pod that gets other networks than those for which it was created.
fn other_networks(pod: &CachedPod, request: &str) -> Option<(String, serde_json::Value)> {
    let created_for = pod.created_for.as_deref()?;
    let digest = created_for.networks.as_ref()?;
    let changed = CreatedFor { networks: None, ..created_for.clone() };
    (launcher_pod::networks_digest(request) != *digest)
        .then(|| (annotation::CREATED_FOR.to_owned(), json!(json!(changed).to_string())))
}

/// Returns the memory overhead with which a pod was rendered.
pub(super) fn memory_overhead(pod: &CachedPod) -> Option<i64> {
    pod.metadata.annotations.as_ref()?.get(annotation::MEMORY_OVERHEAD_BYTES)?.parse().ok()
}
