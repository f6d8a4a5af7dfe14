//! The process at the other end of a unix socket.

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
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
};

use super::{BENEATH, Error, Mismatch, SafeDir, cgroup, mount};

/// A process, held by a descriptor so that its number cannot come to mean another one unnoticed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Peer {
    pid: i32,
    uid: u32,
    gid: u32,
    pidfd: Arc<OwnedFd>,
}

impl Peer {
    /// Who listens at the other end: the process that called `listen`, as the kernel recorded it.
    pub fn of(stream: &UnixStream) -> Result<Self, Error> {
        let credentials = stream.peer_cred().map_err(|source| Error::Io {
            operation: "ask for the peer of",
            path: "socket".into(),
            source,
        })?;
        let pid = credentials.pid().filter(|pid| *pid > 0).ok_or(Error::NoPeerProcess)?;
        Self::open(pid, credentials.uid(), credentials.gid())
    }

    /// The process `pid`, which runs as `uid` and `gid`.
    pub(crate) fn open(pid: i32, uid: u32, gid: u32) -> Result<Self, Error> {
        let number = Pid::from_raw(pid).ok_or(Error::NoPeerProcess)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(|errno| match errno {
            Errno::SRCH => Error::PeerGone(pid),
            errno => Error::io("open process", pid.to_string(), errno),
        })?;
        Ok(Self { pid, uid, gid, pidfd: Arc::new(pidfd) })
    }

    /// Its process id as the agent sees it. Anything looked up by this number counts only if the process
    /// [is alive](Self::is_alive) afterwards.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The user it ran as when it began to listen.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The group it ran as when it began to listen.
    #[must_use]
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// Its descriptor; `setns` takes it.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it has not exited yet.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // A process descriptor becomes readable when the process exits.
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(0))
    }

    /// Returns when it has exited.
    pub async fn exited(&self) {
        #[expect(deprecated, reason = "what takes its place is unsafe; an owned descriptor is what it asks for")]
        let Ok(descriptor) = AsyncFd::with_interest(Arc::clone(&self.pidfd), Interest::READABLE) else {
            // No more descriptors can be waited for: look now and then.
            while self.is_alive() {
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
            return;
        };
        while self.is_alive() {
            match descriptor.readable().await {
                Ok(mut guard) if self.is_alive() => guard.clear_ready(),
                _ => return,
            }
        }
    }

    /// Refuses a process of any other user.
    pub fn require_user(&self, user: u32) -> Result<(), Error> {
        if self.uid == user {
            return Ok(());
        }
        Err(Error::ForeignUser { pid: self.pid, uid: self.uid })
    }

    /// Refuses a process that is not in the pod `pod`, or that has exited.
    pub fn require_pod(&self, pod: &str) -> Result<(), Error> {
        let foreign = |reason: Mismatch| Error::ForeignPod { pid: self.pid, pod: pod.to_owned(), reason };
        let proc = SafeDir::trusted(Path::new("/proc"))?;
        let content = match proc.read_text(format!("{}/cgroup", self.pid), cgroup::LIMIT) {
            Ok(content) => content,
            Err(_) if !self.is_alive() => return Err(Error::PeerGone(self.pid)),
            Err(Error::NotText(_) | Error::TooLarge { .. }) => return Err(foreign(Mismatch::Unreadable)),
            Err(error) => return Err(error),
        };
        // The number may have passed on to another process while it was read; if ours lives, it has not.
        if !self.is_alive() {
            return Err(Error::PeerGone(self.pid));
        }
        cgroup::require_pod(&content, pod).map_err(foreign)
    }

    /// Lets the process, and what it starts from now on, keep `bytes` of its memory from being moved or swapped.
    pub fn allow_locked_memory(&self, bytes: u64) -> Result<(), Error> {
        let number = Pid::from_raw(self.pid).ok_or(Error::NoPeerProcess)?;
        // There is no such call by descriptor. The number is the process's own as long as it has not exited, and should
        // it pass on right now, another process may lock memory that its pod pays for: no more harm than that.
        if !self.is_alive() {
            return Err(Error::PeerGone(self.pid));
        }
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        match rustix::process::prlimit(Some(number), Resource::Memlock, limit) {
            Ok(_) if self.is_alive() => Ok(()),
            Ok(_) | Err(Errno::SRCH) => Err(Error::PeerGone(self.pid)),
            Err(errno) => Err(Error::io("raise the limit of locked memory of process", self.pid.to_string(), errno)),
        }
    }

    /// The root directory that the process sees: the file system of its container, without what is mounted in it.
    ///
    /// The container can hang this call: see [`crate::pod_calls`].
    pub fn root(&self) -> Result<SafeDir, Error> {
        opened(&self.judged_root()?)
    }

    /// The directory `/dev` of its container, without what is mounted in it.
    ///
    /// The container can hang this call: see [`crate::pod_calls`].
    pub fn dev(&self) -> Result<SafeDir, Error> {
        let root = self.judged_root()?;
        // The mount on `/dev` is crossed here. A descriptor that only names the directory asks nothing of what is mounted
        // there, so that its type can be judged first.
        let root = SafeDir { fd: Arc::new(root), one_mount: false };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let dev = root.resolve("open", Path::new("dev"), flags, Mode::empty(), BENEATH)?;
        mount::require(&dev, "/dev", &self.mounts()?, mount::DEV)?;
        opened(&dev)
    }

    /// A descriptor that names the root directory that the process sees, on a file system that may be used.
    fn judged_root(&self) -> Result<OwnedFd, Error> {
        // The last component is a link that the kernel makes; nothing of the pod has a say in it, and nothing is asked of
        // the file system behind it.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(format!("/proc/{}/root", self.pid), flags, Mode::empty())
            .map_err(|errno| Error::io("open the root directory of process", self.pid.to_string(), errno))?;
        mount::require(&root, "/", &self.mounts()?, mount::ROOT)?;
        if self.is_alive() { Ok(root) } else { Err(Error::PeerGone(self.pid)) }
    }

    /// The mounts that the process sees.
    fn mounts(&self) -> Result<Vec<u8>, Error> {
        SafeDir::trusted(Path::new(&format!("/proc/{}", self.pid)))?.read_bounded("mountinfo", mount::LIMIT)
    }
}

/// The directory that a descriptor names, opened for reading.
fn opened(named: &OwnedFd) -> Result<SafeDir, Error> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(named, ".", flags, Mode::empty())
        .map_err(|errno| Error::io("open directory", ".", errno))?;
    Ok(SafeDir { fd: Arc::new(fd), one_mount: true })
}
