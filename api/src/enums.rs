//! String enumerations. An unknown value is kept unchanged, so that reading and writing an object loses nothing and an
//! unexpected object never breaks a watch.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? } default $default:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
            /// A value unknown to this version.
            Other(String),
        }

        impl $name {
            /// All known values.
            pub const KNOWN: &'static [$name] = &[$($name::$variant),+];

            /// Returns the value as on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $($name::$variant => $word,)+
                    $name::Other(word) => word,
                }
            }
        }

        impl From<&str> for $name {
            fn from(word: &str) -> Self {
                match word {
                    $($word => $name::$variant,)+
                    other => $name::Other(other.to_owned()),
                }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                $name::$default
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = Cow::<'de, str>::deserialize(deserializer)?;
                Ok(Self::from(word.as_ref()))
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string"})
            }
        }
    };
}

words! {
    /// Lifecycle phase of a VMI.
    ///
    /// ```text
    /// "" -> Pending -> Scheduling -> Scheduled -> Running -> Succeeded | Failed
    ///          any phase before Running -> Failed
    /// ```
    VmiPhase {
        /// No phase yet.
        Unset = "",
        /// Accepted; there is no pod yet.
        Pending = "Pending",
        /// The launcher pod exists.
        Scheduling = "Scheduling",
        /// virt-launcher answers on its node.
        Scheduled = "Scheduled",
        /// The guest runs.
        Running = "Running",
        /// The guest shut down, by itself or on request.
        Succeeded = "Succeeded",
        /// The guest failed or never started.
        Failed = "Failed",
        /// Waits for an incoming migration from another cluster or namespace.
        WaitingForSync = "WaitingForSync",
        /// The node is unreachable.
        Unknown = "Unknown",
    } default Unset
}

impl VmiPhase {
    /// Returns true for `Succeeded` and `Failed`.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

words! {
    /// An operation that needs the data of a VM to hold still.
    VmOperation {
        /// A snapshot.
        Snapshot = "Snapshot",
        /// A restore.
        Restore = "Restore",
        /// A dump of the guest's memory.
        MemoryDump = "MemoryDump",
        /// Volumes move to other claims.
        VolumeMigration = "VolumeMigration",
        /// A backup.
        Backup = "Backup",
        /// An export of the claims themselves.
        Export = "Export",
        /// The guest's memory is saved to a claim.
        Hibernation = "Hibernation",
    } default Snapshot
}

words! {
    /// Phase of the hibernation of a VM.
    HibernationPhase {
        /// The memory is to be saved.
        Requested = "Requested",
        /// The guest's memory is written to the claim.
        Saving = "Saving",
        /// The claim holds the memory, and no guest runs.
        Hibernated = "Hibernated",
        /// The guest starts from the claim.
        Resuming = "Resuming",
        /// The saved memory is to be removed: it was resumed, or is not wanted.
        Removing = "Removing",
        /// The memory was not saved. The guest runs on, or has ended.
        Failed = "Failed",
    } default Requested
}

words! {
    /// State of the memory of a VMI that is saved or restored.
    SavedMemoryPhase {
        /// The memory is to be saved. virt-handler has not begun.
        Requested = "Requested",
        /// The launcher is asked to save the memory.
        Saving = "Saving",
        /// The memory is saved, and the guest has ended.
        Saved = "Saved",
        /// The memory was not saved.
        SaveFailed = "SaveFailed",
        /// The guest starts from saved memory.
        Restoring = "Restoring",
        /// The guest runs from saved memory, which cannot be used again.
        Restored = "Restored",
    } default Saving
}

words! {
    /// State of the guest's file systems while its volumes are snapshotted.
    QuiesceState {
        /// The guest does not run.
        Offline = "Offline",
        /// The guest is paused.
        Paused = "Paused",
        /// No guest agent is connected.
        NoAgent = "NoAgent",
        /// The guest agent has frozen them.
        Frozen = "Frozen",
        /// They were frozen until all volume snapshots were taken, and run again.
        Thawed = "Thawed",
        /// They ran again before all volume snapshots were taken.
        TimedOut = "TimedOut",
        /// The guest agent could not freeze them.
        Failed = "Failed",
    } default Offline
}

words! {
    /// Phase of a migration.
    ///
    /// ```text
    /// "" -> Pending -> Scheduling -> Scheduled -> PreparingTarget -> TargetReady -> Running -> Succeeded | Failed
    /// between clusters, before Pending: "" -> WaitingForSync (receiving) | Synchronizing (sending)
    /// ```
    MigrationPhase {
        /// No phase yet.
        Unset = "",
        /// The receiving side waits for the sending side.
        WaitingForSync = "WaitingForSync",
        /// The sending side transfers the VMI object to the receiving side.
        Synchronizing = "Synchronizing",
        /// Accepted, in the queue.
        Pending = "Pending",
        /// The target pod exists.
        Scheduling = "Scheduling",
        /// The target pod runs on its node.
        Scheduled = "Scheduled",
        /// The target node prepares the VMI's devices.
        PreparingTarget = "PreparingTarget",
        /// The target waits for the domain.
        TargetReady = "TargetReady",
        /// The domain is being migrated.
        Running = "Running",
        /// The domain runs on the target.
        Succeeded = "Succeeded",
        /// The migration failed; the domain still runs on the source unless it was lost.
        Failed = "Failed",
    } default Unset
}

impl MigrationPhase {
    /// Returns true for `Succeeded` and `Failed`.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

words! {
    /// Run strategy of a VM.
    RunStrategy {
        /// Always running; restarted whenever it stops.
        Always = "Always",
        /// Never running.
        Halted = "Halted",
        /// Controlled by start and stop requests.
        Manual = "Manual",
        /// Running until it succeeds; restarted after a failure.
        RerunOnFailure = "RerunOnFailure",
        /// Started once.
        Once = "Once",
        /// Started by an incoming migration.
        WaitAsReceiver = "WaitAsReceiver",
    } default Halted
}

words! {
    /// Human-readable status of a VM.
    PrintableStatus {
        /// No VMI runs.
        Stopped = "Stopped",
        /// Storage is being created.
        Provisioning = "Provisioning",
        /// The VMI is starting.
        Starting = "Starting",
        /// The guest runs.
        Running = "Running",
        /// The guest is paused.
        Paused = "Paused",
        /// The VMI is stopping.
        Stopping = "Stopping",
        /// The VM is being deleted.
        Terminating = "Terminating",
        /// Starts fail repeatedly; the next one is delayed.
        CrashLoopBackOff = "CrashLoopBackOff",
        /// The VMI is migrating to another node.
        Migrating = "Migrating",
        /// No other status applies.
        Unknown = "Unknown",
        /// No node fits.
        ErrorUnschedulable = "ErrorUnschedulable",
        /// An image cannot be pulled.
        ErrImagePull = "ErrImagePull",
        /// An image cannot be pulled; the next attempt is delayed.
        ImagePullBackOff = "ImagePullBackOff",
        /// A claim is missing.
        ErrorPvcNotFound = "ErrorPvcNotFound",
        /// A DataVolume is in error.
        DataVolumeError = "DataVolumeError",
        /// A claim is not bound.
        WaitingForVolumeBinding = "WaitingForVolumeBinding",
        /// Waits for an incoming migration from another cluster or namespace.
        WaitingForReceiver = "WaitingForReceiver",
    } default Stopped
}

words! {
    /// Phase of a DataVolume. CDI has further ones: a phase that is not known means that its claim is not usable yet.
    DataVolumePhase {
        /// Nobody has looked at it yet, or its claim cannot be made.
        Unset = "",
        /// There is no claim, or the claim is pending.
        Pending = "Pending",
        /// The claim is bound for its first consumer, and filled afterwards.
        WaitForFirstConsumer = "WaitForFirstConsumer",
        /// The claim is filled and bound for its first consumer.
        PendingPopulation = "PendingPopulation",
        /// The claim is bound and not filled yet.
        PvcBound = "PVCBound",
        /// The import pod is pending.
        ImportScheduled = "ImportScheduled",
        /// The import pod runs.
        ImportInProgress = "ImportInProgress",
        /// The clone waits.
        CloneScheduled = "CloneScheduled",
        /// The source is copied.
        CloneInProgress = "CloneInProgress",
        /// A snapshot becomes a volume.
        CloneFromSnapshotSourceInProgress = "CloneFromSnapshotSourceInProgress",
        /// The storage clones the source.
        CsiCloneInProgress = "CSICloneInProgress",
        /// The clone is handed over.
        RebindInProgress = "RebindInProgress",
        /// The upload server starts.
        UploadScheduled = "UploadScheduled",
        /// The upload server waits for a client.
        UploadReady = "UploadReady",
        /// The import waits for its next checkpoint.
        Paused = "Paused",
        /// The claim is filled, or will be.
        Succeeded = "Succeeded",
        /// The claim is lost, or its content cannot be had.
        Failed = "Failed",
        /// The claim is in a phase that is not known.
        Unknown = "Unknown",
    } default Unset
}

words! {
    /// Effect of a node drain on a VMI.
    EvictionStrategy {
        /// The VMI is shut down.
        None = "None",
        /// The VMI is migrated, and the drain waits for it.
        LiveMigrate = "LiveMigrate",
        /// The VMI is migrated if possible, else shut down.
        LiveMigrateIfPossible = "LiveMigrateIfPossible",
        /// Another controller handles the eviction.
        External = "External",
    } default None
}

words! {
    /// Start mode of a guest.
    StartStrategy {
        /// Paused before its first instruction.
        Paused = "Paused",
    } default Paused
}

words! {
    /// Requested change of a VM's state.
    StateChangeAction {
        /// Create the VMI.
        Start = "Start",
        /// Delete the VMI.
        Stop = "Stop",
    } default Start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_preserved() {
        let phase: VmiPhase = serde_json::from_str("\"Dreaming\"").unwrap();
        assert_eq!(phase, VmiPhase::Other("Dreaming".to_owned()));
        assert_eq!(serde_json::to_string(&phase).unwrap(), "\"Dreaming\"");
    }

    #[test]
    fn known_values_match_their_text() {
        for strategy in RunStrategy::KNOWN {
            assert_eq!(&RunStrategy::from(strategy.as_str()), strategy);
        }
    }
}
