//! Copies the bytes of a channel between a launcher and another node.
//!
//! A buffer of fixed size each way is the only memory that a channel takes; a side that does not read stops the other one. An
//! end of one direction is passed on, and the other direction continues.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use daemon::tls::TlsStream;
use prometheus::IntCounter;
use protocol::channels::Channel;
use rustix::net::sockopt;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes},
    net::{TcpStream, UnixStream},
};

use crate::metrics::OpenChannel;

/// Buffer of the direction in which guest memory and disks are copied.
const BULK: usize = 128 << 10;
/// Buffer of other directions.
const SMALL: usize = 16 << 10;
/// Most bytes that the kernel queues at each end of a connection with bulk data; it caps the value at `net.core.wmem_max` and
/// `rmem_max`, and doubles it. QEMU counts queued bytes as transferred: they reach the target while the guest stands still.
const QUEUED: usize = 256 << 10;
/// Silence of the other node after which it is probed, interval of probes, and their number: 14 s until a node counts as lost.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(3), 3);
/// Longest time for sent bytes to be acknowledged.
const ACKNOWLEDGED: Duration = Duration::from_secs(15);

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
    let mut other_node = other_node;
    copy_bidirectional_with_sizes(&mut launcher, &mut other_node, sent, received).await.map(drop)
}

/// Lets the kernel notice that the other node is lost while a connection is idle.
pub(super) fn notice_loss(stream: &TcpStream) -> io::Result<()> {
    let (idle, interval, count) = KEEP_ALIVE;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, count)?;
    Ok(())
}

/// Prepares a connection for the bytes of a channel. Those of bulk data have short queues. For the others the kernel notices that the
/// other node is lost while bytes are on the way.
///
/// That limit also ends connections to a reader that pauses for that long, as QEMU does at a slow disk. libvirt always reads its
/// channel, which exists as long as the others.
pub(super) fn prepare(stream: &TlsStream, channel: Channel) -> io::Result<()> {
    let stream = tcp(stream);
    if channel.is_bulk() {
        sockopt::set_socket_send_buffer_size(stream, QUEUED)?;
        sockopt::set_socket_recv_buffer_size(stream, QUEUED)?;
    } else {
        let limit = u32::try_from(ACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, limit)?;
    }
    Ok(())
}

/// Returns the TCP connection of a stream.
pub(super) fn tcp(stream: &TlsStream) -> &TcpStream {
    stream.get_ref().0.get_ref()
}

/// Connects to another node.
pub(super) async fn dial(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    notice_loss(&stream)?;
    Ok(stream)
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
