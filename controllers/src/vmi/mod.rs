//! VMIs: launcher pods, the phases that the cluster decides, conditions. Start with [`decide`]; `controller.rs` holds the
//! watches.
//!
//! ```text
//!            pod bound to a node,          handler (or launcher ready)      handler
//!  Pending ───────────────────> Scheduling ────────────────────> Scheduled ─────────> Running
//!     │    or waits for one        │                                │                    │
//!     │ DataVolume failed          │ pod ended or gone              │ pod gone           │ guest ended: handler
//!     v                            v                                v                    v pod gone: Failed
//!   Failed <───────────────────────┴────────────────────────────────┴──────────── Succeeded / Failed
//! ```
//! A pod is created once in the life of a VMI: only while its phase is Pending and it has none. Its claims are ready then
//! (`data_volumes.rs`), and so is the one with its state (`state.rs`); a temporary pod may have been scheduled in its place before, so that they could be filled.
//! No operation on the data of its VM forbids the start then (`vm_lease`).
//! A pod that the watch shows no longer is gone only if its end was seen or the API server confirms it. Until then nothing is
//! decided: a second launcher beside a first one without its label would destroy the volumes.
//! virt-handler owns everything from Scheduled on; this controller only fails VMIs whose pod is gone.
//! A VMI that migrates has a second pod. Phase and conditions follow the pod on the node in the status of the VMI, which
//! virt-handler of the target changes when the guest has moved.

mod cid;
mod conditions;
mod controller;
mod data_volumes;
mod hotplug;
mod ineffective;
mod migration_required;
mod networks;
mod phase;
mod pod_metadata;
mod pods;
mod resize;
mod state;
#[cfg(test)]
mod tests;
mod volumes;
mod warnings;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration, VmiPhase,
    config::ClusterConfig,
    constants::{condition, event, finalizer, label},
    vm::status::OperationLease,
    vmi::status::VirtualMachineInstancePhaseTransitionTimestamp,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(crate) use self::{
    controller::{Vmis, definitions, namespace_limits},
    hotplug::{leaving_volume, plugged_volumes},
    ineffective::{Cause, ineffective},
    pods::{TARGET_TIME, present_pod},
};
use self::{
    pod_metadata::{pod_metadata, readiness_gate},
    pods::{
        choose_cid, choose_frequency, create_pod, delete_pods, is_target, remove_ended_pods, restorations,
        split_surplus, undeleted,
    },
};
use crate::{
    data_volumes::DataVolumes,
    launcher_pod::{LauncherImages, NamespaceLimits},
    persistent_state::State,
    resources::{
        attachments::CachedAttachment, claims::CachedClaim, networks::CachedNetwork, pod_warnings::PodWarning,
        pods::CachedPod, vmis::is_unstarted,
    },
    runtime::{Decision, Effect, Event, Failures, Kind},
};

/// Everything that a decision about a VMI depends on.
pub(crate) struct Observed {
    /// The VMI.
    pub instance: Arc<VirtualMachineInstance>,
    /// Its pods.
    pub pods: Vec<Arc<CachedPod>>,
    /// The operation on the data of its VM that keeps it from starting.
    pub held: Option<OperationLease>,
    /// Its migrations that have not ended.
    pub migrations: Vec<Arc<VirtualMachineInstanceMigration>>,
    /// Pods that only let the scheduler bind its claims.
    pub temporary: Vec<Arc<CachedPod>>,
    /// Warnings about pods that do not start.
    pub warnings: Vec<Arc<PodWarning>>,
    /// Labels that the pod requires and no node has, if the pod cannot be scheduled.
    pub unoffered: Vec<String>,
    /// Pods that attach claims to its launcher pods.
    pub attachments: Vec<Arc<CachedAttachment>>,
    /// UIDs of pods in its status that no watch shows and whose end was not seen.
    pub missing: Vec<String>,
    /// Configuration in force.
    pub config: Arc<ClusterConfig>,
    /// Launcher images of this installation.
    pub launcher_images: LauncherImages,
    /// Claims that the VMI names.
    pub claims: BTreeMap<String, Arc<CachedClaim>>,
    /// Claims with its state.
    pub state: State,
    /// DataVolumes of these claims.
    pub data_volumes: DataVolumes,
    /// Limits the namespace makes necessary.
    pub limits: NamespaceLimits,
    /// TSC frequency for a VMI that has none yet and needs one, if nodes offer any.
    pub frequency: Option<i64>,
    /// Context ID for a VMI with a VSOCK device that has not started. It can be the present one.
    pub cid: Option<u32>,
    /// Definitions of the VMI's networks, if the pod requests the resources that they need.
    pub definitions: Option<BTreeMap<String, Arc<CachedNetwork>>>,
    /// Time since the end of a launcher was seen, if one has ended. The kubelet's times are those of another clock.
    pub ended_for: Option<Duration>,
    /// The writes for the VMI that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

/// Wait for the end of a claim that has the name of another one.
const AFTER_CLAIM: Duration = Duration::from_secs(5);
/// Wait after a search for pods.
const AFTER_SEARCH: Duration = Duration::from_millis(500);
/// An error that shows in condition Synchronized.
pub(crate) struct SyncError {
    reason: String,
    message: String,
}

/// Decides what to do about a VMI.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let instance = &*observed.instance;
    let mut decision = Decision::settled();
    let mut error = None;
    decision.effects.extend(restorations(observed));
    if !decision.effects.is_empty() {
        // The result of a search by UID alone wakes no key.
        decision.wake(AFTER_SEARCH);
        return Ok(decision);
    }

    let mut wanted = instance.clone();
    let (own, surplus) = split_surplus(observed, &mut decision);
    data_volumes::delete_pods(observed, &mut decision);
    if instance.is_deleting() {
        delete_pods(observed, observed.pods.iter().map(Arc::as_ref), &mut decision);
        remove_ended_pods(observed, &mut decision);
        error = undeleted(observed);
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

    let present: Vec<&CachedPod> = own.iter().copied().filter(|pod| !is_target(observed, pod)).collect();
    let pod = present_pod(instance, &present);
    phase::advance(observed, pod, &mut wanted, &mut decision);
    conditions::update(observed, pod, error.as_ref(), &mut wanted);
    let resize = resize::update(observed, pod, &mut wanted);
    derived_status(observed, &own, pod, &mut wanted);
    migration_required::update(observed, pod, &mut wanted, &mut decision);
    ineffective::update(observed, pod, &mut wanted);
    finalizers(observed, &mut wanted);
    stamp_phase(instance, &mut wanted, observed.now);

    // Most decisions change nothing, which costs less to see here than in JSON.
    let change = if wanted == *instance { None } else { Effect::change(Kind::Instance, instance, &wanted, None)? };
    // After the pod, so that the status never delays a start.
    if let Some(change) = change {
        decision.push(with_failure_event(instance, &wanted, change));
        decision.effects.extend(hotplug::events(instance, &wanted));
        decision.effects.extend(resize::events(instance, &wanted));
        decision.effects.extend(ineffective::event(instance, &wanted));
        decision.effects.extend(warnings::event(instance, &wanted));
        decision.effects.extend(data_volumes::event(observed, &wanted));
    }
    if let Some(pod) = pod {
        let labelled = readiness_gate(instance, pod, observed.now, &mut decision);
        pod_metadata(observed, pod, labelled, &mut decision);
    }
    // Last, since a refused pod ends the decision.
    hotplug::delete_pods(observed, pod, &wanted, &mut decision);
    hotplug::create_pods(observed, pod, &wanted, &mut decision)?;
    if let Some((pod, resources)) = pod.zip(resize) {
        resize::patch(observed, pod, resources, &mut decision);
    }
    warnings::read(observed, &mut decision);
    Ok(decision)
}

/// Adds the event of a VMI whose end virt-handler did not record. Clients wait for the same event in both cases.
fn with_failure_event(instance: &VirtualMachineInstance, wanted: &VirtualMachineInstance, change: Effect) -> Effect {
    let started = matches!(instance.phase(), VmiPhase::Scheduled | VmiPhase::Running);
    if !started || instance.is_deleting() || *wanted.phase() != VmiPhase::Failed {
        return change;
    }
    let regarding = Kind::Instance.reference(&instance.metadata);
    change.on_success(Event::warning(regarding, event::STOPPED, "The VirtualMachineInstance crashed."))
}

/// Updates the status that follows from the pod. Before the start it waits for a write that has another cause.
fn derived_status(
    observed: &Observed,
    own: &[&CachedPod],
    pod: Option<&CachedPod>,
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
        // The target of a migration matters to virt-handler of its node.
        .filter(|pod| pod.node_name.is_some() || !is_target(observed, pod))
        .filter_map(|pod| Some((pod.metadata.uid.clone()?, pod.node_name.clone().unwrap_or_default())))
        .collect();
    if !active.is_empty() {
        status.active_pods = active;
    }
    volumes::update_claims(&observed.instance.spec, &observed.claims, &mut status.volume_status);
    let state = pod.and_then(|pod| state::mounted(observed, pod.state_claim.as_ref()));
    volumes::update_state(state, &mut status.volume_status);
    hotplug::update_status(observed, pod, &mut status.volume_status);
    let Some(pod) = pod else { return };
    if let Some(attached) = pod.known_networks() {
        let spec = &observed.instance.spec;
        networks::update(&spec.networks, &spec.domain.devices.interfaces, attached, &mut status.interfaces);
    }
    if let Some(image) = &pod.image {
        status.launcher_container_image_version = Some(image.clone());
        let outdated = image != observed.launcher_images.of(&observed.instance.spec);
        let labels = &mut wanted.metadata.labels;
        if outdated {
            labels.get_or_insert_default().insert(label::OUTDATED_LAUNCHER_IMAGE.to_owned(), String::new());
        } else if let Some(labels) = labels {
            // Without labels there are none to write: the API server would keep no empty list, and be sent one again.
            labels.remove(label::OUTDATED_LAUNCHER_IMAGE);
        }
    }
}

fn finalizers(observed: &Observed, wanted: &mut VirtualMachineInstance) {
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
    // A VMI that has ended keeps its finalizers until it has no pod. The finalizer of its VM is of no more use then: the VM
    // controller sees the end in the same caches and records it before it deletes the VMI.
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

/// Records the time of a phase that is entered for the first time.
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

/// Returns true if condition Synchronized shows this already.
fn shows(instance: &VirtualMachineInstance, reason: &str, message: &str) -> bool {
    instance.condition(condition::SYNCHRONIZED).is_some_and(|condition| {
        condition.reason.as_deref() == Some(reason) && condition.message.as_deref() == Some(message)
    })
}
