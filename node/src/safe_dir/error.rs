//! Why a path was not used.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use super::Kind;

/// Why something beneath a directory could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system call failed.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which path, relative to the directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The path leads out of the directory, through a link, or into a mount that is not to be entered.
    #[error("{} leads through a link or out of its directory", .0.display())]
    Escape(PathBuf),
    /// A directory of a container is on a file system of a type that is not used.
    #[error("{} of the container is on a file system of type {found}, expected {expected}", path.display())]
    FileSystem {
        /// Which directory.
        path: PathBuf,
        /// The type of its file system.
        found: String,
        /// The types that are used.
        expected: &'static str,
    },
    /// The path cannot be used at all: absolute, empty or with `..`.
    #[error("{:?} is not a path beneath a directory", .0)]
    NotBeneath(PathBuf),
    /// There is something else at the path.
    #[error("{} is a {found}, not a {expected}", path.display())]
    WrongKind {
        /// Where.
        path: PathBuf,
        /// What was asked for.
        expected: Kind,
        /// What is there.
        found: Kind,
    },
    /// A device node is not the device that its name says.
    #[error("{} is device {found_major}:{found_minor}, not {major}:{minor}", path.display())]
    WrongDevice {
        /// Where.
        path: PathBuf,
        /// Major number asked for.
        major: u32,
        /// Minor number asked for.
        minor: u32,
        /// Major number found.
        found_major: u32,
        /// Minor number found.
        found_minor: u32,
    },
    /// The content exceeds what is read at most.
    #[error("{} has more than {limit} bytes", path.display())]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// Bytes read at most.
        limit: usize,
    },
    /// The directory has more entries than are listed at most.
    #[error("directory has more than {0} entries")]
    TooManyEntries(usize),
    /// The content is not UTF-8.
    #[error("{} is not UTF-8", .0.display())]
    NotText(PathBuf),
    /// It did not happen in time.
    #[error("{} was not there in time", .0.display())]
    Timeout(PathBuf),
    /// The kernel does not tell the process id of the peer.
    #[error("the process at the other end of the socket is outside the agent's process id namespace")]
    NoPeerProcess,
    /// The process at the other end is gone.
    #[error("the process {0} at the other end of the socket is gone")]
    PeerGone(i32),
    /// The process at the other end runs as somebody else.
    #[error("process {pid} at the other end of the socket runs as user {uid}")]
    ForeignUser {
        /// Its process id.
        pid: i32,
        /// Its user id.
        uid: u32,
    },
    /// The process at the other end is not in the pod.
    #[error("process {pid} at the other end of the socket is not in pod {pod}: {reason}")]
    ForeignPod {
        /// Its process id.
        pid: i32,
        /// UID of the pod it should be in.
        pod: String,
        /// What its control groups say.
        reason: super::cgroup::Mismatch,
    },
}

impl Error {
    /// A failed system call; the kernel's refusals to leave the directory become [`Error::Escape`].
    pub(super) fn io(operation: &'static str, path: impl Into<PathBuf>, errno: Errno) -> Self {
        match errno {
            Errno::LOOP | Errno::XDEV => Self::Escape(path.into()),
            errno => Self::Io { operation, path: path.into(), source: errno.into() },
        }
    }

    /// Nothing is there (yet).
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Something is there already.
    #[must_use]
    pub fn already_exists(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }

    /// A socket is there, but nobody listens on it.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// It took too long.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout(_))
    }
}
