//! The peer process of a unix socket.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::{Mode, OFlags},
    io::Errno,
    process::{Pid, PidfdFlags, Resource, Rlimit},
};
use tokio::net::UnixStream;

use super::{BENEATH, Error, Mismatch, SafeDir, cgroup, mount};

/// A process, held by a descriptor, so that a reuse of its number is noticed. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pid: i32,
    uid: u32,
    pidfd: Arc<OwnedFd>,
}

impl Peer {
    /// Returns the process that called `listen`, as recorded by the kernel.
    pub(crate) fn of(stream: &UnixStream) -> Result<Self, Error> {
        let credentials = stream.peer_cred().map_err(|source| Error::Io {
            operation: "ask for the peer of",
            path: "socket".into(),
            source,
        })?;
        let pid = credentials.pid().filter(|pid| *pid > 0).ok_or(Error::NoPeerProcess)?;
        Self::open(pid, credentials.uid())
    }

    /// Opens the process `pid`, which runs as `uid`.
    pub(crate) fn open(pid: i32, uid: u32) -> Result<Self, Error> {
        let number = Pid::from_raw(pid).ok_or(Error::NoPeerProcess)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(|errno| match errno {
            Errno::SRCH => Error::PeerGone(pid),
            errno => Error::io("open process", pid.to_string(), errno),
        })?;
        Ok(Self { pid, uid, pidfd: Arc::new(pidfd) })
    }

    /// Returns its process id. Data that is looked up by this number is valid only if the process [is alive](Self::is_alive)
    /// afterwards.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns its descriptor, for `setns`.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns true until it exits.
    pub(crate) fn is_alive(&self) -> bool {
        // A process descriptor becomes readable when the process exits.
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(0))
    }

    /// Rejects a process of another user.
    pub(crate) fn require_user(&self, user: u32) -> Result<(), Error> {
        if self.uid == user {
            return Ok(());
        }
        Err(Error::ForeignUser { pid: self.pid, uid: self.uid })
    }

    /// Rejects a process that is not in the pod `pod`, or that has exited.
    pub(crate) fn require_pod(&self, pod: &str) -> Result<(), Error> {
        let foreign = |reason: Mismatch| Error::ForeignPod { pid: self.pid, pod: pod.to_owned(), reason };
        let proc = SafeDir::trusted(Path::new("/proc"))?;
        let content = match proc.read_text(format!("{}/cgroup", self.pid), cgroup::LIMIT) {
            Ok(content) => content,
            Err(_) if !self.is_alive() => return Err(Error::PeerGone(self.pid)),
            Err(Error::NotText(_) | Error::TooLarge { .. }) => return Err(foreign(Mismatch::Unreadable)),
            Err(error) => return Err(error),
        };
        // The number can be reused during the read, unless the process is still alive.
        if !self.is_alive() {
            return Err(Error::PeerGone(self.pid));
        }
        cgroup::require_pod(&content, pod).map_err(foreign)
    }

    /// Permits the process, and processes that it starts from now on, to lock `bytes` of memory.
    pub(crate) fn allow_locked_memory(&self, bytes: u64) -> Result<(), Error> {
        let number = Pid::from_raw(self.pid).ok_or(Error::NoPeerProcess)?;
        // There is no such call by descriptor. The number is valid until the process exits. If it is reused right then,
        // another process may lock memory that its pod accounts for, which is harmless.
        self.set_limit(number, Resource::Memlock, bytes, "raise the limit of locked memory of process")
    }

    /// Permits the process, and processes that it starts from now on, to give threads the lowest real-time priority.
    pub(crate) fn allow_real_time(&self) -> Result<(), Error> {
        let number = Pid::from_raw(self.pid).ok_or(Error::NoPeerProcess)?;
        // If the number is reused at this moment, a process with another user gets a permission that it does not know of.
        self.set_limit(number, Resource::Rtprio, 1, "raise the limit of the real-time priority of process")
    }

    fn set_limit(&self, number: Pid, resource: Resource, value: u64, attempt: &'static str) -> Result<(), Error> {
        if !self.is_alive() {
            return Err(Error::PeerGone(self.pid));
        }
        let limit = Rlimit { current: Some(value), maximum: Some(value) };
        match rustix::process::prlimit(Some(number), resource, limit) {
            Ok(_) if self.is_alive() => Ok(()),
            Ok(_) | Err(Errno::SRCH) => Err(Error::PeerGone(self.pid)),
            Err(errno) => Err(Error::io(attempt, self.pid.to_string(), errno)),
        }
    }

    /// Opens the root directory of the process: the file system of its container, without mounts in it.
    ///
    /// The container can hang this call: see [`super::pod_calls`].
    pub(crate) fn root(&self) -> Result<SafeDir, Error> {
        opened(&self.judged_root()?)
    }

    /// Opens `/dev` of its container, without mounts in it.
    ///
    /// The container can hang this call: see [`super::pod_calls`].
    pub(crate) fn dev(&self) -> Result<SafeDir, Error> {
        let root = self.judged_root()?;
        // This crosses the mount on `/dev`. A descriptor that only names the directory does not access the mounted file
        // system, so that its type can be checked first.
        let root = SafeDir { fd: Arc::new(root), one_mount: false };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let dev = root.resolve("open", Path::new("dev"), flags, Mode::empty(), BENEATH)?;
        mount::require(&dev, "/dev", &self.mounts()?, mount::DEV)?;
        opened(&dev)
    }

    /// Opens the directory that is mounted for a volume of its container.
    ///
    /// The container can hang this call: see [`super::pod_calls`].
    pub(crate) fn volume(&self, volume: &str) -> Result<SafeDir, Error> {
        let mounts = self.mounts()?;
        let (number, point) = mount::of_volume(&mounts, volume).ok_or_else(|| Error::NoVolume(volume.to_owned()))?;
        let root = SafeDir { fd: Arc::new(self.judged_root()?), one_mount: false };
        let path = Path::new(point.trim_start_matches('/'));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let named = root.resolve("open", path, flags, Mode::empty(), BENEATH)?;
        // The container can rename directories above the mount.
        mount::require_number(&named, point, number)?;
        opened(&named)
    }

    /// Opens a descriptor that names the root directory of the process, on a permitted file system.
    fn judged_root(&self) -> Result<OwnedFd, Error> {
        // The kernel creates the last component. Neither the pod nor the file system behind the link is involved.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(format!("/proc/{}/root", self.pid), flags, Mode::empty())
            .map_err(|errno| Error::io("open the root directory of process", self.pid.to_string(), errno))?;
        mount::require(&root, "/", &self.mounts()?, mount::ROOT)?;
        if self.is_alive() { Ok(root) } else { Err(Error::PeerGone(self.pid)) }
    }

    /// Returns the names in the directory of hot-plugged volumes on which mounts are attached, as the kernel reports them.
    pub(crate) fn hotplugged_names(&self) -> Result<Vec<String>, Error> {
        let mounts = self.mounts()?;
        // The number can be reused during the read, unless the process is still alive.
        if self.is_alive() { Ok(mount::attached(&mounts)) } else { Err(Error::PeerGone(self.pid)) }
    }

    /// Reads the control groups of the process.
    pub(crate) fn control_groups(&self) -> Result<String, Error> {
        let content = SafeDir::trusted(Path::new("/proc"))?.read_text(format!("{}/cgroup", self.pid), cgroup::LIMIT)?;
        if self.is_alive() { Ok(content) } else { Err(Error::PeerGone(self.pid)) }
    }

    /// Reads the mounts of the process.
    fn mounts(&self) -> Result<Vec<u8>, Error> {
        SafeDir::trusted(Path::new(&format!("/proc/{}", self.pid)))?.read_bounded("mountinfo", mount::LIMIT)
    }
}

/// Reopens a directory descriptor for reading.
fn opened(named: &OwnedFd) -> Result<SafeDir, Error> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(named, ".", flags, Mode::empty())
        .map_err(|errno| Error::io("open directory", ".", errno))?;
    Ok(SafeDir { fd: Arc::new(fd), one_mount: true })
}
