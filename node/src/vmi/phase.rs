//! The phase of a VMI, derived from the state that its launcher reports.

use api::VmiPhase as Phase;
use protocol::{LauncherState, Lifecycle};

/// State of the domain, as far as the phase depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Domain {
    /// Unknown, or between two states.
    Unclear,
    /// No domain exists.
    None,
    /// Running, paused or suspended.
    Alive,
    ShuttingDown,
    Ended(End),
}

/// End of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The guest powered off or was saved.
    Shutdown,
    /// Stopped by force.
    Destroyed,
    /// The guest or QEMU crashed.
    Crashed,
    /// The domain has moved to another launcher.
    Migrated,
    /// libvirt gives no reason, or one that does not concern the guest.
    Unknown,
}

impl Domain {
    /// Returns the domain of a report.
    pub(super) fn of(report: Option<&LauncherState>) -> Self {
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

    /// Returns true if the vCPUs exist.
    pub(super) fn is_alive(self) -> bool {
        matches!(self, Self::Alive | Self::ShuttingDown)
    }
}

impl End {
    fn of(reason: &str) -> Self {
        match simplified(reason).as_str() {
            "shutdown" | "saved" | "fromsnapshot" => Self::Shutdown,
            "destroyed" => Self::Destroyed,
            "crashed" | "panicked" => Self::Crashed,
            "migrated" => Self::Migrated,
            _ => Self::Unknown,
        }
    }
}

/// Removes case and separators from a reason: libvirt writes `io-error`, its API `IOERROR`, the reference `IOError`.
pub(super) fn simplified(reason: &str) -> String {
    const MAX: usize = 64;
    reason.chars().filter(char::is_ascii_alphanumeric).take(MAX).map(|c| c.to_ascii_lowercase()).collect()
}

/// Other inputs of the phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    /// The guest has run, or a Sync reported that it started the guest.
    pub ran: bool,
    /// The VMI cannot be started, or is lost.
    pub permanent: bool,
    /// A forced stop is a failure: the guest had a grace period, and ACPI to use it.
    pub force_is_failure: bool,
}

/// Returns the phase that follows `current`.
pub(super) fn next(current: &Phase, domain: Domain, context: Context) -> Phase {
    if current.is_final() {
        return current.clone();
    }
    match domain {
        Domain::Ended(End::Shutdown) => Phase::Succeeded,
        Domain::Ended(End::Crashed) => Phase::Failed,
        Domain::Ended(End::Destroyed) if context.force_is_failure => Phase::Failed,
        Domain::Ended(End::Destroyed) => Phase::Succeeded,
        // QEMU died while the guest ran.
        Domain::Ended(End::Unknown) if context.ran || *current == Phase::Running => Phase::Failed,
        _ if context.permanent => Phase::Failed,
        // The guest runs on elsewhere: ownership passes, or it is lost.
        Domain::Ended(End::Migrated) => current.clone(),
        Domain::Alive => Phase::Running,
        Domain::Ended(End::Unknown) | Domain::None if *current != Phase::Running => Phase::Scheduled,
        _ => current.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALM: Context = Context { ran: false, permanent: false, force_is_failure: true };

    fn report(lifecycle: Lifecycle, reason: &str) -> Domain {
        let mut state = LauncherState { reason: reason.into(), ..LauncherState::default() };
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
            (Phase::Running, Shutoff, "migrated", Phase::Running),
            (Phase::Scheduled, Shutoff, "failed", Phase::Scheduled),
            (Phase::Succeeded, Running, "", Phase::Succeeded),
            (Phase::Failed, Shutoff, "shutdown", Phase::Failed),
        ];
        for (current, lifecycle, reason, expected) in rows {
            assert_eq!(next(&current, report(lifecycle, reason), CALM), expected, "{current:?} {lifecycle:?} {reason}");
        }
    }

    #[test]
    fn a_forced_stop_succeeds_if_the_guest_could_not_shut_down() {
        let context = Context { force_is_failure: false, ..CALM };
        assert_eq!(next(&Phase::Running, report(Lifecycle::Shutoff, "destroyed"), context), Phase::Succeeded);
    }

    #[test]
    fn a_guest_that_ran_and_ended_without_a_reason_failed() {
        let context = Context { ran: true, ..CALM };
        assert_eq!(next(&Phase::Scheduling, report(Lifecycle::Shutoff, "failed"), context), Phase::Failed);
    }

    #[test]
    fn a_permanent_failure_fails_the_vmi_but_a_clean_end_stays_clean() {
        let context = Context { permanent: true, ..CALM };
        assert_eq!(next(&Phase::Scheduled, report(Lifecycle::NoDomain, ""), context), Phase::Failed);
        assert_eq!(next(&Phase::Running, report(Lifecycle::Shutoff, "shutdown"), context), Phase::Succeeded);
        assert_eq!(next(&Phase::Running, Domain::Unclear, context), Phase::Failed);
    }

    #[test]
    fn reasons_are_compared_without_case_and_separators() {
        for spelling in ["IOError", "io-error", "ioError", "I/O error"] {
            assert_eq!(simplified(spelling), "ioerror");
        }
    }
}
