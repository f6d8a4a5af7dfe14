//! Machines: their launcher pods, their phases as far as the cluster decides them, their conditions.
//!
//! ```text
//!            pod bound to a node,          handler (or launcher ready)      handler
//!  Pending ───────────────────> Scheduling ────────────────────> Scheduled ─────────> Running
//!     │    or waits for one        │                                │                    │
//!     │                            │ pod ended or gone              │ pod gone           │ guest ended: handler
//!     v                            v                                v                    v pod gone: Failed
//!   Failed <───────────────────────┴────────────────────────────────┴──────────── Succeeded / Failed
//! ```
//! A pod is created once in the life of a machine: only while its phase is Pending and it has none.
//! A pod that its watch does not show any more is gone only if its end was seen or the API server says so: until then nothing is decided,
//! since a second launcher beside a first one without its label would destroy the volumes.
//! The node agent owns everything from Scheduled on; this controller only ends machines whose pod is gone.

mod conditions;
mod networks;
mod phase;
#[cfg(test)]
mod tests;
mod volumes;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    VirtualMachineInstance, VmiPhase,
    config::ClusterConfig,
    constants::{annotation, condition, event, finalizer, label, reason},
    tsc::{self, Need},
    vmi::status::VirtualMachineInstancePhaseTransitionTimestamp,
    vsock,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

pub(crate) use self::volumes::claim_name;
use crate::{
    launcher_pod::{self, Inputs, NamespaceLimits, RenderError},
    runtime::{Decision, Effect, Failure, Kind, Note},
    views::{ANNOTATION_LIMIT, ClaimView, DefinitionView, PodView},
};

/// Everything a decision about a machine rests on.
pub struct Observed<'a> {
    /// The machine.
    pub instance: &'a VirtualMachineInstance,
    /// Pods it controls.
    pub pods: &'a [Arc<PodView>],
    /// UIDs of its pods that its status names, that no watch shows, and whose end was not seen.
    pub missing: &'a [String],
    /// Configuration in force.
    pub config: &'a ClusterConfig,
    /// Launcher image of this installation.
    pub launcher_image: &'a str,
    /// Claims of the namespace that the machine names.
    pub claims: &'a BTreeMap<String, Arc<ClaimView>>,
    /// Limits the namespace makes necessary.
    pub limits: NamespaceLimits,
    /// Frequency of the time stamp counter for a machine that has none yet and needs one, if nodes offer any.
    pub frequency: Option<i64>,
    /// Context id for a machine with a VSOCK device that has not started, which may be the one it has.
    pub cid: Option<u32>,
    /// Definitions of the machine's networks, where what they need of a node is asked for here.
    pub definitions: Option<&'a BTreeMap<String, Arc<DefinitionView>>>,
    /// The last write for this machine that was refused.
    pub failure: Option<&'a Failure>,
    /// Now.
    pub now: Timestamp,
}

/// Reason of a machine that no node can be found for, as the reference spells it.
const NO_HINTS: &str = "FailedGatherhingClusterTopologyHints";
/// Wait after a search for pods.
const AFTER_SEARCH: Duration = Duration::from_millis(500);
/// Wait for a context id that is free.
const NO_CID_WAIT: Duration = Duration::from_secs(1);

/// An error that shows in condition Synchronized.
pub(crate) struct SyncError {
    reason: String,
    message: String,
}

/// Decides what to do about a machine.
pub fn decide(observed: &Observed<'_>) -> Result<Decision, serde_json::Error> {
    let instance = observed.instance;
    let mut decision = Decision::settled();
    let mut error = None;
    decision.effects.extend(restorations(observed));
    if !decision.effects.is_empty() {
        // The result of a search by UID alone wakes nobody.
        decision.wake(AFTER_SEARCH);
        return Ok(decision);
    }

    let mut wanted = instance.clone();
    let (own, surplus) = split_surplus(instance, observed.pods);
    if instance.is_deleting() {
        delete_pods(observed, observed.pods.iter().map(Arc::as_ref), &mut decision);
    } else {
        delete_pods(observed, surplus.into_iter(), &mut decision);
        if observed.pods.is_empty() && is_unstarted(instance) {
            let known = choose_frequency(observed, &mut wanted, &mut decision)
                .and_then(|known| Ok(choose_cid(observed, &mut wanted, &mut decision)? && known));
            error = match known {
                Ok(true) => create_pod(observed, &mut decision)?,
                Ok(false) => None,
                Err(error) => Some(error),
            };
        }
    }

    let pod = current_pod(instance, &own);
    phase::advance(observed, pod, &mut wanted, &mut decision);
    conditions::update(observed, pod, error.as_ref(), &mut wanted);
    derived_status(observed, &own, pod, &mut wanted);
    finalizers(observed, &mut wanted);
    stamp_phase(instance, &mut wanted, observed.now);

    // A pod that was decided on first, so that its machine's status never delays a start.
    if let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? {
        decision.push(tell_of_failure(instance, &wanted, change));
    }
    if let Some(pod) = pod {
        readiness_gate(instance, pod, observed.now, &mut decision);
        pod_metadata(observed, pod, &mut decision);
    }
    Ok(decision)
}

/// Looks for pods that no watch shows.
fn restorations(observed: &Observed<'_>) -> Vec<Effect> {
    let metadata = &observed.instance.metadata;
    let restore = |name: Option<String>, uids: Vec<String>| Effect::Restore {
        namespace: metadata.namespace.clone(),
        name,
        uids,
        labels: launcher_pod::identity_labels(observed.instance),
        owner: Kind::Instance.owner_reference(metadata),
    };
    let unseen = observed.pods.iter().filter(|pod| pod.unseen);
    let known = unseen.map(|pod| restore(pod.metadata.name.clone(), pod.metadata.uid.iter().cloned().collect()));
    let missing = (!observed.missing.is_empty()).then(|| restore(None, observed.missing.to_vec()));
    known.chain(missing).collect()
}

/// Tells of the end of a machine that its node's agent did not record. Whoever waits for the event of a machine that ended
/// badly need not know which of the two noticed.
fn tell_of_failure(instance: &VirtualMachineInstance, wanted: &VirtualMachineInstance, change: Effect) -> Effect {
    let started = matches!(instance.phase(), VmiPhase::Scheduled | VmiPhase::Running);
    if !started || instance.is_deleting() || *wanted.phase() != VmiPhase::Failed {
        return change;
    }
    let regarding = Kind::Instance.reference(&instance.metadata);
    change.on_success(Note::warning(regarding, event::STOPPED, "The VirtualMachineInstance crashed."))
}

fn is_unstarted(instance: &VirtualMachineInstance) -> bool {
    matches!(instance.phase(), VmiPhase::Unset | VmiPhase::Pending)
}

/// The machine's own pods, and those that must not be there. A pod whose creation was not answered in time may come
/// into being after another was made in its place: the first that became the machine's stays, later ones go.
fn split_surplus<'a>(
    instance: &VirtualMachineInstance,
    pods: &'a [Arc<PodView>],
) -> (Vec<&'a PodView>, Vec<&'a PodView>) {
    let status = instance.status.as_ref();
    if status.is_some_and(|status| status.migration_state.is_some()) {
        return (pods.iter().map(Arc::as_ref).collect(), Vec::new());
    }
    let active = status.map(|status| &status.active_pods).filter(|active| !active.is_empty());
    let first = pods
        .iter()
        .min_by_key(|pod| (pod.metadata.creation_timestamp.as_ref().map(|at| at.0), pod.metadata.name.clone()));
    let first = first.and_then(|pod| pod.metadata.uid.as_deref());
    let is_own = |pod: &&PodView| {
        let uid = pod.metadata.uid.as_deref();
        match active {
            Some(active) => uid.is_some_and(|uid| active.contains_key(uid)),
            None => uid == first,
        }
    };
    let (own, others): (Vec<_>, Vec<_>) = pods.iter().map(Arc::as_ref).partition(is_own);
    // One that is down is neither: it does not end the machine, and whoever wants to may still read its log.
    (own, others.into_iter().filter(|pod| !pod.is_down()).collect())
}

/// The pod that runs the machine: the newest of its own; once its node is known, the newest there.
fn current_pod<'a>(instance: &VirtualMachineInstance, pods: &[&'a PodView]) -> Option<&'a PodView> {
    let node = instance.status.as_ref().and_then(|status| status.node_name.as_deref()).filter(|name| !name.is_empty());
    pods.iter()
        .copied()
        .filter(|pod| node.is_none() || pod.node_name.as_deref() == node)
        .max_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|at| at.0))
}

/// Chooses the frequency that the counter of a machine is to have, if it needs one: before its pod is made, which looks for
/// a node by it. True when the pod can be made.
fn choose_frequency(
    observed: &Observed<'_>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<bool, SyncError> {
    let instance = observed.instance;
    let need = tsc::need(instance);
    if need == Need::Nothing || tsc::frequency(instance).is_some() {
        return Ok(true);
    }
    if observed.frequency.is_some() {
        let hints = wanted.status.get_or_insert_default().topology_hints.get_or_insert_default();
        hints.tsc_frequency = observed.frequency;
        return Ok(false);
    }
    // An emulated processor does not depend on the node.
    if need == Need::Migration || observed.config.use_emulation {
        return Ok(true);
    }
    // A node with a counter wakes this machine up.
    let message = "no node that takes machines tells the frequency of its time stamp counter".to_owned();
    if !shows(instance, NO_HINTS, &message) {
        let regarding = Kind::Instance.reference(&instance.metadata);
        decision.push(Effect::Event(Note::warning(regarding, NO_HINTS, message.clone())));
    }
    Err(SyncError { reason: NO_HINTS.to_owned(), message })
}

/// Gives a machine with a VSOCK device its context id, before its pod is made: the launcher must find it. True when the pod
/// can be made.
fn choose_cid(
    observed: &Observed<'_>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<bool, SyncError> {
    if !vsock::is_attached(observed.instance) {
        return Ok(true);
    }
    let Some(cid) = observed.cid else {
        decision.wake(NO_CID_WAIT);
        let message = "no VSOCK context id was found to be free".to_owned();
        return Err(SyncError { reason: reason::FAILED_CREATE.to_owned(), message });
    };
    if vsock::cid(observed.instance) == Some(cid) {
        return Ok(true);
    }
    wanted.status.get_or_insert_default().vsock_cid = Some(cid);
    Ok(false)
}

fn create_pod(observed: &Observed<'_>, decision: &mut Decision) -> Result<Option<SyncError>, serde_json::Error> {
    let instance = observed.instance;
    let regarding = || Kind::Instance.reference(&instance.metadata);
    let inputs = Inputs {
        instance,
        config: observed.config,
        launcher_image: observed.launcher_image,
        claims: observed.claims,
        limits: observed.limits,
        definitions: observed.definitions,
    };
    let pod = match launcher_pod::render(&inputs) {
        Ok(pod) => pod,
        Err(RenderError::ClaimNotFound(claim)) => {
            let namespace = instance.metadata.namespace.as_deref().unwrap_or_default();
            let message = format!("PVC {namespace}/{claim} does not exist, waiting for it to appear");
            // The claim's appearance wakes this machine up; the event is told once per change of the condition.
            if !shows(instance, reason::FAILED_PVC_NOT_FOUND, &message) {
                decision.push(Effect::Event(Note::normal(regarding(), reason::FAILED_PVC_NOT_FOUND, message.clone())));
            }
            return Ok(Some(SyncError { reason: reason::FAILED_PVC_NOT_FOUND.to_owned(), message }));
        }
        Err(other) => {
            let message = format!("failed to render launch manifest: {other}");
            if !shows(instance, event::FAILED_CREATE, &message) {
                decision.push(Effect::Event(Note::warning(regarding(), event::FAILED_CREATE, message.clone())));
            }
            return Ok(Some(SyncError { reason: reason::FAILED_CREATE.to_owned(), message }));
        }
    };
    let failure = observed.failure.filter(|failure| failure.reason == event::FAILED_CREATE);
    if let Some(failure) = failure.filter(|failure| failure.blocks(observed.now)) {
        decision.wake(failure.remaining(observed.now));
    } else {
        let effect = Effect::create(Kind::Pod, instance.metadata.namespace.as_deref(), &pod)?
            .on_success(Note::normal(regarding(), event::SUCCESSFUL_CREATE, "Created virtual machine pod {name}"))
            .on_failure(Note::warning(regarding(), event::FAILED_CREATE, "Error creating pod: {error}"));
        decision.push(effect);
    }
    Ok(failure.map(|failure| SyncError {
        reason: reason::FAILED_CREATE.to_owned(),
        message: format!("failed to create virtual machine pod: {}", failure.message),
    }))
}

/// True when condition Synchronized says this already.
fn shows(instance: &VirtualMachineInstance, reason: &str, message: &str) -> bool {
    instance.condition(condition::SYNCHRONIZED).is_some_and(|condition| {
        condition.reason.as_deref() == Some(reason) && condition.message.as_deref() == Some(message)
    })
}

fn delete_pods<'a>(observed: &Observed<'_>, pods: impl Iterator<Item = &'a PodView>, decision: &mut Decision) {
    for pod in pods.filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let regarding = || Kind::Instance.reference(&observed.instance.metadata);
        let failure = observed.failure.filter(|failure| failure.reason == event::FAILED_DELETE);
        if let Some(failure) = failure.filter(|failure| failure.blocks(observed.now)) {
            decision.wake(failure.remaining(observed.now));
            continue;
        }
        decision.push(
            Effect::delete(Kind::Pod, &pod.metadata)
                .on_success(Note::normal(
                    regarding(),
                    event::SUCCESSFUL_DELETE,
                    format!("Deleted virtual machine pod {name}"),
                ))
                .on_failure(Note::warning(
                    regarding(),
                    event::FAILED_DELETE,
                    format!("Failed to delete virtual machine pod {name}"),
                )),
        );
    }
}

/// Status that follows from the pod. Waits for the first write that has another cause, as one write tells it all.
fn derived_status(
    observed: &Observed<'_>,
    own: &[&PodView],
    pod: Option<&PodView>,
    wanted: &mut VirtualMachineInstance,
) {
    let started = !matches!(wanted.phase(), VmiPhase::Unset | VmiPhase::Pending);
    if !started || wanted.is_final() {
        return;
    }
    let status = wanted.status.get_or_insert_default();
    let active: BTreeMap<String, String> = own
        .iter()
        .filter(|pod| !matches!(pod.phase.as_str(), "Succeeded" | "Failed"))
        .filter_map(|pod| Some((pod.metadata.uid.clone()?, pod.node_name.clone().unwrap_or_default())))
        .collect();
    if !active.is_empty() {
        status.active_pods = active;
    }
    volumes::tell_claims(&observed.instance.spec.volumes, observed.claims, &mut status.volume_status);
    let Some(pod) = pod else { return };
    if let Some(attached) = &pod.networks {
        let spec = &observed.instance.spec;
        networks::tell(&spec.networks, &spec.domain.devices.interfaces, attached, &mut status.interfaces);
    }
    if let Some(image) = &pod.image {
        status.launcher_container_image_version = Some(image.clone());
        let outdated = image != observed.launcher_image;
        let labels = &mut wanted.metadata.labels;
        if outdated {
            labels.get_or_insert_default().insert(label::OUTDATED_LAUNCHER_IMAGE.to_owned(), String::new());
        } else if let Some(labels) = labels {
            // Without labels there are none to write: the API server would keep no empty list, and be sent one again.
            labels.remove(label::OUTDATED_LAUNCHER_IMAGE);
        }
    }
}

fn finalizers(observed: &Observed<'_>, wanted: &mut VirtualMachineInstance) {
    if let Some(list) = &mut wanted.metadata.finalizers
        && let Some(legacy) = list.iter().position(|name| name == finalizer::VMI_LEGACY)
    {
        list.remove(legacy);
        if !list.iter().any(|name| name == finalizer::VMI) {
            list.push(finalizer::VMI.to_owned());
        }
    }
    if !wanted.is_final() || !observed.pods.is_empty() {
        return;
    }
    let Some(list) = &mut wanted.metadata.finalizers else { return };
    // A machine that has ended keeps its finalizers until it has no pod; it has none here. That of its VM is of no more
    // use then: the VM has been shown the end by the same caches, and writes it down before it deletes the machine.
    list.retain(|name| ![finalizer::VMI, finalizer::VMI_LEGACY, finalizer::VM].contains(&name.as_str()));
    if list.is_empty() {
        wanted.metadata.finalizers = None;
    }
    if let Some(labels) = &mut wanted.metadata.labels {
        labels.remove(label::OUTDATED_LAUNCHER_IMAGE);
    }
    if let Some(status) = &mut wanted.status {
        status.launcher_container_image_version = None;
        status.active_pods.clear();
    }
}

/// Notes the time of a phase that was not entered before.
fn stamp_phase(former: &VirtualMachineInstance, wanted: &mut VirtualMachineInstance, now: Timestamp) {
    if former.phase() == wanted.phase() {
        return;
    }
    let phase = wanted.phase().clone();
    let Some(status) = &mut wanted.status else { return };
    if status.phase_transition_timestamps.iter().any(|known| known.phase.as_ref() == Some(&phase)) {
        return;
    }
    status.phase_transition_timestamps.push(VirtualMachineInstancePhaseTransitionTimestamp {
        phase: Some(phase),
        phase_transition_timestamp: Some(Time(now)),
    });
}

/// Keeps the pod's readiness gate in step with the machine: a paused machine takes no traffic.
fn readiness_gate(instance: &VirtualMachineInstance, pod: &PodView, now: Timestamp, decision: &mut Decision) {
    if pod.is_going_down() || instance.is_final() || *instance.phase() != VmiPhase::Running {
        return;
    }
    let paused = instance.condition(condition::PAUSED).is_some_and(api::Condition::is_true);
    let (status, reason, message) = if paused {
        ("False", reason::PAUSED, "the virtual machine is paused")
    } else {
        ("True", reason::NOT_PAUSED, "the virtual machine is not paused")
    };
    if pod.unpaused.as_ref().is_some_and(|known| known.status == status) {
        return;
    }
    decision.push(Effect::Patch {
        kind: Kind::Pod,
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        // The kubelet writes pod status often; the list is merged by type, so no lock is needed.
        resource_version: None,
        subresource: Some("status"),
        strategic: true,
        patch: json!({"status": {"conditions": [{
            "type": condition::POD_UNPAUSED,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": Time(now),
        }]}}),
        notes: crate::runtime::effect::Notes::default(),
    });
}

/// Gives pods the labels of their machines that tell of the node, and of an older launcher, and the annotations for
/// backups and for who evicts pods. Waits until the machine runs: nobody needs them before, and the start has no time
/// for them.
fn pod_metadata(observed: &Observed<'_>, pod: &PodView, decision: &mut Decision) {
    if pod.is_going_down() || *observed.instance.phase() != VmiPhase::Running {
        return;
    }
    let outdated = pod.image.as_deref().is_some_and(|image| image != observed.launcher_image);
    let wanted =
        [(label::NODE_NAME, pod.node_name.as_deref()), (label::OUTDATED_LAUNCHER_IMAGE, outdated.then_some(""))];
    let known = |key: &str| pod.metadata.labels.as_ref()?.get(key).map(String::as_str);
    let labels: serde_json::Map<String, serde_json::Value> = wanted
        .into_iter()
        .filter(|&(key, value)| known(key) != value)
        .map(|(key, value)| (key.to_owned(), json!(value)))
        .collect();
    let mut annotations = backup_annotations(observed, pod);
    annotations.extend(eviction_annotations(observed.instance, pod));
    let mut metadata = serde_json::Map::new();
    for (name, changes) in [("labels", labels), ("annotations", annotations)] {
        if !changes.is_empty() {
            metadata.insert(name.to_owned(), json!(changes));
        }
    }
    if metadata.is_empty() {
        return;
    }
    decision.push(Effect::Patch {
        kind: Kind::Pod,
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        resource_version: None,
        subresource: None,
        strategic: false,
        patch: json!({"metadata": metadata}),
        notes: crate::runtime::effect::Notes::default(),
    });
}

/// The changes of a pod's annotations for backups. One of them stands for all: they come and go together.
fn backup_annotations(observed: &Observed<'_>, pod: &PodView) -> serde_json::Map<String, serde_json::Value> {
    let instance = observed.instance;
    let hooked = launcher_pod::hooks_backups(instance, observed.config);
    // What users of a machine wrote themselves stays theirs where ours are not wanted.
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

/// The changes of a pod's annotations that tell a descheduler what its machine says, and that it is to leave its node.
fn eviction_annotations(
    instance: &VirtualMachineInstance,
    pod: &PodView,
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
    ];
    let known = |key: &str| pod.metadata.annotations.as_ref()?.get(key).map(String::as_str);
    let changes = wanted.into_iter().filter(|&(key, value)| known(key) != value);
    changes.map(|(key, value)| (key.to_owned(), json!(value))).collect()
}

/// Memory overhead that a pod was rendered with.
fn memory_overhead(pod: &PodView) -> Option<i64> {
    pod.metadata.annotations.as_ref()?.get(annotation::MEMORY_OVERHEAD_BYTES)?.parse().ok()
}
