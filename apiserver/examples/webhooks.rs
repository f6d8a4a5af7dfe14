//! The admission webhooks without a cluster, for their development.
//!
//! Serves on a local port with a generated certificate and the default configuration. Rules that read the cluster find no
//! objects. The printed URL contains the path segment that webhooks require; here it is a constant.
//!
//! ```console
//! $ cargo run -p ferrovirt-apiserver --example webhooks &
//! https://localhost:9443/admission/0000000000000000000000000000000000000000000000000000000000000000
//! $ export WEBHOOK_URL=https://localhost:9443/admission/0000000000000000000000000000000000000000000000000000000000000000
//! $ cargo test -p ferrovirt-e2e-tests --test conformance
//! $ cargo run --release -p ferrovirt-e2e-bench -- --reviews
//! ```

use std::{future::IntoFuture, net::Ipv4Addr};

use anyhow::Context;
use api::webhook_path::{SEGMENT_BYTES, join, segment};
use apiserver::{
    MAX_CONNECTIONS, allow_open_files,
    metrics::Metrics,
    webhooks::{self, Presets, Segments},
};
use axum::{Json, Router};
use clap::Parser;
use daemon::{
    CancellationToken,
    config::ConfigHandle,
    tls::{Callers, ClientPolicy, Identity, Limits, install_provider, listen, serve, server_config},
};
use http::StatusCode;
use prometheus::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// Serves the admission webhooks without a cluster
#[derive(Parser)]
struct Arguments {
    /// Port of the HTTPS server
    #[arg(long, default_value_t = 9443)]
    port: u16,
}

/// Time after which the proof of this host's address is renewed.
const RENEWAL: std::time::Duration = std::time::Duration::from_secs(60);

/// Answers as the API server of a cluster without objects.
async fn nothing() -> (StatusCode, Json<Value>) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "NotFound", "code": 404,
        "message": "there are no objects",
    });
    (StatusCode::NOT_FOUND, Json(status))
}

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    install_provider();
    allow_open_files();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let identity = Identity::empty();
    identity.set_pem(made.cert.pem().as_bytes(), made.signing_key.serialize_pem().as_bytes())?;
    let empty = TcpListener::bind("127.0.0.1:0").await.context("cannot listen for lookups")?;
    let client = kube::Client::try_from(kube::Config::new(format!("http://{}", empty.local_addr()?).parse()?))?;
    tokio::spawn(axum::serve(empty, Router::new().fallback(nothing)).into_future());
    let metrics = Metrics::register(&Registry::new(), &[])?;
    let config = ConfigHandle::fixed(api::config::ClusterConfig::default());
    // This host acts as the API server.
    let callers = Callers::default();
    let trusted = callers.trusted.clone();
    tokio::spawn(async move {
        loop {
            trusted.record(Ipv4Addr::LOCALHOST.into());
            tokio::time::sleep(RENEWAL).await;
        }
    });
    let segment = segment([0; SEGMENT_BYTES]);
    let (segments, trusted) = (Segments::fixed(&segment), callers.trusted.clone());
    let own = (metrics, daemon::telemetry::Traces::default());
    let router = webhooks::router(client, config, Presets::unknown(), "kubevirt", own, segments, trusted);
    let listener = listen((Ipv4Addr::LOCALHOST, arguments.port).into())
        .with_context(|| format!("cannot listen on port {}", arguments.port))?;
    println!("https://localhost:{}{}", arguments.port, join(&segment, ""));
    let limits = Limits { connections: MAX_CONNECTIONS, ..Limits::default() };
    let tls = server_config(&identity, ClientPolicy::Unjudged, &["http/1.1"])?;
    serve(listener, tls, router, limits, callers, CancellationToken::new()).await;
    Ok(())
}
