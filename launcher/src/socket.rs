//! The sockets of the launcher.

use std::{
    io::{ErrorKind, Result},
    path::Path,
    time::Duration,
};

use tokio::net::{UnixListener, UnixStream};

/// Removes a socket if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Opens the socket. It gets its name once it listens, so that no client is refused.
pub(crate) fn listen(path: &Path) -> Result<UnixListener> {
    let staging = path.with_extension("init");
    remove(&staging)?;
    let listener = UnixListener::bind(&staging)?;
    std::fs::rename(&staging, path)?;
    Ok(listener)
}

/// Returns the next connection to the socket of this name.
pub(crate) async fn accept(listener: &UnixListener, name: &str) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => tracing::warn!(name, %error, "a socket does not accept"),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Reports a connection of virt-handler, which runs as root, or of this user; other processes of the pod have no access.
pub(crate) fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::getuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}
