//! Errors of access to paths.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use super::Kind;

/// Reason why a path beneath a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system call failed.
    #[error("cannot {operation} {}", path.display())]
    Io {
        operation: &'static str,
        /// The path relative to the directory.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The path leads out of the directory, through a link, or into a forbidden mount.
    #[error("{} leads through a link or out of its directory", .0.display())]
    Escape(PathBuf),
    /// A directory of a container has a forbidden file system type.
    #[error("{} of the container is on a file system of type {found}, expected {expected}", path.display())]
    FileSystem {
        path: PathBuf,
        /// The type of its file system.
        found: String,
        /// The permitted types.
        expected: &'static str,
    },
    /// The path is invalid: absolute, empty or with `..`.
    #[error("{:?} is not a path beneath a directory", .0)]
    NotBeneath(PathBuf),
    /// The entry has another kind.
    #[error("{} is a {found}, not a {expected}", path.display())]
    WrongKind { path: PathBuf, expected: Kind, found: Kind },
    /// A device node is another device.
    #[error("{} is device {found_major}:{found_minor}, not {major}:{minor}", path.display())]
    WrongDevice {
        path: PathBuf,
        /// Expected major number.
        major: u32,
        /// Expected minor number.
        minor: u32,
        /// Found major number.
        found_major: u32,
        /// Found minor number.
        found_minor: u32,
    },
    /// The file exceeds the limit.
    #[error("{} has more than {limit} bytes", path.display())]
    TooLarge {
        path: PathBuf,
        /// The limit in bytes.
        limit: usize,
    },
    /// The directory has too many entries.
    #[error("directory has more than {0} entries")]
    TooManyEntries(usize),
    /// The content is not UTF-8.
    #[error("{} is not UTF-8", .0.display())]
    NotText(PathBuf),
    /// The time limit was exceeded.
    #[error("{} was not there in time", .0.display())]
    Timeout(PathBuf),
    /// The process shares the mount namespace of the node or of virt-handler.
    #[error("process {0} is in the mount namespace of the node")]
    NodeNamespace(i32),
    /// The process has made a user namespace, in which it may mount.
    #[error("process {0} is in a user namespace of its own")]
    UserNamespace(i32),
    /// A device node of an attachment pod is none of kubelet.
    #[error("device {major}:{minor} of volume {} is none that kubelet has attached to the attachment pod", volume.display())]
    Unpublished {
        volume: PathBuf,
        /// Major number of the device.
        major: u32,
        /// Minor number of the device.
        minor: u32,
    },
    /// An attachment pod does not have the claim of a volume.
    #[error("the attachment pod does not have the claim of volume {}", .0.display())]
    NotMounted(PathBuf),
    /// A container has no mount for a volume.
    #[error("volume {0} is not mounted in the container")]
    NoVolume(String),
    /// A claim has no image.
    #[error("the claim has no file disk.img")]
    NoImage,
    /// The kernel does not report the process id of the peer.
    #[error("the peer process of the socket is outside virt-handler's process id namespace")]
    NoPeerProcess,
    /// The peer process has exited.
    #[error("peer process {0} of the socket has exited")]
    PeerGone(i32),
    /// The peer process runs as another user.
    #[error("peer process {pid} of the socket runs as user {uid}")]
    ForeignUser {
        /// Its process id.
        pid: i32,
        /// Its user id.
        uid: u32,
    },
    /// The peer process is not in the pod.
    #[error("peer process {pid} of the socket is not in pod {pod}: {reason}")]
    ForeignPod {
        /// Its process id.
        pid: i32,
        /// UID of the expected pod.
        pod: String,
        /// Result of the check of its control groups.
        reason: super::cgroup::Mismatch,
    },
}

impl Error {
    /// Converts the error of a system call. Rejections by `openat2`'s resolve flags become [`Error::Escape`].
    pub(super) fn io(operation: &'static str, path: impl Into<PathBuf>, errno: Errno) -> Self {
        match errno {
            Errno::LOOP | Errno::XDEV => Self::Escape(path.into()),
            errno => Self::Io { operation, path: path.into(), source: errno.into() },
        }
    }

    /// Returns true if nothing exists at the path.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Returns true if the path exists already.
    #[must_use]
    pub fn already_exists(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }

    /// Returns true if nothing listens on the socket.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Returns true if the time limit was exceeded.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout(_))
    }
}
