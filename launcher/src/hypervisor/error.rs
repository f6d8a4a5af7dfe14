//! Failures of the hypervisor.

use std::path::PathBuf;

use thiserror::Error;

/// Failure of a call to the hypervisor.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HypervisorError {
    /// libvirt reported an error.
    #[error("{message}")]
    Libvirt {
        /// libvirt's error number.
        code: u32,
        /// libvirt's text.
        message: String,
    },
    /// The domain does not exist.
    #[error("Domain not found.")]
    NoDomain,
    /// The guest agent does not answer.
    #[error("the guest agent does not answer: {0}")]
    GuestAgentUnresponsive(String),
    /// The guest agent returned an error.
    #[error("{0}")]
    GuestAgentRefused(String),
    /// The daemon cannot be reached.
    #[error("no connection to libvirt: {0}")]
    Disconnected(String),
    /// libvirt did not answer in time.
    #[error("libvirt did not answer to {0} in time")]
    Timeout(&'static str),
    /// Too many calls are waiting for libvirt.
    #[error("too many concurrent calls to libvirt")]
    Busy,
    /// A string for libvirt contains a zero byte.
    #[error("string for libvirt contains a zero byte")]
    ZeroByte,
    /// libvirt's XML of the domain lacks what is different at the target of a migration.
    #[error("libvirt's XML of the domain lacks a disk that moves to another claim, or the NUMA cells of the guest")]
    NoDestination,
    /// The guest cannot be started from a file with its memory.
    #[error("{0}")]
    SavedMemory(String),
    /// The threads of the domain do not fit into the pod of the target.
    #[error("cannot pin the CPUs of the VMI at the target: {0}")]
    Pinning(String),
    /// A disk does not fit into the claim to which it moves.
    #[error(
        "Volume migration cannot be performed because the destination volume is smaller than the source volume: {0}"
    )]
    DestinationTooSmall(String),
    /// The screenshot exceeds the limit.
    #[error("the screenshot is too large")]
    PictureTooLarge,
}

impl HypervisorError {
    /// Reports a failure of the daemon, not of the request: retry after a reconnect.
    pub(crate) const fn is_transient(&self) -> bool {
        matches!(self, Self::Disconnected(_) | Self::Timeout(_) | Self::Busy)
    }
}

/// Failure to set up the hypervisor's daemon.
#[derive(Debug, Error)]
pub enum StartError {
    /// A file cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file of the capabilities cache has a name or size that is not accepted.
    #[error("file {0:?} of the capabilities cache is not acceptable")]
    CacheFile(String),
    /// No daemon is installed.
    #[error("neither virtqemud nor libvirtd is installed")]
    Missing,
}
