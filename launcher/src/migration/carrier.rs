//! Connections of virt-handler that carry a channel.

use std::{
    io::{Error, ErrorKind, IoSlice, Result},
    mem::MaybeUninit,
    os::fd::AsFd,
};

use protocol::channels::{Channel, IDLE};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest, copy_bidirectional_with_sizes},
    net::UnixStream,
    sync::OwnedSemaphorePermit,
};

use super::{ChannelMode, Channels};

/// Buffer of each direction of a connection, in bytes.
const BUFFER: usize = 256 * 1024;

/// A connection of virt-handler.
#[derive(Debug)]
pub(super) struct Carrier {
    stream: UnixStream,
    takes_sockets: bool,
    _permit: OwnedSemaphorePermit,
}

impl Carrier {
    pub(super) fn new(stream: UnixStream, takes_sockets: bool, permit: OwnedSemaphorePermit) -> Self {
        Self { stream, takes_sockets, _permit: permit }
    }

    /// Returns false if virt-handler has closed a connection on which it sends nothing yet.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    /// Tells virt-handler that the launcher knows sockets, although it ends the connection.
    pub(super) fn dismiss(&self) {
        if self.takes_sockets {
            let _ = self.stream.try_write(&[IDLE]);
        }
    }

    /// Answers with a byte and returns the connection, which is the channel.
    pub(super) async fn answer(&mut self, byte: u8) -> Result<&mut UnixStream> {
        self.stream.write_u8(byte).await?;
        Ok(&mut self.stream)
    }

    /// Answers with a byte and carries the bytes of a socket until both sides have ended, or channels of this mode are closed.
    pub(super) async fn carry(
        mut self,
        channels: &Channels,
        mode: ChannelMode,
        channel: Channel,
        byte: u8,
        mut socket: UnixStream,
    ) -> Result<()> {
        let name = channel.name();
        if !self.takes_sockets {
            self.answer(byte).await?;
            tracing::debug!(channel = name, "a channel of the migration is open");
            let result = tokio::select! {
                result = copy_bidirectional_with_sizes(&mut socket, &mut self.stream, BUFFER, BUFFER) => result,
                () = channels.closed(mode) => Err(closed()),
            };
            match result {
                Ok((sent, received)) => tracing::debug!(channel = name, sent, received, "a channel has ended"),
                Err(error) => tracing::debug!(channel = name, %error, "a channel has ended"),
            }
            return Ok(());
        }
        pass(&self.stream, byte, &socket).await?;
        tracing::debug!(channel = name, "virt-handler has the socket of a channel");
        tokio::select! {
            // virt-handler sends nothing. It closes the connection at the end of the channel.
            _ = self.stream.read_u8() => {}
            () = channels.closed(mode) => {}
        }
        // For virt-handler's descriptor as well.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        tracing::debug!(channel = name, "a channel has ended");
        Ok(())
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::ConnectionAborted, "the migration has ended")
}

/// Sends a byte with a socket.
async fn pass(stream: &UnixStream, byte: u8, socket: &UnixStream) -> Result<()> {
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sockets = [socket.as_fd()];
        if !control.push(SendAncillaryMessage::ScmRights(&sockets)) {
            return Err(ErrorKind::OutOfMemory.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::sendmsg(stream, &[IoSlice::new(&[byte])], &mut control, flags)?;
        Ok(())
    };
    stream.async_io(Interest::WRITABLE, send).await
}
