//! The conditions of restores, and their events. As in KubeVirt, the text is the reason of a condition.

use api::{
    Condition,
    condition::set,
    snapshot::{
        condition::{FAILURE, PROGRESSING, READY},
        restore::{VirtualMachineRestore, VirtualMachineRestoreStatus},
    },
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Observed, volumes::Named};
use crate::runtime::{Decision, Effect, Event, Kind};

/// Event about an error after which the restore goes on.
const ERROR: &str = "VirtualMachineRestoreError";
/// Event about a failed restore. Its reason is that of the reference.
const FAILED: &str = "Operation failed";
/// Text of the conditions of a complete restore.
const COMPLETE: &str = "Operation complete";

/// The way of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum End {
    /// It goes on.
    #[default]
    None,
    /// It goes on after an error.
    Error,
    /// It is complete.
    Complete,
    /// It has failed.
    Failed,
    /// It has failed for an error that the reference repeats without end.
    Refused,
}

/// The state to show.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    is_progressing: bool,
    progressing: String,
    ready: String,
    end: End,
    /// Claims and DataVolumes to record.
    named: Option<Named>,
}

impl Shown {
    /// It does something, with the texts of conditions Progressing and Ready.
    pub(super) fn works(progressing: &str, ready: &str) -> Self {
        Self { is_progressing: true, progressing: progressing.to_owned(), ready: ready.to_owned(), ..Self::default() }
    }

    /// It waits for something else.
    pub(super) fn waits(text: &str) -> Self {
        Self::works(text, text)
    }

    /// Records claims and DataVolumes.
    pub(super) fn naming(self, named: Named) -> Self {
        Self { named: Some(named), ..self }
    }

    /// It is tried again after an error.
    pub(super) fn error(text: &str) -> Self {
        Self { end: End::Error, ..Self::idle(text) }
    }

    /// It has failed.
    pub(super) fn failed(text: &str) -> Self {
        Self { end: End::Failed, ..Self::idle(text) }
    }

    /// It has failed. Clients of the reference, which would try again, wait for the event of an error.
    pub(super) fn refused(text: &str) -> Self {
        Self { end: End::Refused, ..Self::idle(text) }
    }

    /// It does nothing: its target runs, or it is deleted.
    pub(super) fn idle(text: &str) -> Self {
        Self { progressing: text.to_owned(), ready: text.to_owned(), ..Self::default() }
    }

    /// It is complete.
    pub(super) fn complete() -> Self {
        Self { end: End::Complete, ..Self::idle(COMPLETE) }
    }

    /// Returns true if the status has this text.
    pub(super) fn is_shown(&self, observed: &Observed) -> bool {
        let known = observed.restore.status.iter().flat_map(|status| &status.conditions);
        known.filter(|known| known.type_ == READY).any(|known| known.reason.as_deref() == Some(self.ready.as_str()))
    }

    fn status(&self, former: &VirtualMachineRestoreStatus, now: &Time) -> VirtualMachineRestoreStatus {
        let mut status = former.clone();
        let is_complete = self.end == End::Complete;
        // The deletion of a complete one changes nothing about that.
        status.complete = Some(is_complete || former.complete == Some(true));
        if is_complete {
            status.restore_time = Some(now.clone());
        }
        if let Some(named) = &self.named {
            status.restores.clone_from(&named.restores);
            status.deleted_data_volumes.clone_from(&named.deleted);
        }
        let mut show = |type_: &str, holds: bool, text: &str| {
            set(&mut status.conditions, Condition::new(type_, holds, text, "", now));
        };
        show(PROGRESSING, self.is_progressing, &self.progressing);
        show(READY, is_complete, &self.ready);
        if matches!(self.end, End::Failed | End::Refused) {
            show(FAILURE, true, &self.ready);
        }
        status
    }

    fn event(&self, restore: &VirtualMachineRestore) -> Option<Event> {
        let regarding = Kind::VmRestore.reference(&restore.metadata);
        let name = restore.metadata.name.as_deref().unwrap_or_default();
        match self.end {
            End::None => None,
            End::Error | End::Refused => {
                let text = format!("VirtualMachineRestore encountered error {}", self.ready);
                Some(Event::warning(regarding, ERROR, text))
            }
            End::Failed => {
                Some(Event::warning(regarding, FAILED, format!("VirtualMachineRestore failed {}", self.ready)))
            }
            End::Complete => {
                let text = format!("Successfully completed VirtualMachineRestore {name}");
                Some(Event::normal(regarding, "VirtualMachineRestoreComplete", text))
            }
        }
    }
}

/// Returns the time since which the restore shows an error.
pub(super) fn hindered_since(observed: &Observed) -> Option<Timestamp> {
    let mut known = observed.restore.status.iter().flat_map(|status| &status.conditions);
    let stopped = known.find(|known| known.type_ == PROGRESSING && known.is_false())?;
    stopped.last_transition_time.as_ref().map(|time| time.0)
}

/// Writes the status, with an event when the text is new.
pub(super) fn show(observed: &Observed, shown: &Shown, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let former = &*observed.restore;
    let mut changed = former.clone();
    let status = shown.status(&observed.status(), &Time(observed.now));
    changed.status = Some(status);
    if let Some(change) = Effect::change(Kind::VmRestore, former, &changed, Some("status"))? {
        let event = shown.event(former).filter(|_| !shown.is_shown(observed));
        decision.push(match event {
            Some(event) => change.on_success(event),
            None => change,
        });
    }
    Ok(())
}
