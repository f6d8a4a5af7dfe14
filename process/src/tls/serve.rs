//! The accept loop: bounded connections, bounded handshakes, graceful end.

use std::{sync::Arc, time::Duration};

use axum::{Extension, Router};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Peer;

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time; more wait in the kernel's queue.
    pub connections: usize,
    /// Longest TLS handshake.
    pub handshake: Duration,
    /// Longest time for a client to send the head of a request.
    pub request_head: Duration,
    /// Requests at a time on one HTTP/2 connection.
    pub streams: u32,
    /// How long open connections may go on after the stop.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            handshake: Duration::from_secs(5),
            request_head: Duration::from_secs(10),
            streams: 128,
            drain: Duration::from_secs(10),
        }
    }
}

/// Serves `router` over TLS until `stop` is cancelled, then lets open connections end within `limits.drain`.
///
/// Each request carries a [`Peer`] extension. Connections may be upgraded (WebSocket).
pub async fn serve(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(config);
    let slots = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    loop {
        let slot = tokio::select! {
            slot = slots.clone().acquire_owned() => slot,
            () = stop.cancelled() => break,
        };
        // The semaphore is never closed.
        let Ok(slot) = slot else { break };
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
        let (acceptor, router, stop) = (acceptor.clone(), router.clone(), stop.clone());
        connections.spawn(async move {
            let _slot = slot;
            connection(stream, address, acceptor, router, limits, stop).await;
        });
        // Collects what has ended, so that the set does not grow.
        while connections.try_join_next().is_some() {}
    }
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, drained).await.is_err() {
        tracing::debug!("open connections were cut");
    }
}

async fn connection(
    stream: TcpStream,
    address: std::net::SocketAddr,
    acceptor: TlsAcceptor,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    // Streams carry single keystrokes.
    let _ = stream.set_nodelay(true);
    let stream = match tokio::time::timeout(limits.handshake, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!(%address, %error, "TLS handshake failed");
            return;
        }
        Err(_) => {
            tracing::debug!(%address, "TLS handshake took too long");
            return;
        }
    };
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let service = router.layer(Extension(Peer::new(address, chain)));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.request_head);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(64 * 1024)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(20));
    let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), TowerToHyperService::new(service));
    let mut served = std::pin::pin!(served);
    let result = tokio::select! {
        result = served.as_mut() => result,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%address, %error, "connection ended");
    }
}
