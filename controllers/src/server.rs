//! The server for metrics and health.

use std::net::SocketAddr;

use axum::{Json, Router, routing::get};
use daemon::{
    CancellationToken,
    ops::Ops,
    tasks::Spawner,
    tls::{ClientPolicy, Identity, Limits, TlsError, listen},
};
use serde_json::{Value, json};

use crate::runtime::Metrics;

/// The error of a server that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be used.
    #[error("cannot listen on {0}")]
    Listen(SocketAddr, #[source] std::io::Error),
    /// TLS refused its configuration.
    #[error("TLS cannot be set up")]
    Tls(#[source] TlsError),
}

/// Starts the server. Handshakes succeed from the moment `identity` has a certificate.
pub(crate) fn start(
    address: SocketAddr,
    ops: Ops,
    metrics: Metrics,
    identity: &Identity,
    stop: CancellationToken,
    tasks: &Spawner,
) -> Result<(), ServerError> {
    let more = Router::new().route("/leader", get(move || std::future::ready(leader(&metrics))));
    let listener = listen(address).map_err(|error| ServerError::Listen(address, error))?;
    let server = ops
        .serve(listener, more, identity, ClientPolicy::Unjudged, Limits::default(), stop)
        .map_err(ServerError::Tls)?;
    tasks.spawn("server", server);
    Ok(())
}

fn leader(metrics: &Metrics) -> Json<Value> {
    Json(json!({"apiserver": {"leader": metrics.is_leading().to_string()}}))
}
