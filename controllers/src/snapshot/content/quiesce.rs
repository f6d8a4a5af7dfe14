//! Freeze and thaw of the guest, decided from the recorded state.

use std::time::Duration;

use api::{
    QuiesceState, VirtualMachineInstance, VmOperation, VmiPhase,
    constants::condition,
    snapshot::content::{Quiesce, VirtualMachineSnapshotContentStatus},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{ATTEMPTS, FROZEN, Observed, is_state, volume_snapshot};
use crate::runtime::Decision;

/// Reason of a refused freeze.
pub(super) const FREEZE: &str = "FreezeFailed";
/// Reason of a refused thaw.
pub(super) const THAW: &str = "ThawFailed";
/// Reason of a refused read of the content of a volume snapshot.
pub(super) const READ: &str = "ReadFailed";
/// Shortest and longest pause between two reads of contents.
const PAUSE: (Duration, Duration) = (Duration::from_millis(30), Duration::from_millis(500));
/// Time after which a guest that was frozen before is looked at again.
const LOOK: Duration = Duration::from_secs(2);
/// Text of the guest agent on Windows after its shadow copies have ended by themselves.
const TOO_LATE: &str = "fsfreeze is limited";

/// The call for the guest that comes before the status.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// None.
    Nothing,
    /// Nothing is done before the next attempt.
    Wait,
    /// A freeze with its limit, or a thaw.
    Call(Option<Duration>),
    /// A thaw before the next attempt.
    Release,
}

/// Returns true if the guest is recorded as frozen.
pub(super) fn is_frozen(status: &VirtualMachineSnapshotContentStatus) -> bool {
    is_state(status, QuiesceState::Frozen)
}

fn record(status: &mut VirtualMachineSnapshotContentStatus, state: QuiesceState, message: Option<String>) {
    let time = status.quiesce.take().and_then(|quiesce| quiesce.time);
    status.quiesce = Some(Quiesce { message, state, time });
}

/// Returns the VMI if its guest agent can be asked.
fn agent(vmi: Option<&VirtualMachineInstance>) -> Option<&VirtualMachineInstance> {
    let runs = |vmi: &&VirtualMachineInstance| *vmi.phase() == VmiPhase::Running && !vmi.has_true(condition::PAUSED);
    vmi.filter(runs).filter(|vmi| vmi.has_true(condition::AGENT_CONNECTED))
}

/// Returns the time at which the guest has thawed itself.
fn limit(status: &VirtualMachineSnapshotContentStatus) -> Option<Timestamp> {
    let frozen = status.quiesce.as_ref().filter(|_| is_frozen(status))?.time.as_ref()?.0;
    frozen.checked_add(SignedDuration::try_from(FROZEN).ok()?).ok()
}

/// Decides about the guest before volume snapshots are created.
pub(super) fn begin(
    observed: &Observed,
    status: &mut VirtualMachineSnapshotContentStatus,
    decision: &mut Decision,
) -> Step {
    if let Some(limit) = limit(status) {
        let is_over = observed.now >= limit;
        // A guest that was not thawed after a refused volume thaws itself.
        let is_left = observed.failures.of(THAW).is_some() && !observed.missing().is_empty();
        if !is_over && !is_left && volume_snapshot::error(observed).is_none() {
            decision.wake(Duration::try_from(limit.duration_since(observed.now)).unwrap_or_default());
            return Step::Nothing;
        }
        record(status, QuiesceState::TimedOut, None);
        let calls = !is_over && !is_left && agent(observed.vmi.as_deref()).is_some();
        return if calls { Step::Call(None) } else { Step::Nothing };
    }
    if status.quiesce.is_some() {
        return Step::Nothing;
    }
    let live = observed.vmi.as_deref().filter(|vmi| !vmi.is_final());
    let state = match live {
        None => QuiesceState::Offline,
        Some(vmi) if vmi.has_true(condition::PAUSED) => QuiesceState::Paused,
        Some(vmi) if agent(Some(vmi)).is_none() => QuiesceState::NoAgent,
        Some(vmi) => return freeze(observed, vmi, status, decision),
    };
    record(status, state, None);
    Step::Nothing
}

fn freeze(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    status: &mut VirtualMachineSnapshotContentStatus,
    decision: &mut Decision,
) -> Step {
    let failure = observed.failures.of(FREEZE);
    if let Some(failure) = failure.filter(|failure| failure.attempts >= ATTEMPTS) {
        record(status, QuiesceState::Failed, Some(failure.message.clone()));
        return Step::Nothing;
    }
    if decision.must_wait(&observed.failures, FREEZE, observed.now) {
        return Step::Wait;
    }
    // By a request whose answer was lost, or by somebody else. Its limit is not known here, and launchers of former releases
    // do not put it off.
    if vmi.status.as_ref().and_then(|status| status.fs_freeze_status.as_deref()) == Some("frozen") {
        decision.wake(LOOK);
        return Step::Release;
    }
    // The guest counts its limit from a later time.
    let time = Some(Time(observed.now));
    status.quiesce = Some(Quiesce { message: None, state: QuiesceState::Frozen, time });
    decision.wake(FROZEN);
    Step::Call(Some(FROZEN))
}

/// Returns the time until the contents of volume snapshots are read again, which grows with the time since the freeze.
pub(super) fn pause(observed: &Observed, status: &VirtualMachineSnapshotContentStatus) -> Duration {
    let left = limit(status).map(|limit| limit.duration_since(observed.now));
    let left = left.and_then(|left| Duration::try_from(left).ok()).unwrap_or_default();
    (FROZEN.saturating_sub(left) / 16).clamp(PAUSE.0, PAUSE.1)
}

/// Decides about the guest once all volume snapshots were taken.
pub(super) fn thaw(
    observed: &Observed,
    status: &mut VirtualMachineSnapshotContentStatus,
    decision: &mut Decision,
) -> Step {
    let Some(limit) = limit(status) else {
        // No volume can be snapshotted, so that no freeze was tried.
        if status.quiesce.is_none() {
            record(status, without_volumes(observed.vmi.as_deref()), None);
        }
        return Step::Nothing;
    };
    let last = observed.taken.values().filter_map(|taken| taken.created.as_ref()).map(|created| created.0).max();
    let is_late = observed.now > limit && last.is_some_and(|last| last > limit);
    let failure = observed.failures.of(THAW);
    let has_expired = failure.is_some_and(|failure| failure.message.contains(TOO_LATE));
    let state = if is_late || has_expired { QuiesceState::TimedOut } else { QuiesceState::Thawed };
    if observed.now > limit || has_expired || agent(observed.vmi.as_deref()).is_none() {
        record(status, state, failure.map(|failure| failure.message.clone()));
        return Step::Nothing;
    }
    if decision.must_wait(&observed.failures, THAW, observed.now) {
        return Step::Wait;
    }
    record(status, state, None);
    Step::Call(None)
}

fn without_volumes(vmi: Option<&VirtualMachineInstance>) -> QuiesceState {
    match vmi.filter(|vmi| !vmi.is_final()) {
        None => QuiesceState::Offline,
        Some(vmi) if vmi.has_true(condition::PAUSED) => QuiesceState::Paused,
        Some(vmi) if agent(Some(vmi)).is_none() => QuiesceState::NoAgent,
        Some(_) => QuiesceState::Thawed,
    }
}

/// Returns true if a freeze may have reached the guest, and no other operation freezes it.
pub(super) fn may_be_frozen(observed: &Observed) -> bool {
    let status = observed.status();
    let lease = observed.vm.as_ref().and_then(|vm| vm.status.as_ref()?.operation.clone());
    let snapshot = observed.content.spec.virtual_machine_snapshot_name.as_deref();
    let is_ours =
        lease.is_none_or(|lease| lease.operation == VmOperation::Snapshot && Some(lease.name.as_str()) == snapshot);
    let is_possible = status.quiesce.is_none() || is_frozen(&status);
    is_ours && is_possible && agent(observed.vmi.as_deref()).is_some()
}

/// Returns the message of a freeze that was refused and will be tried again.
pub(super) fn error(observed: &Observed, status: &VirtualMachineSnapshotContentStatus) -> Option<String> {
    let failure = observed.failures.of(FREEZE).filter(|_| status.quiesce.is_none())?;
    Some(format!("cannot freeze the file systems of the guest: {}", failure.message))
}
