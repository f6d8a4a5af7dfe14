//! virt-controller: the cluster-wide controllers.
//!
//! Each controller is a pure function from what is observed to a decision (`vm`, `vmi`, `replicaset`, `node`,
//! `certificates`, `webhook_path`, `kubevirt`, `workloads`); `runtime` carries decisions out; `wiring` says which change
//! wakes which controller; `inventory` tells dashboards which machines there are.

pub mod certificates;
pub mod inventory;
pub mod kubevirt;
pub mod launcher_pod;
pub mod node;
pub mod options;
mod owned;
pub mod replicaset;
pub mod runtime;
pub mod server;
pub mod tsc;
pub mod views;
pub mod vm;
pub mod vmi;
pub mod vsock;
mod watched_pod;
pub mod webhook_path;
pub mod wiring;
pub mod workloads;
pub mod world;

use std::sync::Arc;

use api::tls;
use process::{
    config::ConfigHandle,
    logging::Verbosity,
    ops::{Ops, Readiness},
    tls::{Identity, Roots},
};
use prometheus::Registry;

use crate::{
    inventory::Inventory,
    options::Options,
    runtime::{
        executor::Executor,
        lease::{Election, Times},
        metrics::Metrics,
        recorder::Recorder,
    },
    wiring::Controllers,
    world::World,
};

/// Name of the Lease.
const LEASE: &str = "virt-controller";

/// Why the process ends before it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// There is no client.
    #[error("the API server cannot be used")]
    Client(#[source] process::client::ClientError),
    /// A counter could not be registered.
    #[error("metrics cannot be registered")]
    Metrics(#[source] prometheus::Error),
    /// The server could not be started.
    #[error("the server for metrics and health cannot be started")]
    Server(#[source] server::ServerError),
    /// Another replica leads.
    #[error("leadership was lost")]
    LeadershipLost,
}

/// Runs until asked to stop, or until leadership is lost.
pub async fn run(options: Options) -> Result<(), RunError> {
    let verbosity = process::logging::init("virt-controller", options.verbosity);
    let stop = process::signals::stop_token();
    let client = process::client::connect().await.map_err(RunError::Client)?;
    let registry = Registry::new();
    let metrics = Metrics::new(&registry).map_err(RunError::Metrics)?;
    let config = process::config::follow(client.clone(), &options.namespace);
    let readiness = Readiness::new();
    let identity = Identity::follow(client.clone(), &options.namespace, tls::CONTROLLER_SECRET);
    let roots = Roots::follow(client.clone(), &options.namespace, tls::CA_CONFIG_MAP, tls::CA_BUNDLE_KEY);
    follow_verbosity(config.clone(), verbosity);
    watch_readiness(identity.clone(), config.clone(), readiness.clone(), metrics.clone());
    let ops = Ops::new(client.clone(), config.clone(), readiness, registry.clone(), roots);
    server::start(options.listen, ops, metrics.clone(), &identity, config.clone(), stop.clone())
        .map_err(RunError::Server)?;

    let name = options.identity.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let mut election = Election::new(client.clone(), &options.namespace, LEASE, name, Times::default());
    if !election.win(&stop).await {
        return Ok(());
    }
    tracing::info!("leading");
    metrics.set_leading(true);
    let world = Arc::new(World::default());
    registry.register(Box::new(Inventory::new(world.clone(), config.clone()))).map_err(RunError::Metrics)?;
    let recorder = Recorder::start(client.clone(), metrics.clone());
    let executor = Executor::new(client.clone(), election.leadership(), recorder, metrics.clone(), world.clone());
    let controllers = Controllers::new(world, executor, config, metrics.clone(), &options);
    // Caches are filled only now: what they list is newer than anything the former leader wrote.
    let started = tokio::spawn(controllers.start(client));
    let kept = election.keep(&stop).await;
    metrics.set_leading(false);
    started.abort();
    if kept {
        election.release().await;
        Ok(())
    } else {
        Err(RunError::LeadershipLost)
    }
}

fn follow_verbosity(mut config: ConfigHandle, verbosity: Verbosity) {
    tokio::spawn(async move {
        loop {
            config.changed().await;
            let level = config.current().verbosity(api::constants::component::VIRT_CONTROLLER, None);
            verbosity.set(u32::try_from(level).unwrap_or(u32::MAX));
        }
    });
}

fn watch_readiness(identity: Identity, mut config: ConfigHandle, readiness: Readiness, metrics: Metrics) {
    readiness.set("certificate", false);
    readiness.set("configuration", false);
    tokio::spawn(async move {
        config.read_once().await;
        readiness.set("configuration", true);
        identity.ready().await;
        readiness.set("certificate", true);
        metrics.set_ready(true);
    });
}
