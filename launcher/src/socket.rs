//! The sockets that virt-handler connects to.

use std::path::Path;

use tokio::net::{UnixListener, UnixStream};

/// Opens the socket. It gets its name once it listens, so that no client is refused.
pub(crate) fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let staging = path.with_extension("init");
    match std::fs::remove_file(&staging) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&staging)?;
    std::fs::rename(&staging, path)?;
    Ok(listener)
}

/// Reports a connection of virt-handler, which runs as root, or of this user; other processes of the pod have no access.
pub(crate) fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::getuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}
