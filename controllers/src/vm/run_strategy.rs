//! Run strategies and requests of users.

use std::time::Duration;

use api::{
    RunStrategy, StateChangeAction, VirtualMachine, VirtualMachineInstance, VmiPhase,
    vm::status::VirtualMachineStateChangeRequest,
};
use jiff::{SignedDuration, Timestamp};

/// Time for which a VMI stays that has ended and is not started again. Timestamps are cut to seconds.
const SHOWN: SignedDuration = SignedDuration::from_secs(2);

/// The next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing to do.
    Nothing,
    /// Wait before the start or the deletion.
    Wait(Duration),
    /// Create the VMI.
    Start {
        /// With its CPUs stopped.
        paused: bool,
    },
    /// Delete the VMI.
    Delete {
        /// Request another start.
        restart: bool,
    },
    /// Change the strategy: a start was requested while it is Halted.
    SwitchToAlways,
    /// A strategy that this version does not know.
    Unknown(String),
}

/// Returns the first request. Later ones wait.
fn head(vm: &VirtualMachine) -> Option<&VirtualMachineStateChangeRequest> {
    vm.status.as_ref()?.state_change_requests.first()
}

/// Returns the first request if it is one to start.
pub(super) fn start_request(vm: &VirtualMachine) -> Option<&VirtualMachineStateChangeRequest> {
    head(vm).filter(|request| request.action == StateChangeAction::Start && !is_outdated(vm, request))
}

/// Returns true for a request to start that is older than the strategy `Halted`, such as that of a VM in back-off. virt-api queues no plain
/// start of a halted VM: it changes the strategy.
pub(super) fn is_outdated(vm: &VirtualMachine, request: &VirtualMachineStateChangeRequest) -> bool {
    let recorded = vm.status.as_ref().and_then(|status| status.run_strategy.as_ref());
    request.action == StateChangeAction::Start
        && request.data.is_empty()
        && vm.spec.effective_run_strategy() == RunStrategy::Halted
        && recorded.is_some_and(|recorded| *recorded != RunStrategy::Halted)
}

fn stop_requested(vm: &VirtualMachine, instance: &VirtualMachineInstance) -> bool {
    head(vm).is_some_and(|request| {
        request.action == StateChangeAction::Stop && request.uid.is_some() && request.uid == instance.metadata.uid
    })
}

/// Returns true if a start without running the guest is requested.
pub(super) fn is_paused_start(vm: &VirtualMachine) -> bool {
    start_request(vm).is_some_and(|request| request.data.get("paused").is_some_and(|value| value == "true"))
}

/// Returns true if the status holds another strategy.
pub(super) fn has_switched(vm: &VirtualMachine, strategy: &RunStrategy) -> bool {
    vm.status.as_ref().and_then(|status| status.run_strategy.as_ref()) != Some(strategy)
}

/// Returns the next action for a VM with its VMI.
pub(super) fn next(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>, now: Timestamp) -> Action {
    let strategy = vm.spec.effective_run_strategy();
    let live = instance.filter(|instance| !instance.is_final());
    let final_phase = instance.filter(|instance| instance.is_final()).map(VirtualMachineInstance::phase);
    if instance.is_some_and(VirtualMachineInstance::is_deleting) {
        return Action::Nothing;
    }
    let start = || after_backoff(vm, now);
    match strategy {
        RunStrategy::Always => match (instance, live) {
            (None, _) => start(),
            (Some(_), Some(live)) if stop_requested(vm, live) => Action::Delete { restart: false },
            (Some(_), Some(_)) => Action::Nothing,
            (Some(_), None) => Action::Delete { restart: false },
        },
        RunStrategy::RerunOnFailure => match (instance, final_phase) {
            (None, _) if start_request(vm).is_some() || has_switched(vm, &strategy) => start(),
            (None, _) => Action::Nothing,
            (Some(_), Some(VmiPhase::Failed)) => Action::Delete { restart: true },
            // It is not started again, so that nobody waits for its end.
            (Some(instance), Some(_)) => match shown_for(instance, now).filter(|_| start_request(vm).is_none()) {
                Some(left) => Action::Wait(left),
                None => Action::Delete { restart: false },
            },
            (Some(instance), None) if stop_requested(vm, instance) => Action::Delete { restart: false },
            (Some(_), None) => Action::Nothing,
        },
        RunStrategy::Manual => match instance {
            Some(instance) if stop_requested(vm, instance) => Action::Delete { restart: false },
            Some(_) => Action::Nothing,
            None if start_request(vm).is_some() => Action::Start { paused: is_paused_start(vm) },
            None => Action::Nothing,
        },
        RunStrategy::Halted => match instance {
            Some(_) => Action::Delete { restart: false },
            None if start_request(vm).is_some() => Action::SwitchToAlways,
            None => Action::Nothing,
        },
        RunStrategy::Once => match instance {
            None => Action::Start { paused: is_paused_start(vm) },
            Some(_) => Action::Nothing,
        },
        other => Action::Unknown(other.as_str().to_owned()),
    }
}

/// Returns how long a VMI stays that has ended, for clients that look once a second. Its end is a time of the node's clock: one that is
/// further ahead does not keep it.
fn shown_for(instance: &VirtualMachineInstance, now: Timestamp) -> Option<Duration> {
    let left = SHOWN.checked_sub(time_in_phase(instance, now)?).filter(|left| *left <= SHOWN * 2)?;
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

/// Returns for how long a VMI has been in its phase. It is negative if the clock of its node is ahead.
pub(super) fn time_in_phase(instance: &VirtualMachineInstance, now: Timestamp) -> Option<SignedDuration> {
    let transitions = &instance.status.as_ref()?.phase_transition_timestamps;
    let entered = transitions.iter().find(|transition| transition.phase.as_ref() == Some(instance.phase()))?;
    Some(now.duration_since(entered.phase_transition_timestamp.as_ref()?.0))
}

fn after_backoff(vm: &VirtualMachine, now: Timestamp) -> Action {
    let retry = vm.status.as_ref().and_then(|status| status.start_failure.as_ref());
    let left = retry
        .and_then(|failure| failure.retry_after_timestamp.as_ref())
        .map(|at| at.0.duration_since(now))
        .and_then(|left| Duration::try_from(left).ok())
        .filter(|left| !left.is_zero());
    match left {
        Some(left) => Action::Wait(left),
        None => Action::Start { paused: is_paused_start(vm) },
    }
}

/// Returns true if strategy and requests require the VMI to run.
pub(super) fn must_run(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>) -> bool {
    let strategy = vm.spec.effective_run_strategy();
    match strategy {
        RunStrategy::Always => true,
        RunStrategy::Manual => match instance {
            Some(instance) => !stop_requested(vm, instance),
            None => start_request(vm).is_some(),
        },
        RunStrategy::RerunOnFailure => match instance {
            Some(instance) => *instance.phase() != VmiPhase::Succeeded,
            None => start_request(vm).is_some() || has_switched(vm, &strategy),
        },
        RunStrategy::Once => instance.is_none(),
        _ => false,
    }
}

/// Removes the first request once it is fulfilled or void.
pub(super) fn trim(requests: &mut Vec<VirtualMachineStateChangeRequest>, instance: Option<&VirtualMachineInstance>) {
    let Some(head) = requests.first() else { return };
    let done = match head.action {
        StateChangeAction::Stop => {
            instance.is_none_or(|instance| head.uid.is_none() || head.uid != instance.metadata.uid)
        }
        StateChangeAction::Start => instance.is_some_and(|instance| !instance.is_deleting() && !instance.is_final()),
        // It can never be carried out and must not block later requests.
        StateChangeAction::Other(_) => true,
    };
    if done {
        requests.remove(0);
    }
}
