//! Effects of changes of a VM's template on its running VMI.
//!
//! Under rollout strategy Stage every change of the template waits for the next start, except hot-pluggable volumes and interfaces.

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
pub struct Change {
    /// Part of the changes of the field; empty for all.
    pub change: &'static str,
    /// Effect.
    pub effect: Effect,
    /// Test of `e2e/tests` that shows it, or the unit test of the rule.
    pub test: &'static str,
}

const fn change(change: &'static str, effect: Effect, test: &'static str) -> Change {
    Change { change, effect, test }
}

const RESIZE: &str = "running_guest_gets_vcpus_and_memory_and_gives_memory_back";
const RULES: &str = "change_of_the_size_is_live_or_requires_a_restart";
const FOLLOWS: &str = "observed_generation_and_placement_follow_the_template";
const VOLUMES: &str = "volumes_are_plugged_into_a_running_vm_and_keep_their_data";
const NICS: &str = "interfaces_are_plugged_into_a_running_guest_and_leave_it";

pub(super) const SOCKETS: &[Change] = &[
    change("more, up to maxSockets", Effect::Live, RESIZE),
    change("fewer, or more than maxSockets", Effect::Restart, RULES),
    change("above an explicit maxSockets", Effect::Refused, "8.5/1"),
];
pub(super) const GUEST: &[Change] = &[
    change("between the memory at boot and maxGuest", Effect::Live, RESIZE),
    change("less than at boot, or more than maxGuest", Effect::Restart, RULES),
    change("above an explicit maxGuest, or not aligned to it", Effect::Refused, "8.5/2"),
];
pub(super) const PLACEMENT: &[Change] = &[change("", Effect::Recorded, FOLLOWS)];
pub(super) const HOTPLUG: &[Change] = &[
    change("a hot-pluggable claim with its disk on scsi or virtio, added or removed", Effect::Live, VOLUMES),
    change("medium of a CD-ROM drive", Effect::Live, "medium_of_a_drive_is_inserted_and_ejected"),
];
pub(super) const CLAIM: &[Change] = &[
    change(
        "another claim, with updateVolumesStrategy Migration",
        Effect::Migration,
        "vmi_begins_to_move_or_the_reason_is_shown",
    ),
    change("another claim, otherwise", Effect::Restart, "other_claim_of_a_volume_is_a_move_or_a_restart"),
];
pub(super) const PLUGGED: &[Change] = &[change("an interface on a secondary network, added", Effect::Live, NICS)];
pub(super) const LINK: &[Change] = &[change("absent, down, up", Effect::Live, NICS)];
pub(super) const NETWORK: &[Change] = &[change(
    "of an interface with bridge binding",
    Effect::Migration,
    "interface_reaches_another_network_by_a_migration",
)];

/// Changes of everything else, for the documents: the object, and the effect.
pub const OTHERS: &[(&str, Change)] = &[
    (
        "networks, interfaces: all others",
        change("", Effect::Restart, "running_vmi_follows_the_interfaces_of_the_template"),
    ),
    ("CPU, memory, volumes, disks: all others", change("", Effect::Restart, "change_is_attributed_to_its_group")),
    ("all other fields", change("", Effect::Restart, FOLLOWS)),
    (
        "metadata of the template",
        change(
            "annotations of deschedulers and backups",
            Effect::Live,
            "annotations_for_backups_and_deschedulers_reach_the_vmi",
        ),
    ),
    ("metadata of the template", change("all others", Effect::NextStart, FOLLOWS)),
    ("spec of a VMI", change("by a user", Effect::Refused, "7/3")),
];
