//! Streams over TLS that are not HTTP.

use tokio::{io::BufReader, net::TcpStream};

/// Most bytes read from a connection at a time. rustls reads 4 KiB; each would be a system call.
const READ: usize = 64 << 10;

/// A stream over TLS, of the server or the client.
pub type TlsStream = tokio_rustls::TlsStream<BufReader<TcpStream>>;

/// Prepares a connection for [`TlsStream`].
pub(super) fn buffered(stream: TcpStream) -> BufReader<TcpStream> {
    BufReader::with_capacity(READ, stream)
}
