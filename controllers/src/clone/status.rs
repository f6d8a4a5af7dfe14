//! The status of clones.

use api::{
    Condition,
    clone::{VirtualMachineClone, VirtualMachineCloneStatus},
    condition::set,
    snapshot::condition::{PROGRESSING, READY},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Observed;
use crate::runtime::{Decision, Effect, Kind};

/// The phase of a clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    New,
    Snapshot,
    Restore,
    Target,
    Succeeded,
    /// Also a phase that this version does not know.
    Failed,
}

impl Phase {
    const NAMED: [Self; 5] = [Self::Snapshot, Self::Restore, Self::Target, Self::Succeeded, Self::Failed];

    fn name(self) -> &'static str {
        match self {
            Self::New => "",
            Self::Snapshot => "SnapshotInProgress",
            Self::Restore => "RestoreInProgress",
            Self::Target => "CreatingTargetVM",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }

    pub(super) fn of(status: &VirtualMachineCloneStatus) -> Self {
        match status.phase.as_deref().filter(|phase| !phase.is_empty()) {
            None => Self::New,
            Some(name) => Self::NAMED.into_iter().find(|phase| phase.name() == name).unwrap_or(Self::Failed),
        }
    }
}

/// The state to show.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    phase: Phase,
    is_progressing: bool,
    is_ready: bool,
    /// Reason of both conditions; that of Ready is the message if there is one.
    reason: &'static str,
    message: String,
    /// Reason of an event with the message.
    event: Option<&'static str>,
    snapshot: Option<String>,
    restore: Option<String>,
    target: Option<String>,
}

impl Shown {
    fn new(phase: Phase, reason: &'static str, message: String) -> Self {
        Self {
            phase,
            is_progressing: false,
            is_ready: false,
            reason,
            message,
            event: None,
            snapshot: None,
            restore: None,
            target: None,
        }
    }

    /// It goes on.
    pub(super) fn works(phase: Phase) -> Self {
        Self { is_progressing: true, ..Self::new(phase, "Still processing", String::new()) }
    }

    /// It waits for this, with an event of this reason.
    pub(super) fn pending(event: &'static str, text: String) -> Self {
        Self { event: Some(event), ..Self::new(Phase::New, "Pending", text) }
    }

    /// It has failed.
    pub(super) fn failed(text: String) -> Self {
        Self::new(Phase::Failed, "Failed", text)
    }

    /// The VM of this name exists.
    pub(super) fn done(target: String) -> Self {
        Self { is_ready: true, target: Some(target), ..Self::new(Phase::Succeeded, "Ready", String::new()) }
    }

    /// Names the snapshot that is needed.
    pub(super) fn snapshot(self, name: String) -> Self {
        Self { snapshot: Some(name), ..self }
    }

    /// Names the restore that is needed.
    pub(super) fn restore(self, name: String) -> Self {
        Self { restore: Some(name), ..self }
    }
}

/// Writes the status.
pub(super) fn show(observed: &Observed, shown: Shown, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let former = &*observed.clone;
    let mut status = observed.status();
    let now = Time(observed.now);
    let mut is_new = false;
    let cause = if shown.message.is_empty() { shown.reason } else { shown.message.as_str() };
    for (type_, holds, reason) in [(PROGRESSING, shown.is_progressing, shown.reason), (READY, shown.is_ready, cause)] {
        is_new |= set(&mut status.conditions, Condition::new(type_, holds, reason, &shown.message, &now));
    }
    if let Some(reason) = shown.event.filter(|_| is_new) {
        decision.push(Effect::Event(observed.event(reason, shown.message)));
    }
    if shown.phase != Phase::New {
        status.phase = Some(shown.phase.name().to_owned());
    }
    if shown.phase == Phase::Succeeded && status.creation_time.is_none() {
        status.creation_time = observed.target.as_ref().and_then(|vm| vm.metadata.creation_timestamp.clone());
    }
    status.snapshot_name = shown.snapshot;
    status.restore_name = shown.restore;
    status.target_name = shown.target.or(status.target_name);
    let changed = VirtualMachineClone { status: Some(status), ..former.clone() };
    decision.effects.extend(Effect::change(Kind::VmClone, former, &changed, Some("status"))?);
    Ok(())
}
