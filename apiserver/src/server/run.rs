//! Starts virt-api: follows configuration and certificates, and serves until the process is stopped.

use std::{sync::Arc, time::Duration};

use api::constants::component;
use axum::Router;
use daemon::{
    CancellationToken, client,
    config::{self, ConfigHandle},
    logging::Verbosity,
    ops::{Ops, Readiness},
    quota::StreamQuota,
    signals,
    tasks::{Spawner, Tasks},
    telemetry::Traces,
    tls::{
        Callers, ClientPolicy, Identity, Limits, ProbeAddresses, Roots, ServerTls, TrustedAddresses, client_config,
        serve,
    },
};
use prometheus::{IntGauge, Registry};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio_util::task::TaskTracker;

use super::Server;
use crate::{
    auth::{authentication, authorization::Authorizer, front_proxy::FrontProxy},
    clients::{ComponentClient, handler::HandlerClient, objects::Objects},
    discovery::{cluster_profiler::ClusterProfiler, guestfs::GuestFs},
    metrics::Metrics,
    requests::body::BodyReader,
    streaming::vmi_watch::VmiWatches,
    subresources::{
        common::call::{Context, MAX_STREAMS},
        registry,
    },
    webhooks::{self, Presets, Segments},
};

/// Time for which requests are accepted after the stop, while endpoints are removed from Services.
const LINGER: Duration = Duration::from_secs(3);
/// Longest time of a connection without a request. kube-apiserver closes an idle one after 90 seconds. The client has to close
/// first, or a request meets a connection that has just been closed.
const IDLE: Duration = Duration::from_secs(120);
/// Most header lines of a request of the front proxy: kube-apiserver sends one for each group and further value of the user,
/// and a few dozen of its own and of the client.
pub const MAX_HEADER_LINES: usize = 2 * authentication::MAX_VALUES + 128;
/// Longest wait for the first list of presets.
const PRESETS_WAIT: Duration = Duration::from_secs(10);
/// Most connections. Each stream has one; the others are kube-apiserver's, one for each concurrent review and subresource
/// request, since it speaks HTTP/1.1 with webhooks.
pub const MAX_CONNECTIONS: usize = 2 * MAX_STREAMS + 1024;
/// Most connections of all addresses that did not prove to be an API server, and of one of them. An API server proves itself
/// by its first request.
const MAX_OTHER_CONNECTIONS: usize = MAX_CONNECTIONS / 4;
const MAX_SHARE: usize = MAX_OTHER_CONNECTIONS / 2;
/// Most connections of these addresses before their first request.
const MAX_SILENT_CONNECTIONS: usize = 128;

/// Errors of the process.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No client for the API server.
    #[error("no client for the API server")]
    Client(#[from] client::ClientError),
    /// The port is in use or not allowed.
    #[error("cannot listen on port {port}")]
    Listen {
        /// The port.
        port: u16,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The TLS configuration of the server, or of connections to components.
    #[error("TLS")]
    Tls(#[from] daemon::tls::TlsError),
    /// A task that the server relies on ended.
    #[error("a task ended")]
    Task(#[from] daemon::tasks::TaskEnded),
    /// A metric was registered twice.
    #[error("metrics")]
    Metrics(#[from] prometheus::Error),
}

/// Serves until the process is stopped. The log's verbosity follows the cluster configuration.
pub async fn run(port: u16, verbosity: Verbosity) -> Result<(), StartError> {
    let stop = signals::stop_token();
    let mut tasks = Tasks::stopped_by(stop.clone());
    let spawner = tasks.spawner();
    allow_open_files();
    let namespace = client::install_namespace();
    let client = client::connect().await?;
    let config = config::follow(client.clone(), &namespace, &spawner);
    follow_settings(config.clone(), verbosity, &spawner);
    let identity = Identity::follow(client.clone(), &namespace, api::tls::API_SERVER_SECRET, &spawner);
    let client_identity = Identity::follow(client.clone(), &namespace, api::tls::API_CLIENT_SECRET, &spawner);
    let roots = Roots::follow(client.clone(), &namespace, api::tls::CA_CONFIG_MAP, api::tls::CA_BUNDLE_KEY, &spawner);
    let front_proxy = FrontProxy::follow(client.clone(), &spawner);
    let presets = Presets::follow(client.clone(), &spawner);
    let segments = Segments::follow(client.clone(), &namespace, &spawner);
    let trusted = TrustedAddresses::default();

    let registry = Registry::new();
    let metrics = Metrics::register(&registry, &registry::stream_kinds())?;
    let traces = Traces::start(component::VIRT_API, &registry, &spawner)?;
    let readiness = Readiness::new();
    let gates = Gates { readiness: readiness.clone(), gauge: metrics.ready.clone(), tasks: spawner.clone() };
    gates.add("certificate", identity.clone(), |identity| async move { identity.ready().await });
    gates.add("client certificate", client_identity.clone(), |identity| async move { identity.ready().await });
    gates.add("CA bundle", roots.clone(), |roots| async move { roots.ready().await });
    gates.add("front proxy", front_proxy.clone(), |proxy| async move { proxy.ready().await });
    gates.add("webhook path", segments.clone(), |segments| async move { segments.ready().await });
    gates.add("configuration", config.clone(), |mut config| async move { config.read_once().await });
    gates.add("presets", presets.clone(), |mut presets| async move {
        // Without a list the presets are read for each VMI, which is slow, but no reason to refuse VMIs.
        tokio::time::timeout(PRESETS_WAIT, presets.ready()).await.ok();
    });

    let component_tls = client_config(&roots, Some(&client_identity), &["http/1.1"])?;
    let components = Arc::new(ComponentClient::new(component_tls));
    let ops = Ops::new(client.clone(), config.clone(), readiness.clone(), registry, roots.clone());
    let streams = TaskTracker::new();
    let server = Arc::new(Server {
        front_proxy,
        trusted: trusted.clone(),
        authorizer: Authorizer::new(client.clone()),
        profiler: ClusterProfiler::new(client.clone(), &namespace, components.clone()),
        client: client.clone(),
        namespace: namespace.clone(),
        ops: ops.clone(),
        guestfs: GuestFs::default(),
        context: Context {
            objects: Objects { client: client.clone() },
            config: config.clone(),
            handler: HandlerClient::new(client.clone(), &namespace, components),
            metrics: metrics.clone(),
            bodies: BodyReader::default(),
            stream_quota: StreamQuota::new(MAX_STREAMS),
            streams: streams.clone(),
            vmi_watches: VmiWatches::default(),
            stop: stop.clone(),
        },
    });
    let router = Router::new().fallback(super::serve).with_state(server).merge(ops.router()).merge(webhooks::router(
        client,
        config.clone(),
        presets,
        &namespace,
        (metrics, traces),
        segments,
        trusted.clone(),
    ));

    let listener = daemon::tls::listen_everywhere(port).map_err(|source| StartError::Listen { port, source })?;
    // Streams use the upgrade of HTTP/1.1.
    let tls = ServerTls::following(&identity, ClientPolicy::Unjudged, &["http/1.1"], config)?;
    let closed = CancellationToken::new();
    spawner.spawn_once("stop", gates.close(stop, closed.clone()));
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
    tokio::select! {
        () = serve(listener, tls, router, limits, callers, closed) => {}
        ended = tasks.ended() => return Err(ended.into()),
    }
    // All streams are stopped; their closing handshakes take some seconds at most.
    streams.close();
    streams.wait().await;
    tracing::info!("stopped");
    Ok(())
}

/// Raises the limit of open files to the permitted maximum. The default is often 1,024; [`MAX_CONNECTIONS`] needs more.
pub fn allow_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the number of open files stays limited");
    }
}

/// Follows the settings of the process itself: verbosity of the log, limit of requests.
fn follow_settings(mut config: ConfigHandle, verbosity: Verbosity, tasks: &Spawner) {
    tasks.spawn("settings", async move {
        loop {
            config.changed().await;
            let current = config.current();
            client::limit_requests(current.request_limit(component::VIRT_API));
            let level = current.verbosity(component::VIRT_API, None);
            verbosity.set(u32::try_from(level).unwrap_or(u32::MAX));
        }
    });
}

/// Conditions of readiness, and their gauge.
struct Gates {
    readiness: Readiness,
    gauge: IntGauge,
    tasks: Spawner,
}

impl Gates {
    /// Keeps the process unready until `ready` has completed.
    fn add<T, F, R>(&self, name: &'static str, subject: T, ready: F)
    where
        T: Send + 'static,
        F: FnOnce(T) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        self.readiness.set(name, false);
        let (readiness, gauge) = (self.readiness.clone(), self.gauge.clone());
        self.tasks.spawn_once(name, async move {
            ready(subject).await;
            readiness.set(name, true);
            // Never reset to 0 here: another condition may have completed since the check.
            if readiness.missing().is_empty() {
                gauge.set(1);
            }
        });
    }

    /// Ends readiness at the stop, and serving some time later.
    async fn close(self, stop: CancellationToken, closed: CancellationToken) {
        stop.cancelled().await;
        self.readiness.set("not stopping", false);
        self.gauge.set(0);
        tokio::time::sleep(LINGER).await;
        closed.cancel();
    }
}
