//! The server for metrics and health.

use std::net::SocketAddr;

use axum::{Json, routing::get};
use process::{
    CancellationToken,
    config::ConfigHandle,
    ops::Ops,
    tls::{Callers, ClientPolicy, Identity, Limits, ProbeAddresses, ServerTls, TlsError, listen, serve},
};
use serde_json::{Value, json};

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

/// Starts the server. Handshakes succeed from the moment `identity` has a certificate.
pub fn start(
    address: SocketAddr,
    ops: Ops,
    metrics: Metrics,
    identity: &Identity,
    config: ConfigHandle,
    stop: CancellationToken,
) -> Result<(), ServerError> {
    let router = ops.router().route("/leader", get(move || std::future::ready(leader(&metrics))));
    let tls =
        ServerTls::following(identity, ClientPolicy::Unjudged, &["http/1.1"], config).map_err(ServerError::Tls)?;
    let listener = listen(address).map_err(|error| ServerError::Listen(address, error))?;
    let callers = Callers { probes: ProbeAddresses::of_this_pod(), ..Callers::default() };
    tokio::spawn(serve(listener, tls, router, Limits::default(), callers, stop));
    Ok(())
}

fn leader(metrics: &Metrics) -> Json<Value> {
    Json(json!({"apiserver": {"leader": metrics.is_leading().to_string()}}))
}
