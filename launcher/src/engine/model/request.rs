//! Requests to the engine and their results.

use std::{fmt, sync::Arc};

use api::VirtualMachineInstance;
use protocol::MigrateRequest;
use thiserror::Error;

use crate::{domain::unsupported::Unsupported, hypervisor::HypervisorError};

/// Number of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestId(pub(crate) u64);

/// Result of a request: true if it started the domain.
pub(crate) type Answer = Result<bool, RequestError>;

/// The wanted VMI.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) vmi: VirtualMachineInstance,
    /// Its fields that no component carries out.
    pub(crate) unsupported: Unsupported,
    /// Options from virt-handler.
    pub(crate) options: protocol::VmiOptions,
}

/// A request to the engine.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// virt-handler's Hello with the node's capabilities.
    Hello {
        /// Files of libvirt's cache.
        cache: Vec<protocol::CacheFile>,
        /// Software emulation is allowed.
        allow_emulation: bool,
    },
    /// The wanted VMI: starts the domain, or brings the running domain in line with it.
    Sync(Arc<Wanted>),
    /// The guest's memory is to be written to a hot-plugged volume.
    DumpMemory {
        volume: String,
        /// Name of the file in its claim.
        file: String,
    },
    /// The guest's memory is to be saved to a hot-plugged volume, and the domain ends.
    SaveMemory {
        volume: String,
        /// Name of the file in its claim.
        file: String,
    },
    /// The domain of another launcher is to arrive.
    PrepareMigration {
        /// Name of the migration.
        migration: String,
        /// The VMI.
        wanted: Arc<Wanted>,
    },
    /// The domain is to move to another launcher.
    Migrate(Arc<MigrateRequest>),
    /// The migration of this name is to end.
    AbortMigration(String),
    /// The other launcher reports the end of its domain. The answer is false if no domain has arrived.
    Release {
        /// The user has paused the guest.
        paused: bool,
    },
    /// An action without further data.
    Act(Action),
}

/// Actions on the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Request a shutdown, destroy the domain after the grace period.
    Shutdown {
        /// Grace period in seconds.
        grace: u64,
    },
    /// The pod terminates: as `Shutdown`, then the launcher exits.
    Terminate {
        /// Grace period in seconds.
        grace: u64,
    },
    /// Destroy the domain.
    Kill,
    /// Pause the guest's CPUs.
    Pause,
    /// Resume the guest's CPUs.
    Unpause,
    /// Press the reset button.
    Reset,
    /// Request a reboot of the guest.
    SoftReboot,
    /// virt-handler has recorded the final state.
    Finish,
}

/// Name of a job, for refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobName {
    /// The start of the domain.
    Start,
    /// The shutdown of the guest.
    Shutdown,
    MemoryDump,
    MemorySave,
    /// A migration to another launcher.
    MigrationSource,
    /// A migration to this launcher.
    MigrationTarget,
    /// The sync of a running domain, which holds no job slot.
    Sync,
}

/// Failure of a request.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum RequestError {
    /// There is no running domain.
    #[error("Domain not found.")]
    NoDomain,
    /// The domain has ended.
    #[error("the domain has ended")]
    Ended,
    /// A domain runs here already.
    #[error("a domain runs in this pod")]
    Runs,
    /// The domain is being stopped.
    #[error("the domain is being stopped")]
    Ending,
    /// The volume is not one of virt-handler's.
    #[error("the pod has no volume {0}")]
    NoVolume(String),
    /// The launcher knows no such migration.
    #[error("there is no migration {0}")]
    NoMigration(String),
    /// The migration has ended, so it cannot be aborted.
    #[error("migration {0} has ended")]
    MigrationEnded(String),
    /// The domain is still arriving.
    #[error("the domain is still arriving")]
    Arriving,
    /// The domain has not ended.
    #[error("the domain has not ended")]
    NotEnded,
    /// virt-handler has not sent Hello yet.
    #[error("Hello must come first")]
    NoHello,
    /// A job that the request conflicts with is in progress.
    #[error("the domain is busy: {job} is in progress ({progress})")]
    Conflict {
        job: JobName,
        /// Its step.
        progress: &'static str,
    },
    /// Too many requests are in progress.
    #[error("too many requests are in progress")]
    Busy,
    /// The request is for another VMI than the pod's.
    #[error("this launcher runs VMI {0}")]
    OtherVmi(String),
    /// The file systems of the guest are frozen.
    #[error("the file systems of the guest are frozen")]
    Frozen,
    /// The guest has neither a connected guest agent nor ACPI.
    #[error("VMI neither have the agent connected nor the ACPI feature enabled")]
    NoWayToReboot,
    /// The domain cannot be started.
    #[error("{message}")]
    Start {
        message: String,
        /// A retry cannot succeed.
        permanent: bool,
    },
    /// The VMI has fields that no component carries out. A retry fails, too.
    #[error("VMI uses fields that virt-launcher does not support: {0}")]
    Unsupported(Unsupported),
    /// The hypervisor failed.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// The engine has stopped.
    #[error("the launcher is stopping")]
    Gone,
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Shutdown => "shutdown",
            Self::MemoryDump => "memory dump",
            Self::MemorySave => "save of the memory",
            Self::MigrationSource => "migration to another node",
            Self::MigrationTarget => "migration to this node",
            Self::Sync => "change of the running domain",
        })
    }
}

impl RequestError {
    /// Wraps an error that a retry may resolve: an image appears, space is freed, a claim is repaired.
    pub(crate) fn retryable(error: impl std::fmt::Display) -> Self {
        Self::Start { message: error.to_string(), permanent: false }
    }
}

impl Wanted {
    /// Fails if the VMI has fields that no component carries out.
    pub(crate) fn check_supported(&self) -> Result<(), RequestError> {
        refuse(self.unsupported.clone())
    }

    /// Fails if the spec of a running VMI has such fields.
    pub(crate) fn check_spec_supported(&self) -> Result<(), RequestError> {
        refuse(self.unsupported.of_spec())
    }

    /// Reports tagged devices.
    pub(crate) fn has_tagged_devices(&self) -> bool {
        let devices = &self.vmi.spec.domain.devices;
        let of_host = devices.host_devices.iter().map(|device| &device.tag);
        let of_host = of_host.chain(devices.gpus.iter().map(|gpu| &gpu.tag));
        let tags = devices.interfaces.iter().map(|interface| &interface.tag);
        let mut tags = tags.chain(devices.disks.iter().map(|disk| &disk.tag)).chain(of_host).flatten();
        tags.any(|tag| !tag.is_empty())
    }
}

fn refuse(unsupported: Unsupported) -> Result<(), RequestError> {
    if unsupported.is_empty() { Ok(()) } else { Err(RequestError::Unsupported(unsupported)) }
}
