//! An effect as a plain value: [`super::decide`] returns it, [`super::effects`] executes it.

use std::time::Duration;

use super::{desired::Desired, event::Event, migration_facts::Route};
use crate::volumes::Work;

/// An effect. Each kind is in progress at most once.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Effect {
    /// Waits for the socket of a pod's launcher and connects.
    Connect {
        /// UID of the pod.
        pod: String,
        /// Longest wait for the socket.
        within: Duration,
    },
    /// Calls Hello.
    Hello,
    /// Sets up the pod's network.
    SetUpNetwork {
        /// Interfaces whose links are given back to the network plugins.
        release: Vec<String>,
    },
    /// Hands hot-plugged volumes to the launcher, and takes them back.
    HandVolumes {
        /// UID of the launcher's pod.
        pod: String,
        /// The volumes.
        work: Work,
    },
    /// Sends the desired VMI to the launcher.
    Sync {
        /// Fingerprint of the desired VMI.
        fingerprint: u64,
    },
    /// Requests a memory dump.
    DumpMemory {
        /// The volume.
        volume: String,
        /// Name of the file in its claim.
        file: String,
    },
    /// Carries the connections of a migration; `None` ends that.
    Carry(Option<Route>),
    /// Prepares the launcher to receive the domain.
    PrepareMigration {
        /// UID of the migration.
        migration: String,
    },
    /// Begins to move the domain to another launcher.
    Migrate {
        /// UID of the migration.
        migration: String,
    },
    /// Aborts the migration in progress.
    AbortMigration {
        /// UID of the migration.
        migration: String,
    },
    /// Requests the shutdown of the guest.
    Shutdown {
        /// Seconds that are left of the grace period.
        grace: u64,
    },
    /// Stops the domain at once.
    Kill,
    /// Permits the launcher to exit.
    Finish,
    /// Writes the status, then publishes the events.
    Write(Box<Desired>),
    /// Writes the progress of a migration.
    WriteProgress(String),
    /// Reads the object.
    Read,
    /// Publishes an event.
    Publish(Event),
    /// Ends the task: nothing is left to do.
    Retire,
}
