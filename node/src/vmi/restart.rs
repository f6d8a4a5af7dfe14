//! Restarts the task of a VMI after a panic.
//!
//! A panic in one task must not end the process or lose the VMI. The new task starts from the object and the launcher's socket,
//! as after a restart of virt-handler. So does a new task for a VMI that is to come back to a node from which it left.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api::VirtualMachineInstance;
use daemon::{CancellationToken, backoff, tasks::panics, telemetry::Traces};
use tokio::sync::{mpsc, watch};

use super::{
    handle::{Feed, Handle},
    host::Host,
    records::Records,
    request::PendingRequest,
    role::{self, Role},
    task::Task,
};
use crate::metrics::VmiMetrics;

/// First and longest pause before a restart.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Duration after which the pause starts at its first value.
const LASTING: Duration = Duration::from_secs(600);

/// Everything that tasks of one VMI share.
pub(super) struct Shared {
    pub(super) host: Arc<dyn Host>,
    pub(super) records: Arc<dyn Records>,
    pub(super) handle: Arc<Handle>,
    pub(super) metrics: VmiMetrics,
    pub(super) traces: Traces,
}

/// Runs tasks of `vmi`, one after the other, until one ends without a panic or until `stop`.
pub(super) async fn run(
    mut vmi: Arc<VirtualMachineInstance>,
    shared: Shared,
    mut feed: watch::Receiver<Feed>,
    mut requests: mpsc::Receiver<PendingRequest>,
    stop: CancellationToken,
) {
    let mut restarts = 0_u32;
    loop {
        let started = Instant::now();
        let task = async {
            let Shared { host, records, handle, metrics, traces } = &shared;
            let task = Task::new(vmi.clone(), host.clone(), records.clone(), handle.clone(), metrics.clone());
            let task = task.with_traces(traces.clone());
            task.run(&mut feed, &mut requests, &stop).await;
        };
        let panic = match panics::catch(task).await {
            Err(panic) => panic,
            Ok(()) => {
                let Some(newest) = comes_back(&feed, shared.host.name()).filter(|_| !stop.is_cancelled()) else {
                    return;
                };
                tracing::info!("the VMI is to come to this node again");
                vmi = newest;
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(PAUSE.0) => continue,
                }
            }
        };
        if started.elapsed() >= LASTING {
            restarts = 0;
        }
        restarts = restarts.saturating_add(1);
        let pause = backoff::pause(PAUSE, restarts);
        shared.metrics.panics.inc();
        shared.handle.set_launcher(None);
        tracing::error!(%panic, restarts, ?pause, "the task of this VMI panicked and will be restarted");
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        if let Feed::Object(newest) = &*feed.borrow() {
            vmi = newest.clone();
        }
    }
}

/// Returns the newest object if a migration brings the VMI to this node.
fn comes_back(feed: &watch::Receiver<Feed>, node: &str) -> Option<Arc<VirtualMachineInstance>> {
    match &*feed.borrow() {
        Feed::Object(vmi) if role::decide(vmi, node) == Role::MigrationTarget => Some(vmi.clone()),
        Feed::Object(_) | Feed::Missing | Feed::Replaced => None,
    }
}
