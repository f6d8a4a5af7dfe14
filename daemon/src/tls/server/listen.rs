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
