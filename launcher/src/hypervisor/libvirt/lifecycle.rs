//! Names of libvirt's states of a domain. Pure.

use protocol::Lifecycle;
use virt::sys;

/// Reports a guest stopped by a disk error.
pub(super) fn is_io_error(state: u32, reason: i32) -> bool {
    state == sys::VIR_DOMAIN_PAUSED && i64::from(reason) == i64::from(sys::VIR_DOMAIN_PAUSED_IOERROR)
}

/// Returns lifecycle and reason of a domain.
pub(super) fn lifecycle(state: u32, reason: i32) -> (Lifecycle, &'static str) {
    let reason = |names: &[&'static str]| {
        usize::try_from(reason).ok().and_then(|index| names.get(index)).copied().unwrap_or("unknown")
    };
    // Positions are libvirt's numbers of virDomainState and of its reasons.
    match state {
        1 | 2 => (
            Lifecycle::Running,
            reason(&[
                "unknown",
                "booted",
                "migrated",
                "restored",
                "fromSnapshot",
                "unpaused",
                "migrationCanceled",
                "saveCanceled",
                "wakeup",
                "crashed",
                "postcopy",
                "postcopyFailed",
            ]),
        ),
        3 => (
            Lifecycle::Paused,
            reason(&[
                "unknown",
                "user",
                "migration",
                "save",
                "dump",
                "ioError",
                "watchdog",
                "fromSnapshot",
                "shuttingDown",
                "snapshot",
                "crashed",
                "startingUp",
                "postcopy",
                "postcopyFailed",
                "apiError",
            ]),
        ),
        4 => (Lifecycle::ShuttingDown, reason(&["unknown", "user"])),
        5 => (
            Lifecycle::Shutoff,
            reason(&[
                "unknown",
                "shutdown",
                "destroyed",
                "crashed",
                "migrated",
                "saved",
                "failed",
                "fromSnapshot",
                "daemon",
            ]),
        ),
        6 => (Lifecycle::Crashed, reason(&["unknown", "panicked"])),
        7 => (Lifecycle::PmSuspended, "unknown"),
        _ => (Lifecycle::NoDomain, "unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_and_reasons_have_libvirts_names() {
        for (state, reason, expected) in [
            (1, 1, (Lifecycle::Running, "booted")),
            (3, 5, (Lifecycle::Paused, "ioError")),
            (3, 11, (Lifecycle::Paused, "startingUp")),
            (4, 1, (Lifecycle::ShuttingDown, "user")),
            (5, 1, (Lifecycle::Shutoff, "shutdown")),
            (5, 6, (Lifecycle::Shutoff, "failed")),
            (6, 1, (Lifecycle::Crashed, "panicked")),
            (5, 99, (Lifecycle::Shutoff, "unknown")),
            (0, -1, (Lifecycle::NoDomain, "unknown")),
        ] {
            assert_eq!(lifecycle(state, reason), expected);
        }
        assert!(is_io_error(3, 5) && !is_io_error(3, 1) && !is_io_error(1, 5));
    }
}
