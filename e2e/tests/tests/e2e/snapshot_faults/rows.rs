//! The table: phases with victims, and troubles of guest agent and storage.

use std::fmt::{self, Display};

/// A phase in which an operation is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// A snapshot waits for another one, which the snapshot-controller does not complete.
    Waiting,
    /// The guest agent does not answer the freeze.
    Freezing,
    /// The guest is frozen, and the snapshot-controller does not take the volume snapshot.
    Frozen,
    /// A restore waits for the end of the guest.
    Running,
    /// Nobody provisions the volumes of a restore.
    Making,
    /// The same for a restore in place: the former claim is deleted.
    Replacing,
    /// The snapshot of a clone is held as in [`Phase::Frozen`].
    CloneTaking,
    /// Nobody provisions the volumes of a clone.
    CloneMaking,
}

impl Phase {
    const ALL: [Self; 8] = [
        Self::Waiting,
        Self::Freezing,
        Self::Frozen,
        Self::Running,
        Self::Making,
        Self::Replacing,
        Self::CloneTaking,
        Self::CloneMaking,
    ];

    /// Returns true if a guest runs.
    pub(super) const fn has_guest(self) -> bool {
        !matches!(self, Self::Making | Self::Replacing | Self::CloneMaking)
    }

    /// Returns true if the snapshot-controller is stopped.
    pub(super) const fn stops_snapshots(self) -> bool {
        matches!(self, Self::Waiting | Self::Frozen | Self::CloneTaking)
    }
}

/// A process that is killed, or an object that a user deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Leader,
    VirtHandler,
    Worker,
    Libvirtd,
    Qemu,
    /// kubelet is silent until the control plane has lost the node, and virt-handler is killed.
    Node,
    /// The snapshot, restore or clone.
    Object,
    /// The claim of the VM, or that of the restore.
    Claim,
}

impl Victim {
    const ALL: [Self; 8] = [
        Self::Leader,
        Self::VirtHandler,
        Self::Worker,
        Self::Libvirtd,
        Self::Qemu,
        Self::Node,
        Self::Object,
        Self::Claim,
    ];

    /// Returns true if the victim exists in the phase, and its end can concern the operation.
    const fn exists_in(self, phase: Phase) -> bool {
        match self {
            Self::Leader | Self::VirtHandler | Self::Object => true,
            Self::Worker | Self::Libvirtd | Self::Qemu => phase.has_guest(),
            Self::Node => matches!(phase, Phase::Frozen),
            Self::Claim => {
                matches!(phase, Phase::Waiting | Phase::Frozen | Phase::Making | Phase::Replacing | Phase::CloneMaking)
            }
        }
    }
}

/// A condition of guest agent or storage under which an operation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The guest agent answers the freeze after some seconds.
    AgentLate,
    /// The guest agent answers after the snapshot has failed.
    AgentHangs,
    /// The guest agent answers no attempt to freeze.
    AgentNeverAnswers,
    /// A volume snapshot takes longer than a guest stays frozen.
    SnapshotSlow,
    SnapshotFull,
    SnapshotRefused,
    /// The class has no snapshots.
    NoSnapshots,
    /// No snapshot-controller runs.
    ControllerAway,
    /// The volumes of a restore come late.
    RestoreSlow,
    /// There is no space for them until the class is repaired.
    RestoreFull,
    RestoreRefused,
    /// The snapshot of a clone fails.
    CloneFull,
}

impl Trouble {
    const ALL: [Self; 12] = [
        Self::AgentLate,
        Self::AgentHangs,
        Self::SnapshotSlow,
        Self::SnapshotFull,
        Self::SnapshotRefused,
        Self::NoSnapshots,
        Self::ControllerAway,
        Self::RestoreSlow,
        Self::RestoreFull,
        Self::RestoreRefused,
        // The long ones are last, so that numbers of rows are the same without them.
        Self::AgentNeverAnswers,
        Self::CloneFull,
    ];

    /// Returns true if the row takes more than three minutes.
    pub(super) const fn is_long(self) -> bool {
        matches!(self, Self::AgentNeverAnswers | Self::CloneFull)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    Kill(Phase, Victim),
    Trouble(Trouble),
}

impl Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill(phase, victim) => write!(f, "{victim:?} killed during {phase:?}"),
            Self::Trouble(trouble) => write!(f, "{trouble:?}"),
        }
    }
}

/// The operation of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Snapshot,
    Restore { in_place: bool },
    Clone,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    /// It fails with this text.
    Failed(&'static str),
    /// It was deleted.
    Gone,
}

impl Row {
    pub(super) const fn operation(self) -> Operation {
        match self {
            Self::Kill(Phase::Waiting | Phase::Freezing | Phase::Frozen, _) => Operation::Snapshot,
            Self::Kill(Phase::Running | Phase::Making, _) => Operation::Restore { in_place: false },
            Self::Kill(Phase::Replacing, _) => Operation::Restore { in_place: true },
            Self::Kill(Phase::CloneTaking | Phase::CloneMaking, _) => Operation::Clone,
            Self::Trouble(trouble) => match trouble {
                Trouble::RestoreSlow | Trouble::RestoreFull | Trouble::RestoreRefused => {
                    Operation::Restore { in_place: false }
                }
                Trouble::CloneFull => Operation::Clone,
                _ => Operation::Snapshot,
            },
        }
    }

    pub(super) const fn end(self) -> End {
        match self {
            Self::Kill(_, Victim::Object) => End::Gone,
            // The other snapshot ends with its deadline, and so does this one.
            Self::Kill(Phase::Waiting, Victim::Claim) => End::Failed("deadline"),
            Self::Kill(Phase::Frozen, Victim::Claim) => End::Failed("being deleted"),
            Self::Trouble(Trouble::AgentHangs) => End::Failed("has not answered"),
            Self::Trouble(Trouble::ControllerAway) => End::Failed("does a snapshot-controller run?"),
            Self::Trouble(Trouble::SnapshotFull | Trouble::CloneFull) => End::Failed("no space left"),
            Self::Trouble(Trouble::SnapshotRefused) => End::Failed("refused"),
            Self::Trouble(Trouble::NoSnapshots) => End::Failed("snapshots=false"),
            _ => End::Done,
        }
    }

    /// Returns the parameters of the VM's storage class.
    pub(super) fn parameters(self) -> serde_json::Value {
        match self {
            Self::Trouble(Trouble::SnapshotSlow) => serde_json::json!({"faults": "snapshot=slow:75"}),
            Self::Trouble(Trouble::SnapshotFull | Trouble::CloneFull) => serde_json::json!({"faults": "snapshot=full"}),
            Self::Trouble(Trouble::SnapshotRefused) => serde_json::json!({"faults": "snapshot=refused"}),
            Self::Trouble(Trouble::NoSnapshots) => serde_json::json!({"snapshots": "false"}),
            _ => serde_json::json!({}),
        }
    }

    /// Returns the faults of the class that replaces the VM's before the operation. `None`: nobody provisions its volumes
    /// until the end of the hold.
    pub(super) const fn later(self) -> Option<Option<&'static str>> {
        match self {
            Self::Kill(Phase::Making | Phase::Replacing | Phase::CloneMaking, _) => Some(None),
            Self::Trouble(Trouble::RestoreSlow) => Some(Some("create=slow:20")),
            Self::Trouble(Trouble::RestoreFull) => Some(Some("create=full")),
            Self::Trouble(Trouble::RestoreRefused) => Some(Some("create=refused")),
            _ => None,
        }
    }

    /// Returns the deadline of a snapshot.
    pub(super) const fn deadline(self) -> &'static str {
        match self {
            Self::Kill(_, Victim::Claim)
            | Self::Trouble(
                Trouble::AgentHangs
                | Trouble::ControllerAway
                | Trouble::SnapshotFull
                | Trouble::SnapshotRefused
                | Trouble::NoSnapshots,
            ) => "40s",
            _ => "5m",
        }
    }
}

/// Returns the table, without the longest rows unless `is_long`.
pub(super) fn table(is_long: bool) -> Vec<Row> {
    let kills = Phase::ALL.into_iter().flat_map(|phase| {
        let victims = Victim::ALL.into_iter().filter(move |victim| victim.exists_in(phase));
        victims.map(move |victim| Row::Kill(phase, victim))
    });
    let troubles = Trouble::ALL.into_iter().filter(|trouble| is_long || !trouble.is_long());
    kills.chain(troubles.map(Row::Trouble)).collect()
}

#[test]
fn table_has_each_phase_with_each_victim_that_exists_in_it() {
    let (rows, shorter) = (table(true), table(false));
    assert_eq!((rows.len(), shorter.len()), (57, 55));
    let names: std::collections::BTreeSet<String> = rows.iter().map(ToString::to_string).collect();
    assert_eq!(names.len(), rows.len());
    for victim in Victim::ALL {
        assert!(rows.iter().any(|row| matches!(row, Row::Kill(_, of) if *of == victim)), "{victim:?}");
    }
    // The class is replaced for what is made from a snapshot only.
    assert!(rows.iter().all(|row| row.later().is_none() || row.operation() != Operation::Snapshot));
}
