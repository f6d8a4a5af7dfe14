//! Watches of all resources.

use std::sync::Arc;

use api::FeatureGate;
use daemon::config::ConfigHandle;
use futures::{FutureExt, future::BoxFuture};
use kube::Client;

use super::{
    Caches, Resource,
    declaration::{Declaration, Visitor},
};
use crate::cache::{Cache, Source, Watch};

/// The watches with the resources whose caches they fill.
pub(crate) type Sources = Vec<(Resource, Arc<dyn Source>)>;

/// Returns the watches of all resources.
pub(crate) fn sources(caches: &Caches, client: &Client, namespace: &str, config: &ConfigHandle) -> Sources {
    let mut watches = Watches { caches, client, namespace, config, sources: Vec::new() };
    caches.each(&mut watches);
    watches.sources
}

struct Watches<'a> {
    caches: &'a Caches,
    client: &'a Client,
    namespace: &'a str,
    config: &'a ConfigHandle,
    sources: Sources,
}

impl Visitor for Watches<'_> {
    fn visit<D: Declaration>(&mut self, resource: Resource, cache: &Arc<Cache<D::Kept>>) {
        let watch = || {
            let api = D::api(self.client.clone(), self.namespace);
            D::adjust(Watch::new(cache, api, D::keep).present(D::PRESENCE), self.caches)
        };
        for watch in D::SELECTION.watches(watch) {
            let source: Arc<dyn Source> = Arc::new(watch);
            let source = match D::UNLESS {
                Some(gate) => Arc::new(Unless { gate, config: self.config.clone(), source }),
                None => source,
            };
            self.sources.push((resource, source));
        }
    }
}

/// A watch that starts when a feature gate is off.
struct Unless {
    gate: FeatureGate,
    config: ConfigHandle,
    source: Arc<dyn Source>,
}

impl Source for Unless {
    fn run(self: Arc<Self>) -> BoxFuture<'static, ()> {
        async move {
            let mut config = self.config.clone();
            config.read_once().await;
            while config.current().enabled(self.gate) {
                config.changed().await;
            }
            self.source.clone().run().await;
        }
        .boxed()
    }

    fn filled(&self) -> BoxFuture<'_, ()> {
        async {
            if !self.config.current().enabled(self.gate) {
                self.source.filled().await;
            }
        }
        .boxed()
    }

    fn catch_up(&self) -> BoxFuture<'_, ()> {
        async {
            if !self.config.current().enabled(self.gate) {
                self.source.catch_up().await;
            }
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, PoisonError},
        time::Duration,
    };

    use api::config::ClusterConfig;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        cache::Key,
        scripted::{Reply, Server, status},
    };

    const PATH: &str = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions";

    /// A list of the definitions of these networks.
    fn list(names: &[&str]) -> Reply {
        let meta =
            |name: &str| json!({"name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": "5"});
        let items: Vec<Value> =
            names.iter().map(|name| json!({"metadata": meta(name), "spec": {"config": "{}"}})).collect();
        Reply::Answer(
            200,
            json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "9"}, "items": items}),
        )
    }

    fn unserved() -> Reply {
        Reply::Answer(404, status(404, "NotFound"))
    }

    /// Returns the source of the definitions of networks, while the gate is on or off.
    fn networks(caches: &Caches, server: &Server, gate: bool) -> Arc<dyn Source> {
        let mut config = ClusterConfig::default();
        if !gate {
            config.disabled_feature_gates.extend(["ExternalNetResourceInjection".to_owned()]);
        }
        let config = ConfigHandle::fixed(config);
        let mut sources = sources(caches, &server.client(), "kubevirt", &config).into_iter();
        sources.find_map(|(resource, source)| (resource == Resource::Networks).then_some(source)).unwrap()
    }

    async fn within(limit: u64, wanted: impl Fn() -> bool) {
        let end = tokio::time::Instant::now() + Duration::from_secs(limit);
        while !wanted() {
            assert!(tokio::time::Instant::now() < end, "not within {limit} s");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn optional_resource_is_watched_when_it_appears_and_dropped_when_it_goes() {
        let bookmark = json!({"type": "BOOKMARK", "object": {
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"resourceVersion": "9"}}});
        // Not served; served with one object; the watch ends; not served for a time; served again with another object.
        let script = [unserved(), unserved(), list(&[]), list(&["a"]), Reply::Answer(200, bookmark)];
        let gone = std::iter::repeat_with(unserved).take(40);
        let again = [list(&[]), list(&["b"])];
        let server = Server::new(script.into_iter().chain(gone).chain(again));
        let caches = Caches::default();
        let changes = Arc::new(Mutex::new(Vec::new()));
        let seen = changes.clone();
        caches.networks.listen(move |(former, present)| {
            let name = |network: &super::super::CachedNetwork| network.metadata.name.clone().unwrap_or_default();
            seen.lock().unwrap_or_else(PoisonError::into_inner).push((former.map(name), present.map(name)));
        });
        let source = networks(&caches, &server, false);
        assert!(!caches.networks.is_absent(), "not known yet");
        let task = tokio::spawn(source.clone().run());
        // A leader does not wait for a resource that the cluster lacks.
        assert!(tokio::time::timeout(Duration::from_secs(1), source.catch_up()).await.is_ok());
        assert!(caches.networks.is_absent());
        within(45, || caches.networks.get(&Key::new("n", "a")).is_some()).await;
        assert!(!caches.networks.is_absent());
        within(15, || caches.networks.is_absent()).await;
        assert_eq!(caches.networks.len(), 0);
        within(3600, || caches.networks.get(&Key::new("n", "b")).is_some()).await;
        let name = |name: &str| Some(name.to_owned());
        let none = (None, None);
        let expected =
            [none.clone(), none.clone(), (None, name("a")), (name("a"), None), none.clone(), none, (None, name("b"))];
        assert_eq!(*changes.lock().unwrap(), expected);
        assert!(server.requests().iter().all(|(_, path)| path == PATH));
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn replica_that_takes_the_lease_looks_for_what_was_not_served() {
        // Not served; found at the lease, by the watch that waits for it, and by its first list.
        let server = Server::new([unserved(), list(&[]), list(&[]), list(&["a"])]);
        let caches = Caches::default();
        let source = networks(&caches, &server, false);
        let follows = tokio::spawn(source.clone().run());
        within(5, || caches.networks.is_absent()).await;
        let leads = tokio::spawn(async move { source.catch_up().await });
        within(5, || caches.networks.get(&Key::new("n", "a")).is_some()).await;
        assert!(!caches.networks.is_absent());
        leads.abort();
        follows.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn optional_resource_that_cannot_be_listed_holds_nothing_back() {
        let refused =
            || Reply::Answer(403, json!({"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden"}));
        let server = Server::new(std::iter::repeat_with(refused).take(100));
        let caches = Caches::default();
        let source = networks(&caches, &server, false);
        let task = tokio::spawn(source.clone().run());
        assert!(tokio::time::timeout(Duration::from_secs(40), source.catch_up()).await.is_ok());
        assert!(!caches.networks.is_absent());
        assert!(server.requests().len() < 10, "each failure lengthens the pause: {:?}", server.requests());
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn short_absence_drops_nothing() {
        let script = [list(&[]), list(&["a"]), unserved(), unserved(), unserved(), list(&[]), list(&["a"])];
        let server = Server::new(script);
        let caches = Caches::default();
        let changes = Arc::new(Mutex::new(0));
        let seen = changes.clone();
        caches.networks.listen(move |_| *seen.lock().unwrap_or_else(PoisonError::into_inner) += 1);
        let task = tokio::spawn(networks(&caches, &server, false).run());
        within(30, || server.requests().len() > 7).await;
        assert_eq!(*changes.lock().unwrap(), 1);
        assert_eq!(caches.networks.len(), 1);
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn resource_that_a_gate_makes_unnecessary_is_not_watched() {
        let (server, caches) = (Server::default(), Caches::default());
        let source = networks(&caches, &server, true);
        let task = tokio::spawn(source.clone().run());
        assert!(tokio::time::timeout(Duration::from_secs(1), source.catch_up()).await.is_ok());
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(server.requests().is_empty());
        task.abort();
    }
}
