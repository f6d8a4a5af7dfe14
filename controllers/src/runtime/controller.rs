//! The trait of controllers, and the handle by which watched changes reach their queues.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard},
};

use api::config::ClusterConfig;
use daemon::lock;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    decision::{Decision, Failures},
    queue::Queue,
};
use crate::{
    cache::{Cache, Cached, Key},
    shards::LEADER,
};

/// A controller: from a changed object to a decision about it. All IO is done by the runtime.
pub(crate) trait Controller: Send + Sync + 'static {
    /// Name in logs and metrics.
    const NAME: &'static str;
    /// Keys that are worked on at a time.
    const WORKERS: usize = 1;
    /// Metrics count the decisions about each object. True for VMIs only, because the metric does not contain the controller.
    const COUNTS_SYNCS: bool = false;
    /// Its keys are divided among the replicas. False for a controller that keeps facts of several VMs in memory, or limits something in
    /// the whole cluster, or depends on the order in which another controller of the leader writes.
    const SHARDED: bool = false;
    /// Resources whose caches have to be filled before the first decision.
    const NEEDS: Needs;
    /// The caches.
    type Caches: Send + Sync + 'static;
    /// Everything that a decision depends on.
    type Observed: Send + 'static;

    /// Returns the VM that a key of a sharded controller belongs to: all decisions about a VM are made in one process.
    fn vm(_caches: &Self::Caches, key: &Key) -> Key {
        key.clone()
    }

    /// Registers the changes that wake keys. Listeners must not block.
    fn watch(&self, caches: &Arc<Self::Caches>, wake: &Wake);

    /// Wakes the keys that a change of the configuration concerns.
    fn config_changed(&self, _caches: &Self::Caches, _change: &ConfigChange, _wake: &Wake) {}

    /// Collects the objects that the decision about a key depends on. `None`: nothing is to be decided.
    fn observe(&self, caches: &Self::Caches, attempt: &Attempt<'_>) -> Option<Self::Observed>;

    /// Returns the object that the key names, for logs and traces.
    fn subject<'a>(&self, _observed: &'a Self::Observed) -> Option<&'a ObjectMeta> {
        None
    }

    /// Returns true while the object starts, so that its reconciles belong to the trace of its start.
    fn is_starting(&self, _observed: &Self::Observed) -> bool {
        false
    }

    /// Decides. The same observation yields the same decision, except for random numbers. An error means that an object cannot
    /// be written as JSON, which is a defect.
    fn decide(&self, observed: &Self::Observed) -> Result<Decision, serde_json::Error>;
}

/// A set of resources, by their numbers. A controller starts when the caches of those that it needs are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs(u64);

impl Needs {
    /// The empty set.
    pub(crate) const NONE: Self = Self(0);

    /// Adds a resource.
    pub(crate) const fn with(self, number: u32) -> Self {
        Self(self.0 | 1 << number)
    }

    /// Returns true if the set contains all resources of another.
    pub(crate) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A change of the cluster configuration.
#[derive(Clone, Debug)]
pub(crate) struct ConfigChange {
    /// The former configuration.
    pub former: Arc<ClusterConfig>,
    /// The present configuration.
    pub present: Arc<ClusterConfig>,
}

/// The circumstances of one observation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt<'a> {
    /// The key.
    pub key: &'a Key,
    /// The writes for the key that were refused.
    pub failures: &'a Failures,
    /// The current time.
    pub now: Timestamp,
}

type Seed = Box<dyn Fn() -> Vec<Key> + Send + Sync>;

/// The shards of the keys of a sharded controller.
#[derive(Clone)]
struct Placement {
    shard_of: Arc<dyn Fn(&Key) -> u32 + Send + Sync>,
    /// The shards that this process holds.
    held: Arc<Mutex<BTreeSet<u32>>>,
}

/// Wakes keys of one controller. Cheap to clone. Does nothing on a standby, whose queue is closed, and for keys of shards that other
/// replicas hold.
#[derive(Clone, Default)]
pub(crate) struct Wake {
    pub(super) queue: Arc<Queue<Key>>,
    failures: Arc<Mutex<HashMap<Key, Failures>>>,
    seeds: Arc<Mutex<Vec<Seed>>>,
    /// `None`: all keys are in the shard of the leader.
    placement: Option<Placement>,
}

impl Wake {
    /// Creates a handle for the keys of several shards.
    pub(super) fn placed(shard_of: impl Fn(&Key) -> u32 + Send + Sync + 'static) -> Self {
        let placement = Placement { shard_of: Arc::new(shard_of), held: Arc::default() };
        Self { placement: Some(placement), ..Self::default() }
    }

    /// Returns the shard of a key.
    pub(super) fn shard(&self, key: &Key) -> u32 {
        self.placement.as_ref().map_or(LEADER, |placement| (placement.shard_of)(key))
    }

    /// Queues a key.
    pub(crate) fn key(&self, key: Key) {
        if let Some(placement) = &self.placement {
            let shard = (placement.shard_of)(&key);
            if !lock(&placement.held).contains(&shard) {
                return;
            }
        }
        self.queue.add(key);
    }

    /// Queues a key whose refused write may succeed now.
    pub(crate) fn retry(&self, key: Key) {
        self.forget(&key);
        self.key(key);
    }

    /// Queues keys.
    pub(crate) fn keys(&self, keys: impl IntoIterator<Item = Key>) {
        keys.into_iter().for_each(|key| self.key(key));
    }

    /// Queues the keys that `keys` returns for a change of a cache: for the former object, if any, and the present one, if any.
    pub(crate) fn on<K: Cached, I: IntoIterator<Item = Key>>(
        &self,
        cache: &Cache<K>,
        keys: impl Fn(Option<&K>, Option<&K>) -> I + Send + Sync + 'static,
    ) {
        let wake = self.clone();
        cache.listen(move |(former, present)| wake.keys(keys(former, present)));
    }

    /// Queues the keys that `keys` returns for an object that has appeared, changed or gone.
    pub(crate) fn on_object<K: Cached, I: IntoIterator<Item = Key>>(
        &self,
        cache: &Cache<K>,
        keys: impl Fn(&K) -> I + Send + Sync + 'static,
    ) {
        self.on(cache, move |former, present| present.or(former).map(&keys).into_iter().flatten());
    }

    /// Queues a key when a fact of an object changes. An object that does not exist has the fact of `None`.
    pub(crate) fn key_on_change<K: Cached, F: PartialEq>(
        &self,
        cache: &Cache<K>,
        key: &Key,
        fact: impl Fn(Option<&K>) -> F + Send + Sync + 'static,
    ) {
        let key = key.clone();
        self.on(cache, move |former, present| (fact(former) != fact(present)).then(|| key.clone()));
    }

    /// Queues a key on any change of a cache.
    pub(crate) fn key_on<K: Cached>(&self, cache: &Cache<K>, key: &Key) {
        let key = key.clone();
        self.on(cache, move |_, _| [key.clone()]);
    }

    /// Queues the objects of a cache when the API server begins or ceases to serve another kind.
    pub(crate) fn all_on_presence<K: Cached, O: Cached>(&self, kind: &Cache<K>, cache: &Arc<Cache<O>>) {
        let cache = cache.clone();
        self.on(kind, move |former, present| match (former, present) {
            (None, None) => cache.keys(),
            _ => Vec::new(),
        });
    }

    /// Queues the objects of a cache at the start and when they change, and forgets refusals of deleted objects.
    pub(crate) fn objects_of<K: Cached>(&self, cache: &Arc<Cache<K>>) {
        let wake = self.clone();
        cache.listen(move |(former, present)| {
            let Some(object) = present.or(former) else { return };
            let key = Key::of(object.meta());
            // Another object of the name is another attempt.
            if former.is_some_and(|former| present.is_none_or(|present| former.meta().uid != present.meta().uid)) {
                wake.forget(&key);
            }
            wake.key(key);
        });
        let cache = cache.clone();
        self.at_start(move || cache.keys());
    }

    /// Queues these keys at the start.
    pub(crate) fn at_start(&self, keys: impl Fn() -> Vec<Key> + Send + Sync + 'static) {
        lock(&self.seeds).push(Box::new(keys));
    }

    /// Opens the queue for a shard and queues its keys of the start.
    pub(super) fn open(&self, shard: u32) {
        if let Some(placement) = &self.placement {
            lock(&placement.held).insert(shard);
        }
        self.queue.open();
        for seed in lock(&self.seeds).iter() {
            self.keys(seed().into_iter().filter(|key| self.shard(key) == shard));
        }
    }

    /// Queues no further keys of a shard, and forgets their refusals: others decide about them now.
    pub(super) fn close(&self, shard: u32) {
        if let Some(placement) = &self.placement {
            lock(&placement.held).remove(&shard);
            let refused: Vec<Key> = self.failures().keys().cloned().collect();
            refused.iter().filter(|key| self.shard(key) == shard).for_each(|key| self.forget(key));
        }
    }

    /// Opens the queue, takes what waits in it, and releases it.
    #[cfg(test)]
    pub(crate) fn woken(&self) -> Vec<Key> {
        self.queue.open();
        let keys: Vec<Key> = std::iter::from_fn(|| self.queue.pop()).map(|taken| taken.key).collect();
        for key in &keys {
            self.queue.done(key, false);
        }
        keys
    }

    /// Returns the refusals of a key.
    pub(super) fn failures_of(&self, key: &Key) -> Failures {
        self.failures().get(key).cloned().unwrap_or_default()
    }

    pub(super) fn failures(&self) -> MutexGuard<'_, HashMap<Key, Failures>> {
        lock(&self.failures)
    }

    /// Forgets the refusals of a key.
    pub(super) fn forget(&self, key: &Key) {
        self.failures().remove(key);
    }
}
