//! Connections to a port of a guest.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    net::{TcpStream, UdpSocket},
    time::timeout,
};

/// Longest time for a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Port and protocol of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestPort {
    /// Port, 1 to 65535.
    pub port: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
}

/// Protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// A stream.
    Tcp,
    /// One message for each datagram.
    Udp,
}

/// A connection to a guest.
#[derive(Debug)]
pub(crate) enum Connection {
    /// A stream.
    Tcp(TcpStream),
    /// Datagrams to and from one port.
    Udp(UdpSocket),
}

/// Connects to a port of a guest.
pub(crate) async fn connect(target: SocketAddr, protocol: Protocol) -> io::Result<Connection> {
    let connecting = async {
        match protocol {
            Protocol::Tcp => {
                let stream = TcpStream::connect(target).await?;
                stream.set_nodelay(true)?;
                io::Result::Ok(Connection::Tcp(stream))
            }
            Protocol::Udp => {
                let any: IpAddr =
                    if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
                let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
                // From here on the kernel drops datagrams from other addresses.
                socket.connect(target).await?;
                Ok(Connection::Udp(socket))
            }
        }
    };
    timeout(CONNECT_TIMEOUT, connecting).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
