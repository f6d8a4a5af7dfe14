//! Listening sockets.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use tokio::net::{TcpListener, TcpSocket};

/// Connections that the kernel queues until they are accepted, as far as `net.core.somaxconn` allows. When the queue is full
/// the kernel drops new ones, and a probe repeats after a second.
const BACKLOG: u32 = 4096;
/// Listens on an address, with a queue in the kernel for bursts of connections.
///
/// # Errors
/// When the address cannot be used.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Listens on a port of all addresses of both families, or of IPv4 on a host without IPv6.
///
/// # Errors
/// When the port cannot be used.
pub fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    match listen((Ipv6Addr::UNSPECIFIED, port).into()) {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
        Err(_) => listen((Ipv4Addr::UNSPECIFIED, port).into()),
    }
}

/// Listens on the same port of the loopback address, to which `kubectl port-forward` connects, unless a listener at `address` does
/// so already. The server works without: an address that cannot be used is only logged.
#[must_use]
pub fn listen_at_loopback(address: SocketAddr) -> Option<TcpListener> {
    let (served, port) = (address.ip().to_canonical(), address.port());
    if served.is_unspecified() || served == Ipv4Addr::LOCALHOST || served == Ipv6Addr::LOCALHOST {
        return None;
    }
    let listener = match listen((Ipv4Addr::LOCALHOST, port).into()) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => listen((Ipv6Addr::LOCALHOST, port).into()),
        other => other,
    };
    listener
        .inspect_err(|error| tracing::warn!(%error, port, "cannot listen on the loopback address, port-forward fails"))
        .ok()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn port_of_one_address_is_also_reached_at_the_loopback_address() {
        // Another process can use the port of the loopback address.
        let (first, second) = (0..16)
            .find_map(|_| {
                let first = listen(([127, 0, 0, 2], 0).into()).unwrap();
                let second = listen_at_loopback(first.local_addr().unwrap())?;
                Some((first, second))
            })
            .unwrap();
        let port = first.local_addr().unwrap().port();
        assert_eq!(second.local_addr().unwrap(), SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        for (last, expected) in [(1, true), (2, true), (3, false)] {
            let connected = TcpStream::connect((Ipv4Addr::new(127, 0, 0, last), port)).await;
            assert_eq!(connected.is_ok(), expected, "127.0.0.{last}");
        }
        // The port is in use now.
        assert!(listen_at_loopback(first.local_addr().unwrap()).is_none());
    }

    #[test]
    fn listener_that_loopback_connections_reach_needs_no_other_one() {
        for address in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            assert!(listen_at_loopback(address.parse().unwrap()).is_none(), "{address}");
        }
    }
}
