//! The server of streams that are not HTTP.

use std::{io, net::SocketAddr};

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{
    Callers, Limits,
    accept::{Connection, Entry, accept},
};
use crate::tls::{
    Peer, ServerTls,
    stream::{TlsStream, buffered},
};

/// A stream after its handshake.
pub struct Accepted {
    /// The stream.
    pub stream: TlsStream,
    /// Its other end.
    pub peer: Peer,
    entry: Entry,
}

impl Accepted {
    /// Takes the stream apart. The connection gives way to no other one any more; its slot is free when `Kept` is dropped.
    pub fn keep(self) -> (TlsStream, Kept) {
        self.entry.keep();
        (self.stream, Kept { _entry: self.entry })
    }
}

/// The slot of a connection that gives way to no other one.
#[must_use]
pub struct Kept {
    _entry: Entry,
}

/// Serves streams over TLS until `stop` is cancelled, then lets open ones end within `limits.drain`.
///
/// Of `limits`, those of connections, handshakes and the drain apply. `serve` has to end streams whose peer is silent, and to call
/// [`Accepted::keep`] for those that may last. `failed` is called for each connection whose handshake fails.
pub async fn serve_streams<F, R>(
    listener: TcpListener,
    tls: impl Into<ServerTls>,
    limits: Limits,
    callers: Callers,
    stop: CancellationToken,
    failed: impl Fn(SocketAddr, &io::Error) + Clone + Send + 'static,
    serve: F,
) where
    F: Fn(Accepted) -> R + Clone + Send + 'static,
    R: Future<Output = ()> + Send,
{
    let serve = move |connection: Connection<_>| {
        let Connection { stream, address, entry } = connection;
        let peer = Peer::new(address, stream.get_ref().1.peer_certificates().unwrap_or_default());
        serve(Accepted { stream: stream.into(), peer, entry })
    };
    accept(listener, tls.into(), limits, callers, stop, buffered, failed, serve).await;
}
