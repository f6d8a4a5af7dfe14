//! The accept loop: bounded connections, bounded handshakes.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Callers, Limits, TrustedAddresses, connections::ConnectionTable, handshake::handshake};
use crate::lock;
use crate::tls::ServerTls;

/// Handshakes of addresses without a proof that are computed at a time. Each takes a fraction of a millisecond of a
/// processor; the other processors serve requests.
const HANDSHAKES: usize = 1;

/// The entry of a connection in the table; removed on drop.
pub(super) struct Entry {
    table: Arc<Mutex<ConnectionTable<DropGuard>>>,
    id: u64,
    address: IpAddr,
    trusted: TrustedAddresses,
}

impl Entry {
    /// Records that the head of a request was received.
    pub(super) fn requested(&self) {
        lock(&self.table).requested(self.id, Instant::now());
    }

    /// Records that a request is answered.
    pub(super) fn answered(&self) {
        let trusted = self.trusted.contains(self.address);
        lock(&self.table).answered(self.id, trusted, Instant::now());
    }

    /// Keeps the connection: it gives way to no other one.
    pub(super) fn keep(&self) {
        lock(&self.table).keep(self.id);
    }

    /// Returns true while the address has a proof.
    pub(super) fn is_trusted(&self) -> bool {
        self.trusted.contains(self.address)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.table).close(self.id);
    }
}

/// A connection after its handshake.
pub(super) struct Connection<S> {
    pub(super) stream: TlsStream<S>,
    pub(super) address: SocketAddr,
    pub(super) entry: Entry,
}

/// Accepts connections until `stop` is cancelled, then lets open ones end within `limits.drain`.
///
/// Connections are accepted at all times: when all slots are in use, another connection gives way or the new one is closed at
/// once. `wrap` prepares a connection, `failed` is called when its handshake fails, and `serve` serves it.
#[expect(clippy::too_many_arguments, reason = "called by the two servers, next to the creation of each argument")]
pub(super) async fn accept<S, F, R>(
    listener: TcpListener,
    tls: ServerTls,
    limits: Limits,
    callers: Callers,
    stop: CancellationToken,
    wrap: fn(TcpStream) -> S,
    failed: impl Fn(SocketAddr, &io::Error) + Clone + Send + 'static,
    serve: F,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Connection<S>) -> R + Clone + Send + 'static,
    R: Future<Output = ()> + Send,
{
    let table = Arc::new(Mutex::new(ConnectionTable::new(limits)));
    let gate = Arc::new(Semaphore::new(HANDSHAKES));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually no file descriptor is left; they are freed as connections end.
                tracing::warn!(%error, "connection was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let sender = callers.sender(address.ip());
        let gives_way = CancellationToken::new();
        let opened = lock(&table).open(sender, gives_way.clone().drop_guard(), Instant::now());
        let Ok(opened) = opened else {
            tracing::debug!(%address, "connection refused, all slots are in use");
            continue;
        };
        let entry =
            Entry { table: table.clone(), id: opened.id, address: sender.address, trusted: callers.trusted.clone() };
        let gate = (!sender.trusted && !opened.reserved).then(|| gate.clone());
        // Their guards end them.
        drop(opened.gave_way);
        let (acceptor, failed, serve) = (TlsAcceptor::from(tls.current()), failed.clone(), serve.clone());
        connections.spawn(async move {
            let served = async move {
                // Streams carry single keystrokes.
                let _ = stream.set_nodelay(true);
                match handshake(wrap(stream), acceptor, gate, limits.handshake).await {
                    Ok(stream) => {
                        if limits.handshake_proves {
                            entry.trusted.record(entry.address);
                        }
                        serve(Connection { stream, address, entry }).await;
                    }
                    Err(error) => {
                        tracing::debug!(%address, %error, "TLS handshake failed");
                        failed(address, &error);
                    }
                }
            };
            tokio::select! {
                () = gives_way.cancelled() => tracing::debug!(%address, "connection gave way to another one"),
                () = served => {}
            }
        });
        // Removes ended tasks, so that the set does not grow.
        while connections.try_join_next().is_some() {}
    }
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, drained).await.is_err() {
        tracing::debug!("open connections were cut");
    }
}
