//! The work of the leader: wait for the caches, start the controllers, pass changes of the configuration on.

use std::sync::Arc;

use daemon::{config::ConfigHandle, tasks::Spawner};
use futures::{
    FutureExt,
    future::{join, join_all, join3},
};

use crate::{
    cache::Source,
    resources::{Caches, Sources},
    runtime::{ConfigChange, Executor, Needs, Run},
};

/// Starts each controller once its caches are as new as the lease, and passes changes of the configuration on.
pub(crate) async fn lead(
    controllers: Vec<Arc<dyn Run>>,
    sources: Sources,
    caches: Arc<Caches>,
    executor: Arc<Executor>,
    mut config: ConfigHandle,
    tasks: Spawner,
) {
    let start = |needs: Needs| {
        let ready = controllers.iter().filter(|controller| controller.needs() == needs);
        ready.for_each(|controller| controller.clone().start(&executor, &tasks));
    };
    // Certificates come first: other writes may need the webhooks.
    catch_up(&sources.certificates).await;
    start(Needs::Certificates);
    // Pods must not be created from the defaults that hold until the configuration has been read.
    config.read_once().await;
    let former = config.current();
    let workloads = catch_up(&sources.workloads).shared();
    let started = async {
        workloads.clone().await;
        tracing::info!(vmis = caches.vmis.len(), pods = caches.pods.len(), "caches are as new as the lease");
        start(Needs::Workloads);
    };
    // A list that fails holds back only the controllers that depend on it.
    let with = |sources| join(workloads.clone(), catch_up(sources)).map(drop).shared();
    let (machines, sets) = (with(&sources.virtual_machines), with(&sources.replica_sets));
    let both = join(machines.clone(), sets.clone()).map(drop);
    let dependent = join3(
        machines.map(|()| start(Needs::VirtualMachines)),
        sets.map(|()| start(Needs::ReplicaSets)),
        both.map(|()| start(Needs::AllWorkloads)),
    );
    let follow = async {
        let mut former = former;
        loop {
            config.changed().await;
            let present = config.current();
            let change = ConfigChange { former, present: present.clone() };
            controllers.iter().for_each(|controller| controller.config_changed(&change));
            former = present;
        }
    };
    join3(started, dependent, follow).await;
}

/// Waits until caches are as new as the API server is now. Nothing may be decided from older ones: the former leader may
/// have written until it lost the lease.
async fn catch_up(sources: &[Arc<dyn Source>]) {
    join_all(sources.iter().map(|source| source.catch_up())).await;
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, PoisonError},
        time::Duration,
    };

    use api::config::ClusterConfig;
    use daemon::{tasks::Tasks, telemetry::Traces};
    use futures::{FutureExt, future::BoxFuture};
    use tokio::sync::watch;

    use super::*;
    use crate::{
        runtime::{Election, Metrics, Recorder, Times},
        scripted::Server,
    };

    /// A source that catches up on request.
    struct Slow(watch::Sender<bool>);

    impl Source for Slow {
        fn run(self: Arc<Self>) -> BoxFuture<'static, ()> {
            std::future::pending().boxed()
        }
        fn synced(&self) -> BoxFuture<'_, ()> {
            std::future::ready(()).boxed()
        }
        fn catch_up(&self) -> BoxFuture<'_, ()> {
            async { self.0.subscribe().wait_for(|done| *done).await.map(|_| ()).unwrap() }.boxed()
        }
    }

    /// A controller that records its start.
    struct Recorded(Needs, Arc<Mutex<Vec<Needs>>>);

    impl Run for Recorded {
        fn needs(&self) -> Needs {
            self.0
        }
        fn watch(&self) {}
        fn start(self: Arc<Self>, _executor: &Arc<Executor>, _tasks: &Spawner) {
            self.1.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
        }
        fn config_changed(&self, _change: &ConfigChange) {}
        fn open_empty(&self) {}
        fn observe_queued(&self) -> usize {
            0
        }
    }

    #[tokio::test(start_paused = true)]
    async fn controllers_start_when_their_caches_are_as_new_as_the_lease() {
        let (client, tasks) = (Server::default().client(), Tasks::new());
        let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
        let recorder = Recorder::start(client.clone(), metrics.clone(), &tasks.spawner());
        let election = Election::new(client.clone(), "kubevirt", "lease", "a".to_owned(), Times::default());
        let caches = Arc::new(Caches::default());
        let executor =
            Executor::new(client, election.leadership(), recorder, metrics, caches.clone(), Traces::default());
        let slow = || Arc::new(Slow(watch::Sender::new(false)));
        let (certificates, workloads, machines, sets) = (slow(), slow(), slow(), slow());
        let sources = Sources {
            certificates: vec![certificates.clone()],
            workloads: vec![workloads.clone()],
            virtual_machines: vec![machines.clone()],
            replica_sets: vec![sets.clone()],
            // Nothing waits for the others.
            others: vec![slow()],
        };
        let started: Arc<Mutex<Vec<Needs>>> = Arc::default();
        let needs =
            [Needs::AllWorkloads, Needs::ReplicaSets, Needs::VirtualMachines, Needs::Workloads, Needs::Certificates];
        let controllers =
            needs.into_iter().map(|needs| Arc::new(Recorded(needs, started.clone())) as Arc<dyn Run>).collect();
        let config = ConfigHandle::fixed(ClusterConfig::default());
        tasks.spawn("leader", lead(controllers, sources, caches, executor, config, tasks.spawner()));
        let after = |done: Option<Arc<Slow>>| {
            let started = started.clone();
            async move {
                done.into_iter().for_each(|source| {
                    source.0.send_replace(true);
                });
                tokio::time::sleep(Duration::from_secs(1)).await;
                started.lock().unwrap().clone()
            }
        };
        assert_eq!(after(None).await, []);
        assert_eq!(after(Some(certificates)).await, [Needs::Certificates]);
        // Without the VMIs no VM is decided on.
        assert_eq!(after(Some(machines)).await, [Needs::Certificates]);
        // The list of replica sets fails.
        let others = [Needs::Certificates, Needs::Workloads, Needs::VirtualMachines];
        assert_eq!(after(Some(workloads)).await, others);
        assert_eq!(after(Some(sets)).await[3..], [Needs::ReplicaSets, Needs::AllWorkloads]);
    }
}
