//! Watches that fill caches, and the comparison of a cache with the API server.

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Resource,
    api::ListParams,
    runtime::{WatchStreamExt, watcher},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::{
    Cache, Cached, Key,
    content::{parse_version, version},
};

/// Objects on a page of a list. An object can have 1.5 MiB, and a page is held as a whole, beside those of other watches.
const PAGE: u32 = 50;
/// Objects on a page of a list of metadata.
const METADATA_PAGE: u32 = 50;
/// Time for the watch to deliver the difference between a cache and the API server. Then the list is repeated.
const DELIVERY: Duration = Duration::from_secs(2);
/// Interval at which a cache is compared again.
const RECHECK: Duration = Duration::from_millis(20);
/// Longest time for a page of a list of metadata at first: nothing else ends a request to an API server that was lost, for
/// minutes. Doubled after each page that took longer.
const PAGE_TIMEOUT: Duration = Duration::from_secs(3);
const LONGEST_PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Least time between two new starts of a watch.
const RESTART_INTERVAL: Duration = Duration::from_secs(10);
/// Wait after a list that failed.
const RETRY: Duration = Duration::from_millis(500);
/// Time for which the API server must not know a resource until it counts as one that is not installed: it may be about to read
/// its definitions.
const ABSENT: Duration = Duration::from_secs(10);
/// Interval at which an unchanged failure is logged again.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// A watch of any resource.
pub(crate) trait Source: Send + Sync {
    /// Watches for ever.
    fn run(self: Arc<Self>) -> BoxFuture<'static, ()>;
    /// Waits until the first list has been read.
    fn synced(&self) -> BoxFuture<'_, ()>;
    /// Waits until the cache is as new as the API server was at the call. A resource that is not installed has no objects.
    fn catch_up(&self) -> BoxFuture<'_, ()>;
}

/// A watch of one resource that keeps a cache up to date.
pub(crate) struct Watch<W, K: Cached> {
    cache: Arc<Cache<K>>,
    api: Api<W>,
    config: watcher::Config,
    convert: Box<dyn Fn(W) -> Option<K> + Send + Sync>,
    /// Returns true for metadata of objects that `convert` keeps.
    selects: fn(&ObjectMeta) -> bool,
    /// Returns true for objects that stay although the watch shows them no longer, see [`Cached::unseen`].
    keeps_unseen: Box<dyn Fn(&K) -> bool + Send + Sync>,
    /// The only object of the watch, in a cache that other watches fill as well.
    name: Option<&'static str>,
    synced: watch::Sender<bool>,
    /// Events so far.
    delivered: AtomicU64,
    /// Starts the watch anew.
    restart: Notify,
}

/// The error of a comparison.
#[derive(Debug, thiserror::Error)]
enum CompareError {
    /// The API server refused or failed.
    #[error(transparent)]
    List(#[from] kube::Error),
    /// The API server did not answer.
    #[error("no answer in time")]
    Timeout,
}

impl CompareError {
    /// Returns true if the API server does not know the resource. A list by selectors is never "not found" otherwise.
    fn is_absent(&self) -> bool {
        matches!(self, Self::List(kube::Error::Api(status)) if status.code == 404)
    }
}

/// Consecutive failures of comparisons: each reason is logged once per interval.
#[derive(Debug, Default)]
struct Failures {
    logged: Option<(Instant, String)>,
    absent_since: Option<Instant>,
}

impl Failures {
    /// Records a failure. Returns true if the resource counts as one that is not installed.
    fn record(&mut self, resource: &str, error: &CompareError) -> bool {
        let (now, text) = (Instant::now(), error.to_string());
        if self.logged.as_ref().is_none_or(|(at, known)| now >= *at + LOG_INTERVAL || *known != text) {
            tracing::warn!(resource, error = text, "cache cannot be compared with the API server");
            self.logged = Some((now, text));
        }
        self.absent_since = error.is_absent().then(|| self.absent_since.unwrap_or(now));
        self.absent_since.is_some_and(|since| now >= since + ABSENT)
    }
}

impl<W, K> Watch<W, K>
where
    K: Cached,
    W: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Creates a watch of all objects of `api`.
    pub(crate) fn new(cache: &Arc<Cache<K>>, api: Api<W>, convert: impl Fn(W) -> K + Send + Sync + 'static) -> Self {
        Self::filtered(cache, api, |_| true, move |object| Some(convert(object)))
    }

    /// Creates a watch of those objects for which `convert` returns one. `selects` returns the same from metadata.
    pub(crate) fn filtered(
        cache: &Arc<Cache<K>>,
        api: Api<W>,
        selects: fn(&ObjectMeta) -> bool,
        convert: impl Fn(W) -> Option<K> + Send + Sync + 'static,
    ) -> Self {
        Self {
            cache: cache.clone(),
            api,
            config: watcher::Config::default().page_size(PAGE),
            convert: Box::new(convert),
            selects,
            keeps_unseen: Box::new(|_| false),
            name: None,
            synced: watch::Sender::new(false),
            delivered: AtomicU64::new(0),
            restart: Notify::new(),
        }
    }

    /// Restricts the watch to objects that match a label selector.
    pub(crate) fn labels(mut self, selector: &str) -> Self {
        self.config = self.config.labels(selector);
        self
    }

    /// Restricts the watch to objects that match a field selector.
    pub(crate) fn fields(mut self, selector: &str) -> Self {
        self.config = self.config.fields(selector);
        self
    }

    /// Restricts the watch to one object, in a cache that other watches fill as well.
    pub(crate) fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self.fields(&format!("metadata.name={name}"))
    }

    /// Keeps objects that the watch shows no longer while `keeps` returns true, see [`Cached::unseen`].
    pub(crate) fn keeping_unseen(mut self, keeps: impl Fn(&K) -> bool + Send + Sync + 'static) -> Self {
        self.keeps_unseen = Box::new(keeps);
        self
    }

    /// Waits until the resource counts as one that is not installed. Its first list never comes then.
    async fn absent(&self, resource: &str) {
        let mut failures = Failures::default();
        let one = ListParams { field_selector: self.config.field_selector.clone(), ..ListParams::default().limit(1) };
        loop {
            // The watch usually reads its first list meanwhile.
            tokio::time::sleep(PAGE_TIMEOUT).await;
            let listed = tokio::time::timeout(PAGE_TIMEOUT, self.api.list_metadata(&one)).await;
            let listed = listed.map_err(|_| CompareError::Timeout).and_then(|listed| Ok(listed?));
            match listed {
                Ok(_) => failures = Failures::default(),
                Err(error) if failures.record(resource, &error) => return log_absent(resource),
                Err(_) => {}
            }
        }
    }

    fn covers(&self, key: &Key) -> bool {
        self.name.is_none_or(|name| key.name == name)
    }

    /// Watches for ever.
    async fn follow(&self) {
        loop {
            tokio::select! {
                () = self.follow_events() => return,
                () = self.restart.notified() => tracing::warn!("watch is silent and is started again"),
            }
        }
    }

    async fn follow_events(&self) {
        let events = watcher::watcher(self.api.clone(), self.config.clone()).default_backoff();
        let mut events = std::pin::pin!(events);
        let mut listed: HashSet<Key> = HashSet::new();
        let mut before: Vec<Key> = Vec::new();
        while let Some(event) = events.next().await {
            self.delivered.fetch_add(u64::from(event.is_ok()), Ordering::Relaxed);
            match event {
                Ok(watcher::Event::Init) => {
                    listed.clear();
                    // Answers to writes that arrive while the list is read may be newer than the list.
                    before = self.cache.keys();
                }
                Ok(watcher::Event::InitApply(object)) => {
                    // An object that is not kept counts as not listed: it may have been kept before.
                    if let Some(object) = (self.convert)(object) {
                        listed.insert(Key::of(object.meta()));
                        self.cache.apply(object, false);
                    }
                }
                Ok(watcher::Event::InitDone) => {
                    for key in std::mem::take(&mut before) {
                        if self.covers(&key) && !listed.contains(&key) {
                            self.cache.lose(&key, None, None, &self.keeps_unseen);
                        }
                    }
                    listed = HashSet::new();
                    self.synced.send_replace(true);
                }
                Ok(watcher::Event::Apply(object)) => {
                    let (key, uid) = (Key::of(object.meta()), object.meta().uid.clone());
                    match (self.convert)(object) {
                        Some(object) => self.cache.apply(object, false),
                        None if self.cache.get(&key).is_some() => {
                            self.cache.lose(&key, uid.as_deref(), None, &self.keeps_unseen);
                        }
                        None => {}
                    }
                }
                Ok(watcher::Event::Delete(object)) => {
                    let (key, uid) = (Key::of(object.meta()), object.meta().uid.clone());
                    let last = (self.convert)(object);
                    if last.is_some() || self.cache.get(&key).is_some() {
                        self.cache.lose(&key, uid.as_deref(), last, &self.keeps_unseen);
                    }
                }
                Err(error) => tracing::warn!(error = %error, "watch was interrupted"),
            }
        }
    }

    /// Returns the differences between the cache and a consistent list of metadata, each page of which takes at most `limit`.
    async fn differences(&self, limit: Duration) -> Result<Vec<Difference>, CompareError> {
        let mut differences = Vec::new();
        let mut listed: HashSet<Key> = HashSet::new();
        let mut parameters = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            ..ListParams::default().limit(METADATA_PAGE)
        };
        loop {
            // Without a resource version the API server answers with the newest state.
            let page = tokio::time::timeout(limit, self.api.list_metadata(&parameters)).await;
            let page = page.map_err(|_| CompareError::Timeout)??;
            let list_version = parse_version(page.metadata.resource_version.as_deref());
            for object in page.items.into_iter().filter(|object| (self.selects)(&object.metadata)) {
                let key = Key::of(&object.metadata);
                listed.insert(key.clone());
                let uid = object.metadata.uid.clone().unwrap_or_default();
                differences.push(Difference::Newer { key, uid, version: version(&object.metadata) });
            }
            differences.retain(|difference| !self.is_settled(difference));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => {
                    let surplus = self.cache.keys().into_iter().filter(|key| self.covers(key) && !listed.contains(key));
                    differences.extend(surplus.map(|key| Difference::Gone { key, version: list_version }));
                    differences.retain(|difference| !self.is_settled(difference));
                    return Ok(differences);
                }
            }
        }
    }

    /// Returns true when the cache has caught up with a difference.
    fn is_settled(&self, difference: &Difference) -> bool {
        match difference {
            Difference::Newer { key, uid, version: wanted } => match self.cache.get(key) {
                Some(known) if known.is_unseen() => false,
                Some(known) => version(known.meta()) >= *wanted,
                None => self.cache.is_gone(uid),
            },
            // An object that was created after the list is not surplus.
            Difference::Gone { key, version: listed } => {
                self.cache.get(key).is_none_or(|known| known.is_unseen() || version(known.meta()) > *listed)
            }
        }
    }
}

fn log_absent(resource: &str) {
    tracing::warn!(resource, "the API server does not serve the resource, its cache is used as it is");
}

/// A difference between a cache and the API server.
#[derive(Debug)]
enum Difference {
    /// The cache holds no version of the object that is as new.
    Newer { key: Key, uid: String, version: u64 },
    /// The cache holds an object that did not exist at this version.
    Gone { key: Key, version: u64 },
}

impl<W, K> Source for Watch<W, K>
where
    K: Cached,
    W: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    fn run(self: Arc<Self>) -> BoxFuture<'static, ()> {
        async move { self.follow().await }.boxed()
    }

    fn synced(&self) -> BoxFuture<'_, ()> {
        async {
            // The sender lives in self, so waiting cannot fail.
            let _ = self.synced.subscribe().wait_for(|synced| *synced).await;
        }
        .boxed()
    }

    fn catch_up(&self) -> BoxFuture<'_, ()> {
        async {
            let resource = self.api.resource_url();
            let is_absent = tokio::select! {
                () = self.synced() => false,
                () = self.absent(resource) => true,
            };
            if is_absent {
                return;
            }
            let mut failures = Failures::default();
            let mut restarted: Option<Instant> = None;
            let mut limit = PAGE_TIMEOUT;
            loop {
                let delivered = self.delivered.load(Ordering::Relaxed);
                match self.differences(limit).await {
                    Ok(mut differences) => {
                        let end = Instant::now() + DELIVERY;
                        while !differences.is_empty() && Instant::now() < end {
                            tokio::time::sleep(RECHECK).await;
                            differences.retain(|difference| !self.is_settled(difference));
                        }
                        if differences.is_empty() {
                            return;
                        }
                        failures = Failures::default();
                        tracing::warn!(resource, differences = differences.len(), "cache is behind the API server");
                        // The connection of a silent watch may be dead, which shows only when its time limit ends.
                        let is_silent = self.delivered.load(Ordering::Relaxed) == delivered;
                        if is_silent && restarted.is_none_or(|at| at.elapsed() >= RESTART_INTERVAL) {
                            restarted = Some(Instant::now());
                            self.restart.notify_one();
                        }
                    }
                    Err(error) => {
                        if failures.record(resource, &error) {
                            return log_absent(resource);
                        }
                        if matches!(error, CompareError::Timeout) {
                            limit = (limit * 2).min(LONGEST_PAGE_TIMEOUT);
                        }
                        tokio::time::sleep(RETRY).await;
                    }
                }
            }
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::{Value, json};

    use super::*;
    use crate::scripted::{Reply, Server, status};

    #[derive(Clone, Debug)]
    struct Thing(ObjectMeta);

    impl Cached for Thing {
        type Index = ();

        fn meta(&self) -> &ObjectMeta {
            &self.0
        }
    }

    fn meta(name: &str, version: u64) -> Value {
        json!({"name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": version.to_string()})
    }

    fn thing(name: &str, version: u64) -> Thing {
        Thing(serde_json::from_value(meta(name, version)).unwrap())
    }

    fn list(version: u64, items: &[Value]) -> Value {
        let items: Vec<Value> = items.iter().map(|meta| json!({"metadata": meta})).collect();
        json!({
            "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
            "metadata": {"resourceVersion": version.to_string()}, "items": items,
        })
    }

    /// A cache that has been read once, and its watch, which delivers nothing.
    fn standby(server: &Server, known: &[(&str, u64)]) -> (Arc<Cache<Thing>>, Watch<ConfigMap, Thing>) {
        let cache = Arc::new(Cache::default());
        known.iter().for_each(|(name, version)| cache.observe(thing(name, *version)));
        let api = Api::<ConfigMap>::namespaced(server.client(), "n");
        let watch = Watch::new(&cache, api, |object| Thing(object.metadata));
        watch.synced.send_replace(true);
        (cache, watch)
    }

    #[tokio::test(start_paused = true)]
    async fn new_leader_waits_until_its_cache_is_as_new_as_the_api_server() {
        // The former leader changed `a`, created `b` and deleted `c` before it lost the lease.
        let newest = list(20, &[meta("a", 15), meta("b", 16), meta("d", 4)]);
        let server = Server::new([Reply::Answer(200, newest.clone()), Reply::Answer(200, newest)]);
        let (cache, watch) = standby(&server, &[("a", 5), ("c", 3), ("d", 4)]);
        let mut waits = std::pin::pin!(watch.catch_up());
        let soon = Duration::from_millis(200);
        assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
        cache.observe(thing("a", 15));
        assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
        // Deleted again at once.
        cache.observe_deleted(&Key::new("n", "b"), Some("uid-b"));
        assert!(tokio::time::timeout(soon, &mut waits).await.is_err());
        cache.observe_deleted(&Key::new("n", "c"), Some("uid-c"));
        assert!(tokio::time::timeout(soon, &mut waits).await.is_ok());
        assert_eq!(server.requests().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn cache_that_is_as_new_is_ready_at_once() {
        let server = Server::new([
            Reply::Answer(500, status(500, "InternalError")),
            Reply::Answer(200, list(20, &[meta("a", 5)])),
        ]);
        // Objects newer than the list may be known already.
        let (_, watch) = standby(&server, &[("a", 7), ("new", 21)]);
        assert!(tokio::time::timeout(Duration::from_secs(1), watch.catch_up()).await.is_ok());
        assert_eq!(server.requests().len(), 2, "a failed list is repeated");
    }

    #[tokio::test(start_paused = true)]
    async fn list_without_an_answer_is_repeated() {
        let server = Server::new([Reply::Silence, Reply::Answer(200, list(20, &[meta("a", 5)]))]);
        let (_cache, watch) = standby(&server, &[("a", 5)]);
        assert!(tokio::time::timeout(Duration::from_secs(4), watch.catch_up()).await.is_ok());
        assert_eq!(server.requests().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_watch_is_started_again() {
        let newest = || Reply::Answer(200, list(20, &[meta("a", 15)]));
        // List and watch. Then comparisons and the requests of the second watch get the same answer, in any order.
        let first = [Reply::Answer(200, list(10, &[meta("a", 5)])), Reply::Silence];
        let server = Server::new(first.into_iter().chain(std::iter::repeat_with(newest).take(10)));
        let cache = Arc::new(Cache::default());
        let api = Api::<ConfigMap>::namespaced(server.client(), "n");
        let watch = Arc::new(Watch::new(&cache, api, |object| Thing(object.metadata)));
        let task = tokio::spawn(watch.clone().run());
        watch.synced().await;
        // The watch is under way.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let caught_up = tokio::time::timeout(Duration::from_secs(5), watch.catch_up()).await;
        assert!(caught_up.is_ok(), "{:?}", server.requests());
        let known = cache.get(&Key::new("n", "a")).and_then(|object| object.0.resource_version.clone());
        assert_eq!(known.as_deref(), Some("15"));
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn list_is_repeated_when_the_watch_does_not_deliver() {
        let server = Server::new([Reply::Answer(200, list(20, &[meta("a", 15)])), Reply::Answer(200, list(30, &[]))]);
        let (_, watch) = standby(&server, &[]);
        assert!(tokio::time::timeout(Duration::from_secs(5), watch.catch_up()).await.is_ok());
        assert_eq!(server.requests().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn resource_that_is_not_installed_does_not_hold_the_leader_back() {
        let absent = || Reply::Answer(404, status(404, "NotFound"));
        let server = Server::new(std::iter::repeat_with(absent).take(200));
        // Once a standby whose watch has read a list before, once one that never could.
        for synced in [true, false] {
            let (_cache, watch) = standby(&server, &[]);
            watch.synced.send_replace(synced);
            assert!(tokio::time::timeout(ABSENT - RETRY, watch.catch_up()).await.is_err(), "{synced}");
            assert!(tokio::time::timeout(ABSENT * 2, watch.catch_up()).await.is_ok(), "{synced}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn list_that_is_refused_holds_the_leader_back_until_it_is_read() {
        let refused = || Reply::Answer(403, status(403, "Forbidden"));
        let absent_for_a_moment = Reply::Answer(404, status(404, "NotFound"));
        let replies = std::iter::repeat_with(refused).take(100).chain([absent_for_a_moment]);
        let server = Server::new(replies.chain([Reply::Answer(200, list(20, &[]))]));
        let (_cache, watch) = standby(&server, &[]);
        let mut waits = std::pin::pin!(watch.catch_up());
        assert!(tokio::time::timeout(RETRY * 99, &mut waits).await.is_err());
        assert!(tokio::time::timeout(RETRY * 5, &mut waits).await.is_ok());
    }

    #[test]
    fn failures_are_logged_once_for_each_reason() {
        let failure = |code: u16| {
            let status = serde_json::from_value(status(code, "x")).unwrap();
            CompareError::List(kube::Error::Api(Box::new(status)))
        };
        let mut failures = Failures::default();
        assert!(!failures.record("things", &failure(404)));
        let first = failures.logged.clone();
        assert!(!failures.record("things", &failure(404)));
        assert_eq!(failures.logged, first, "the same reason is not logged again");
        assert!(failures.absent_since.is_some());
        assert!(!failures.record("things", &failure(500)));
        assert_ne!(failures.logged, first);
        assert!(failures.absent_since.is_none(), "only consecutive answers count");
    }
}
