//! The phase of a machine from what its launcher reports.

use api::VmiPhase as Phase;
use protocol::{Lifecycle, MachineState};

/// How the domain stands, in the terms the phase depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Nothing is known, or the launcher is between two states.
    Unclear,
    /// There is none.
    None,
    /// Running, paused or suspended.
    Alive,
    /// On its way to power off.
    ShuttingDown,
    /// Ended, and how.
    Ended(End),
}

/// How a domain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest powered off, or was saved.
    Shutdown,
    /// Stopped by force.
    Destroyed,
    /// The guest or QEMU crashed.
    Crashed,
    /// libvirt gives no reason, or one that says nothing about the guest.
    Unknown,
}

impl Domain {
    /// The domain of a report.
    pub fn of(report: Option<&MachineState>) -> Self {
        let Some(report) = report else { return Self::Unclear };
        match report.lifecycle() {
            Lifecycle::Unspecified => Self::Unclear,
            Lifecycle::NoDomain => Self::None,
            Lifecycle::Running | Lifecycle::Paused | Lifecycle::PmSuspended => Self::Alive,
            Lifecycle::ShuttingDown => Self::ShuttingDown,
            Lifecycle::Shutoff => Self::Ended(End::of(&report.reason)),
            Lifecycle::Crashed => Self::Ended(End::Crashed),
        }
    }

    /// The guest's processors exist.
    pub fn is_alive(self) -> bool {
        matches!(self, Self::Alive | Self::ShuttingDown)
    }
}

impl End {
    fn of(reason: &str) -> Self {
        match simplified(reason).as_str() {
            "shutdown" | "saved" | "fromsnapshot" => Self::Shutdown,
            "destroyed" => Self::Destroyed,
            "crashed" | "panicked" => Self::Crashed,
            _ => Self::Unknown,
        }
    }
}

/// A reason without case and separators: libvirt writes `io-error`, its API `IOERROR`, the reference `IOError`.
pub fn simplified(reason: &str) -> String {
    const MAX: usize = 64;
    reason.chars().filter(char::is_ascii_alphanumeric).take(MAX).map(|c| c.to_ascii_lowercase()).collect()
}

/// What the phase depends on besides the domain.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances {
    /// The guest has been seen running, or a synchronization said that it started it.
    pub ran: bool,
    /// The machine cannot be started, or the connection was lost for good.
    pub hopeless: bool,
    /// A stop by force is a failure: the guest had a grace period and ACPI to use it.
    pub force_is_failure: bool,
}

/// The phase that follows `current`.
pub fn next(current: &Phase, domain: Domain, around: Circumstances) -> Phase {
    if current.is_final() {
        return current.clone();
    }
    match domain {
        Domain::Ended(End::Shutdown) => Phase::Succeeded,
        Domain::Ended(End::Crashed) => Phase::Failed,
        Domain::Ended(End::Destroyed) if around.force_is_failure => Phase::Failed,
        Domain::Ended(End::Destroyed) => Phase::Succeeded,
        // QEMU died without a word, while the guest ran.
        Domain::Ended(End::Unknown) if around.ran || *current == Phase::Running => Phase::Failed,
        _ if around.hopeless => Phase::Failed,
        Domain::Alive => Phase::Running,
        Domain::Ended(End::Unknown) | Domain::None if *current != Phase::Running => Phase::Scheduled,
        _ => current.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALM: Circumstances = Circumstances { ran: false, hopeless: false, force_is_failure: true };

    fn report(lifecycle: Lifecycle, reason: &str) -> Domain {
        let mut state = MachineState { reason: reason.into(), ..MachineState::default() };
        state.set_lifecycle(lifecycle);
        Domain::of(Some(&state))
    }

    #[test]
    fn phase_follows_the_table_of_domain_states() {
        use Lifecycle::{Crashed, NoDomain, Paused, PmSuspended, Running, Shutoff, ShuttingDown, Unspecified};
        let rows = [
            (Phase::Scheduling, Running, "booted", Phase::Running),
            (Phase::Scheduled, Paused, "user", Phase::Running),
            (Phase::Scheduled, PmSuspended, "", Phase::Running),
            (Phase::Running, ShuttingDown, "user", Phase::Running),
            (Phase::Scheduled, ShuttingDown, "user", Phase::Scheduled),
            (Phase::Running, Unspecified, "", Phase::Running),
            (Phase::Scheduling, NoDomain, "", Phase::Scheduled),
            (Phase::Running, NoDomain, "", Phase::Running),
            (Phase::Running, Shutoff, "shutdown", Phase::Succeeded),
            (Phase::Running, Shutoff, "saved", Phase::Succeeded),
            (Phase::Running, Shutoff, "from_snapshot", Phase::Succeeded),
            (Phase::Running, Shutoff, "crashed", Phase::Failed),
            (Phase::Running, Crashed, "panicked", Phase::Failed),
            (Phase::Running, Shutoff, "destroyed", Phase::Failed),
            (Phase::Running, Shutoff, "failed", Phase::Failed),
            (Phase::Running, Shutoff, "", Phase::Failed),
            (Phase::Scheduled, Shutoff, "failed", Phase::Scheduled),
            (Phase::Succeeded, Running, "", Phase::Succeeded),
            (Phase::Failed, Shutoff, "shutdown", Phase::Failed),
        ];
        for (current, lifecycle, reason, wanted) in rows {
            assert_eq!(next(&current, report(lifecycle, reason), CALM), wanted, "{current:?} {lifecycle:?} {reason}");
        }
    }

    #[test]
    fn a_stop_by_force_succeeds_where_the_guest_had_no_chance_to_shut_down() {
        let around = Circumstances { force_is_failure: false, ..CALM };
        assert_eq!(next(&Phase::Running, report(Lifecycle::Shutoff, "destroyed"), around), Phase::Succeeded);
    }

    #[test]
    fn a_guest_that_ran_and_ended_without_a_reason_failed() {
        let around = Circumstances { ran: true, ..CALM };
        assert_eq!(next(&Phase::Scheduling, report(Lifecycle::Shutoff, "failed"), around), Phase::Failed);
    }

    #[test]
    fn a_hopeless_start_fails_but_a_clean_end_stays_clean() {
        let around = Circumstances { hopeless: true, ..CALM };
        assert_eq!(next(&Phase::Scheduled, report(Lifecycle::NoDomain, ""), around), Phase::Failed);
        assert_eq!(next(&Phase::Running, report(Lifecycle::Shutoff, "shutdown"), around), Phase::Succeeded);
        assert_eq!(next(&Phase::Running, Domain::Unclear, around), Phase::Failed);
    }

    #[test]
    fn reasons_are_compared_without_case_and_separators() {
        for spelling in ["IOError", "io-error", "ioError", "I/O error"] {
            assert_eq!(simplified(spelling), "ioerror");
        }
    }
}
