//! The work of the leader: wait for the caches, start the controllers, pass changes of the configuration on.

use std::sync::Arc;

use daemon::{config::ConfigHandle, tasks::Spawner};
use futures::{
    FutureExt,
    future::{join_all, join3},
};

use crate::{
    resources::{CERTIFICATES, Caches, Resource, Sources, needs},
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
    // Nothing may be decided from older caches: the former leader may have written until it lost the lease. A list that fails
    // holds back only the controllers that depend on it.
    let caught_up: Vec<_> =
        sources.iter().map(|(resource, source)| (needs(&[*resource]), source.catch_up().shared())).collect();
    let ready = |needs: Needs| {
        join_all(caught_up.iter().filter(|(resource, _)| needs.contains(*resource)).map(|(_, ready)| ready.clone()))
    };
    let (first, others): (Vec<_>, Vec<_>) =
        controllers.iter().partition(|controller| CERTIFICATES.contains(controller.needs()));
    let start = |controller: &Arc<dyn Run>| controller.clone().start(&executor, &tasks);
    // Certificates come first: other writes may need the webhooks.
    ready(CERTIFICATES).await;
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
    use daemon::{tasks::Tasks, telemetry::Traces};
    use futures::{FutureExt, future::BoxFuture};
    use tokio::sync::watch;

    use super::*;
    use crate::{
        cache::Source,
        runtime::{Election, Metrics, Recorder, Times},
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
        fn start(self: Arc<Self>, _executor: &Arc<Executor>, _tasks: &Spawner) {
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
        assert_eq!(after(Some(certificates)).await, [of_certificates]);
        // Without the VMIs no VM is decided on.
        assert_eq!(after(Some(machines)).await, [of_certificates]);
        // The list of replica sets fails.
        let others = [of_certificates, of_workloads, of_machines];
        assert_eq!(after(Some(workloads)).await, others);
        assert_eq!(after(Some(sets)).await[3..], [of_sets, of_all]);
    }
}
