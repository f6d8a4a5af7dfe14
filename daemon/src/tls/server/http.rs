//! HTTP over a connection.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
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
    sync::Notify,
};
use tokio_util::sync::CancellationToken;

use super::{
    Callers, Limits,
    accept::{Connection, accept},
    path::collapse_slashes,
    repoll::repolled,
    write_timeout::WriteTimeout,
};
use crate::tls::{Peer, ServerTls};

/// Most bytes buffered for a client without a certificate: the head of a request and the first part of its body.
const BUFFER: usize = 64 << 10;
/// The same for a client with a certificate, which may act for users with many groups, until its address has a proof. From
/// then on it is the default of hyper, 408 KiB.
const UNPROVEN_PROXY_BUFFER: usize = 256 << 10;

/// Serves `router` over TLS until `stop` is cancelled, then lets open connections end within `limits.drain`.
///
/// Each request carries a [`Peer`] extension. Connections may be upgraded (WebSocket).
pub async fn serve(
    listener: TcpListener,
    tls: impl Into<ServerTls>,
    router: Router,
    limits: Limits,
    callers: Callers,
    stop: CancellationToken,
) {
    let stopped = stop.clone();
    let serve = move |opened| repolled(connection(opened, router.clone(), limits, stopped.clone()));
    accept(listener, tls.into(), limits, callers, stop, |stream| stream, |_, _| {}, serve).await;
}

async fn connection(opened: Connection<TcpStream>, router: Router, limits: Limits, stop: CancellationToken) {
    let Connection { stream, address, entry } = opened;
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
        if !entry.is_trusted() {
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
