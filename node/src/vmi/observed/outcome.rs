//! The outcomes of effects.

use std::{sync::Arc, time::Duration};

use api::{VirtualMachineInstance, VmiPhase as Phase};
use daemon::backoff;

use super::{CONNECT, Failure, Now, ObjectState, Observed, RECORD, REQUEST, WRITE_INTERVAL, link::RECONNECT};
use crate::{
    launcher::LauncherError,
    vmi::{event::Event, host::ConnectError, records::WriteError, role},
};

/// Writes of an outdated object in a row after which the next read follows at once.
const PROMPT_READS: u32 = 3;

/// The outcome of an effect.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The attempt to connect ended.
    Connected(Result<u64, ConnectError>),
    /// The object was written; the new version, and the events to publish.
    Written(Result<Arc<VirtualMachineInstance>, WriteError>, Vec<Event>),
    /// The progress of a migration was written; the new version.
    ProgressWritten(Result<Arc<VirtualMachineInstance>, WriteError>),
    /// The object was read; `None` if it does not exist.
    Read(Result<Option<Arc<VirtualMachineInstance>>, WriteError>),
    /// The request of a user was carried out.
    Requested,
}

impl Observed {
    /// Applies the outcome of an effect. Returns events for users.
    pub(in crate::vmi) fn apply_outcome(&mut self, outcome: Outcome, node: &str, now: Now) -> Vec<Event> {
        match outcome {
            Outcome::Connected(result) => {
                self.busy.remove(CONNECT);
                self.apply_connect(result, now);
            }
            Outcome::Written(result, events) => {
                self.busy.remove(RECORD);
                let written = result.is_ok();
                self.apply_write(result, node, now);
                if written {
                    return events;
                }
            }
            Outcome::ProgressWritten(result) => {
                self.busy.remove(RECORD);
                match result {
                    Ok(vmi) => self.replace_object(vmi, node),
                    // The next progress is another one.
                    Err(WriteError::Conflict | WriteError::Gone) => self.object = ObjectState::Unverified,
                    Err(WriteError::Other(error)) => tracing::debug!(error, "the progress was not written"),
                }
            }
            Outcome::Read(result) => {
                self.busy.remove(RECORD);
                self.apply_read(result, node, now);
            }
            Outcome::Requested => {
                self.busy.remove(REQUEST);
            }
        }
        Vec::new()
    }

    /// Applies the failure of a call. Returns events for users.
    pub(in crate::vmi) fn failed(&mut self, error: &LauncherError, now: Now) -> Vec<Event> {
        // The state stream reports the end of the connection, and a new one is opened.
        if error.is_lost() {
            self.hold_until = now.since_start + RECONNECT;
            return Vec::new();
        }
        let permanent = matches!(error, LauncherError::Refused { irrecoverable: true, .. });
        self.note_failure(error.to_string(), permanent, now)
    }

    /// Makes a failure temporary if the guest runs: a running guest must not fail because its launcher rejects a Sync, or
    /// because a restarted virt-handler rejects its network.
    pub(in crate::vmi) fn spare_guest(&mut self) {
        let runs = match &self.report {
            Some(_) => self.domain().is_alive(),
            None => self.facts.phase == Phase::Running,
        };
        if let Some(failure) = self.failure.as_mut().filter(|_| runs) {
            failure.permanent = false;
        }
    }

    /// Records a failure with a doubling pause. Returns an event for each new message.
    pub(in crate::vmi) fn note_failure(&mut self, message: String, permanent: bool, now: Now) -> Vec<Event> {
        note(&mut self.failure, "SyncFailed", message, permanent, now)
    }

    /// Records the failure to plug or unplug interfaces of a guest that runs, as [`Self::note_failure`] does. It delays no other call.
    pub(in crate::vmi) fn note_network_failure(&mut self, message: String, now: Now) -> Vec<Event> {
        note(&mut self.network_failure, "NicHotplug", message, false, now)
    }

    fn apply_write(&mut self, result: Result<Arc<VirtualMachineInstance>, WriteError>, node: &str, now: Now) {
        match result {
            Ok(vmi) => {
                self.write_retry = None;
                self.guest_changed_at = None;
                self.guest_written_at = Some(now.since_start);
                self.paced = self.paced.max(now.since_start) + WRITE_INTERVAL;
                self.replace_object(vmi, node);
            }
            Err(WriteError::Gone) => self.object = ObjectState::Unverified,
            Err(WriteError::Conflict) => self.delay_write("conflict".into(), now, true),
            Err(WriteError::Other(message)) => self.delay_write(message, now, false),
        }
    }

    /// Delays the next write. `stale`: the object has to be read first, and the first attempts follow at once.
    fn delay_write(&mut self, message: String, now: Now, stale: bool) {
        let count = self.write_retry.as_ref().map_or(0, |failure| failure.count).saturating_add(1);
        let wait = match count.saturating_sub(PROMPT_READS) {
            0 if stale => Duration::ZERO,
            later if stale => pause(later),
            _ => pause(count),
        };
        self.write_retry = Some(Failure { message, count, retry_at: now.since_start + wait, permanent: false });
        if stale {
            self.object = ObjectState::Unverified;
        }
    }

    fn apply_read(&mut self, result: Result<Option<Arc<VirtualMachineInstance>>, WriteError>, node: &str, now: Now) {
        match result {
            Ok(Some(vmi)) if vmi.metadata.uid.as_deref() != Some(self.facts.uid.as_str()) => {
                self.object = ObjectState::Deleted(now.since_start);
            }
            Ok(None) | Err(WriteError::Gone) => self.object = ObjectState::Deleted(now.since_start),
            Ok(Some(vmi)) => {
                self.object = ObjectState::Current;
                self.role = role::decide(&vmi, node);
                self.replace_object(vmi, node);
            }
            Err(WriteError::Conflict) => self.delay_write("conflict".into(), now, false),
            Err(WriteError::Other(message)) => self.delay_write(message, now, false),
        }
    }
}

fn note(known: &mut Option<Failure>, reason: &'static str, message: String, permanent: bool, now: Now) -> Vec<Event> {
    let count = known.as_ref().map_or(0, |failure| failure.count).saturating_add(1);
    let is_new = known.as_ref().is_none_or(|failure| failure.message != message);
    let event = is_new.then(|| Event::warning(reason, message.clone()));
    *known = Some(Failure { message, count, retry_at: now.since_start + pause(count), permanent });
    event.into_iter().collect()
}

/// Returns the pause after the n-th consecutive failure: 1 s, doubling, at most a minute.
pub(in crate::vmi) fn pause(count: u32) -> Duration {
    backoff::pause((Duration::from_secs(1), Duration::from_secs(60)), count)
}
