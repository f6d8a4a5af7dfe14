//! The kernel's VSOCK sockets.
//!
//! They are handled as tokio's Unix streams, which are no more than descriptors of stream sockets that the runtime waits
//! for: reading, writing and closing one half are the same calls for both families.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{VsockAddr, bind, connect as begin, getpeername},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, listen, socket_with};
use tokio::{io::Interest, net::UnixStream};

/// Context id that stands for any of the host's own.
const ANY: u32 = u32::MAX;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;

/// Connects to a port of the guest with this context id.
pub(super) async fn connect(cid: u32, port: u32) -> io::Result<UnixStream> {
    let socket = stream_socket()?;
    match begin(socket.as_raw_fd(), &VsockAddr::new(cid, port)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    let stream = UnixStream::from_std(socket.into())?;
    // It can be written to once it is connected, or has failed.
    stream.writable().await?;
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// A port of the host.
pub(super) struct Listener(UnixStream);

impl Listener {
    /// Listens on a port for all guests.
    pub(super) fn bind(port: u32) -> io::Result<Self> {
        let socket = stream_socket()?;
        bind(socket.as_raw_fd(), &VsockAddr::new(ANY, port))?;
        listen(&socket, BACKLOG)?;
        Ok(Self(UnixStream::from_std(socket.into())?))
    }

    /// The next connection, and the context id of who made it.
    pub(super) async fn accept(&self) -> io::Result<(UnixStream, u32)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            self.0.readable().await?;
            let socket = match self.0.try_io(Interest::READABLE, || Ok(accept_with(&self.0, flags)?)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                accepted => accepted?,
            };
            // One that has gone already has no address.
            if let Ok(peer) = getpeername::<VsockAddr>(socket.as_raw_fd()) {
                return Ok((UnixStream::from_std(socket.into())?, peer.cid()));
            }
        }
    }
}

fn stream_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_guest_that_is_not_there_is_an_error() {
        // Wherever this runs: without VSOCK, without guests, or with some, of which none has this context id.
        let attempt = tokio::time::timeout(Duration::from_secs(20), connect(0xfeed_beef, 1)).await;
        assert!(attempt.is_ok_and(|connected| connected.is_err()));
    }
}
