//! virt-handler: the agent of one node.
//!
//! It drives the launchers of its node's machines and records what they do ([`machine`], [`launcher`]), sets up the
//! network of their pods ([`network`]), offers the node's devices to kubelet ([`device_plugin`], [`host_devices`]),
//! describes the node in labels ([`heartbeat`], [`labels`], [`capabilities`]) and carries consoles and lifecycle requests
//! ([`server`]), and connections to ports of guests, which in turn ask it whom to trust ([`vsock`]). It is ready when
//! machines can start ([`readiness`]).
//!
//! Every byte, path and socket of a pod or guest is hostile: all access to files goes through [`safe_dir`].

pub mod capabilities;
pub mod certificate;
pub mod device_access;
pub mod device_plugin;
pub mod domain_metrics;
pub mod heartbeat;
pub mod host_devices;
pub mod labels;
pub mod launcher;
pub mod machine;
pub mod metrics;
pub mod network;
pub mod pod_calls;
pub mod readiness;
pub mod safe_dir;
pub mod server;
pub mod vsock;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use process::{
    CancellationToken,
    config::ConfigHandle,
    logging::Verbosity,
    ops::{Ops, Readiness},
    shares::Shares,
    tls::{Callers, ClientPolicy, Identity, Limits, ProbeAddresses, Roots, ServerTls, TlsError},
};
use tokio::{net::TcpListener, sync::watch, task::JoinSet};
use tokio_util::task::TaskTracker;

use crate::{
    domain_metrics::DomainMetrics,
    machine::{ApiRecords, Machines, NodeHost},
    metrics::Metrics,
    vsock::Guests,
};

/// The kernel's tree of devices. A container shows the node's, as far as it is not about networks.
const SYS: &str = "/sys";
/// Time for tasks and connections to end after the stop.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Bounds of the server for metrics and health: each page of metrics asks all launchers.
const METRICS: Limits = Limits { connections: 64, others: 32, share: 8, ..Limits::DEFAULT };
/// Bounds of the server for consoles and lifecycle requests. Streams that were upgraded count for themselves. Nobody without
/// a certificate of virt-api gets through the handshake, and no probe comes here.
const CONSOLES: Limits = Limits { probes: 0, handshake_proves: true, ..Limits::DEFAULT };

/// What the agent has to know to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node it runs on.
    pub node_name: String,
    /// Address on which to serve.
    pub listen: IpAddr,
    /// Namespace of the installation.
    pub namespace: String,
    /// kubelet's directory.
    pub kubelet_root: PathBuf,
    /// Directory with the capabilities that a launcher image found on this node.
    pub capabilities_dir: PathBuf,
    /// The node's `/dev`.
    pub device_dir: PathBuf,
    /// Port for metrics and health.
    pub metrics_port: u16,
    /// Port for consoles and lifecycle requests.
    pub console_port: u16,
    /// Devices of each kind that kubelet may hand out.
    pub max_devices: u32,
}

/// Why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No client for the API server.
    #[error("no connection to the API server is possible")]
    Client(#[from] process::client::ClientError),
    /// kubelet's directory cannot be used.
    #[error("kubelet's directory cannot be used")]
    Kubelet(#[from] safe_dir::Error),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up")]
    Tls(#[from] TlsError),
    /// Metrics cannot be registered.
    #[error("metrics cannot be registered")]
    Metrics(#[from] prometheus::Error),
    /// A port cannot be used.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
}

/// The runtime of the process: the work is waiting, so a few threads do.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).max_blocking_threads(8).enable_all().build()
}

/// Runs the agent until the process is asked to stop.
pub async fn run(options: Options, verbosity: Verbosity) -> Result<(), Error> {
    let client = process::client::connect().await?;
    let metrics = Metrics::new()?;
    let stop = process::signals::stop_token();
    let node = options.node_name.as_str();
    let config = process::config::follow(client.clone(), &options.namespace);
    let roots = Roots::follow(client.clone(), &options.namespace, api::tls::CA_CONFIG_MAP, api::tls::CA_BUNDLE_KEY);
    let at_once = std::future::ready(());
    let identity = certificate::follow(client.clone(), node, certificate::Role::Agent, at_once, stop.clone());
    let mut gates = config.clone();
    let with_vsock = async move { vsock::service::wanted(&mut gates, true).await };
    let to_guests = certificate::follow(client.clone(), node, certificate::Role::GuestClient, with_vsock, stop.clone());
    let readiness = Readiness::new();
    readiness.set("certificate", false);
    readiness.set("machines", false);
    readiness.set(readiness::GATE, false);

    let host = NodeHost::new(
        node.to_owned(),
        options.listen,
        &options.kubelet_root,
        &options.capabilities_dir,
        &options.device_dir,
        config.clone(),
    )?;
    let records = ApiRecords::new(client.clone(), node, metrics.writes.clone(), metrics.events_dropped.clone());
    let machines = Machines::new(Arc::new(host), records, metrics.machines.clone(), stop.clone());

    let mut parts = JoinSet::new();
    parts.spawn(follow_verbosity(config.clone(), verbosity, node.to_owned()));
    let streams = TaskTracker::new();
    let guests = Guests::new(to_guests);
    serve(
        &options, &client, &config, &metrics, &readiness, &machines, &identity, &roots, guests, &streams, &stop,
        &mut parts,
    )?;
    parts.spawn(vsock::service::run(options.device_dir.clone(), config.clone(), roots, stop.clone()));
    let listed = {
        let (readiness, ready) = (readiness.clone(), metrics.ready.clone());
        move || {
            readiness.set("machines", true);
            ready.set(1);
        }
    };
    parts.spawn(machine::follow(client.clone(), machines.clone(), listed, stop.clone()));
    let (offered, offers) = watch::channel(device_plugin::Offers::new());
    let plugin = device_plugin::Config {
        plugins_dir: options.kubelet_root.join("device-plugins"),
        dev_dir: options.device_dir.clone(),
        sys_dir: SYS.into(),
        max_devices: options.max_devices,
    };
    parts.spawn(device_plugin::run(plugin, config.clone(), offered, stop.clone()));
    let shown = readiness::follow(client.clone(), node.to_owned(), offers.clone(), readiness.clone(), stop.clone());
    parts.spawn(shown);
    let beat = heartbeat::Config {
        node: node.to_owned(),
        labeller_dir: options.capabilities_dir.clone(),
        kubelet_dir: options.kubelet_root.clone(),
    };
    parts.spawn(heartbeat::run(beat, client, config, offers, stop.clone()));

    stop.cancelled().await;
    metrics.ready.set(0);
    let ended = async {
        machines.stopped().await;
        // Clients are told that their streams end.
        streams.close();
        streams.wait().await;
        // The part that follows the verbosity never ends by itself.
        while parts.len() > 1 && parts.join_next().await.is_some() {}
    };
    if tokio::time::timeout(STOP_LIMIT, ended).await.is_err() {
        tracing::warn!("not everything ended in time");
    }
    Ok(())
}

/// Starts both servers. They are bound at once, so that a port that is taken is found at once.
#[expect(clippy::too_many_arguments, reason = "wiring: each is a part made above")]
fn serve(
    options: &Options,
    client: &kube::Client,
    config: &ConfigHandle,
    metrics: &Metrics,
    readiness: &Readiness,
    machines: &Machines,
    identity: &Identity,
    roots: &Roots,
    guests: Guests,
    streams: &TaskTracker,
    stop: &CancellationToken,
    parts: &mut JoinSet<()>,
) -> Result<(), Error> {
    let domains = DomainMetrics::new(machines.clone(), options.node_name.clone());
    metrics.registry.register(Box::new(domains.clone()))?;
    let ops = Ops::new(client.clone(), config.clone(), readiness.clone(), metrics.registry.clone(), roots.clone());
    let ops = ops.with_refresh(move || {
        let domains = domains.clone();
        Box::pin(async move { domains.refresh().await })
    });
    let ops_tls = ServerTls::following(identity, ClientPolicy::Optional(roots.clone()), &["http/1.1"], config.clone())?;
    let ops_router = ops.router();
    let callers = Callers { probes: ProbeAddresses::of_this_pod(), ..Callers::default() };
    let listener = listen(SocketAddr::new(options.listen, options.metrics_port))?;
    parts.spawn(process::tls::serve(listener, ops_tls, ops_router, METRICS, callers, stop.clone()));

    let clients = ClientPolicy::only(roots.clone(), api::tls::API_CLIENT_CN);
    // Streams are upgraded from HTTP/1.1.
    let console_tls = ServerTls::following(identity, clients, &["http/1.1"], config.clone())?;
    let listener = listen(SocketAddr::new(options.listen, options.console_port))?;
    let shares = Shares::of(server::MAX_STREAMS);
    let router = server::router(machines.clone(), metrics.streams.clone(), shares, guests, streams.clone());
    parts.spawn(process::tls::serve(listener, console_tls, router, CONSOLES, Callers::default(), stop.clone()));

    let (identity, readiness) = (identity.clone(), readiness.clone());
    tokio::spawn(async move {
        identity.ready().await;
        readiness.set("certificate", true);
    });
    Ok(())
}

fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    process::tls::listen(address).map_err(|source| Error::Listen { address, source })
}

async fn follow_verbosity(mut config: ConfigHandle, verbosity: Verbosity, node: String) {
    loop {
        config.changed().await;
        let wanted = config.current().verbosity(api::constants::component::VIRT_HANDLER, Some(&node));
        verbosity.set(u32::try_from(wanted).unwrap_or(u32::MAX));
    }
}
