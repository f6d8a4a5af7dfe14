//! Watches that fill caches, and the comparison of a cache with the API server, see `compare.rs`.

mod compare;

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use daemon::backoff;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Resource,
    api::{ListParams, ObjectList, PartialObjectMeta},
    runtime::watcher,
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::{Cache, Cached, Key, content::version};

/// Objects on a page of a list. An object can have 1.5 MiB, and a page is held as a whole, beside those of other watches.
const PAGE: u32 = 50;
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
/// Interval at which the API server is asked for a resource that it does not serve, and the longest one.
const DISCOVERY: Duration = Duration::from_secs(20);
const LONGEST_DISCOVERY: Duration = Duration::from_secs(120);
/// Longest wait for a resource of other software at the start: one that cannot be listed must not hold everything else back.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for which the API server must not know a resource until it counts as one that is not installed: it may be about to read
/// its definitions.
const ABSENT: Duration = Duration::from_secs(10);
/// Interval at which an unchanged failure is logged again.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// A watch of any resource.
pub(crate) trait Source: Send + Sync {
    /// Watches for ever.
    fn run(self: Arc<Self>) -> BoxFuture<'static, ()>;
    /// Waits until the first list has been read. A resource that is not installed has none.
    fn filled(&self) -> BoxFuture<'_, ()>;
    /// Waits until the cache is as new as the API server was at the call. A resource that is not installed has no objects.
    fn catch_up(&self) -> BoxFuture<'_, ()>;
}

/// How a resource comes into a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Every cluster has it.
    Required,
    /// Other software brings it: it is watched as long as the API server serves it.
    WhenServed,
    /// As `WhenServed`, and controllers must not act as without it for long.
    Awaited,
}

impl Presence {
    /// Returns true for a resource that a cluster may lack.
    fn is_optional(self) -> bool {
        self != Self::Required
    }

    /// Returns the time until the API server is asked again for a resource that it has not served for this time. A replica that does not
    /// act by its cache asks when it takes a lease.
    fn discovery(self, unserved: Duration, acts: bool) -> Duration {
        let is_awaited = self != Self::WhenServed && acts;
        if is_awaited { DISCOVERY } else { (unserved / 4).clamp(DISCOVERY, LONGEST_DISCOVERY) }
    }
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
    presence: Presence,
    synced: watch::Sender<bool>,
    /// Events so far.
    delivered: AtomicU64,
    /// Version up to which the cache lacks no change. 0: unknown.
    complete_to: AtomicU64,
    /// Starts the watch anew.
    restart: Notify,
    /// This replica leads, or has led.
    acts: AtomicBool,
    /// Ends the pause before the API server is asked again for a resource that it does not serve.
    look: Notify,
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
    /// Creates a watch of those objects of `api` for which `convert` returns one.
    pub(crate) fn new(
        cache: &Arc<Cache<K>>,
        api: Api<W>,
        convert: impl Fn(W) -> Option<K> + Send + Sync + 'static,
    ) -> Self {
        Self {
            cache: cache.clone(),
            api,
            config: watcher::Config::default().page_size(PAGE),
            convert: Box::new(convert),
            selects: |_| true,
            keeps_unseen: Box::new(|_| false),
            name: None,
            presence: Presence::Required,
            synced: watch::Sender::new(false),
            delivered: AtomicU64::new(0),
            complete_to: AtomicU64::new(0),
            restart: Notify::new(),
            acts: AtomicBool::new(false),
            look: Notify::new(),
        }
    }

    /// Sets the function that returns true for metadata of objects that are kept.
    pub(crate) fn selecting(mut self, selects: fn(&ObjectMeta) -> bool) -> Self {
        self.selects = selects;
        self
    }

    /// Sets how the resource comes into a cluster.
    pub(crate) fn present(mut self, presence: Presence) -> Self {
        self.presence = presence;
        self
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
        if self.presence.is_optional() {
            if tokio::time::timeout(PATIENCE, self.cache.absent()).await.is_err() {
                tracing::warn!(resource, "the resource cannot be listed, and is not waited for");
            }
            return;
        }
        let mut failures = Failures::default();
        loop {
            // The watch usually reads its first list meanwhile.
            tokio::time::sleep(PAGE_TIMEOUT).await;
            match self.list_one().await {
                Ok(()) => failures = Failures::default(),
                Err(error) if failures.record(resource, &error) => return log_absent(resource),
                Err(_) => {}
            }
        }
    }

    /// Lists one object, which fails if the API server does not serve the resource.
    async fn list_one(&self) -> Result<(), CompareError> {
        let one = ListParams { field_selector: self.config.field_selector.clone(), ..ListParams::default().limit(1) };
        self.page(&one, PAGE_TIMEOUT).await.map(drop)
    }

    /// Returns a page of a list of metadata.
    async fn page(
        &self,
        parameters: &ListParams,
        limit: Duration,
    ) -> Result<ObjectList<PartialObjectMeta<W>>, CompareError> {
        let page = tokio::time::timeout(limit, self.api.list_metadata(parameters)).await;
        Ok(page.map_err(|_| CompareError::Timeout)??)
    }

    fn covers(&self, key: &Key) -> bool {
        self.name.is_none_or(|name| key.name == name)
    }

    /// Waits until the first list has been read.
    async fn synced(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.synced.subscribe().wait_for(|synced| *synced).await;
    }

    /// Waits until the first list has been read. Returns false if the resource counts as one that is not installed.
    async fn is_filled(&self) -> bool {
        tokio::select! {
            () = self.synced() => true,
            () = self.absent(self.api.resource_url()) => false,
        }
    }

    /// Watches for ever.
    async fn follow(&self) {
        loop {
            if self.presence.is_optional() {
                self.served().await;
            }
            tokio::select! {
                () = self.follow_events() => tokio::time::sleep(RETRY).await,
                () = self.restart.notified() => tracing::warn!("watch is silent and is started again"),
            }
        }
    }

    /// Waits until the API server serves the resource. The cache of one that was read stays for a while: the API server may be
    /// about to read its definitions.
    async fn served(&self) {
        let resource = self.api.resource_url();
        let mut unserved_since: Option<Instant> = None;
        let (mut failures, mut in_a_row) = (Failures::default(), 0_u32);
        loop {
            match self.list_one().await {
                Ok(()) => {
                    tracing::info!(resource, "the API server serves the resource, which is watched");
                    return self.cache.set_absent(false);
                }
                Err(error) if error.is_absent() => {
                    in_a_row = 0;
                    let since = *unserved_since.get_or_insert_with(Instant::now);
                    let is_over = !*self.synced.borrow() || since.elapsed() >= ABSENT;
                    if is_over && !self.cache.is_absent() {
                        tracing::info!(resource, "the API server does not serve the resource");
                        self.synced.send_replace(false);
                        self.cache.set_absent(true);
                    }
                }
                Err(error) => {
                    unserved_since = None;
                    in_a_row = in_a_row.saturating_add(1);
                    failures.record(resource, &error);
                }
            }
            let pause = if self.cache.is_absent() {
                let unserved = unserved_since.map_or(Duration::ZERO, |since| since.elapsed());
                self.presence.discovery(unserved, self.acts.load(Ordering::Relaxed))
            } else {
                backoff::pause((RETRY, DISCOVERY), in_a_row)
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.look.notified() => {}
            }
        }
    }

    /// Looks if the API server still does not serve the resource, after long pauses of this replica, which acts from now on.
    async fn look_again(&self) {
        self.acts.store(true, Ordering::Relaxed);
        if !self.cache.is_absent() {
            return;
        }
        let began = Instant::now();
        loop {
            match self.list_one().await {
                Ok(()) => break self.cache.set_absent(false),
                Err(error) if error.is_absent() || began.elapsed() >= PATIENCE => break,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
        self.look.notify_one();
    }

    /// Watches until the API server does not know an optional resource any more.
    async fn follow_events(&self) {
        let mut events = std::pin::pin!(daemon::watch::events(self.api.clone(), self.config.clone()));
        let mut listed: HashSet<Key> = HashSet::new();
        let mut before: Vec<Key> = Vec::new();
        // Version of the newest listed object. That of the list is not known here.
        let mut newest = 0;
        let mut is_complete = false;
        while let Some(event) = events.next().await {
            self.delivered.fetch_add(u64::from(event.is_ok()), Ordering::Relaxed);
            match event {
                Ok(watcher::Event::Init) => {
                    listed.clear();
                    newest = 0;
                    // Answers to writes that arrive while the list is read may be newer than the list.
                    before = self.cache.keys();
                }
                Ok(watcher::Event::InitApply(object)) => {
                    newest = newest.max(version(object.meta()));
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
                    is_complete = true;
                    self.complete_to.store(newest, Ordering::Relaxed);
                    self.synced.send_replace(true);
                }
                Ok(watcher::Event::Apply(object)) => {
                    let (key, uid) = (Key::of(object.meta()), object.meta().uid.clone());
                    let reached = version(object.meta());
                    match (self.convert)(object) {
                        Some(object) => self.cache.apply(object, false),
                        None if self.cache.get(&key).is_some() => {
                            self.cache.lose(&key, uid.as_deref(), None, &self.keeps_unseen);
                        }
                        None => {}
                    }
                    self.complete_to.store(if is_complete { reached } else { 0 }, Ordering::Relaxed);
                }
                Ok(watcher::Event::Delete(object)) => {
                    let (key, uid) = (Key::of(object.meta()), object.meta().uid.clone());
                    let reached = version(object.meta());
                    let last = (self.convert)(object);
                    if last.is_some() || self.cache.get(&key).is_some() {
                        self.cache.lose(&key, uid.as_deref(), last, &self.keeps_unseen);
                    }
                    self.complete_to.store(if is_complete { reached } else { 0 }, Ordering::Relaxed);
                }
                Err(error) if self.presence.is_optional() && is_unknown(&error) => return,
                Err(error) => {
                    tracing::warn!(error = %error, "watch was interrupted");
                    if is_missed(&error) {
                        is_complete = false;
                        self.complete_to.store(0, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}

/// Returns true if an event may be lost. Events that cannot be parsed are reported as an answer with an error, and are not repeated, unlike
/// those of a connection that ended.
fn is_missed(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchFailed(kube::Error::Api(_) | kube::Error::SerdeError(_)))
}

/// Returns true if the API server does not know the resource.
fn is_unknown(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    matches!(error, InitialListFailed(kube::Error::Api(status)) | WatchStartFailed(kube::Error::Api(status)) if status.code == 404)
}

fn log_absent(resource: &str) {
    tracing::warn!(resource, "the API server does not serve the resource, its cache is used as it is");
}

impl<W, K> Source for Watch<W, K>
where
    K: Cached,
    W: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    fn run(self: Arc<Self>) -> BoxFuture<'static, ()> {
        async move { self.follow().await }.boxed()
    }

    fn filled(&self) -> BoxFuture<'_, ()> {
        self.is_filled().map(|_| ()).boxed()
    }

    fn catch_up(&self) -> BoxFuture<'_, ()> {
        async {
            let resource = self.api.resource_url();
            self.look_again().await;
            if !self.is_filled().await {
                return;
            }
            let mut failures = Failures::default();
            let mut restarted: Option<Instant> = None;
            let mut limit = PAGE_TIMEOUT;
            let began = Instant::now();
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
                        // The connection of a silent watch may be dead, which shows only after minutes.
                        let is_silent = self.delivered.load(Ordering::Relaxed) == delivered;
                        if is_silent && restarted.is_none_or(|at| at.elapsed() >= RESTART_INTERVAL) {
                            restarted = Some(Instant::now());
                            self.restart.notify_one();
                        }
                    }
                    Err(error) => {
                        let is_over = self.presence.is_optional() && began.elapsed() >= PATIENCE;
                        if failures.record(resource, &error) || is_over {
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
mod tests;
