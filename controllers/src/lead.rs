//! The work of the leader and of holders of shards: wait for the caches, start the controllers, pass changes of the configuration on.

use std::sync::Arc;

use daemon::{config::ConfigHandle, tasks::Spawner, telemetry::Traces};
use futures::{
    FutureExt,
    future::{join_all, join3},
};
use kube::Client;

use crate::{
    resources::{CERTIFICATES, Caches, Resource, Sources, needs},
    runtime::{ConfigChange, Executor, Leadership, Metrics, Needs, Recorder, Run},
    shards::LEADER,
};

/// Everything that the work needs.
pub(crate) struct Work {
    /// The client that writes.
    pub client: Client,
    /// The caches.
    pub caches: Arc<Caches>,
    /// The watches that fill them.
    pub sources: Sources,
    /// All controllers.
    pub controllers: Vec<Arc<dyn Run>>,
    /// The cluster configuration.
    pub config: ConfigHandle,
    /// Metrics of the runtime.
    pub metrics: Metrics,
    /// Records events.
    pub recorder: Recorder,
    /// Records spans.
    pub traces: Traces,
    /// Starts the workers.
    pub tasks: Spawner,
}

impl Work {
    /// Returns the controllers whose keys are divided among the replicas.
    pub(crate) fn sharded(&self) -> Vec<Arc<dyn Run>> {
        self.controllers.iter().filter(|controller| controller.is_sharded()).cloned().collect()
    }

    /// Works on a shard for ever. The leader works on what is not divided, too.
    pub(crate) fn lead(&self, shard: u32, leadership: Leadership) -> impl Future<Output = ()> + Send + use<> {
        let controllers = if shard == LEADER { self.controllers.clone() } else { self.sharded() };
        let (caches, metrics, traces) = (self.caches.clone(), self.metrics.clone(), self.traces.clone());
        let executor =
            Executor::new(self.client.clone(), leadership, self.recorder.clone(), metrics, caches.clone(), traces);
        lead(shard, controllers, self.sources.clone(), caches, executor, self.config.clone(), self.tasks.clone())
    }
}

/// Starts each controller for a shard once its caches are as new as the lease, and passes changes of the configuration on.
async fn lead(
    shard: u32,
    controllers: Vec<Arc<dyn Run>>,
    sources: Sources,
    caches: Arc<Caches>,
    executor: Arc<Executor>,
    mut config: ConfigHandle,
    tasks: Spawner,
) {
    // Nothing may be decided from older caches: the former leader may have written until it lost the lease. A list that fails
    // holds back only the controllers that depend on it.
    let caught_up: Vec<_> =
        sources.iter().map(|(resource, source)| (needs(&[*resource]), source.catch_up().shared())).collect();
    let ready = |needs: Needs| {
        join_all(caught_up.iter().filter(|(resource, _)| needs.contains(*resource)).map(|(_, ready)| ready.clone()))
    };
    let (first, others): (Vec<_>, Vec<_>) =
        controllers.iter().partition(|controller| CERTIFICATES.contains(controller.needs()));
    let start = |controller: &Arc<dyn Run>| controller.clone().start(shard, &executor, &tasks);
    // Certificates come first: other writes may need the webhooks.
    if !first.is_empty() {
        ready(CERTIFICATES).await;
    }
    first.into_iter().for_each(start);
    // Pods must not be created from the defaults that hold until the configuration has been read.
    config.read_once().await;
    let mut former = config.current();
    let started = join_all(others.into_iter().map(|controller| ready(controller.needs()).map(|_| start(controller))));
    let filled = ready(needs(&[Resource::Vmis, Resource::Pods])).map(|_| {
        tracing::info!(vmis = caches.vmis.len(), pods = caches.pods.len(), "caches are as new as the lease");
    });
    let follow = async {
        loop {
            config.changed().await;
            let present = config.current();
            let change = ConfigChange { former, present: present.clone() };
            controllers.iter().for_each(|controller| controller.config_changed(&change));
            former = present;
        }
    };
    join3(started, filled, follow).await;
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, PoisonError},
        time::Duration,
    };

    use api::config::ClusterConfig;
    use daemon::tasks::Tasks;
    use futures::{FutureExt, future::BoxFuture};
    use tokio::sync::watch;

    use super::*;
    use crate::{
        cache::Source,
        runtime::{Election, Times},
        scripted::Server,
    };

    /// A source that catches up on request.
    struct Slow(watch::Sender<bool>);

    impl Source for Slow {
        fn run(self: Arc<Self>) -> BoxFuture<'static, ()> {
            std::future::pending().boxed()
        }
        fn filled(&self) -> BoxFuture<'_, ()> {
            futures::future::ready(()).boxed()
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
        fn is_sharded(&self) -> bool {
            false
        }
        fn stop(&self, _shard: u32) {}
        fn is_idle(&self, _shard: u32) -> bool {
            true
        }
        fn start(self: Arc<Self>, _shard: u32, _executor: &Arc<Executor>, _tasks: &Spawner) {
            self.1.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
        }
        fn config_changed(&self, _change: &ConfigChange) {}
        fn open(&self) -> &'static str {
            ""
        }

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
        let sources: Sources = vec![
            (Resource::Secrets, certificates.clone()),
            (Resource::Vmis, workloads.clone()),
            (Resource::Vms, machines.clone()),
            (Resource::ReplicaSets, sets.clone()),
            // Nothing waits for the others.
            (Resource::Roles, slow()),
        ];
        let started: Arc<Mutex<Vec<Needs>>> = Arc::default();
        let of_certificates = needs(&[Resource::Secrets]);
        let of_workloads = needs(&[Resource::Vmis]);
        let of_machines = needs(&[Resource::Vmis, Resource::Vms]);
        let of_sets = needs(&[Resource::Vmis, Resource::ReplicaSets]);
        let of_all = needs(&[Resource::Vmis, Resource::Vms, Resource::ReplicaSets]);
        let needs = [of_workloads, of_machines, of_sets, of_all, of_certificates];
        let controllers =
            needs.into_iter().map(|needs| Arc::new(Recorded(needs, started.clone())) as Arc<dyn Run>).collect();
        let config = ConfigHandle::fixed(ClusterConfig::default());
        tasks.spawn("leader", lead(LEADER, controllers, sources, caches, executor, config, tasks.spawner()));
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
        assert_eq!(after(Some(certificates)).await, [of_certificates]);
        // Without the VMIs no VM is decided on.
        assert_eq!(after(Some(machines)).await, [of_certificates]);
        // The list of replica sets fails.
        let others = [of_certificates, of_workloads, of_machines];
        assert_eq!(after(Some(workloads)).await, others);
        assert_eq!(after(Some(sets)).await[3..], [of_sets, of_all]);
    }
}
