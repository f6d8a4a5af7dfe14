//! virt-api: the aggregated API `subresources.kubevirt.io` and the admission webhooks.
//!
//! ```text
//! kube-apiserver ──TLS──▶ serve ─▶ router ─┬▶ webhooks ─▶ crate admission
//!                                          ├▶ /metrics, /readyz
//!                                          └▶ subresources ─▶ discovery, openapi        (open to everybody)
//!                                                          └▶ authentication ▶ authorization ▶ path
//!                                                               ├▶ lifecycle, evacuation ─▶ patches of VM and VMI
//!                                                               ├▶ instance ─▶ handler ─▶ virt-handler
//!                                                               ├▶ websocket, stream ◀──▶ virt-handler
//!                                                               └▶ websocket, tunnel ◀──▶ port of a guest; presence
//! ```
//!
//! Nothing is cached but access reviews, for seconds, and presets, which are followed; other objects are read from the
//! API server when they are needed. Watched are machines while ports of them are forwarded.

use std::{net::Ipv4Addr, net::Ipv6Addr, sync::Arc, time::Duration};

use api::constants::component;
use axum::Router;
use process::{
    CancellationToken, client,
    config::{self, ConfigHandle},
    logging::Verbosity,
    ops::{Ops, Readiness},
    shares::Shares,
    signals,
    tls::{
        Callers, ClientPolicy, Identity, Limits, ProbeAddresses, Roots, ServerTls, TrustedAddresses, client_config,
        serve,
    },
};
use prometheus::{IntGauge, Registry};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

pub mod address;
pub mod authentication;
pub mod authorization;
pub mod bodies;
pub mod dial;
pub mod discovery;
pub mod endpoint;
pub mod error;
pub mod evacuation;
pub mod expansion;
pub mod frames;
pub mod front_proxy;
pub mod graph;
pub mod guestfs;
pub mod handler;
pub mod installation;
pub mod instance;
pub mod lifecycle;
pub mod memory_dump;
pub mod metrics;
pub mod negotiation;
pub mod neighbours;
pub mod openapi;
pub mod options;
pub mod path;
pub mod port_forward;
pub mod presence;
pub mod presets;
pub mod profiles;
pub mod sev;
pub mod stream;
pub mod subresources;
pub mod tunnel;
pub mod volumes;
pub mod webhook_path;
pub mod webhooks;
pub mod websocket;

use crate::{
    authorization::Authorizer,
    bodies::Bodies,
    front_proxy::FrontProxy,
    guestfs::GuestFs,
    handler::HandlerClient,
    metrics::Metrics,
    presence::Presence,
    presets::Presets,
    profiles::Components,
    subresources::{MAX_STREAMS, Server},
    webhook_path::Segments,
};

/// How long requests are still accepted after the stop, while endpoints are taken out of Services.
const LINGER: Duration = Duration::from_secs(3);
/// How long a connection may wait for its next request. kube-apiserver gives an idle one up after 90 seconds: whoever does
/// so first must be the side that sends, or a request meets a connection that has just been closed.
const IDLE: Duration = Duration::from_secs(120);
/// Most lines in the head of a request of the front proxy: kube-apiserver sends a line for each group of the user and for
/// each further value, besides a few dozen of its own and of the client.
pub const MAX_HEADER_LINES: usize = 2 * authentication::MAX_VALUES + 128;
/// Longest wait for the first list of presets.
const PRESETS_WAIT: Duration = Duration::from_secs(10);
/// Most connections at a time: each stream has one, the rest are kube-apiserver's, which opens one for each review and
/// subresource request that it has under way, since it speaks HTTP/1.1 with webhooks.
pub const MAX_CONNECTIONS: usize = 2 * MAX_STREAMS + 1024;
/// Most of them of all addresses that did not prove to be an API server, and of one of these. An API server proves itself by
/// its first request.
const MAX_OTHER_CONNECTIONS: usize = MAX_CONNECTIONS / 4;
const MAX_SHARE: usize = MAX_OTHER_CONNECTIONS / 2;
/// Most of them of these addresses from which no request has come yet.
const MAX_SILENT_CONNECTIONS: usize = 128;

/// Why the process cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No client for the API server.
    #[error("no client for the API server")]
    Client(#[from] client::ClientError),
    /// The port is taken or not allowed.
    #[error("port {port} cannot be listened on")]
    Listen {
        /// The port.
        port: u16,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The TLS configuration of the server, or towards node agents.
    #[error("TLS")]
    Tls(#[from] process::tls::TlsError),
    /// A metric was registered twice.
    #[error("metrics")]
    Metrics(#[from] prometheus::Error),
}

/// Serves until the process is asked to stop.
///
/// The log's verbosity follows the cluster configuration.
pub async fn run(port: u16, verbosity: Verbosity) -> Result<(), StartError> {
    let stop = signals::stop_token();
    allow_open_files();
    let namespace = client::install_namespace();
    let client = client::connect().await?;
    let config = config::follow(client.clone(), &namespace);
    follow_verbosity(config.clone(), verbosity);
    let identity = Identity::follow(client.clone(), &namespace, api::tls::API_SERVER_SECRET);
    let client_identity = Identity::follow(client.clone(), &namespace, api::tls::API_CLIENT_SECRET);
    let roots = Roots::follow(client.clone(), &namespace, api::tls::CA_CONFIG_MAP, api::tls::CA_BUNDLE_KEY);
    let front_proxy = FrontProxy::follow(client.clone());
    let presets = Presets::follow(client.clone());
    let segments = Segments::follow(client.clone(), &namespace);
    let trusted = TrustedAddresses::default();

    let registry = Registry::new();
    let metrics = Metrics::register(&registry)?;
    let readiness = Readiness::new();
    let ready = metrics.ready.clone();
    gate(&readiness, &ready, "certificate", identity.clone(), |identity| async move { identity.ready().await });
    gate(&readiness, &ready, "client certificate", client_identity.clone(), |identity| async move {
        identity.ready().await
    });
    gate(&readiness, &ready, "CA bundle", roots.clone(), |roots| async move { roots.ready().await });
    gate(&readiness, &ready, "front proxy", front_proxy.clone(), |proxy| async move { proxy.ready().await });
    gate(&readiness, &ready, "webhook path", segments.clone(), |segments| async move { segments.ready().await });
    gate(&readiness, &ready, "configuration", config.clone(), |mut config| async move { config.read_once().await });
    gate(&readiness, &ready, "presets", presets.clone(), |mut presets| async move {
        // Where there is no list, each machine's are read; that is slow, and no reason to refuse machines.
        tokio::time::timeout(PRESETS_WAIT, presets.ready()).await.ok();
    });

    let neighbour_tls = client_config(&roots, Some(&client_identity), &["http/1.1"])?;
    let ops = Ops::new(client.clone(), config.clone(), readiness.clone(), registry, roots.clone());
    let streams = TaskTracker::new();
    let server = Arc::new(Server {
        front_proxy,
        trusted: trusted.clone(),
        authorizer: Authorizer::new(client.clone()),
        handler: HandlerClient::new(client.clone(), &namespace, neighbour_tls.clone()),
        components: Components::new(client.clone(), &namespace, neighbour_tls),
        client: client.clone(),
        namespace: namespace.clone(),
        config: config.clone(),
        ops: ops.clone(),
        metrics: metrics.clone(),
        guestfs: GuestFs::default(),
        presence: Presence::default(),
        bodies: Bodies::default(),
        shares: Shares::of(MAX_STREAMS),
        streams: streams.clone(),
        stop: stop.clone(),
    });
    let tls_demands = config.clone();
    let router = Router::new()
        .fallback(subresources::serve)
        .with_state(server)
        .merge(ops.router())
        .merge(webhooks::router(client, config, presets, &namespace, metrics, segments, trusted.clone()));

    let listener = listen(port).map_err(|source| StartError::Listen { port, source })?;
    // Streams are opened by HTTP/1.1's upgrade.
    let tls = ServerTls::following(&identity, ClientPolicy::Unjudged, &["http/1.1"], tls_demands)?;
    let closed = CancellationToken::new();
    let close = closed.clone();
    tokio::spawn(async move {
        stop.cancelled().await;
        readiness.set("not stopping", false);
        ready.set(0);
        tokio::time::sleep(LINGER).await;
        close.cancel();
    });
    tracing::info!(port, namespace, "serving");
    let limits = Limits {
        connections: MAX_CONNECTIONS,
        others: MAX_OTHER_CONNECTIONS,
        share: MAX_SHARE,
        silent: MAX_SILENT_CONNECTIONS,
        idle: IDLE,
        header_lines: MAX_HEADER_LINES,
        drain: Duration::from_secs(5),
        ..Limits::default()
    };
    let callers = Callers { trusted, probes: ProbeAddresses::of_this_pod() };
    serve(listener, tls, router, limits, callers, closed).await;
    // Each has been told to stop; closing takes seconds at most.
    streams.close();
    streams.wait().await;
    tracing::info!("stopped");
    Ok(())
}

/// Lets the process have as many files open as it is allowed to ask for. What it starts with is often 1,024, for
/// programs that are older than this one; [`MAX_CONNECTIONS`] needs more.
pub fn allow_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the number of open files stays limited");
    }
}

fn follow_verbosity(mut config: ConfigHandle, verbosity: Verbosity) {
    tokio::spawn(async move {
        loop {
            config.changed().await;
            let level = config.current().verbosity(component::VIRT_API, None);
            verbosity.set(u32::try_from(level).unwrap_or(u32::MAX));
        }
    });
}

/// Keeps the process unready until `ready` has come true for `subject`, and the gauge that tells of it current.
fn gate<T, F, R>(readiness: &Readiness, gauge: &IntGauge, name: &'static str, subject: T, ready: F)
where
    T: Send + 'static,
    F: FnOnce(T) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    readiness.set(name, false);
    let (readiness, gauge) = (readiness.clone(), gauge.clone());
    tokio::spawn(async move {
        ready(subject).await;
        readiness.set(name, true);
        // Never back to 0 here: another gate may have opened, and told, since this one looked.
        if readiness.missing().is_empty() {
            gauge.set(1);
        }
    });
}

/// Listens on all addresses of both families, or of IPv4 where a host has no other.
fn listen(port: u16) -> std::io::Result<TcpListener> {
    match process::tls::listen((Ipv6Addr::UNSPECIFIED, port).into()) {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error),
        Err(_) => process::tls::listen((Ipv4Addr::UNSPECIFIED, port).into()),
    }
}
