//! Phases that this controller decides.

use api::{
    VirtualMachineInstance, VmiPhase,
    constants::{annotation, label},
    quantity,
};

use super::{Observed, memory_overhead};
use crate::{runtime::Decision, views::PodView};

/// How long the node agent is given to record the end of a machine whose launcher has ended.
const AGENT_GRACE: jiff::SignedDuration = jiff::SignedDuration::from_secs(10);
/// [`AGENT_GRACE`] as a time to wait.
const WHOLE_GRACE: std::time::Duration = std::time::Duration::from_secs(10);
/// How long a pod may wait for a word of a scheduler before its machine shows that it waits. Most are bound in much less.
const SCHEDULER_GRACE: jiff::SignedDuration = jiff::SignedDuration::from_secs(5);

/// Moves the machine on as its pod demands.
pub(super) fn advance(
    observed: &Observed<'_>,
    pod: Option<&PodView>,
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

fn pending(
    observed: &Observed<'_>,
    pod: Option<&PodView>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) {
    match pod {
        // Without a pod there is nothing to wait for.
        None if observed.instance.is_deleting() && observed.pods.is_empty() => fail(wanted, None),
        None => {}
        Some(pod) if pod.is_down() => {
            bind(pod, wanted);
            fail(wanted, pod.reason.clone());
        }
        // One write tells of the pod and of its node. Nothing is written before the scheduler has spoken.
        Some(pod) if pod.node_name.is_some() || is_unschedulable(pod) || observed.instance.is_deleting() => {
            set(wanted, VmiPhase::Scheduling);
            bind(pod, wanted);
        }
        // A scheduler that is not there, or that has much to do, says nothing.
        Some(pod) => match patience(observed, pod) {
            Some(left) => decision.wake(left),
            None => set(wanted, VmiPhase::Scheduling),
        },
    }
}

/// How much longer a scheduler is waited for before the machine shows that it waits.
fn patience(observed: &Observed<'_>, pod: &PodView) -> Option<std::time::Duration> {
    let made = pod.metadata.creation_timestamp.as_ref()?.0;
    let left = SCHEDULER_GRACE.checked_sub(observed.now.duration_since(made))?;
    std::time::Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

fn is_unschedulable(pod: &PodView) -> bool {
    pod.scheduled.as_ref().is_some_and(|condition| condition.status == "False")
}

/// Takes over what follows from the pod's node.
fn bind(pod: &PodView, wanted: &mut VirtualMachineInstance) {
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
    observed: &Observed<'_>,
    pod: Option<&PodView>,
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

fn started(
    observed: &Observed<'_>,
    pod: Option<&PodView>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) {
    match pod {
        // Every pod of the machine is gone, so no second copy can be running.
        None if observed.pods.is_empty() => fail(wanted, Some("PodNotExists".to_owned())),
        None => {}
        Some(pod) => ended(observed, pod, wanted, decision),
    }
}

/// A launcher that has ended ends its machine. The node agent, which knows how, goes first.
fn ended(observed: &Observed<'_>, pod: &PodView, wanted: &mut VirtualMachineInstance, decision: &mut Decision) {
    if !pod.is_down() {
        return;
    }
    // Without a container nothing ever ran there: no agent will come.
    let Some(end) = pod.compute_ended else {
        fail(wanted, pod.reason.clone());
        return;
    };
    let Some(end) = end else {
        // kubelet has lost sight of it, as with evicted pods. How a guest ended that ran is the agent's to tell, or the
        // node's controller's if there is no agent; neither waits for a guest that never ran.
        if *observed.instance.phase() != VmiPhase::Running {
            fail(wanted, pod.reason.clone());
        }
        return;
    };
    let waited = observed.now.duration_since(end);
    if waited >= AGENT_GRACE {
        fail(wanted, pod.reason.clone());
    } else {
        let left = AGENT_GRACE.checked_sub(waited).unwrap_or(AGENT_GRACE);
        decision.wake(std::time::Duration::try_from(left).unwrap_or(WHOLE_GRACE));
    }
}
