//! The form of the state that virt-handler sees. Pure.

use protocol::{DiskError, DiskTarget, LauncherState, Lifecycle};

use crate::hypervisor::DiskFailure;

/// Clears the facts of a guest agent that is disconnected.
pub(crate) fn forget_guest(state: &mut LauncherState) {
    state.guest = None;
    state.interfaces.clear();
    state.agent = None;
    state.file_systems.clear();
}

/// Reports a guest stopped by a disk error. Other pauses are requested or end by themselves.
pub(crate) fn waits_for_disk(lifecycle: Lifecycle, reason: &str) -> bool {
    lifecycle == Lifecycle::Paused && reason == "ioError"
}

/// Reports a state in which a guest agent cannot answer: no guest runs yet, or it is paused.
pub(crate) fn may_be_silent(lifecycle: Lifecycle, reason: &str) -> bool {
    const REASONS: [&str; 9] =
        ["user", "migration", "save", "dump", "fromSnapshot", "shuttingDown", "snapshot", "startingUp", "postcopy"];
    match lifecycle {
        Lifecycle::NoDomain => true,
        Lifecycle::Paused => REASONS.contains(&reason),
        _ => false,
    }
}

/// Returns disk errors by volume. Disks without a volume are left out.
pub(crate) fn errors_by_volume(errors: &[(String, DiskFailure)], disks: &[DiskTarget]) -> Vec<DiskError> {
    let volume = |target: &str| disks.iter().find(|disk| disk.target == target).map(|disk| disk.volume.clone());
    errors
        .iter()
        .filter_map(|(target, failure)| {
            Some(DiskError { volume: volume(target)?, no_space: *failure == DiskFailure::NoSpace })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_guest_stopped_by_a_disk_error_is_resumed() {
        for (state, reason, waits) in [
            (Lifecycle::Paused, "ioError", true),
            (Lifecycle::Paused, "user", false),
            (Lifecycle::Paused, "startingUp", false),
            (Lifecycle::Running, "ioError", false),
            (Lifecycle::Running, "booted", false),
        ] {
            assert_eq!(waits_for_disk(state, reason), waits, "{state:?} {reason}");
        }
    }

    #[test]
    fn a_paused_guest_may_be_silent() {
        for (state, reason, excused) in [
            (Lifecycle::NoDomain, "", true),
            (Lifecycle::Paused, "user", true),
            (Lifecycle::Paused, "ioError", false),
            (Lifecycle::Running, "booted", false),
            (Lifecycle::Shutoff, "shutdown", false),
        ] {
            assert_eq!(may_be_silent(state, reason), excused, "{state:?} {reason}");
        }
    }

    #[test]
    fn disk_errors_are_reported_by_volume() {
        let disks = [DiskTarget { volume: "data".into(), target: "vdb".into(), size: 0 }];
        let errors = [("vdb".to_owned(), DiskFailure::NoSpace), ("vdc".to_owned(), DiskFailure::InputOutput)];
        assert_eq!(errors_by_volume(&errors, &disks), [DiskError { volume: "data".into(), no_space: true }]);
    }
}
