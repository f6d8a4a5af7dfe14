//! The states that the launcher reports.

use std::time::Duration;

use api::VmiPhase as Phase;
use daemon::backoff;
use protocol::{GuestPanic, LauncherState, Lifecycle, MigrationStep};

use super::{Now, Observed, Retry};
use crate::vmi::{
    event::Event,
    phase::{Domain, End, simplified},
};

/// Least interval of events about failed pings of the guest agent, independent of the launcher's count.
const PING_EVENT_INTERVAL: Duration = Duration::from_secs(60);
/// The same for events about panics of the guest's kernel, of which a guest can report any number.
const PANIC_EVENT_INTERVAL: Duration = Duration::from_secs(10);
/// First and longest pause before a Sync is repeated for a guest that an I/O error paused, or for items that failed.
const RETRY: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(180));
/// Duration after which a running guest counts as recovered from an I/O error.
const IO_RECOVERED: Duration = Duration::from_secs(30);

/// Reason of the event about a panic of the guest's kernel.
pub(in crate::vmi) const GUEST_PANICKED: &str = "GuestPanicked";

/// A guest that an I/O error paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IoPause {
    /// Attempts so far.
    pub(in crate::vmi) attempts: u32,
    /// Time of the next attempt.
    pub(in crate::vmi) retry_at: Duration,
    /// Since when it runs again. A pause that follows soon counts as the same error.
    pub(in crate::vmi) running_since: Option<Duration>,
}

impl Observed {
    /// Applies a state that the launcher reported. Returns events for users.
    pub(in crate::vmi) fn apply_report(&mut self, state: LauncherState, now: Now) -> Vec<Event> {
        let panics = number_of_panics(&state);
        // A restarted virt-handler finds panics that were reported before. One that has just ended the guest was not.
        let is_end = matches!(Domain::of(Some(&state)), Domain::Ended(End::Crashed)) && !self.facts.is_final();
        let known = self.panics.replace(panics).unwrap_or(if is_end { 0 } else { panics });
        let sent = self.panicked_at.is_some_and(|at| now.since_start < at.saturating_add(PANIC_EVENT_INTERVAL));
        let panic = state.guest_panic.as_ref().filter(|_| panics > known && !sent).map(|panic| {
            self.panicked_at = Some(now.since_start);
            Event::warning(GUEST_PANICKED, panic_text(panic))
        });
        let ping_failed = self.report.as_ref().is_some_and(|known| state.silences > known.silences);
        let sent = self.ping_failed_at.is_some_and(|at| now.since_start < at.saturating_add(PING_EVENT_INTERVAL));
        let ping_failed = (ping_failed && !sent).then(|| {
            self.ping_failed_at = Some(now.since_start);
            let name = self.vmi.metadata.name.as_deref().unwrap_or_default();
            Event::warning("GuestAgentPingFailed", format!("GuestAgentPing probe failed for VMI {name}"))
        });
        let events: Vec<_> = panic.into_iter().chain(ping_failed).collect();
        if self.report.as_ref().is_none_or(|known| guest_differs(known, &state)) {
            self.guest_changed_at.get_or_insert(now.since_start);
        }
        self.apply_io_pause(&state, now);
        let failed = state.items.iter().any(|item| !item.needs_restart);
        self.item_retry = failed
            .then(|| self.item_retry.unwrap_or(Retry { attempts: 0, retry_at: now.since_start + retry_pause(0) }));
        self.report = Some(state);
        self.reported = true;
        self.moved_since = match self.domain() {
            Domain::Ended(End::Migrated) => Some(self.moved_since.unwrap_or(now.since_start)),
            _ if is_releasing(&self.report) => Some(self.moved_since.unwrap_or(now.since_start)),
            _ => None,
        };
        self.ran |= self.domain().is_alive();
        if self.ran || self.facts.phase == Phase::Running {
            match self.domain() {
                Domain::None => {
                    self.no_domain_since.get_or_insert(now.since_start);
                }
                _ => self.no_domain_since = None,
            }
        }
        events
    }

    fn apply_io_pause(&mut self, state: &LauncherState, now: Now) {
        let paused = state.lifecycle() == Lifecycle::Paused && simplified(&state.reason) == "ioerror";
        let known =
            self.io_pause.filter(|pause| pause.running_since.is_none_or(|at| now.since_start < at + IO_RECOVERED));
        self.io_pause = match (paused, known) {
            (false, None) => None,
            (false, Some(pause)) => {
                Some(IoPause { running_since: Some(pause.running_since.unwrap_or(now.since_start)), ..pause })
            }
            (true, Some(pause)) if pause.running_since.is_none() => Some(pause),
            (true, known) => {
                let attempts = known.map_or(0, |pause| pause.attempts);
                let retry_at = now.since_start + retry_pause(attempts);
                Some(IoPause { attempts, retry_at, running_since: None })
            }
        };
    }

    /// Counts a Sync as an attempt of every repeated Sync.
    pub(in crate::vmi) fn delay_retries(&mut self, now: Now) {
        if let Some(pause) = &mut self.io_pause {
            pause.attempts = pause.attempts.saturating_add(1);
            pause.retry_at = now.since_start + retry_pause(pause.attempts);
        }
        if let Some(retry) = &mut self.item_retry {
            retry.attempts = retry.attempts.saturating_add(1);
            retry.retry_at = now.since_start + retry_pause(retry.attempts);
        }
    }
}

/// Returns true if the domain has ended here by a migration, and the target has not confirmed that it runs the guest.
fn is_releasing(report: &Option<LauncherState>) -> bool {
    let moving = report.as_ref().and_then(|report| report.migration.as_ref());
    moving.is_some_and(|moving| moving.step() == MigrationStep::Releasing)
}

/// Returns the pause before the next repeated Sync.
fn retry_pause(attempts: u32) -> Duration {
    backoff::pause(RETRY, attempts.saturating_add(1))
}

/// Returns the number of panics of the guest's kernel. A launcher of an older release reports the first one only.
fn number_of_panics(state: &LauncherState) -> u32 {
    state.guest_panics.max(u32::from(state.guest_panic.is_some()))
}

/// Returns the message of the event about a panic of the guest's kernel.
fn panic_text(panic: &GuestPanic) -> String {
    let values: Vec<String> = panic.values.iter().map(|value| format!("'{value}'")).collect();
    match panic.kind.as_str() {
        "" => "GuestPanicked (details unavailable)".into(),
        "hyper-v" if !values.is_empty() => format!("GuestPanicked: {}", values.join(", ")),
        kind => format!("GuestPanicked: type={kind}"),
    }
}

/// Returns true if the report of the guest itself differs.
fn guest_differs(known: &LauncherState, new: &LauncherState) -> bool {
    known.guest_agent_connected != new.guest_agent_connected
        || known.guest != new.guest
        || known.agent != new.agent
        || known.interfaces != new.interfaces
        || known.memory_current != new.memory_current
        || known.online_vcpus != new.online_vcpus
}
