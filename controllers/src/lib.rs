//! virt-controller: the cluster-wide controllers.
//!
//! `registry.rs` lists the controllers; each has a folder with its watches, observations and decisions. `resources/` caches
//! the cluster, `runtime/` runs the controllers and carries their decisions out, `inventory/` exports metrics of VMs and VMIs.

mod attachment_pod;
mod budgets;
mod cache;
mod certificates;
mod clone;
mod clone_source;
mod common_instancetypes;
mod data_volumes;
mod evacuation;
mod importer;
mod inventory;
mod kubevirt;
mod launcher_pod;
mod lead;
mod migration;
mod node;
pub mod options;
mod owned_vmis;
mod persistent_state;
mod pod_parts;
mod pod_trace;
mod pool;
mod registry;
mod replicaset;
mod resources;
mod restore;
mod runtime;
#[cfg(test)]
mod scripted;
mod server;
mod setup;
mod snapshot;
mod snapshot_class;
mod tsc;
mod uninstall;
mod vm;
mod vm_lease;
mod vmi;
mod volume_migration;
mod webhook_path;
mod workload_update;

use std::{sync::Arc, time::Duration};

use api::{constants::component, tls};
use daemon::{
    config::ConfigHandle,
    logging::Verbosity,
    ops::{Ops, Readiness},
    tasks::{TaskEnded, Tasks},
    telemetry::Traces,
    tls::{Identity, Roots},
};
use futures::future::join_all;
use prometheus::Registry;

use crate::{
    inventory::Inventory,
    options::Options,
    resources::Caches,
    runtime::{Election, Executor, Metrics, Recorder, Times},
    setup::Setup,
};

/// Name of the Lease.
const LEASE: &str = "virt-controller";
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
    let mut election = Election::new(client.clone(), &options.namespace, LEASE, name, Times::default());
    let candidacy = async {
        // A former process of this pod that led was killed: a replica with full caches takes over at once.
        election.release().await;
        tokio::select! {
            _ = tokio::time::timeout(FILL_TIMEOUT, join_all(sources.iter().map(|(_, source)| source.filled()))) => {
                election.win(&stop).await
            }
            () = stop.cancelled() => false,
        }
    };
    let won = tokio::select! {
        won = candidacy => won,
        ended = tasks.ended() => return Err(RunError::Task(ended)),
    };
    if !won {
        return Ok(());
    }
    tracing::info!("leading");
    metrics.set_leading(true);
    let recorder = Recorder::start(client.clone(), metrics.clone(), &spawner);
    pod_trace::follow(&caches, &traces);
    spawner.spawn_once("disruption budgets", budgets::remove(client.clone()));
    spawner.spawn("import progress", importer::progress::follow(caches.clone()));
    let executor = Executor::new(client, election.leadership(), recorder, metrics.clone(), caches.clone(), traces);
    spawner.spawn("leader", lead::lead(controllers, sources, caches, executor, config, spawner.clone()));
    let kept = tokio::select! {
        kept = election.keep(&stop) => kept,
        ended = tasks.ended() => return Err(RunError::Task(ended)),
    };
    metrics.set_leading(false);
    if kept {
        election.release().await;
        Ok(())
    } else {
        Err(RunError::LeadershipLost)
    }
}

/// Follows the settings of the process itself: verbosity of the log, limit of requests.
async fn follow_settings(mut config: ConfigHandle, verbosity: Verbosity) {
    use api::constants::component::VIRT_CONTROLLER;
    loop {
        config.changed().await;
        let current = config.current();
        daemon::client::limit_requests(current.request_limit(VIRT_CONTROLLER));
        let level = current.verbosity(VIRT_CONTROLLER, None);
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
