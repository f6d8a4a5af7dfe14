//! TCP connections to other nodes: short queues in the kernel, and the notice that a node is lost.
//!
//! QEMU counts queued bytes as transferred: they reach the target while the guest stands still. At the sender only bytes that wait to be
//! sent are limited, those on their way are not. At the receiver the queue has room for the bytes of one round trip, since a shorter one
//! limits the throughput between distant nodes.

use std::{io, net::SocketAddr, time::Duration};

use daemon::tls::TlsStream;
use nix::{
    getsockopt_impl, libc, setsockopt_impl, sockopt_impl,
    sys::socket::{getsockopt, setsockopt, sockopt::GetStruct},
};
use protocol::channels::Channel;
use rustix::{io::Errno, net::sockopt};
use tokio::net::TcpStream;

/// Bytes of a connection with bulk data that wait to be sent before no more are accepted.
const UNSENT: u32 = 256 << 10;
/// Least and most bytes that wait at the receiver until they are read. The kernel doubles the value for its own use.
const UNREAD: (u64, u64) = (256 << 10, 4 << 20);
/// Bytes a second that the queue of the receiver permits: 8.6 Gbit/s for each connection, of which QEMU opens several.
const RATE: u64 = 1 << 30;
/// Silence of the other node after which it is probed, interval of probes, and their number: 14 s until a node counts as lost.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(3), 3);
/// Longest time for sent bytes to be acknowledged.
const ACKNOWLEDGED: Duration = Duration::from_secs(15);

sockopt_impl!(
    /// Bytes that wait to be sent before the connection accepts no more (`tcp(7)`).
    NotSentLowWater,
    Both,
    libc::IPPROTO_TCP,
    libc::TCP_NOTSENT_LOWAT,
    u32
);

/// Words of the kernel's description of a connection up to [`SHORTEST_ROUND_TRIP`].
type ConnectionWords = [u32; SHORTEST_ROUND_TRIP + 1];
/// Word of the shortest round trip so far in microseconds (`tcpi_min_rtt` of `linux/tcp.h`, Linux 4.6).
const SHORTEST_ROUND_TRIP: usize = 37;
/// The first words of the kernel's description of a connection.
#[derive(Clone, Copy)]
struct ConnectionInfo;
getsockopt_impl!(ConnectionInfo, libc::IPPROTO_TCP, libc::TCP_INFO, ConnectionWords, GetStruct<ConnectionWords>);

/// Connects to another node.
pub(super) async fn dial(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    notice_loss(&stream)?;
    Ok(stream)
}

/// Returns the TCP connection of a stream.
pub(super) fn tcp(stream: &TlsStream) -> &TcpStream {
    stream.get_ref().0.get_ref()
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
pub(super) fn prepare(stream: &TcpStream, channel: Channel) -> io::Result<()> {
    if channel.is_bulk() {
        setsockopt(stream, NotSentLowWater, &UNSENT)?;
        let [.., shortest] = getsockopt(stream, ConnectionInfo)?;
        limit_unread(stream, unread(Duration::from_micros(shortest.into())))
    } else {
        let limit = u32::try_from(ACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
        Ok(sockopt::set_tcp_user_timeout(stream, limit)?)
    }
}

/// Limits the bytes that wait until they are read. Without the right to pass by `net.core.rmem_max`, the kernel caps the value.
fn limit_unread(stream: &TcpStream, length: usize) -> io::Result<()> {
    match sockopt::set_socket_recv_buffer_size_force(stream, length) {
        Err(Errno::PERM) => Ok(sockopt::set_socket_recv_buffer_size(stream, length)?),
        forced => Ok(forced?),
    }
}

/// Returns the bytes that may wait at the receiver of a connection with this round trip.
fn unread(round_trip: Duration) -> usize {
    let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    let (least, most) = UNREAD;
    let length = (RATE / 1_000_000).saturating_mul(micros).clamp(least, most);
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = dial(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    #[test]
    fn queue_of_the_receiver_has_room_for_a_round_trip() {
        for (micros, expected) in [
            (0, 256 << 10),
            (50, 256 << 10),
            (500, 536_500),
            (1_000, 1_073_000),
            (2_000, 2_146_000),
            (10_000, 4 << 20),
            (u64::from(u32::MAX), 4 << 20),
            (u64::MAX, 4 << 20),
        ] {
            assert_eq!(unread(Duration::from_micros(micros)), expected, "{micros}");
        }
    }

    #[tokio::test]
    async fn bulk_data_has_short_queues_and_a_send_buffer_that_grows() {
        let (near, far) = connected().await;
        let untouched = sockopt::socket_send_buffer_size(&far).unwrap();
        for channel in [Channel::Memory, Channel::Disks] {
            prepare(&far, channel).unwrap();
            assert_eq!(getsockopt(&far, NotSentLowWater), Ok(UNSENT));
            assert_eq!(sockopt::socket_send_buffer_size(&far).unwrap(), untouched);
            // Twice the value, or what `net.core.rmem_max` permits without privileges.
            let received = sockopt::socket_recv_buffer_size(&far).unwrap();
            assert!(received <= 2 * usize::try_from(UNREAD.1).unwrap(), "{received}");
        }
        assert_eq!(getsockopt(&near, NotSentLowWater), Ok(0));
    }

    #[tokio::test]
    async fn other_channels_notice_a_lost_node_while_bytes_are_on_the_way() {
        let (near, _far) = connected().await;
        assert!(sockopt::tcp_nodelay(&near).unwrap() && sockopt::socket_keepalive(&near).unwrap());
        for channel in [Channel::Control, Channel::Release] {
            prepare(&near, channel).unwrap();
            assert_eq!(sockopt::tcp_user_timeout(&near).unwrap(), 15_000);
            assert_eq!(getsockopt(&near, NotSentLowWater), Ok(0));
        }
    }
}
