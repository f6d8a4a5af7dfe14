//! Unix sockets beneath a [`SafeDir`].

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{libc, sys::socket::setsockopt};
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

/// User of every launcher, also with the feature gate `Root`. A process of a pod that runs as root is never accepted as a
/// launcher.
const LAUNCHER_USER: u32 = 107;
/// Pause between attempts while the backlog of a socket is full.
const QUEUE_FULL: Duration = Duration::from_millis(20);
/// Option of a socket: processes may pass descriptors to it (`asm-generic/socket.h`).
#[derive(Clone, Copy)]
pub(super) struct PassRights;
const SO_PASSRIGHTS: libc::c_int = 83;
nix::setsockopt_impl!(PassRights, libc::SOL_SOCKET, SO_PASSRIGHTS, bool, nix::sys::socket::sockopt::SetBool);
/// Backlog of a listening socket.
const BACKLOG: i32 = 16;

impl SafeDir {
    /// Connects to the socket `path` beneath this directory.
    ///
    /// The path is resolved once to a descriptor. If that is a socket, it is connected through `/proc/self/fd`. Later
    /// changes of the name have no effect.
    pub(crate) async fn connect(&self, path: impl AsRef<Path>, within: Duration) -> Result<UnixStream, Error> {
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

    /// Listens on a new socket `path`; an existing socket is replaced.
    pub(crate) fn listen(&self, path: impl AsRef<Path>, mode: u32) -> Result<UnixListener, Error> {
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
        // The file gets the mode of the socket at the time of the bind.
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

/// Returns a socket to which nobody can pass descriptors (Linux 6.16). The kernel closes those that nobody asked for in the thread
/// that reads, where the end of a file or of a TCP connection can take as long as the sender likes (`SO_LINGER`).
fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match setsockopt(&socket, PassRights, &false) {
        // An earlier kernel.
        Ok(()) | Err(nix::Error::ENOPROTOOPT) => Ok(socket),
        Err(errno) => Err(Errno::from_raw_os_error(errno as i32)),
    }
}

/// Returns the path of a pod's launcher socket beneath kubelet's `pods` directory.
pub(crate) fn launcher_socket(pod_uid: &str) -> PathBuf {
    socket_path(pod_uid, "launcher-sock")
}

fn socket_path(pod_uid: &str, name: &str) -> PathBuf {
    [pod_uid, "volumes", "kubernetes.io~empty-dir", "sockets", name].iter().collect()
}

/// Waits for the launcher of a pod to listen and connects to it. The peer must run as the launcher's user and in this pod:
/// the socket identifies the VMI.
pub(crate) async fn connect_launcher(
    kubelet_pods: &SafeDir,
    pod_uid: &str,
    within: Duration,
) -> Result<(UnixStream, Peer), Error> {
    connect_pod(kubelet_pods, pod_uid, launcher_socket(pod_uid), within).await
}

/// Waits for the launcher of a pod, or its QEMU, to listen for channels of a migration on the socket `name` and connects to it. The peer
/// is checked like that of [`connect_launcher`].
pub(crate) async fn connect_migration(
    kubelet_pods: &SafeDir,
    pod_uid: &str,
    name: &str,
    within: Duration,
) -> Result<(UnixStream, Peer), Error> {
    connect_pod(kubelet_pods, pod_uid, socket_path(pod_uid, name), within).await
}

/// Waits for a process of a pod to listen on the socket at `path` and connects to it. The peer must run as the launcher's
/// user and in this pod.
pub(crate) async fn connect_pod(
    kubelet_pods: &SafeDir,
    pod_uid: &str,
    path: PathBuf,
    within: Duration,
) -> Result<(UnixStream, Peer), Error> {
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
