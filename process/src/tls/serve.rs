//! The accept loop: bounded connections, bounded handshakes, graceful end.

use std::{
    io,
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
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Notify, Semaphore},
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    Peer, ProbeAddresses, ServerTls, TrustedAddresses,
    again::again,
    connections::{ConnectionTable, Sender},
    gate::gated,
    patient::Patient,
};

/// Connections that the kernel keeps until they are accepted, where `net.core.somaxconn` allows as many. When they are all
/// taken the kernel drops what comes, and a probe is tried again after a second.
const BACKLOG: u32 = 4096;
/// Handshakes of addresses without a proof that are computed at a time. Each takes a fraction of a millisecond of a
/// processor; the others are left for what is under way.
const HANDSHAKES: usize = 1;
/// Most bytes buffered of a client that shows no certificate: the head of a request, or what has come of its body.
const BUFFER: usize = 64 << 10;
/// The same of a client that shows one, and may speak for users with many groups, until its address has a proof. From then
/// on it is what hyper takes, 408 KiB.
const UNPROVEN_PROXY_BUFFER: usize = 256 << 10;

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Connections at a time of all addresses without a proof together.
    pub others: usize,
    /// Connections at a time of one address without a proof.
    pub share: usize,
    /// Connections at a time of addresses without a proof from which no request has come yet.
    pub silent: usize,
    /// Connections at a time of [`ProbeAddresses`] that count for none of the above.
    pub probes: usize,
    /// A handshake proves the address of the client, because the server requires a certificate.
    pub handshake_proves: bool,
    /// Longest TLS handshake.
    pub handshake: Duration,
    /// Longest time from the handshake to the head of the first request.
    pub request_head: Duration,
    /// Longest time from an answer to the head of the next request.
    pub idle: Duration,
    /// Longest time for an answer, or a large part of it, to be taken.
    pub answer: Duration,
    /// Most lines in the head of a request of a client that shows a certificate; others send a hundred at most.
    pub header_lines: usize,
    /// How long open connections may go on after the stop.
    pub drain: Duration,
}

impl Limits {
    /// Those of a server for metrics and health.
    pub const DEFAULT: Self = Self {
        connections: 128,
        others: 64,
        share: 32,
        silent: 48,
        probes: 16,
        handshake_proves: false,
        handshake: Duration::from_secs(5),
        request_head: Duration::from_secs(10),
        idle: Duration::from_secs(30),
        answer: Duration::from_secs(60),
        header_lines: 100,
        drain: Duration::from_secs(10),
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Addresses whose connections do not give way to those of all others.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    /// Addresses with a proof.
    pub trusted: TrustedAddresses,
    /// Addresses that probes come from.
    pub probes: ProbeAddresses,
}

impl Callers {
    fn sender(&self, address: IpAddr) -> Sender {
        let address = address.to_canonical();
        Sender { address, trusted: self.trusted.contains(address), probes: self.probes.contains(address) }
    }
}

/// The place of a connection in the table; free again when dropped.
struct Place {
    table: Arc<Mutex<ConnectionTable<DropGuard>>>,
    id: u64,
    address: IpAddr,
    trusted: TrustedAddresses,
}

impl Place {
    fn asked(&self) {
        lock(&self.table).asked(self.id, Instant::now());
    }

    fn answered(&self) {
        let trusted = self.trusted.contains(self.address);
        lock(&self.table).answered(self.id, trusted, Instant::now());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.table).close(self.id);
    }
}

fn lock(table: &Mutex<ConnectionTable<DropGuard>>) -> MutexGuard<'_, ConnectionTable<DropGuard>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

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

/// Serves `router` over TLS until `stop` is cancelled, then lets open connections end within `limits.drain`.
///
/// Each request carries a [`Peer`] extension. Connections may be upgraded (WebSocket). Connections are accepted at all
/// times: one that there is no place for is closed at once, or another one gives way to it.
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
                // Typically out of file descriptors; they come back as connections end.
                tracing::warn!(%error, "connection was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let sender = callers.sender(address.ip());
        let gives_way = CancellationToken::new();
        let opened = lock(&table).open(sender, gives_way.clone().drop_guard(), Instant::now());
        let Ok(opened) = opened else {
            tracing::debug!(%address, "connection refused, all places are taken");
            continue;
        };
        let place =
            Place { table: table.clone(), id: opened.id, address: sender.address, trusted: callers.trusted.clone() };
        let gate = (!sender.trusted && !opened.reserved).then(|| gate.clone());
        // They end with the guards.
        drop(opened.gave_way);
        let (acceptor, router, stop) = (TlsAcceptor::from(tls.current()), router.clone(), stop.clone());
        connections.spawn(again(async move {
            tokio::select! {
                () = gives_way.cancelled() => tracing::debug!(%address, "connection gave way to another one"),
                () = connection(stream, address, acceptor, gate, place, router, limits, stop) => {}
            }
        }));
        // Collects what has ended, so that the set does not grow.
        while connections.try_join_next().is_some() {}
    }
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, drained).await.is_err() {
        tracing::debug!("open connections were cut");
    }
}

/// Does the TLS handshake within its time, and with a gate when it is its turn.
async fn handshake(
    stream: TcpStream,
    address: SocketAddr,
    acceptor: TlsAcceptor,
    gate: Option<Arc<Semaphore>>,
    limit: Duration,
) -> Option<TlsStream<TcpStream>> {
    let accepted = acceptor.accept(stream);
    let accepted = async move {
        match gate {
            Some(gate) => gated(gate, accepted).await,
            None => accepted.await,
        }
    };
    match tokio::time::timeout(limit, accepted).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%address, %error, "TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!(%address, "TLS handshake took too long");
            None
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "called once, where each of them is made")]
async fn connection(
    stream: TcpStream,
    address: SocketAddr,
    acceptor: TlsAcceptor,
    gate: Option<Arc<Semaphore>>,
    place: Place,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    // Streams carry single keystrokes.
    let _ = stream.set_nodelay(true);
    let Some(stream) = handshake(stream, address, acceptor, gate, limits.handshake).await else { return };
    if limits.handshake_proves {
        place.trusted.record(place.address);
    }
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    // Not the builder that finds out the version: it waits for the first bytes without a limit, and takes HTTP/2 from
    // those who were not offered it.
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle);
    // hyper makes room for all the lines that there may be, anew for each request, and on the heap unless they are the
    // hundred it is used to: two thousand are 140 KB. Only who speaks for users has that much to say.
    if chain.is_empty() {
        http.max_buf_size(BUFFER);
    } else {
        http.max_headers(limits.header_lines);
        if !place.trusted.contains(place.address) {
            http.max_buf_size(UNPROVEN_PROXY_BUFFER);
        }
    }
    let asked = Arc::new(Notify::new());
    let first = asked.clone();
    let peer = Peer::new(address, chain);
    let place = Arc::new(place);
    let upgraded = Arc::new(AtomicBool::new(false));
    let stream = Patient::new(stream, limits.answer, upgraded.clone());
    let service = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        asked.notify_one();
        place.asked();
        // Not a layer of the router: it would make all its routes anew for each connection.
        request.extensions_mut().insert(peer.clone());
        let (answer, upgraded, place) = (service.call(request), upgraded.clone(), place.clone());
        async move {
            let answer = answer.await;
            if answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::SWITCHING_PROTOCOLS) {
                upgraded.store(true, Ordering::Relaxed);
            } else {
                place.answered();
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
            tracing::debug!(%address, "no request came");
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
