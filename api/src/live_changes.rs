//! Changes of a VM whose VMI runs: what follows at once, what the next start takes over, what is refused.
//!
//! The one list of them: `docs/reference/live-changes.md` is generated from it. Under rollout strategy Stage every change of
//! the template waits for the next start, except hot-pluggable volumes and interfaces.

/// Effect of a change on the running VMI.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Effect {
    /// The guest is changed while it runs.
    Live,
    /// The VMI records it for the next pod: the running pod stays where it is.
    Recorded,
    /// Condition RestartRequired shows it; the next start takes it over.
    Restart,
    /// The next start takes it over, without a condition.
    NextStart,
    /// A live migration carries it out. A VMI that cannot migrate needs a restart.
    Migration,
    /// Admission refuses it.
    Refused,
}

impl Effect {
    /// Returns the words of the documents.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Recorded => "recorded for the next pod",
            Self::Restart => "restart",
            Self::NextStart => "next start",
            Self::Migration => "live, by a migration",
            Self::Refused => "refused",
        }
    }
}

/// A change and its effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LiveChange {
    /// Field below the VM's `spec.template`, and which of its changes.
    pub change: &'static str,
    /// Effect.
    pub effect: Effect,
    /// Test of `e2e/tests` that shows it, or the unit test of the rule.
    pub test: &'static str,
}

const fn row(change: &'static str, effect: Effect, test: &'static str) -> LiveChange {
    LiveChange { change, effect, test }
}

const RESIZE: &str = "running_guest_gets_vcpus_and_memory_and_gives_memory_back";
const RULES: &str = "change_of_the_size_is_live_or_requires_a_restart";
const PLACEMENT: &str = "observed_generation_and_placement_follow_the_template";
const GENERIC: &str = "change_is_attributed_to_its_group";
const VOLUMES: &str = "volumes_are_plugged_into_a_running_vm_and_keep_their_data";

const NICS: &str = "interfaces_are_plugged_into_a_running_guest_and_leave_it";

/// All changes.
pub const TABLE: &[LiveChange] = &[
    row("spec.domain.cpu.sockets: more, up to maxSockets", Effect::Live, RESIZE),
    row("spec.domain.cpu.sockets: fewer, or more than maxSockets", Effect::Restart, RULES),
    row("spec.domain.cpu: cores, threads, maxSockets and all others", Effect::Restart, GENERIC),
    row("spec.domain.memory.guest: between the memory at boot and maxGuest", Effect::Live, RESIZE),
    row("spec.domain.memory.guest: less than at boot, or more than maxGuest", Effect::Restart, RULES),
    row("spec.domain.memory: maxGuest and all others", Effect::Restart, GENERIC),
    row("spec.domain.cpu.sockets above an explicit maxSockets", Effect::Refused, "8.5/1"),
    row("spec.domain.memory.guest above an explicit maxGuest, or not aligned to it", Effect::Refused, "8.5/2"),
    row("spec.nodeSelector, spec.affinity, spec.tolerations", Effect::Recorded, PLACEMENT),
    row("spec.volumes: hot-pluggable claims with disks on scsi or virtio", Effect::Live, VOLUMES),
    row("spec.volumes: medium of a CD-ROM drive", Effect::Live, "medium_of_a_drive_is_inserted_and_ejected"),
    row(
        "spec.volumes: the claim of another volume, with updateVolumesStrategy Migration",
        Effect::Migration,
        "vmi_begins_to_move_or_the_reason_is_shown",
    ),
    row(
        "spec.volumes: the claim of another volume, otherwise",
        Effect::Restart,
        "other_claim_of_a_volume_is_a_move_or_a_restart",
    ),
    row("spec.volumes and disks: all others", Effect::Restart, GENERIC),
    row("spec.domain.devices.interfaces: added, with bridge binding on a secondary network", Effect::Live, NICS),
    row("spec.domain.devices.interfaces.state: absent, down, up", Effect::Live, NICS),
    row(
        "spec.networks.multus.networkName, of an interface with bridge binding",
        Effect::Migration,
        "interface_reaches_another_network_by_a_migration",
    ),
    row(
        "spec.networks, spec.domain.devices.interfaces: all others",
        Effect::Restart,
        "running_vmi_follows_the_interfaces_of_the_template",
    ),
    row(
        "metadata: annotations of deschedulers and backups",
        Effect::Live,
        "annotations_for_backups_and_deschedulers_reach_the_vmi",
    ),
    row("metadata: all others", Effect::NextStart, PLACEMENT),
    row("spec: all others", Effect::Restart, PLACEMENT),
    row("the spec of a VMI, by a user", Effect::Refused, "7/3"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_change_is_listed_once_with_its_test() {
        let names: BTreeSet<_> = TABLE.iter().map(|row| row.change).collect();
        assert_eq!(names.len(), TABLE.len());
        assert!(TABLE.iter().all(|row| !row.test.is_empty()));
    }
}
