//! Unix sockets beneath a [`SafeDir`].

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use tokio::{
    net::{UnixListener, UnixStream},
    time::{Instant, sleep, timeout_at},
};

use super::{BENEATH, Error, Kind, Peer, SafeDir, beneath, descriptor_path, require_kind, stat_of};

/// User that every launcher runs as, with the feature gate `Root` too. Nothing of a pod that runs as root is taken for a launcher.
const LAUNCHER_USER: u32 = 107;
/// Pause between attempts while the queue of a listening socket is full.
const QUEUE_FULL: Duration = Duration::from_millis(20);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;

impl SafeDir {
    /// Connects to the socket `path` beneath this directory.
    ///
    /// The path is resolved once, to a descriptor; only if that is a socket, it is connected to, through
    /// `/proc/self/fd`. Whatever the name stands for afterwards does not matter.
    pub async fn connect(&self, path: impl AsRef<Path>, within: Duration) -> Result<UnixStream, Error> {
        let path = beneath(path.as_ref())?;
        let deadline = Instant::now() + within;
        let named = self.resolve("connect to", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        require_kind(stat_of(&named, path)?, path, Kind::Socket)?;
        let failed = |errno| Error::io("connect to", path, errno);
        let address = SocketAddrUnix::new(descriptor_path(&named)).map_err(failed)?;
        let socket = stream_socket().map_err(failed)?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => break,
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => sleep(QUEUE_FULL).await,
                Err(Errno::AGAIN | Errno::INTR) => return Err(Error::Timeout(path.to_owned())),
                Err(errno) => return Err(failed(errno)),
            }
        }
        UnixStream::from_std(socket.into()).map_err(|source| Error::Io {
            operation: "connect to",
            path: path.to_owned(),
            source,
        })
    }

    /// Listens on a new socket `path`; a socket that is there already is replaced.
    pub fn listen(&self, path: impl AsRef<Path>, mode: u32) -> Result<UnixListener, Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        match parent.stat(&name) {
            Ok(stat) => {
                require_kind(stat, path, Kind::Socket)?;
                parent.remove_file(&name)?;
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        let failed = |errno| Error::io("listen on", path, errno);
        let socket = stream_socket().map_err(failed)?;
        // The node in the file system takes the mode that the socket has when it is bound.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode & 0o777)).map_err(failed)?;
        let address = SocketAddrUnix::new(descriptor_path(parent.as_fd()).join(name)).map_err(failed)?;
        rustix::net::bind(&socket, &address).map_err(failed)?;
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        UnixListener::from_std(socket.into()).map_err(|source| Error::Io {
            operation: "listen on",
            path: path.to_owned(),
            source,
        })
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Where the launcher of a pod listens, beneath kubelet's `pods` directory.
#[must_use]
pub fn launcher_socket(pod_uid: &str) -> PathBuf {
    [pod_uid, "volumes", "kubernetes.io~empty-dir", "sockets", "launcher-sock"].iter().collect()
}

/// Waits for the launcher of a pod to listen and connects to it. Who answers has to run as a launcher does and has to
/// be in that very pod: the machine's identity is that of the socket.
pub async fn connect_launcher(
    kubelet_pods: &SafeDir,
    pod_uid: &str,
    within: Duration,
) -> Result<(UnixStream, Peer), Error> {
    let path = launcher_socket(pod_uid);
    let deadline = Instant::now() + within;
    let connected = timeout_at(deadline, async {
        kubelet_pods.wait_for(&path, within).await?;
        kubelet_pods.connect(&path, deadline.saturating_duration_since(Instant::now())).await
    })
    .await;
    let stream = connected.map_err(|_| Error::Timeout(path))??;
    let peer = Peer::of(&stream)?;
    peer.require_user(LAUNCHER_USER)?;
    peer.require_pod(pod_uid)?;
    Ok((stream, peer))
}
