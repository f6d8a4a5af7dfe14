//! The accept loop: bounded connections, bounded handshakes, graceful end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
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
use tokio_util::sync::CancellationToken;

use super::{Peer, ServerTls, again::again, patient::Patient};
use crate::shares::Shares;

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time; more wait in the kernel's queue.
    pub connections: usize,
    /// Connections of one address at a time; more are closed, so that no address takes the place of all others.
    pub share: usize,
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

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            share: 256,
            handshake: Duration::from_secs(5),
            request_head: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            answer: Duration::from_secs(60),
            header_lines: 100,
            drain: Duration::from_secs(10),
        }
    }
}

/// Serves `router` over TLS until `stop` is cancelled, then lets open connections end within `limits.drain`.
///
/// Each request carries a [`Peer`] extension. Connections may be upgraded (WebSocket).
pub async fn serve(
    listener: TcpListener,
    tls: impl Into<ServerTls>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    let tls = tls.into();
    let slots = Arc::new(Semaphore::new(limits.connections));
    let addresses = Shares::each(limits.share);
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
        let Ok(share) = addresses.claim(address.ip()) else {
            tracing::debug!(%address, "too many connections of this address");
            continue;
        };
        let (acceptor, router, stop) = (TlsAcceptor::from(tls.current()), router.clone(), stop.clone());
        connections.spawn(async move {
            let (_slot, _share) = (slot, share);
            again(connection(stream, address, acceptor, router, limits, stop)).await;
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
    // Not the builder that finds out the version: it waits for the first bytes without a limit, and takes HTTP/2 from
    // those who were not offered it.
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle);
    // hyper makes room for all the lines that there may be, anew for each request, and on the heap unless they are the
    // hundred it is used to: two thousand are 140 KB. Only who speaks for users has that much to say.
    if !chain.is_empty() {
        http.max_headers(limits.header_lines);
    }
    let asked = Arc::new(Notify::new());
    let first = asked.clone();
    let peer = Peer::new(address, chain);
    let upgraded = Arc::new(AtomicBool::new(false));
    let stream = Patient::new(stream, limits.answer, upgraded.clone());
    let service = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        asked.notify_one();
        // Not a layer of the router: it would make all its routes anew for each connection.
        request.extensions_mut().insert(peer.clone());
        let (answer, upgraded) = (service.call(request), upgraded.clone());
        async move {
            let answer = answer.await;
            if answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::SWITCHING_PROTOCOLS) {
                upgraded.store(true, Ordering::Relaxed);
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
