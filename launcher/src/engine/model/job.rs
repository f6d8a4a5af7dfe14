//! The job slot: at most one long work on the domain at a time.
//!
//! Snapshot, backup and volume copy get a variant of [`Job`] when they are carried out.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    migration::{InStep, MigrationIn, MigrationOut, OutStep},
    request::{Action, JobName, RequestId, Wanted},
};
use crate::domain::Domain;

/// The work in the job slot.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    /// The domain starts.
    Start(Start),
    /// The guest is asked to shut down, and the domain is destroyed after the grace period.
    Shutdown(Shutdown),
    /// The guest's memory is written to a volume. [`protocol::LauncherState`] tells which.
    MemoryDump,
    /// The domain moves to another launcher.
    MigrationOut(Box<MigrationOut>),
    /// The domain moves to this launcher.
    MigrationIn(Box<MigrationIn>),
}

/// Start of the domain.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    /// Requests that wait for the start.
    pub(crate) requests: Vec<RequestId>,
    /// The VMI.
    pub(crate) wanted: Arc<Wanted>,
    /// Progress.
    pub(crate) step: StartStep,
    /// Requests to end the domain that arrived while QEMU started; they follow the start.
    pub(crate) then: Vec<(RequestId, Action)>,
}

/// Step of a start.
#[derive(Clone, Debug)]
pub(crate) enum StartStep {
    /// A former worker may have started the domain: waits for the connection to find it.
    Adopting {
        /// Time limit.
        until: Instant,
    },
    /// Prepares the disks and renders the XML while libvirt's daemon starts.
    Preparing,
    /// Waits for the connection.
    Connecting {
        /// The rendered domain.
        domain: Box<Domain>,
        /// Time limit.
        until: Instant,
    },
    /// Starts DHCP, console and credentials.
    Serving {
        /// The rendered domain.
        domain: Box<Domain>,
    },
    /// Defines the domain.
    Defining {
        /// Start without running the guest.
        paused: bool,
    },
    /// Writes the tags of interfaces.
    Tagging {
        /// Start without running the guest.
        paused: bool,
    },
    /// QEMU starts.
    Creating,
    /// Reads the running domain.
    Reading,
}

/// Shutdown of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shutdown {
    /// Time at which the domain is destroyed.
    pub(crate) force_at: Instant,
    /// Time of the next request to the guest.
    pub(crate) signal_at: Instant,
    /// A request to the guest is in progress.
    pub(crate) signalling: bool,
}

impl Job {
    /// Returns the job's name.
    pub(crate) const fn name(&self) -> JobName {
        match self {
            Self::Start(_) => JobName::Start,
            Self::Shutdown(_) => JobName::Shutdown,
            Self::MemoryDump => JobName::MemoryDump,
            Self::MigrationOut(_) => JobName::MigrationOut,
            Self::MigrationIn(_) => JobName::MigrationIn,
        }
    }

    /// Returns the job's step.
    pub(crate) const fn progress(&self) -> &'static str {
        match self {
            Self::Start(start) => match start.step {
                StartStep::Adopting { .. } => "looking for a running domain",
                StartStep::Preparing => "preparing the disks",
                StartStep::Connecting { .. } => "connecting to libvirt",
                StartStep::Serving { .. } => "serving the network and the console",
                StartStep::Defining { .. } => "defining the domain",
                StartStep::Tagging { .. } => "writing the tags of interfaces",
                StartStep::Creating => "starting QEMU",
                StartStep::Reading => "reading the running domain",
            },
            Self::Shutdown(_) => "waiting for the guest",
            Self::MemoryDump => "writing the guest's memory",
            Self::MigrationOut(out) => match out.step {
                OutStep::Opening => "opening its channels",
                OutStep::Copying | OutStep::Watching => "copying the domain",
                OutStep::Settling => "looking for the domain",
                OutStep::Asking => "asking the target for the guest",
                OutStep::Restoring => "resuming the guest",
                OutStep::Releasing => "releasing the guest at the target",
            },
            Self::MigrationIn(incoming) => match incoming.step {
                InStep::Preparing => "preparing the disks",
                InStep::Connecting { .. } => "connecting to libvirt",
                InStep::Serving => "serving the network and the console",
                InStep::Opening => "opening its channels",
                InStep::Waiting => "waiting for the domain",
                InStep::Releasing => "resuming the guest",
            },
        }
    }
}

impl StartStep {
    /// Reports that the domain is not read, because it would be found half-started: the read after QEMU's start comes in any
    /// case.
    pub(crate) const fn holds_reads(&self) -> bool {
        matches!(self, Self::Defining { .. } | Self::Tagging { .. } | Self::Creating)
    }
}

impl Start {
    /// Reports that QEMU may be starting, so that the start cannot be aborted.
    pub(crate) const fn is_past_abort(&self) -> bool {
        matches!(self.step, StartStep::Creating | StartStep::Reading)
    }
}
