//! Phases that this controller decides.

use std::time::Duration;

use api::{
    VirtualMachineInstance, VmiPhase,
    constants::{annotation, event, label},
    dedicated, quantity,
};

use super::{
    Observed,
    data_volumes::{self, Gate},
    pod_metadata::memory_overhead,
    pods::{may_have_moved, may_run_elsewhere},
};
use crate::{
    resources::pods::CachedPod,
    runtime::{Decision, Effect, Event, Kind},
};

/// Time for virt-handler to record the end of a VMI whose launcher has ended.
const HANDLER_GRACE: Duration = Duration::from_secs(10);
/// Time for a scheduler to bind the pod before the VMI shows that it waits. Most pods are bound much sooner.
const SCHEDULER_GRACE: jiff::SignedDuration = jiff::SignedDuration::from_secs(5);

/// Advances the phase according to the pod.
pub(super) fn advance(
    observed: &Observed,
    pod: Option<&CachedPod>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) {
    match observed.instance.phase() {
        VmiPhase::Unset | VmiPhase::Pending => pending(observed, pod, wanted, decision),
        VmiPhase::Scheduling => scheduling(observed, pod, wanted, decision),
        VmiPhase::Scheduled | VmiPhase::Running => started(observed, pod, wanted, decision),
        // Final, or a phase of another writer.
        _ => {}
    }
}

fn set(wanted: &mut VirtualMachineInstance, phase: VmiPhase) {
    wanted.status.get_or_insert_default().phase = Some(phase);
}

fn fail(wanted: &mut VirtualMachineInstance, reason: Option<String>) {
    let status = wanted.status.get_or_insert_default();
    status.phase = Some(VmiPhase::Failed);
    if reason.is_some() {
        status.reason = reason;
    }
}

fn pending(observed: &Observed, pod: Option<&CachedPod>, wanted: &mut VirtualMachineInstance, decision: &mut Decision) {
    match pod {
        // Without a pod there is nothing to wait for.
        None if observed.instance.is_deleting() && observed.pods.is_empty() => fail(wanted, None),
        None => {
            if matches!(data_volumes::gate(observed), Gate::Failed(_)) {
                fail(wanted, Some(event::FAILED_DATA_VOLUME_IMPORT.to_owned()));
            } else if let Some(temporary) = data_volumes::failed_pod(observed) {
                fail(wanted, temporary.reason.clone());
            }
        }
        Some(pod) if pod.is_down() => {
            bind(pod, wanted);
            fail(wanted, pod.reason.clone());
        }
        Some(pod) if lacks_guarantee(observed, pod) => {
            fail(wanted, Some(event::FAILED_GUARANTEE_RESOURCES.to_owned()));
            let regarding = Kind::Instance.reference(&observed.instance.metadata);
            let message = "failed to guarantee pod resources: requests and limits of all containers must be equal";
            let event = Event::warning(regarding, event::FAILED_GUARANTEE_RESOURCES, message);
            decision.push(Effect::Event(event));
        }
        // One write covers the pod and its node. Nothing is written before the scheduler has decided.
        Some(pod) if pod.node_name.is_some() || pod.is_unschedulable() || observed.instance.is_deleting() => {
            set(wanted, VmiPhase::Scheduling);
            bind(pod, wanted);
        }
        // The scheduler is absent or busy.
        Some(pod) => match scheduler_time_left(observed, pod) {
            Some(left) => decision.wake(left),
            None => set(wanted, VmiPhase::Scheduling),
        },
    }
}

/// Returns true for a pod whose CPUs others may use, although those of the VMI are dedicated.
fn lacks_guarantee(observed: &Observed, pod: &CachedPod) -> bool {
    let class = pod.qos_class.as_deref();
    dedicated::is_dedicated(&observed.instance.spec.domain) && class.is_some_and(|class| class != "Guaranteed")
}

/// Returns the rest of the time for a scheduler to bind the pod.
fn scheduler_time_left(observed: &Observed, pod: &CachedPod) -> Option<Duration> {
    let made = pod.metadata.creation_timestamp.as_ref()?.0;
    let left = SCHEDULER_GRACE.checked_sub(observed.now.duration_since(made))?;
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

/// Records the pod's node and its consequences.
fn bind(pod: &CachedPod, wanted: &mut VirtualMachineInstance) {
    let Some(node) = pod.node_name.clone() else { return };
    wanted.metadata.labels.get_or_insert_default().insert(label::NODE_NAME.to_owned(), node.clone());
    let status = wanted.status.get_or_insert_default();
    status.node_name = Some(node);
    status.qos_class.clone_from(&pod.qos_class);
    let transport = pod.metadata.annotations.as_ref();
    if transport.is_some_and(|annotations| annotations.contains_key(annotation::MIGRATION_TRANSPORT_UNIX)) {
        status.migration_transport = Some("Unix".to_owned());
    }
    if let Some(bytes) = memory_overhead(pod) {
        status.memory.get_or_insert_default().memory_overhead = Some(quantity::bytes(bytes));
    }
}

fn scheduling(
    observed: &Observed,
    pod: Option<&CachedPod>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) {
    let Some(pod) = pod else {
        fail(wanted, Some("PodNotExists".to_owned()));
        return;
    };
    if observed.instance.status.as_ref().is_none_or(|status| status.node_name.is_none()) {
        bind(pod, wanted);
    }
    ended(observed, pod, wanted, decision);
}

fn started(observed: &Observed, pod: Option<&CachedPod>, wanted: &mut VirtualMachineInstance, decision: &mut Decision) {
    match pod {
        // Every pod that may run the guest is gone, so no second copy can be running.
        None if !may_run_elsewhere(observed) => fail(wanted, Some("PodNotExists".to_owned())),
        None => {}
        Some(pod) => ended(observed, pod, wanted, decision),
    }
}

/// Fails a VMI whose launcher has ended, after virt-handler had time to record the end.
fn ended(observed: &Observed, pod: &CachedPod, wanted: &mut VirtualMachineInstance, decision: &mut Decision) {
    // The end of the target, or a write of virt-handler there, wakes the VMI.
    if !pod.is_down() || may_have_moved(observed) {
        return;
    }
    // Without a container nothing ran there, and virt-handler records no end.
    let Some(end) = pod.compute_ended else {
        fail(wanted, pod.reason.clone());
        return;
    };
    if end.is_none() {
        // The kubelet does not know the end, as with evicted pods. For a guest that ran, virt-handler records the end, or the
        // node controller if there is no virt-handler.
        if *observed.instance.phase() != VmiPhase::Running {
            fail(wanted, pod.reason.clone());
        }
        return;
    }
    match HANDLER_GRACE.checked_sub(observed.ended_for.unwrap_or_default()).filter(|left| !left.is_zero()) {
        Some(left) => decision.wake(left),
        None => fail(wanted, pod.reason.clone()),
    }
}
