//! Starts the parts of virt-controller and connects them.

use std::{sync::Arc, time::Duration};

use api::{
    constants::{component, controller_lease},
    tls,
};
use daemon::{
    CancellationToken,
    config::ConfigHandle,
    logging::Verbosity,
    ops::{Ops, Readiness},
    tasks::{TaskEnded, Tasks},
    telemetry::Traces,
    tls::{Identity, Roots},
};
use futures::future::{join, join_all, try_join, try_join_all};
use prometheus::Registry;

use crate::{
    hold, importer,
    inventory::Inventory,
    lead::Work,
    options::Options,
    pod_trace, registry,
    replicas::{self, Replicas},
    resources::{self, Caches},
    runtime::{Election, Metrics, Recorder, Times},
    server,
    setup::Setup,
    shards::LEADER,
};

/// Longest time for which a replica leaves the lease to others because its caches are not full. Lists may need the certificates that the
/// leader makes.
const FILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The error that ends the process.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The client cannot be created.
    #[error("the API server cannot be used")]
    Client(#[source] daemon::client::ClientError),
    /// A metric cannot be registered.
    #[error("metrics cannot be registered")]
    Metrics(#[source] prometheus::Error),
    /// The server cannot be started.
    #[error("the server for metrics and health cannot be started")]
    Server(#[source] server::ServerError),
    /// A task that lives as long as the process ended.
    #[error("a task ended")]
    Task(#[source] TaskEnded),
    /// Another replica leads.
    #[error("leadership was lost")]
    LeadershipLost,
}

/// Runs until it is stopped or leadership is lost.
pub async fn run(options: Options) -> Result<(), RunError> {
    let verbosity = daemon::logging::init("virt-controller", options.verbosity);
    let stop = daemon::signals::stop_token();
    let mut tasks = Tasks::stopped_by(stop.clone());
    let spawner = tasks.spawner();
    let client = daemon::client::connect().await.map_err(RunError::Client)?;
    let registry = Registry::new();
    let metrics = Metrics::new(&registry).map_err(RunError::Metrics)?;
    let traces = Traces::start(component::VIRT_CONTROLLER, &registry, &spawner).map_err(RunError::Metrics)?;
    let config = daemon::config::follow(client.clone(), &options.namespace, &spawner);
    let readiness = Readiness::new();
    let identity = Identity::follow(client.clone(), &options.namespace, tls::CONTROLLER_SECRET, &spawner);
    let roots = Roots::follow(client.clone(), &options.namespace, tls::CA_CONFIG_MAP, tls::CA_BUNDLE_KEY, &spawner);
    spawner.spawn("settings", follow_settings(config.clone(), verbosity));
    readiness.set("certificate", false);
    readiness.set("configuration", false);
    spawner
        .spawn_once("readiness", watch_readiness(identity.clone(), config.clone(), readiness.clone(), metrics.clone()));
    let ops = Ops::new(client.clone(), config.clone(), readiness, registry.clone(), roots);
    server::start(options.listen, ops, metrics.clone(), &identity, stop.clone(), &spawner).map_err(RunError::Server)?;

    // Every replica keeps its caches up to date, so that a new leader need not fill them.
    let caches = Arc::new(Caches::default());
    let inventory = Inventory::new(caches.clone(), config.clone(), metrics.clone());
    registry.register(Box::new(inventory)).map_err(RunError::Metrics)?;
    let setup =
        Setup { caches: caches.clone(), config: config.clone(), metrics: metrics.clone(), options: options.clone() };
    let controllers = registry::controllers(&setup);
    controllers.iter().for_each(|controller| controller.watch());
    let sources = resources::sources(&caches, &client, &options.namespace, &config);
    for (_, source) in &sources {
        spawner.spawn("watch", source.clone().run());
    }

    let name = options.identity.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let election = |shard: u32| {
        let lease = controller_lease(shard);
        Election::new(client.clone(), &options.namespace, &lease, name.clone(), Times::default())
    };
    let mut leader = election(LEADER);
    let mut others: Vec<(u32, Election)> = (1..options.shards).map(|shard| (shard, election(shard))).collect();
    let replicas = Replicas::new(name.clone());
    if options.shards > 1 {
        let pods = replicas.clone().follow(client.clone(), options.namespace.clone(), options.shards);
        spawner.spawn("replicas", pods);
    }
    let recorder = Recorder::start(client.clone(), metrics.clone(), &spawner);
    let work = Work { client, caches, sources, controllers, config, metrics, recorder, traces, tasks: spawner };
    let candidacy = async {
        // A former process of this pod that led was killed: a replica with full caches takes over at once.
        leader.release().await;
        join_all(others.iter_mut().map(|(_, election)| election.release())).await;
        let former = replicas::wait_for_former(work.client.clone(), &options.namespace, &name, options.shards);
        let filled = join_all(work.sources.iter().map(|(_, source)| source.filled()));
        tokio::select! {
            _ = join(former, tokio::time::timeout(FILL_TIMEOUT, filled)) => {}
            () = stop.cancelled() => return Ok(()),
        }
        let (replicas, work, stop) = (&*replicas, &work, &stop);
        let held = others.iter_mut().map(|(shard, election)| async move {
            let is_kept = hold::hold(*shard, election, replicas, work, stop).await;
            if is_kept { Ok(()) } else { Err(RunError::LeadershipLost) }
        });
        try_join(lead_once(&mut leader, work, stop), try_join_all(held)).await.map(|_| ())
    };
    tokio::select! {
        ended = candidacy => ended,
        ended = tasks.ended() => Err(RunError::Task(ended)),
    }
}

/// Leads from the election of this replica until it is stopped or leadership is lost.
async fn lead_once(election: &mut Election, work: &Work, stop: &CancellationToken) -> Result<(), RunError> {
    if !election.win(stop).await {
        return Ok(());
    }
    tracing::info!("leading");
    work.metrics.set_leading(true);
    pod_trace::follow(&work.caches, &work.traces);
    work.tasks.spawn("import progress", importer::progress::follow(work.caches.clone()));
    work.tasks.spawn("leader", work.lead(LEADER, election.leadership()));
    let kept = election.keep(stop).await;
    work.metrics.set_leading(false);
    if kept {
        election.release().await;
        Ok(())
    } else {
        Err(RunError::LeadershipLost)
    }
}

/// Follows the settings of the process itself: verbosity of the log, limit of requests.
async fn follow_settings(mut config: ConfigHandle, verbosity: Verbosity) {
    loop {
        config.changed().await;
        let current = config.current();
        daemon::client::limit_requests(current.request_limit(component::VIRT_CONTROLLER));
        let level = current.verbosity(component::VIRT_CONTROLLER, None);
        verbosity.set(u32::try_from(level).unwrap_or(u32::MAX));
    }
}

async fn watch_readiness(identity: Identity, mut config: ConfigHandle, readiness: Readiness, metrics: Metrics) {
    config.read_once().await;
    readiness.set("configuration", true);
    identity.ready().await;
    readiness.set("certificate", true);
    metrics.set_ready(true);
}
