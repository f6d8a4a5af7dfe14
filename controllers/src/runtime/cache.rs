//! Caches of what is watched, with the answers to our own writes mixed in.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt::Debug,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt, watcher},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::Key;

/// UIDs of deleted objects that are remembered. An answer to a write may arrive after the watch has told of the
/// deletion; it must not bring the object back. The time between the two is seconds, the deletions in it few.
const TOMBSTONES: usize = 1024;

/// What can be kept in a cache.
pub trait Cached: Clone + Debug + Send + Sync + 'static {
    /// The object's metadata.
    fn meta(&self) -> &ObjectMeta;
    /// Drops what nobody reads.
    fn trim(&mut self) {}
    /// UIDs under which the object is found by [`Cache::owned_by`]: by default that of its controller.
    fn index(&self) -> Option<String> {
        api::owner::controller(self.meta()).map(|owner| owner.uid.clone())
    }
    /// The object as it is kept when its watch shows it no longer although its end was not seen; `None`: it counts as deleted.
    fn unseen(&self) -> Option<Self> {
        None
    }
    /// True for an object as [`Cached::unseen`] returns it.
    fn is_unseen(&self) -> bool {
        false
    }
}

/// Drops the parts of metadata that no controller reads.
pub fn trim_meta(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
    meta.self_link = None;
    if let Some(annotations) = &mut meta.annotations {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
}

struct Content<K> {
    objects: HashMap<Key, Arc<K>>,
    index: HashMap<String, HashSet<Key>>,
    tombstones: VecDeque<String>,
}

impl<K: Cached> Content<K> {
    fn insert(&mut self, key: Key, object: Arc<K>) -> Option<Arc<K>> {
        let former = self.remove(&key);
        if let Some(index) = object.index() {
            self.index.entry(index).or_default().insert(key.clone());
        }
        self.objects.insert(key, object);
        former
    }

    fn remove(&mut self, key: &Key) -> Option<Arc<K>> {
        let former = self.objects.remove(key)?;
        if let Some(index) = former.index()
            && let Some(keys) = self.index.get_mut(&index)
        {
            keys.remove(key);
            if keys.is_empty() {
                self.index.remove(&index);
            }
        }
        Some(former)
    }

    fn bury(&mut self, uid: String) {
        if self.tombstones.contains(&uid) {
            return;
        }
        if self.tombstones.len() >= TOMBSTONES {
            self.tombstones.pop_front();
        }
        self.tombstones.push_back(uid);
    }
}

/// A change seen in a cache: the former version, if any, and the present one, if any.
pub type Seen<'a, K> = (Option<&'a K>, Option<&'a K>);

type Listener<K> = Box<dyn Fn(Seen<'_, K>) + Send + Sync>;

/// Objects of one kind by namespace and name.
pub struct Cache<K> {
    content: RwLock<Content<K>>,
    listeners: Mutex<Vec<Listener<K>>>,
    /// How many watches have been read once.
    synced: watch::Sender<usize>,
}

impl<K: Cached> Default for Cache<K> {
    fn default() -> Self {
        Self {
            content: RwLock::new(Content {
                objects: HashMap::new(),
                index: HashMap::new(),
                tombstones: VecDeque::new(),
            }),
            listeners: Mutex::new(Vec::new()),
            synced: watch::Sender::new(0),
        }
    }
}

impl<K: Cached> Cache<K> {
    /// The object with this key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.content.read().unwrap_or_else(PoisonError::into_inner).objects.get(key).cloned()
    }

    /// Objects whose controller (or other index, see [`Cached::index`]) has this UID, in order of their names.
    #[must_use]
    pub fn owned_by(&self, uid: &str) -> Vec<Arc<K>> {
        let content = self.content.read().unwrap_or_else(PoisonError::into_inner);
        let Some(keys) = content.index.get(uid) else { return Vec::new() };
        let mut keys: Vec<&Key> = keys.iter().collect();
        keys.sort();
        keys.into_iter().filter_map(|key| content.objects.get(key).cloned()).collect()
    }

    /// All objects for which `wanted` holds, in order of their names.
    #[must_use]
    pub fn filter(&self, wanted: impl Fn(&K) -> bool) -> Vec<Arc<K>> {
        let content = self.content.read().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<(&Key, &Arc<K>)> = content.objects.iter().filter(|(_, object)| wanted(object)).collect();
        found.sort_by(|left, right| left.0.cmp(right.0));
        found.into_iter().map(|(_, object)| object.clone()).collect()
    }

    /// All keys.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.content.read().unwrap_or_else(PoisonError::into_inner).objects.keys().cloned().collect()
    }

    /// Number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.content.read().unwrap_or_else(PoisonError::into_inner).objects.len()
    }

    /// True when nothing is cached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `listener` with each change from now on. It must not block.
    pub fn listen(&self, listener: impl Fn(Seen<'_, K>) + Send + Sync + 'static) {
        self.listeners().push(Box::new(listener));
    }

    /// Waits until the first list has been read.
    pub async fn synced(&self) {
        self.synced_all(1).await;
    }

    /// Waits until the first lists of `watches` watches have been read.
    pub async fn synced_all(&self, watches: usize) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.synced.subscribe().wait_for(|synced| *synced >= watches).await;
    }

    /// Takes the answer to one of our writes, unless something newer is known.
    pub fn observe(&self, object: K) {
        self.apply(object, true);
    }

    /// Takes the answer that an object is gone.
    pub fn observe_deleted(&self, key: &Key, uid: Option<&str>) {
        let former = {
            let mut content = self.content.write().unwrap_or_else(PoisonError::into_inner);
            let known = content.objects.get(key).and_then(|object| object.meta().uid.clone());
            if let Some(gone) = uid.map(str::to_owned).or_else(|| known.clone()) {
                content.bury(gone);
            }
            if uid.is_some() && known.as_deref() != uid {
                return;
            }
            content.remove(key)
        };
        if let Some(former) = former {
            self.tell((Some(&former), None));
        }
    }

    /// True when the object with this UID is known to be deleted. False says nothing: only the latest deletions are remembered.
    #[must_use]
    pub fn is_gone(&self, uid: &str) -> bool {
        let content = self.content.read().unwrap_or_else(PoisonError::into_inner);
        content.tombstones.iter().any(|gone| gone == uid)
    }

    /// Takes the news that a watch does not show an object any more. `last` is its last version, if the watch told it. An object whose
    /// end was not seen stays, as [`Cached::unseen`] says, if `wanted` wants it.
    fn lose(&self, key: &Key, uid: Option<&str>, last: Option<K>, wanted: impl Fn(&K) -> bool) {
        let known = self.get(key).filter(|known| uid.is_none() || known.meta().uid.as_deref() == uid);
        let kept = known.and_then(|known| last.as_ref().unwrap_or(&*known).unseen()).filter(wanted);
        let Some(kept) = kept else {
            self.observe_deleted(key, uid);
            return;
        };
        let kept = Arc::new(kept);
        let former = {
            let mut content = self.content.write().unwrap_or_else(PoisonError::into_inner);
            content.insert(key.clone(), kept.clone())
        };
        self.tell((former.as_deref(), Some(&kept)));
    }

    /// Drops the objects of an owner that no watch shows.
    pub fn forget_unseen(&self, owner: &str) {
        for object in self.owned_by(owner).into_iter().filter(|object| object.is_unseen()) {
            self.observe_deleted(&Key::of(object.meta()), object.meta().uid.as_deref());
        }
    }

    fn apply(&self, mut object: K, answer: bool) {
        object.trim();
        let key = Key::of(object.meta());
        let object = Arc::new(object);
        let former = {
            let mut content = self.content.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = content.objects.get(&key)
                && (version(known.meta()) > version(object.meta())
                    || (answer && known.meta().resource_version == object.meta().resource_version))
            {
                return;
            }
            if answer && object.meta().uid.as_ref().is_some_and(|uid| content.tombstones.contains(uid)) {
                return;
            }
            content.insert(key, object.clone())
        };
        // The watch brings back each of our writes; that is no change.
        if former.as_ref().is_some_and(|former| former.meta().resource_version == object.meta().resource_version) {
            return;
        }
        self.tell((former.as_deref(), Some(&object)));
    }

    fn tell(&self, seen: Seen<'_, K>) {
        for listener in self.listeners().iter() {
            listener(seen);
        }
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Listener<K>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches `api` and keeps the cache up to date, for ever. `convert` makes the cached object of the watched one.
    pub async fn follow<W>(
        self: Arc<Self>,
        api: Api<W>,
        config: watcher::Config,
        convert: impl Fn(W) -> K + Send + Sync + 'static,
    ) where
        W: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        self.follow_where(api, config, move |object| Some(convert(object)), |_| true, |_| false).await;
    }

    /// As [`Cache::follow`], for those of the watched objects of which `convert` makes one to be cached. An object whose end was not
    /// seen stays if `wanted` wants it, see [`Cached::unseen`].
    pub async fn follow_some<W>(
        self: Arc<Self>,
        api: Api<W>,
        config: watcher::Config,
        convert: impl Fn(W) -> Option<K> + Send + Sync + 'static,
        wanted: impl Fn(&K) -> bool + Send + Sync + 'static,
    ) where
        W: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        self.follow_where(api, config, convert, |_| true, wanted).await;
    }

    /// As [`Cache::follow`], for a watch of the one object `name` in a cache that other watches fill as well.
    pub async fn follow_one<W>(
        self: Arc<Self>,
        api: Api<W>,
        config: watcher::Config,
        name: &'static str,
        convert: impl Fn(W) -> K + Send + Sync + 'static,
    ) where
        W: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let one = move |key: &Key| key.name == name;
        self.follow_where(api, config, move |object| Some(convert(object)), one, |_| false).await;
    }

    /// `covers` tells which keys this watch is to know of: those it does not list are gone.
    async fn follow_where<W>(
        self: Arc<Self>,
        api: Api<W>,
        config: watcher::Config,
        convert: impl Fn(W) -> Option<K> + Send + Sync + 'static,
        covers: impl Fn(&Key) -> bool + Send + Sync + 'static,
        wanted: impl Fn(&K) -> bool + Send + Sync + 'static,
    ) where
        W: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut events = std::pin::pin!(watcher::watcher(api, config).default_backoff());
        let mut listed: HashSet<Key> = HashSet::new();
        let mut before: Vec<Key> = Vec::new();
        let mut first = true;
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => {
                    listed.clear();
                    // What answers to writes bring while the list is read may be newer than the list.
                    before = self.keys();
                }
                Ok(watcher::Event::InitApply(object)) => {
                    // An object that is not kept counts as not listed: it may have been kept before.
                    if let Some(object) = convert(object) {
                        listed.insert(Key::of(object.meta()));
                        self.apply(object, false);
                    }
                }
                Ok(watcher::Event::InitDone) => {
                    for key in std::mem::take(&mut before) {
                        if covers(&key) && !listed.contains(&key) {
                            self.lose(&key, None, None, &wanted);
                        }
                    }
                    listed = HashSet::new();
                    if std::mem::take(&mut first) {
                        self.synced.send_modify(|synced| *synced += 1);
                    }
                }
                Ok(watcher::Event::Apply(object)) => {
                    let (key, uid) = (Key::of(object.meta()), object.meta().uid.clone());
                    match convert(object) {
                        Some(object) => self.apply(object, false),
                        None if self.get(&key).is_some() => self.lose(&key, uid.as_deref(), None, &wanted),
                        None => {}
                    }
                }
                Ok(watcher::Event::Delete(object)) => {
                    let (key, uid) = (Key::of(object.meta()), object.meta().uid.clone());
                    let last = convert(object);
                    if last.is_some() || self.get(&key).is_some() {
                        self.lose(&key, uid.as_deref(), last, &wanted);
                    }
                }
                Err(error) => tracing::warn!(error = %error, "watch was interrupted"),
            }
        }
    }
}

/// Resource versions of one kind can be compared as numbers.
fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Clone, Debug)]
    struct Thing(ObjectMeta);
    impl Cached for Thing {
        fn meta(&self) -> &ObjectMeta {
            &self.0
        }
    }

    fn thing(uid: &str, resource_version: &str) -> Thing {
        Thing(ObjectMeta {
            name: Some("a".to_owned()),
            namespace: Some("n".to_owned()),
            uid: Some(uid.to_owned()),
            resource_version: Some(resource_version.to_owned()),
            ..ObjectMeta::default()
        })
    }

    fn known(cache: &Cache<Thing>) -> Option<String> {
        cache.get(&Key::new("n", "a")).and_then(|object| object.0.resource_version.clone())
    }

    #[test]
    fn older_answer_does_not_replace_a_newer_version() {
        let cache = Cache::default();
        cache.apply(thing("u", "10"), false);
        cache.observe(thing("u", "9"));
        assert_eq!(known(&cache).as_deref(), Some("10"));
        cache.observe(thing("u", "11"));
        assert_eq!(known(&cache).as_deref(), Some("11"));
    }

    #[test]
    fn own_write_coming_back_is_no_change() {
        let cache = Cache::default();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        cache.listen(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        cache.observe(thing("u", "5"));
        cache.apply(thing("u", "5"), false);
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn late_answer_does_not_bring_back_a_deleted_object() {
        let cache = Cache::default();
        cache.apply(thing("u", "5"), false);
        cache.observe_deleted(&Key::new("n", "a"), Some("u"));
        cache.observe(thing("u", "4"));
        assert_eq!(known(&cache), None);
    }

    #[derive(Clone, Debug)]
    struct Doubtful(Thing, bool);
    impl Cached for Doubtful {
        fn meta(&self) -> &ObjectMeta {
            &self.0.0
        }
        fn unseen(&self) -> Option<Self> {
            self.meta().deletion_timestamp.is_none().then(|| Self(self.0.clone(), true))
        }
        fn is_unseen(&self) -> bool {
            self.1
        }
    }

    #[test]
    fn object_whose_end_was_not_seen_stays_while_it_is_wanted() {
        let key = Key::new("n", "a");
        let doubtful = || Doubtful(thing("u", "5"), false);
        let ended = || {
            let mut ended = doubtful();
            ended.0.0.deletion_timestamp = serde_json::from_value(serde_json::json!("2030-01-01T00:00:00Z")).unwrap();
            ended
        };
        for (uid, last, wanted, kept) in [
            (Some("u"), Some(doubtful()), true, true),
            (None, None, true, true),
            (Some("u"), Some(ended()), true, false),
            (Some("u"), Some(doubtful()), false, false),
        ] {
            let cache = Cache::default();
            cache.apply(doubtful(), false);
            cache.lose(&key, uid, last, |_| wanted);
            assert_eq!(cache.get(&key).is_some_and(|object| object.is_unseen()), kept);
            assert_eq!((cache.get(&key).is_some(), cache.is_gone("u")), (kept, !kept));
        }
        // The end of a former object of the name.
        let cache = Cache::default();
        cache.apply(doubtful(), false);
        cache.lose(&key, Some("old"), None, |_| true);
        assert!(cache.get(&key).is_some_and(|object| !object.is_unseen()) && cache.is_gone("old"));
    }

    #[test]
    fn deletion_of_a_former_object_of_the_name_is_ignored() {
        let cache = Cache::default();
        cache.apply(thing("new", "5"), false);
        cache.observe_deleted(&Key::new("n", "a"), Some("old"));
        assert_eq!(known(&cache).as_deref(), Some("5"));
    }
}
