//! The server for metrics and health.

use std::net::SocketAddr;

use axum::{Json, routing::get};
use process::{
    CancellationToken,
    config::ConfigHandle,
    ops::Ops,
    tls::{ClientPolicy, Identity, Limits, ServerTls, TlsError, serve},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::runtime::metrics::Metrics;

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be used.
    #[error("{0} cannot be listened on")]
    Listen(SocketAddr, #[source] std::io::Error),
    /// TLS refused its configuration.
    #[error("TLS cannot be set up")]
    Tls(#[source] TlsError),
}

/// Few ask for metrics and health.
const CONNECTIONS: usize = 64;

/// Starts the server. Handshakes succeed from the moment `identity` has a certificate.
pub async fn start(
    listen: SocketAddr,
    ops: Ops,
    metrics: Metrics,
    identity: &Identity,
    config: ConfigHandle,
    stop: CancellationToken,
) -> Result<(), ServerError> {
    let router = ops.router().route("/leader", get(move || std::future::ready(leader(&metrics))));
    let tls =
        ServerTls::following(identity, ClientPolicy::Unjudged, &["http/1.1"], config).map_err(ServerError::Tls)?;
    let listener = TcpListener::bind(listen).await.map_err(|error| ServerError::Listen(listen, error))?;
    let limits = Limits { connections: CONNECTIONS, ..Limits::default() };
    tokio::spawn(serve(listener, tls, router, limits, stop));
    Ok(())
}

fn leader(metrics: &Metrics) -> Json<Value> {
    Json(json!({"apiserver": {"leader": metrics.is_leading().to_string()}}))
}
