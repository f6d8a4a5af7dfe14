//! The wait for the end of a target's guest.

use std::time::Duration;

use api::{
    RunStrategy, StateChangeAction, VirtualMachineInstance, snapshot::restore::VirtualMachineRestore,
    vm::status::VirtualMachineStateChangeRequest,
};
use jiff::{SignedDuration, Timestamp};

use super::{Observed, REFUSED, Shown, Step, failed};
use crate::runtime::{Effect, Event, Kind};

/// Time within which the guest must end.
const GRACE: SignedDuration = SignedDuration::from_mins(5);
const STOP: &str = "Waiting for target VM to be powered off. Please stop the restore target to proceed with restore";
/// Message of the event about a guest that a user must stop.
const NOT_READY: &str = "Restore target VMI still exists, please stop the restore target to proceed with restore";

/// Returns the step of a restore whose target has a VMI. The lease would keep users from stopping it.
pub(super) fn step(observed: &Observed, vmi: &VirtualMachineInstance) -> Result<Step, serde_json::Error> {
    Ok(by_policy(observed, vmi)?.before(observed.release(false)?))
}

/// Deletes a VMI that was created in the instant in which the restore took the lease, and has no guest yet: it names the former claims. The
/// VM makes another one afterwards.
pub(super) fn too_early(vmi: &VirtualMachineInstance) -> Step {
    let delete = (!vmi.is_deleting()).then(|| Effect::delete(Kind::Instance, &vmi.metadata).refused_as(REFUSED));
    Step::show(Shown::waits("Waiting for the end of a VMI that was created when the restore began")).after(delete)
}

fn by_policy(observed: &Observed, vmi: &VirtualMachineInstance) -> Result<Step, serde_json::Error> {
    match observed.restore.spec.target_readiness_policy.as_deref().unwrap_or("WaitGracePeriod") {
        "FailImmediate" => failed(observed, "Restore target VMI must be powered off before restore operation"),
        "WaitEventually" => Ok(waits(observed, STOP, NOT_READY)),
        "StopTarget" => {
            // Its run strategy cannot change while a snapshot is taken. The VM wakes the restore.
            if let Some(holder) = other_holder(observed) {
                return Ok(Step::show(Shown::waits(&holder)));
            }
            let text = "Automatically stopping restore target for restore operation";
            Ok(waits(observed, text, text).after(stop(observed, vmi)?))
        }
        "WaitGracePeriod" => match left(&observed.restore, observed.now) {
            Some(left) => {
                let text = format!("{STOP}, or the operation will fail after 5m0s");
                Ok(waits(observed, &text, NOT_READY).wake(left))
            }
            None => failed(
                observed,
                "Restore target failed to be ready within 5m0s. Please power off the target VM before attempting restore",
            ),
        },
        unknown => failed(observed, &format!("unknown targetReadinessPolicy: {unknown}")),
    }
}

/// Returns the text about another operation on the data of the target.
fn other_holder(observed: &Observed) -> Option<String> {
    let lease = observed.vm.as_ref()?.status.as_ref()?.operation.as_ref()?;
    (!observed.holds_lease()).then(|| lease.holder())
}

/// Waits for the guest's end, with the text of the conditions and the message of the event.
fn waits(observed: &Observed, text: &str, message: &str) -> Step {
    let shown = Shown::idle(text);
    let regarding = Kind::VmRestore.reference(&observed.restore.metadata);
    let event = Event::warning(regarding, "RestoreTargetNotReady", message);
    let event = (!shown.is_shown(observed)).then_some(Effect::Event(event));
    Step::show(shown).after(event)
}

/// Returns the rest of the time within which the guest must end.
fn left(restore: &VirtualMachineRestore, now: Timestamp) -> Option<Duration> {
    let created = restore.metadata.creation_timestamp.as_ref()?.0;
    Duration::try_from(GRACE - now.duration_since(created)).ok().filter(|left| !left.is_zero())
}

/// Stops the guest as the subresource `stop` does.
fn stop(observed: &Observed, vmi: &VirtualMachineInstance) -> Result<Option<Effect>, serde_json::Error> {
    let Some(vm) = observed.vm.as_deref().filter(|_| !vmi.is_deleting()) else { return Ok(None) };
    let mut wanted = vm.clone();
    let subresource = match vm.spec.effective_run_strategy() {
        RunStrategy::Always | RunStrategy::Once if vm.spec.running.is_some() => {
            wanted.spec.running = Some(false);
            None
        }
        RunStrategy::Always | RunStrategy::Once => {
            wanted.spec.run_strategy = Some(RunStrategy::Halted);
            None
        }
        RunStrategy::Manual | RunStrategy::RerunOnFailure => {
            wanted.status.get_or_insert_default().state_change_requests = vec![VirtualMachineStateChangeRequest {
                action: StateChangeAction::Stop,
                uid: vmi.metadata.uid.clone(),
                ..VirtualMachineStateChangeRequest::default()
            }];
            Some("status")
        }
        _ => return Ok(None),
    };
    let change = Effect::change(Kind::VirtualMachine, vm, &wanted, subresource)?;
    Ok(change.map(|change| change.refused_as(REFUSED)))
}
