//! The process: starts all tasks, and stops them.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use api::constants::component;
use daemon::{
    CancellationToken,
    config::ConfigHandle,
    logging::Verbosity,
    ops::{Ops, Readiness},
    quota::StreamQuota,
    tasks::{Spawner, Tasks},
    telemetry::Traces,
    tls::{Callers, ClientPolicy, Identity, Limits, Roots, ServerTls, TlsError, listen_at_loopback},
};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::task::TaskTracker;

use crate::{
    certificate,
    devices::{plugin, post_copy},
    metrics::{Metrics, domains::DomainMetrics},
    migration::{self, Channels, Threads},
    node_object::{heartbeat, readiness, seccomp},
    safe_dir, server,
    vmi::{self, ApiRecords, NodeHost, Vmis},
    vsock::{self, Guests},
};

/// The kernel's device tree. A container sees the node's, except for network devices.
const SYS: &str = "/sys";
/// The kernel's settings of same-page merging.
const KSM: &str = "/sys/kernel/mm/ksm";
/// Limit for the end of tasks and connections after the stop.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Limits of the server for metrics and health: each scrape calls all launchers.
const METRICS: Limits = Limits { connections: 64, others: 32, share: 8, ..Limits::DEFAULT };
/// Limits of the server for consoles and lifecycle requests. Upgraded streams have their own quota. The handshake requires
/// virt-api's certificate, and no probe uses this port.
const CONSOLES: Limits = Limits { probes: 0, handshake_proves: true, ..Limits::DEFAULT };

/// Options of virt-handler.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the node.
    pub node_name: String,
    /// Address of the console server, beside the loopback address.
    pub listen: IpAddr,
    /// Namespace of the installation.
    pub namespace: String,
    /// kubelet's directory.
    pub kubelet_root: PathBuf,
    /// Directory with the capabilities of QEMU on this node.
    pub capabilities_dir: PathBuf,
    /// The node's `/dev`.
    pub device_dir: PathBuf,
    /// Port for metrics and health.
    pub metrics_port: u16,
    /// Port for consoles and lifecycle requests.
    pub console_port: u16,
    /// Port for migrations from other nodes.
    pub migration_port: u16,
    /// Devices of each kind that kubelet may allocate.
    pub max_devices: u32,
    /// Longest wait for migrations in progress before the stop.
    pub graceful_shutdown: Duration,
}

/// Reason why virt-handler cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No client for the API server.
    #[error("cannot connect to the API server")]
    Client(#[from] daemon::client::ClientError),
    /// kubelet's directory cannot be used.
    #[error("cannot use kubelet's directory")]
    Kubelet(#[from] safe_dir::Error),
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[from] TlsError),
    /// Metrics cannot be registered.
    #[error("cannot register metrics")]
    Metrics(#[from] prometheus::Error),
    /// Threads cannot be started.
    #[error("cannot start threads")]
    Threads(#[source] std::io::Error),
    /// A task that lives as long as the process ended.
    #[error("a task ended")]
    Task(#[from] daemon::tasks::TaskEnded),
    /// A port cannot be used.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error.
        source: std::io::Error,
    },
}

/// Creates the runtime of the process. The tasks mostly wait, so that few threads are enough.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).max_blocking_threads(8).enable_all().build()
}

/// Runs virt-handler until the process is asked to stop, or until a task of the process ends. Migrations in progress end before the
/// stop, and all VMIs of the node are served meanwhile.
pub async fn run(options: Options, verbosity: Verbosity) -> Result<(), Error> {
    let client = daemon::client::connect().await?;
    let metrics = Metrics::new()?;
    let (asked, stop) = (daemon::signals::stop_token(), CancellationToken::new());
    let mut tasks = Tasks::stopped_by(stop.clone());
    let spawner = tasks.spawner();
    let config = daemon::config::follow(client.clone(), &options.namespace, &spawner);
    let roots =
        Roots::follow(client.clone(), &options.namespace, api::tls::CA_CONFIG_MAP, api::tls::CA_BUNDLE_KEY, &spawner);
    let readiness = Readiness::new();
    for part in ["certificate", "vmis", readiness::GATE] {
        readiness.set(part, false);
    }
    let (threads, ending) = (Threads::start().map_err(Error::Threads)?, TaskTracker::new());
    let process = Process { options, client, metrics, stop, spawner, config, roots, readiness, ending, threads };
    let Started { vmis, streams, channels } = process.start(verbosity)?;

    let drained = async {
        asked.cancelled().await;
        process.metrics.ready.set(0);
        process.readiness.hold_back("stop", "virt-handler stops");
        drain(&channels, process.options.graceful_shutdown).await;
    };
    tokio::select! {
        () = drained => process.stop.cancel(),
        ended = tasks.ended() => return Err(ended.into()),
    }
    let ended = async {
        vmis.stopped().await;
        // Every stream sends the reason of its end to its client.
        streams.close();
        streams.wait().await;
        process.ending.close();
        process.ending.wait().await;
    };
    if tokio::time::timeout(STOP_LIMIT, ended).await.is_err() {
        tracing::warn!(limit = ?STOP_LIMIT, "not all tasks ended in time");
    }
    Ok(())
}

/// Waits until no migration is in progress, at most for `limit`. Another signal ends the wait.
async fn drain(channels: &Channels, limit: Duration) {
    tokio::select! {
        biased;
        () = channels.drain() => {}
        () = daemon::signals::terminated() => tracing::warn!("another signal: migrations in progress are cut"),
        () = tokio::time::sleep(limit) => tracing::warn!(?limit, "migrations did not end in time, and are cut"),
    }
}

/// Parts of the process that end in an order of their own.
struct Started {
    vmis: Vmis,
    /// Open streams.
    streams: TaskTracker,
    channels: Channels,
}

/// Shared parts of the process.
struct Process {
    options: Options,
    client: kube::Client,
    metrics: Metrics,
    stop: CancellationToken,
    spawner: Spawner,
    config: ConfigHandle,
    roots: Roots,
    readiness: Readiness,
    /// Tasks that end by themselves after the stop, and are waited for.
    ending: TaskTracker,
    /// Threads of migrations.
    threads: Threads,
}

impl Process {
    /// Starts a task of the process that ends after the stop.
    fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawner.spawn(name, self.ending.track_future(task));
    }

    /// Starts all tasks.
    fn start(&self, verbosity: Verbosity) -> Result<Started, Error> {
        let Self { options, client, metrics, stop, config, .. } = self;
        let node = options.node_name.as_str();
        self.spawner.spawn("settings", follow_settings(config.clone(), verbosity, node.to_owned()));
        let identity = self.identity(certificate::Role::Handler, std::future::ready(()));
        let channels = self.migrations(&identity)?;
        let host = NodeHost::new(
            node.to_owned(),
            options.listen,
            &options.kubelet_root,
            &options.capabilities_dir,
            &options.device_dir,
            config.clone(),
        )?
        .with_channels(channels.clone());
        let (writes, dropped) = (metrics.writes.clone(), metrics.events_dropped.clone());
        let records = ApiRecords::new(client.clone(), node, writes, dropped, &self.spawner);
        let traces = Traces::start(component::VIRT_HANDLER, &metrics.registry, &self.spawner)?;
        let vmis = Vmis::new(Arc::new(host), records, metrics.vmis.clone(), stop.clone()).with_traces(traces);
        let streams = TaskTracker::new();
        self.serve(&vmis, &streams, identity)?;
        self.start_devices();
        let listed = {
            let (readiness, ready) = (self.readiness.clone(), metrics.ready.clone());
            move || {
                readiness.set("vmis", true);
                ready.set(1);
            }
        };
        self.spawn("vmis", vmi::follow(client.clone(), vmis.clone(), listed, stop.clone()));
        Ok(Started { vmis, streams, channels })
    }

    /// Starts the device plugins, and the tasks that depend on their registration.
    fn start_devices(&self) {
        let Self { options, client, metrics, stop, config, .. } = self;
        if let Err(error) = seccomp::install(&options.kubelet_root) {
            tracing::error!(%error, "cannot install the seccomp profile of launchers: pods that name it do not start here");
        }
        let (registrations, offers) = watch::channel(plugin::Offers::new());
        let plugins = plugin::Config {
            plugins_dir: options.kubelet_root.join("device-plugins"),
            dev_dir: options.device_dir.clone(),
            sys_dir: SYS.into(),
            max_devices: options.max_devices,
        };
        let (permit, post_copy) = watch::channel(false);
        self.spawner.spawn("post-copy", post_copy::follow(client.clone(), config.clone(), permit));
        self.spawn("device-plugins", plugin::run(plugins, config.clone(), post_copy, registrations, stop.clone()));
        let node = options.node_name.clone();
        let ready =
            readiness::follow(client.clone(), node.clone(), offers.clone(), self.readiness.clone(), stop.clone());
        self.spawn("device-readiness", ready);
        let heartbeat = heartbeat::Config {
            node,
            deprecated: metrics.deprecated_machine_types.clone(),
            labeller_dir: options.capabilities_dir.clone(),
            kubelet_dir: options.kubelet_root.clone(),
            ksm_dir: KSM.into(),
        };
        self.spawn("heartbeat", heartbeat::run(heartbeat, client.clone(), config.clone(), offers, stop.clone()));
    }

    /// Starts both servers and the VSOCK service. The ports are bound at once, so that a port in use is an error at once.
    fn serve(&self, vmis: &Vmis, streams: &TaskTracker, identity: Identity) -> Result<(), Error> {
        let Self { options, client, metrics, stop, config, roots, .. } = self;
        let domains = {
            let vmis = vmis.clone();
            DomainMetrics::new(move || vmis.domains(), options.node_name.clone(), &options.kubelet_root)
        };
        metrics.registry.register(Box::new(domains.clone()))?;
        let registry = metrics.registry.clone();
        let ops = Ops::new(client.clone(), config.clone(), self.readiness.clone(), registry, roots.clone());
        let ops = ops.with_refresh(move || {
            let domains = domains.clone();
            Box::pin(async move { domains.refresh().await })
        });
        // All addresses of the pod: `kubectl port-forward` connects to its loopback address.
        let listener = daemon::tls::listen_everywhere(options.metrics_port).map_err(|source| Error::Listen {
            address: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), options.metrics_port),
            source,
        })?;
        let clients = ClientPolicy::Optional(roots.clone());
        let server = ops.serve(listener, axum::Router::new(), &identity, clients, METRICS, stop.clone())?;
        self.spawn("metrics-server", server);

        let mut gates = config.clone();
        let enabled = async move { vsock::service::gate(&mut gates, true).await };
        let guests = Guests::new(self.identity(certificate::Role::GuestClient, enabled));
        let clients = ClientPolicy::only(roots.clone(), api::tls::API_CLIENT_CN);
        // Streams are upgraded from HTTP/1.1.
        let tls = ServerTls::following(&identity, clients, &["http/1.1"], config.clone())?;
        let address = SocketAddr::new(options.listen, options.console_port);
        let listeners = [Some(listen(address)?), listen_at_loopback(address)];
        let quota = StreamQuota::new(server::MAX_STREAMS);
        let router = server::router(vmis.clone(), metrics.streams.clone(), quota, guests, streams.clone());
        for listener in listeners.into_iter().flatten() {
            let (tls, router, callers) = (tls.clone(), router.clone(), Callers::default());
            self.spawn("console-server", daemon::tls::serve(listener, tls, router, CONSOLES, callers, stop.clone()));
        }
        let (device_dir, config) = (options.device_dir.clone(), config.clone());
        self.spawn("vsock-service", vsock::service::run(device_dir, config, roots.clone(), stop.clone()));

        let readiness = self.readiness.clone();
        self.spawner.spawn_once("certificate-readiness", async move {
            identity.ready().await;
            readiness.set("certificate", true);
        });
        Ok(())
    }

    /// Listens for migrations from other nodes, on threads of their own.
    fn migrations(&self, identity: &Identity) -> Result<Channels, Error> {
        let _entered = self.threads.enter();
        let address = SocketAddr::new(migration::address(self.options.listen), self.options.migration_port);
        let listener = listen(address)?;
        let endpoint = listener.local_addr().map_err(|source| Error::Listen { address, source })?;
        let (metrics, stop) = (self.metrics.migration.clone(), self.stop.clone());
        let channels = Channels::new(endpoint, identity, &self.roots, metrics, stop.clone())?;
        for listener in [Some(listener), listen_at_loopback(endpoint)].into_iter().flatten() {
            self.spawn("migration-server", migration::serve(channels.clone(), listener, stop.clone()));
        }
        let pod = self.options.listen;
        let now = move || migration::address(pod);
        self.spawn("migration-address", migration::follow_address(channels.clone(), now, stop));
        Ok(channels)
    }

    /// Keeps a certificate of virt-handler up to date. It is requested once `needed` is ready.
    fn identity(&self, role: certificate::Role, needed: impl Future<Output = ()> + Send + 'static) -> Identity {
        let identity = Identity::empty();
        let (client, node) = (self.client.clone(), self.options.node_name.clone());
        let (roots, stop) = (self.roots.clone(), self.stop.clone());
        self.spawn("certificate", certificate::follow(client, node, role, needed, roots, identity.clone(), stop));
        identity
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    daemon::tls::listen(address).map_err(|source| Error::Listen { address, source })
}

/// Follows the settings of the process itself: verbosity of the log, limit of requests.
async fn follow_settings(mut config: ConfigHandle, verbosity: Verbosity, node: String) {
    loop {
        config.changed().await;
        let current = config.current();
        daemon::client::limit_requests(current.request_limit(component::VIRT_HANDLER));
        let level = current.verbosity(component::VIRT_HANDLER, Some(&node));
        verbosity.set(u32::try_from(level).unwrap_or(u32::MAX));
    }
}
