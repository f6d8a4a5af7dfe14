//! Words with a closed meaning. Each is a plain string on the wire; a word this version does not know is kept as it
//! is, so that reading and writing an object loses nothing and one odd object never breaks a watch.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? } default $default:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
            /// A word this version does not know.
            Other(String),
        }

        impl $name {
            /// All known words.
            pub const KNOWN: &'static [$name] = &[$($name::$variant),+];

            /// The word as on the wire.
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
    /// Place in the life of a machine.
    ///
    /// ```text
    /// "" -> Pending -> Scheduling -> Scheduled -> Running -> Succeeded | Failed
    ///          any phase before Running -> Failed
    /// ```
    VmiPhase {
        /// No phase yet.
        Unset = "",
        /// Accepted, no pod yet.
        Pending = "Pending",
        /// The launcher pod exists.
        Scheduling = "Scheduling",
        /// The launcher answers on its node.
        Scheduled = "Scheduled",
        /// The guest runs.
        Running = "Running",
        /// The guest ended by itself or as asked.
        Succeeded = "Succeeded",
        /// The guest ended by a fault, or never started.
        Failed = "Failed",
        /// Waits for a machine sent from elsewhere.
        WaitingForSync = "WaitingForSync",
        /// The node cannot be asked.
        Unknown = "Unknown",
    } default Unset
}

impl VmiPhase {
    /// Whether the machine is over.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

words! {
    /// Place in the life of a migration.
    ///
    /// ```text
    /// "" -> Pending -> Scheduling -> Scheduled -> PreparingTarget -> TargetReady -> Running -> Succeeded | Failed
    /// between clusters, before Pending: "" -> WaitingForSync (receiving) | Synchronizing (sending)
    /// ```
    MigrationPhase {
        /// No phase yet.
        Unset = "",
        /// The receiving half waits for the sending half.
        WaitingForSync = "WaitingForSync",
        /// The sending half tells the receiving half of the machine.
        Synchronizing = "Synchronizing",
        /// Accepted, in the queue.
        Pending = "Pending",
        /// The target pod exists.
        Scheduling = "Scheduling",
        /// The target pod runs on its node.
        Scheduled = "Scheduled",
        /// The target node gets the machine's devices ready.
        PreparingTarget = "PreparingTarget",
        /// The target waits for the guest.
        TargetReady = "TargetReady",
        /// The guest is copied.
        Running = "Running",
        /// The guest runs at the target.
        Succeeded = "Succeeded",
        /// The guest stayed where it was, or was lost.
        Failed = "Failed",
    } default Unset
}

impl MigrationPhase {
    /// Whether the migration is over.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

words! {
    /// When a VM's machine runs.
    RunStrategy {
        /// Always; started again whenever it ends.
        Always = "Always",
        /// Never.
        Halted = "Halted",
        /// When asked for by start and stop.
        Manual = "Manual",
        /// Until it ends well; started again after a failure.
        RerunOnFailure = "RerunOnFailure",
        /// Once.
        Once = "Once",
        /// When a migration from elsewhere arrives.
        WaitAsReceiver = "WaitAsReceiver",
    } default Halted
}

words! {
    /// State of a VM for people.
    PrintableStatus {
        /// No machine runs.
        Stopped = "Stopped",
        /// Storage is being made.
        Provisioning = "Provisioning",
        /// The machine is on its way up.
        Starting = "Starting",
        /// The guest runs.
        Running = "Running",
        /// The guest is paused.
        Paused = "Paused",
        /// The machine is on its way down.
        Stopping = "Stopping",
        /// The VM is being deleted.
        Terminating = "Terminating",
        /// Starts keep failing; the next waits.
        CrashLoopBackOff = "CrashLoopBackOff",
        /// The machine moves to another node.
        Migrating = "Migrating",
        /// Nothing else fits.
        Unknown = "Unknown",
        /// No node fits.
        ErrorUnschedulable = "ErrorUnschedulable",
        /// An image cannot be pulled.
        ErrImagePull = "ErrImagePull",
        /// An image cannot be pulled; the next try waits.
        ImagePullBackOff = "ImagePullBackOff",
        /// A claim is missing.
        ErrorPvcNotFound = "ErrorPvcNotFound",
        /// A DataVolume is in error.
        DataVolumeError = "DataVolumeError",
        /// A claim is not bound.
        WaitingForVolumeBinding = "WaitingForVolumeBinding",
        /// Waits for a machine sent from elsewhere.
        WaitingForReceiver = "WaitingForReceiver",
    } default Stopped
}

words! {
    /// What a drain does to a machine.
    EvictionStrategy {
        /// It is shut down.
        None = "None",
        /// It is migrated; the drain waits for it.
        LiveMigrate = "LiveMigrate",
        /// It is migrated when it can be, else shut down.
        LiveMigrateIfPossible = "LiveMigrateIfPossible",
        /// Someone else takes care of it.
        External = "External",
    } default None
}

words! {
    /// How a guest starts.
    StartStrategy {
        /// Stopped at its first instruction.
        Paused = "Paused",
    } default Paused
}

words! {
    /// An asked-for change of a VM's state.
    StateChangeAction {
        /// Create the machine.
        Start = "Start",
        /// Delete the machine.
        Stop = "Stop",
    } default Start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_words_survive() {
        let phase: VmiPhase = serde_json::from_str("\"Dreaming\"").unwrap();
        assert_eq!(phase, VmiPhase::Other("Dreaming".to_owned()));
        assert_eq!(serde_json::to_string(&phase).unwrap(), "\"Dreaming\"");
    }

    #[test]
    fn known_words_are_their_own_text() {
        for strategy in RunStrategy::KNOWN {
            assert_eq!(&RunStrategy::from(strategy.as_str()), strategy);
        }
    }
}
