//! The program of an attachment pod.
//!
//! kubelet attaches the claims of hot-plugged volumes to this pod. virt-handler connects to the socket and learns from the
//! kernel which process listens, enters its mount namespace and hands the volumes to the launcher pod. Nothing is read from a
//! connection or written to it.

use std::{io::ErrorKind, path::Path};

use tokio::{
    net::UnixListener,
    signal::unix::{SignalKind, signal},
};

/// Listens on the socket until a termination signal arrives.
///
/// # Errors
/// When the socket cannot be created.
pub fn run(socket: &Path) -> std::io::Result<()> {
    // One thread, and no blocking ones: the pod exists once per VMI with hot-plugged volumes.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        match std::fs::remove_file(socket) {
            // Of a former container of the pod.
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let listener = UnixListener::bind(socket)?;
        tracing::info!(socket = %socket.display(), "holding the volumes");
        loop {
            tokio::select! {
                _ = term.recv() => return Ok(()),
                _ = int.recv() => return Ok(()),
                connection = listener.accept() => drop(connection?),
            }
        }
    })
}
