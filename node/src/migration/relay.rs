//! Copies the bytes of a channel between a launcher and another node.
//!
//! A buffer of fixed size each way is the only memory that a channel takes; a side that does not read stops the other one. An
//! end of one direction is passed on, and the other direction continues.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use daemon::tls::TlsStream;
use prometheus::IntCounter;
use protocol::channels::Channel;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes},
    net::UnixStream,
};

use super::gathered::Gathered;
use crate::metrics::OpenChannel;

/// Buffer of the direction in which guest memory and disks are copied.
const BULK: usize = 128 << 10;
/// Buffer of other directions.
const SMALL: usize = 16 << 10;

/// End of a migration at which a channel is relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The launcher of this node is the source.
    Source,
    /// The launcher of this node is the target.
    Target,
}

/// Copies the bytes of a channel both ways until both sides have ended.
pub(super) async fn relay(
    other_node: TlsStream,
    launcher: UnixStream,
    end: End,
    channel: Channel,
    open: &OpenChannel,
) -> io::Result<()> {
    let bulk = if channel.is_bulk() { BULK } else { SMALL };
    let (sent, received) = match end {
        End::Source => (bulk, SMALL),
        End::Target => (SMALL, bulk),
    };
    let mut launcher = Counted { inner: launcher, sent: open.sent(), received: open.received() };
    let mut other_node = Gathered::new(other_node);
    copy_bidirectional_with_sizes(&mut launcher, &mut other_node, sent, received).await.map(drop)
}

/// The connection of a launcher, whose bytes are counted.
struct Counted {
    inner: UnixStream,
    sent: IntCounter,
    received: IntCounter,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        self.sent.inc_by((buffer.filled().len() - before) as u64);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(context, bytes))?;
        self.received.inc_by(written as u64);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
