//! Conditions that this controller writes.

use std::sync::Arc;

use api::{
    Condition, VirtualMachineInstance, VmiPhase,
    condition::{remove, set, set_or_remove},
    constants::{condition, event, reason},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Observed, SyncError,
    data_volumes::{self, Gate},
    pods::NO_HINTS,
    warnings,
};
use crate::{
    launcher_pod::with_unoffered,
    resources::{pod_warnings, pods::CachedPod},
    vm_lease,
};

/// Reasons for which there is no pod, or one too many: those of each [`SyncError`]. A reason that is not listed stays until virt-handler removes it.
const ERRORS: &[&str] = &[
    reason::FAILED_CREATE,
    reason::FAILED_PVC_NOT_FOUND,
    reason::FAILED_BACKEND_STORAGE_CREATE,
    reason::FAILED_BACKEND_STORAGE_DELETE,
    reason::FAILED_BACKEND_STORAGE_PROBE,
    reason::BACKEND_STORAGE_NOT_READY,
    event::CONTAINER_PATH_VOLUMES_DISABLED,
    event::FAILED_DATA_VOLUME_IMPORT,
    vm_lease::OPERATION,
    reason::FAILED_DELETE,
    NO_HINTS,
];

pub(super) fn update(
    observed: &Observed,
    pod: Option<&CachedPod>,
    error: Option<&SyncError>,
    wanted: &mut VirtualMachineInstance,
) {
    let now = Time(observed.now);
    let final_phase = wanted.is_final();
    let phase = wanted.phase().clone();
    let unstarted = matches!(phase, VmiPhase::Unset | VmiPhase::Pending);
    let former = observed.instance.condition(condition::READY);
    let paused = observed.instance.condition(condition::PAUSED).is_some_and(Condition::is_true);
    let ready = ready(&phase, pod, former.filter(|_| !paused), &now);
    let evicted = is_marked_for_eviction(wanted);
    // Nothing is written while the pod waits to be scheduled, unless something is wrong or a claim is being filled.
    let waits = pod.is_none() && !matches!(data_volumes::gate(observed), Gate::Open);
    if unstarted
        && error.is_none()
        && !waits
        && wanted.status.as_ref().is_none_or(|status| status.conditions.is_empty())
    {
        return;
    }
    let conditions = &mut wanted.status.get_or_insert_default().conditions;
    set(conditions, ready);
    if final_phase {
        remove(conditions, condition::POD_SCHEDULED);
        remove(conditions, condition::PROVISIONING);
        let ended = pod.or_else(|| data_volumes::failed_pod(observed));
        let rejected = ended.filter(|_| is_starting(observed.instance.phase())).and_then(rejection);
        if let Some(message) = rejected {
            set(conditions, Condition::new(condition::SYNCHRONIZED, false, event::POD_REJECTED, &message, &now));
        }
        undeleted(error, &now, conditions);
        return;
    }
    data_volumes::update_conditions(observed, &phase, conditions);
    let reason = condition::EVICTION_REQUESTED;
    let evicted = evicted.then(|| Condition::new(reason, true, reason, "VMI is marked for eviction", &now));
    set_or_remove(conditions, reason, evicted);
    synchronized(observed, &phase, pod, error, conditions);
    scheduled(observed, &phase, pod, error, conditions);
}

/// Shows that the pod of a VMI that has ended is not deleted. While the guest runs, virt-handler owns the condition.
fn undeleted(error: Option<&SyncError>, now: &Time, conditions: &mut Vec<Condition>) {
    let reason = reason::FAILED_DELETE;
    let shown = |known: &Condition| known.type_ == condition::SYNCHRONIZED && known.reason.as_deref() == Some(reason);
    match error.filter(|error| error.reason == reason) {
        Some(error) => {
            set(conditions, Condition::new(condition::SYNCHRONIZED, false, reason, &error.message, now));
        }
        None => conditions.retain(|known| !shown(known)),
    }
}

/// Returns true for a phase in which no guest has been started.
fn is_starting(phase: &VmiPhase) -> bool {
    matches!(phase, VmiPhase::Unset | VmiPhase::Pending | VmiPhase::Scheduling)
}

/// Returns why kubelet has ended a pod whose container it did not start: its node cannot give the CPUs, huge pages or NUMA nodes.
fn rejection(pod: &CachedPod) -> Option<String> {
    let ended = pod.phase == "Failed" && pod.compute_ended.flatten().is_none();
    let (reason, message) = (pod.reason.as_deref()?, pod.message.as_deref().unwrap_or("no message"));
    let node = pod.node_name.as_deref().unwrap_or("without name");
    ended.then(|| format!("the launcher pod ended on node {node} before the guest started: {reason}: {message}"))
}

/// Returns true if an eviction of the pod was requested and the VMI must leave its node.
pub(super) fn is_marked_for_eviction(instance: &VirtualMachineInstance) -> bool {
    let node = instance.status.as_ref().and_then(|status| status.evacuation_node_name.as_deref());
    node.is_some_and(|node| !node.is_empty())
}

/// `former` is the condition to keep while the pod is about to become ready.
fn ready(phase: &VmiPhase, pod: Option<&CachedPod>, former: Option<&Condition>, now: &Time) -> Condition {
    let not = |reason: &str, message: &str| Condition::new(condition::READY, false, reason, message, now);
    let Some(pod) = pod else {
        return not(reason::POD_NOT_EXISTS, "virt-launcher pod has not yet been scheduled");
    };
    if pod.is_going_down() {
        return not(reason::POD_TERMINATING, "virt-launcher pod is terminating");
    }
    if *phase != VmiPhase::Running {
        return not(reason::GUEST_NOT_RUNNING, "Guest VM is not reported as running");
    }
    match &pod.ready {
        // Only our readiness gate is missing. It follows soon and needs no write of its own.
        Some(ready)
            if ready.status == "False"
                && ready.reason.as_deref() == Some("ReadinessGatesNotReady")
                && former.is_some_and(Condition::is_false) =>
        {
            former.cloned().unwrap_or_default()
        }
        Some(ready) => Condition {
            status: ready.status.clone(),
            reason: ready.reason.clone(),
            message: ready.message.clone(),
            ..Condition::new(condition::READY, true, "", "", now)
        },
        None => not(reason::POD_CONDITION_MISSING, "virt-launcher pod is missing the Ready condition"),
    }
}

/// Reports the reason of a start that does not progress. virt-handler owns the condition once the VMI is Scheduled.
fn synchronized(
    observed: &Observed,
    phase: &VmiPhase,
    pod: Option<&CachedPod>,
    error: Option<&SyncError>,
    conditions: &mut Vec<Condition>,
) {
    if !is_starting(phase) {
        return;
    }
    let stuck = pod.and_then(warnings::stuck);
    let starting = pod.filter(|pod| pod.is_starting());
    let read = starting.and_then(|pod| warnings::of(observed, pod));
    let warning = read.and_then(|read| read.warning.as_ref());
    let warning = warning.map(|warning| (warning.reason, warning.message.as_str()));
    let error = error.map(|error| (error.reason.as_str(), error.message.as_str()));
    let shown = error.or(stuck).or(warning);
    // After a change of the leader they have to be read first.
    let is_unread = starting.is_some() && read.is_none();
    match shown {
        Some((reason, message)) => {
            // A changed wording alone (an image pull counts its attempts in it) is not worth a write.
            let known = conditions.iter().any(|known| {
                known.type_ == condition::SYNCHRONIZED
                    && known.is_false()
                    && known.reason.as_deref() == Some(reason)
                    && stuck.is_some()
            });
            if !known {
                let now = Time(observed.now);
                set(conditions, Condition::new(condition::SYNCHRONIZED, false, reason, message, &now));
            }
        }
        // virt-handler may have started and owns the condition then.
        None => conditions.retain(|known| {
            let is_ours = |reason: &str| {
                let is_over = pod_warnings::known(reason).is_some() && !is_unread;
                is_over || warnings::STUCK.contains(&reason) || ERRORS.contains(&reason)
            };
            known.type_ != condition::SYNCHRONIZED || !known.reason.as_deref().is_some_and(is_ours)
        }),
    }
}

/// Mirrors that the pod cannot be scheduled.
fn scheduled(
    observed: &Observed,
    phase: &VmiPhase,
    pod: Option<&CachedPod>,
    error: Option<&SyncError>,
    conditions: &mut Vec<Condition>,
) {
    let now = &Time(observed.now);
    let missing_claim = error.filter(|error| error.reason == reason::FAILED_PVC_NOT_FOUND);
    if let Some(error) = missing_claim {
        let unschedulable = reason::UNSCHEDULABLE;
        set(conditions, Condition::new(condition::POD_SCHEDULED, false, unschedulable, &error.message, now));
        return;
    }
    // Before the launcher pod a temporary one may be scheduled.
    let temporary = observed.temporary.iter().map(Arc::as_ref).find(|pod| pod.metadata.deletion_timestamp.is_none());
    let unscheduled =
        pod.or(temporary).and_then(|pod| pod.scheduled.as_ref()).filter(|condition| condition.status == "False");
    let unscheduled = unscheduled.filter(|_| *phase == VmiPhase::Scheduling || pod.is_none()).map(|unscheduled| {
        let reason = unscheduled.reason.as_deref().unwrap_or_default();
        let message =
            with_unoffered(unscheduled.message.as_deref().unwrap_or_default(), "no node", &observed.unoffered);
        Condition::new(condition::POD_SCHEDULED, false, reason, &message, now)
    });
    set_or_remove(conditions, condition::POD_SCHEDULED, unscheduled);
}
