//! The accept loop: bounded connections, bounded handshakes, graceful end.
//!
//! `connections` decides which connection gives way to a new one, `handshake` and `limits` bound one, `write_timeout` and
//! `repoll` wrap it, `probes` and `trusted` hold addresses with connections of their own.

mod callers;
mod connections;
mod handshake;
mod limits;
mod listen;
mod path;
mod probes;
mod repoll;
mod trusted;
mod write_timeout;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::Router;
use hyper::{
    Request, StatusCode,
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{
    connections::ConnectionTable, handshake::handshake, path::collapse_slashes, repoll::repolled,
    write_timeout::WriteTimeout,
};
use super::{Peer, ServerTls};

pub use callers::Callers;
pub use limits::Limits;
pub use listen::{listen, listen_everywhere};
pub use probes::ProbeAddresses;
pub use trusted::TrustedAddresses;

/// Handshakes of addresses without a proof that are computed at a time. Each takes a fraction of a millisecond of a
/// processor; the other processors serve requests.
const HANDSHAKES: usize = 1;
/// Most bytes buffered for a client without a certificate: the head of a request and the first part of its body.
const BUFFER: usize = 64 << 10;
/// The same for a client with a certificate, which may act for users with many groups, until its address has a proof. From
/// then on it is the default of hyper, 408 KiB.
const UNPROVEN_PROXY_BUFFER: usize = 256 << 10;

/// The entry of a connection in the table; removed on drop.
struct Entry {
    table: Arc<Mutex<ConnectionTable<DropGuard>>>,
    id: u64,
    address: IpAddr,
    trusted: TrustedAddresses,
}

impl Entry {
    fn requested(&self) {
        lock(&self.table).requested(self.id, Instant::now());
    }

    fn answered(&self) {
        let trusted = self.trusted.contains(self.address);
        lock(&self.table).answered(self.id, trusted, Instant::now());
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.table).close(self.id);
    }
}

fn lock(table: &Mutex<ConnectionTable<DropGuard>>) -> MutexGuard<'_, ConnectionTable<DropGuard>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves `router` over TLS until `stop` is cancelled, then lets open connections end within `limits.drain`.
///
/// Each request carries a [`Peer`] extension. Connections may be upgraded (WebSocket). Connections are accepted at all
/// times: when all slots are in use, another connection gives way or the new one is closed at once.
pub async fn serve(
    listener: TcpListener,
    tls: impl Into<ServerTls>,
    router: Router,
    limits: Limits,
    callers: Callers,
    stop: CancellationToken,
) {
    let tls = tls.into();
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
        let (acceptor, router, stop) = (TlsAcceptor::from(tls.current()), router.clone(), stop.clone());
        connections.spawn(repolled(async move {
            tokio::select! {
                () = gives_way.cancelled() => tracing::debug!(%address, "connection gave way to another one"),
                () = connection(stream, address, acceptor, gate, entry, router, limits, stop) => {}
            }
        }));
        // Removes ended tasks, so that the set does not grow.
        while connections.try_join_next().is_some() {}
    }
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, drained).await.is_err() {
        tracing::debug!("open connections were cut");
    }
}

#[expect(clippy::too_many_arguments, reason = "called once, next to the creation of each argument")]
async fn connection(
    stream: TcpStream,
    address: SocketAddr,
    acceptor: TlsAcceptor,
    gate: Option<Arc<Semaphore>>,
    entry: Entry,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    // Streams carry single keystrokes.
    let _ = stream.set_nodelay(true);
    let Some(stream) = handshake(stream, address, acceptor, gate, limits.handshake).await else { return };
    if limits.handshake_proves {
        entry.trusted.record(entry.address);
    }
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    // Not the builder that detects the version: it waits for the first bytes without a limit, and accepts HTTP/2 although
    // ALPN did not offer it.
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle);
    // hyper allocates all allowed header lines for each request, on the heap when they are more than its default of a
    // hundred: two thousand take 140 KB. Only clients that act for users send that many.
    if chain.is_empty() {
        http.max_buf_size(BUFFER);
    } else {
        http.max_headers(limits.header_lines);
        if !entry.trusted.contains(entry.address) {
            http.max_buf_size(UNPROVEN_PROXY_BUFFER);
        }
    }
    let requested = Arc::new(Notify::new());
    let first = requested.clone();
    let peer = Peer::new(address, chain);
    let entry = Arc::new(entry);
    let upgraded = Arc::new(AtomicBool::new(false));
    let stream = WriteTimeout::new(stream, limits.answer, upgraded.clone());
    let service = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        requested.notify_one();
        entry.requested();
        // Not a layer of the router, which would build all routes for each connection.
        request.extensions_mut().insert(peer.clone());
        collapse_slashes(request.uri_mut());
        let (answer, upgraded, entry) = (service.call(request), upgraded.clone(), entry.clone());
        async move {
            let answer = answer.await;
            if answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::SWITCHING_PROTOCOLS) {
                upgraded.store(true, Ordering::Relaxed);
            } else {
                entry.answered();
            }
            answer
        }
    });
    let served = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
    let mut served = std::pin::pin!(served);
    let silent = async {
        if tokio::time::timeout(limits.request_head, first.notified()).await.is_ok() {
            std::future::pending::<()>().await;
        }
    };
    let result = tokio::select! {
        result = served.as_mut() => result,
        () = silent => {
            tracing::debug!(%address, "no request was received");
            return;
        }
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%address, %error, "connection ended");
    }
}
