//! The launcher's end of a channel: the socket of libvirt or QEMU that it passes, or its connection.
//!
//! The launcher and virt-handler share a passed socket, and with it the flag that makes it block. Therefore no call here relies on
//! this flag.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::{
    cmsg_space,
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, Shutdown, SocketType, sockopt,
    },
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, Interest, ReadBuf},
    net::UnixStream,
};

use super::LauncherSocket;

/// The launcher's end of a channel.
pub(super) struct LauncherEnd {
    /// Carries the data.
    pub(super) data: Data,
    /// Without a passed socket the connection carries the data.
    pub(super) connection: Option<UnixStream>,
}

/// The socket that carries the data.
pub(super) struct Data(UnixStream);

impl Data {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        UnixStream::from_std(socket).map(Self)
    }
}

impl LauncherEnd {
    /// Waits for the launcher's answer. Returns its byte, and the end of the channel.
    ///
    /// # Errors
    /// When the connection ends (`UnexpectedEof`), or when the launcher passes something else than a socket of its pod.
    pub(super) async fn receive(stream: UnixStream, launcher: &dyn LauncherSocket) -> io::Result<(u8, Self)> {
        let (byte, passed) = stream.async_io(Interest::READABLE, || receive(&stream)).await?;
        let end = match passed {
            Some(socket) => {
                require_stream(&socket)?;
                launcher.check(socket.as_fd())?;
                Self { data: Data::new(socket)?, connection: Some(stream) }
            }
            None => Self { data: Data(stream), connection: None },
        };
        Ok((byte, end))
    }
}

/// Waits until the launcher ends a channel whose socket it has passed.
pub(super) async fn ended(connection: &mut Option<UnixStream>) {
    match connection {
        // It sends nothing more.
        Some(connection) => drop(connection.read_u8().await),
        None => std::future::pending().await,
    }
}

/// Reads a byte, with the descriptor that comes with it. The kernel closes further ones.
fn receive(stream: &UnixStream) -> io::Result<(u8, Option<OwnedFd>)> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let mut passed = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let passed = passed.next().and_then(|mut descriptors| descriptors.next());
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((byte[0], passed))
}

/// Refuses everything but a stream socket of this host: calls on other descriptors can block.
fn require_stream(socket: &OwnedFd) -> io::Result<()> {
    let is_stream = || {
        let is_unix = sockopt::socket_domain(socket)? == AddressFamily::UNIX;
        Ok::<_, Errno>(is_unix && sockopt::socket_type(socket)? == SocketType::STREAM)
    };
    match is_stream() {
        Ok(true) => Ok(()),
        Ok(false) => Err(io::Error::new(io::ErrorKind::InvalidData, "the launcher passes a socket of another kind")),
        Err(errno) => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("the launcher passes no socket: {errno}")))
        }
    }
}

fn is_retried(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl AsyncRead for Data {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(context))?;
            let space = buffer.initialize_unfilled();
            let receive = || Ok(rustix::net::recv(&self.0, space, RecvFlags::DONTWAIT)?.0);
            match self.0.try_io(Interest::READABLE, receive) {
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if is_retried(&error) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Data {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(context))?;
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match self.0.try_io(Interest::WRITABLE, || Ok(rustix::net::send(&self.0, bytes, flags)?)) {
                Err(error) if is_retried(&error) => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match rustix::net::shutdown(&self.0, Shutdown::Write) {
            // The other end is gone.
            Ok(()) | Err(Errno::NOTCONN) => Ok(()),
            Err(errno) => Err(errno.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn launcher_that_makes_its_socket_block_stops_nothing() {
        let (sender, receiver) = mpsc::channel();
        // A thread of its own: a call that blocks would stop the test as well.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (near, mut far) = UnixStream::pair().unwrap();
                let mut data = Data(near);
                let blocks = data.0.as_fd().try_clone_to_owned().unwrap();
                std::os::unix::net::UnixStream::from(blocks).set_nonblocking(false).unwrap();
                let (mut byte, bytes) = ([0], vec![7; 1 << 20]);
                let is_pending = futures::poll!(std::pin::pin!(data.0.readable())).is_pending();
                // The runtime takes the socket for readable once it was.
                tokio::io::AsyncWriteExt::write_all(&mut far, b"x").await.unwrap();
                data.read_exact(&mut byte).await.unwrap();
                let reads = futures::poll!(std::pin::pin!(data.read_exact(&mut byte))).is_pending();
                let writes = tokio::io::AsyncWriteExt::write_all(&mut data, &bytes);
                let writes = futures::poll!(std::pin::pin!(writes)).is_pending();
                sender.send((is_pending, reads, writes)).unwrap();
            });
        });
        let pending = receiver.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        assert_eq!(pending, (true, true, true));
    }
}
