//! Converts libvirt's state of a domain to the protocol's form. Pure.

use protocol::{DiskError, DiskTarget, Lifecycle};

use crate::hypervisor::libvirt::{DiskFailure, DomainState};

/// Longest domain XML that is parsed.
const XML_LIMIT: usize = 4 * 1024 * 1024;

/// Returns lifecycle and reason of a domain.
pub(crate) fn lifecycle(state: DomainState) -> (Lifecycle, &'static str) {
    let reason = |names: &[&'static str]| {
        usize::try_from(state.reason).ok().and_then(|index| names.get(index)).copied().unwrap_or("unknown")
    };
    // Positions are libvirt's numbers of virDomainState and of its reasons.
    match state.state {
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

/// Facts of the active domain XML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ActiveDomain {
    /// Machine type with its version.
    pub(crate) machine_type: String,
    /// Runs without hardware virtualization.
    pub(crate) software_emulation: bool,
    /// ACPI is on.
    pub(crate) acpi: bool,
    /// The guest agent's channel is connected.
    pub(crate) guest_agent_connected: bool,
    /// Disks by volume.
    pub(crate) disks: Vec<DiskTarget>,
}

/// Parses the active domain XML, written by libvirt. Missing parts are empty.
pub(crate) fn active_domain(xml: &str) -> ActiveDomain {
    let Some(document) = (xml.len() <= XML_LIMIT).then(|| roxmltree::Document::parse(xml).ok()).flatten() else {
        return ActiveDomain::default();
    };
    let root = document.root_element();
    let find = |name: &str| root.children().find(|node| node.has_tag_name(name));
    let machine_type = find("os")
        .and_then(|os| os.children().find(|node| node.has_tag_name("type")))
        .and_then(|kind| kind.attribute("machine"))
        .unwrap_or_default();
    let acpi = find("features").is_some_and(|features| features.children().any(|node| node.has_tag_name("acpi")));
    let mut domain = ActiveDomain {
        machine_type: machine_type.to_owned(),
        software_emulation: root.attribute("type") == Some("qemu"),
        acpi,
        ..ActiveDomain::default()
    };
    for device in find("devices").into_iter().flat_map(|devices| devices.children()) {
        let child = |name: &str| device.children().find(|node| node.has_tag_name(name));
        match device.tag_name().name() {
            "disk" => {
                let volume =
                    child("alias").and_then(|alias| alias.attribute("name")).and_then(|n| n.strip_prefix("ua-"));
                let target = child("target").and_then(|target| target.attribute("dev"));
                if let (Some(volume), Some(target)) = (volume, target) {
                    domain.disks.push(DiskTarget { volume: volume.to_owned(), target: target.to_owned(), size: 0 });
                }
            }
            "channel" => {
                domain.guest_agent_connected |= child("target").is_some_and(|target| {
                    target.attribute("name") == Some("org.qemu.guest_agent.0")
                        && target.attribute("state") == Some("connected")
                });
            }
            _ => {}
        }
    }
    domain
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
        .filter_map(|(target, trouble)| {
            Some(DiskError { volume: volume(target)?, no_space: *trouble == DiskFailure::NoSpace })
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
        assert!(DomainState { state: 3, reason: 5 }.is_io_error());
        assert!(
            !DomainState { state: 3, reason: 1 }.is_io_error() && !DomainState { state: 1, reason: 5 }.is_io_error()
        );
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
            assert_eq!(lifecycle(DomainState { state, reason }), expected);
        }
    }

    #[test]
    fn a_running_domain_is_read() {
        let domain = active_domain(
            "<domain type='qemu'><os><type machine='pc-q35-10.0'>hvm</type></os><features><acpi/></features><devices>\
             <disk><target dev='vda'/><alias name='ua-root'/></disk>\
             <channel><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel></devices></domain>",
        );
        assert_eq!(domain.machine_type, "pc-q35-10.0");
        assert!(domain.software_emulation && domain.acpi && domain.guest_agent_connected);
        assert_eq!(domain.disks, [DiskTarget { volume: "root".into(), target: "vda".into(), size: 0 }]);
        assert_eq!(active_domain("<domain"), ActiveDomain::default());
    }
}
