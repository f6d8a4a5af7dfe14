//! The server for metrics and health.

use std::net::SocketAddr;

use axum::{Json, routing::get};
use daemon::{
    CancellationToken,
    config::ConfigHandle,
    ops::Ops,
    tasks::Spawner,
    tls::{Callers, ClientPolicy, Identity, Limits, ProbeAddresses, ServerTls, TlsError, listen, serve},
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
    config: ConfigHandle,
    stop: CancellationToken,
    tasks: &Spawner,
) -> Result<(), ServerError> {
    let router = ops.router().route("/leader", get(move || std::future::ready(leader(&metrics))));
    let tls =
        ServerTls::following(identity, ClientPolicy::Unjudged, &["http/1.1"], config).map_err(ServerError::Tls)?;
    let listener = listen(address).map_err(|error| ServerError::Listen(address, error))?;
    let callers = Callers { probes: ProbeAddresses::of_this_pod(), ..Callers::default() };
    tasks.spawn("server", serve(listener, tls, router, Limits::default(), callers, stop));
    Ok(())
}

fn leader(metrics: &Metrics) -> Json<Value> {
    Json(json!({"apiserver": {"leader": metrics.is_leading().to_string()}}))
}
