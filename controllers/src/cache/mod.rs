//! In-memory copies of watched objects, with named indices. Answers to our own writes are mixed in.
//!
//! Start with [`Cache`]. `watch/` fills caches and compares them with the API server, `content.rs` holds objects and
//! indices, `key.rs` names objects.

mod content;
mod key;
#[cfg(test)]
mod tests;
mod watch;

#[cfg(test)]
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::{
    fmt::Debug,
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use daemon::lock;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch::Sender;

use self::content::Content;
pub(crate) use self::{
    key::Key,
    watch::{Presence, Source, Watch},
};

/// An object that a cache can hold.
pub(crate) trait Cached: Clone + Debug + Send + Sync + 'static {
    /// Names of the indices, each with its value.
    type Index: Clone + Debug + Ord + Send + Sync + 'static;

    /// Returns the metadata.
    fn meta(&self) -> &ObjectMeta;
    /// Drops the parts that no controller reads.
    fn trim(&mut self) {}
    /// Returns the index entries under which the object is found. Must depend on nothing but the object.
    fn indices(&self) -> Vec<Self::Index> {
        Vec::new()
    }
    /// Returns the object as it is kept when the watch shows it no longer although its end was not seen. `None`: the object
    /// counts as deleted.
    fn unseen(&self) -> Option<Self> {
        None
    }
    /// Returns true for an object that [`Cached::unseen`] returned.
    fn is_unseen(&self) -> bool {
        false
    }
}

/// A change in a cache: the former object, if any, and the present one, if any. Neither: the API server serves the resource from
/// now on, or no longer.
pub(crate) type Seen<'a, K> = (Option<&'a K>, Option<&'a K>);

type Listener<K> = Box<dyn Fn(Seen<'_, K>) + Send + Sync>;

/// Objects of one resource by namespace and name.
pub(crate) struct Cache<K: Cached> {
    content: RwLock<Content<K>>,
    listeners: Mutex<Vec<Listener<K>>>,
    absent: Sender<bool>,
    /// Objects that lookups returned or passed.
    #[cfg(test)]
    visited: AtomicUsize,
    /// It was read since the last question.
    #[cfg(test)]
    is_read: AtomicBool,
}

impl<K: Cached> Default for Cache<K> {
    fn default() -> Self {
        Self {
            content: RwLock::new(Content::new()),
            listeners: Mutex::new(Vec::new()),
            absent: Sender::new(false),
            #[cfg(test)]
            visited: AtomicUsize::new(0),
            #[cfg(test)]
            is_read: AtomicBool::new(false),
        }
    }
}

impl<K: Cached> Cache<K> {
    /// Returns the object with this key.
    #[must_use]
    pub(crate) fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.visit(1);
        self.read().objects.get(key).cloned()
    }

    /// Returns the objects of an index entry in the order of their keys.
    #[must_use]
    pub(crate) fn by(&self, index: &K::Index) -> Vec<Arc<K>> {
        let content = self.read();
        let keys = content.indices.get(index).into_iter().flatten();
        let found: Vec<Arc<K>> = keys.filter_map(|key| content.objects.get(key).cloned()).collect();
        self.visit(found.len());
        found
    }

    /// Returns the keys of an index entry in order.
    #[must_use]
    pub(crate) fn keys_by(&self, index: &K::Index) -> Vec<Key> {
        let keys: Vec<Key> = self.read().indices.get(index).into_iter().flatten().map(|key| Key::clone(key)).collect();
        self.visit(keys.len());
        keys
    }

    /// Returns the number of objects of an index entry.
    #[must_use]
    pub(crate) fn count_by(&self, index: &K::Index) -> usize {
        self.visit(1);
        self.read().indices.get(index).map_or(0, std::collections::BTreeSet::len)
    }

    /// Returns the entries of an index in order, each once.
    #[must_use]
    pub(crate) fn entries(&self, range: RangeInclusive<K::Index>) -> Vec<K::Index> {
        let entries: Vec<K::Index> = self.read().indices.range(range).map(|(index, _)| index.clone()).collect();
        self.visit(entries.len());
        entries
    }

    /// Returns the first entry of an index.
    #[must_use]
    pub(crate) fn first_entry(&self, range: RangeInclusive<K::Index>) -> Option<K::Index> {
        self.visit(1);
        self.read().indices.range(range).next().map(|(index, _)| index.clone())
    }

    /// Returns all objects in the order of their keys. Only for caches of a fixed size and for metrics.
    #[must_use]
    pub(crate) fn all(&self) -> Vec<Arc<K>> {
        let content = self.read();
        self.visit(content.objects.len());
        let mut found: Vec<(&Arc<Key>, &Arc<K>)> = content.objects.iter().collect();
        found.sort_by(|left, right| left.0.cmp(right.0));
        found.into_iter().map(|(_, object)| object.clone()).collect()
    }

    /// Returns all keys. Only for the start, for changes of the configuration, and for caches of a fixed size.
    #[must_use]
    pub(crate) fn keys(&self) -> Vec<Key> {
        let content = self.read();
        self.visit(content.objects.len());
        content.objects.keys().map(|key| Key::clone(key)).collect()
    }

    /// Returns the number of objects.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Returns true if the API server does not serve the resource. Without objects, the cache of one that it serves is empty.
    #[must_use]
    pub(crate) fn is_absent(&self) -> bool {
        *self.absent.borrow()
    }

    /// Waits until the API server is known not to serve the resource.
    async fn absent(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.absent.subscribe().wait_for(|absent| *absent).await;
    }

    /// Records if the API server serves the resource. Drops the objects of one that it does not serve.
    fn set_absent(&self, absent: bool) {
        if self.absent.send_replace(absent) == absent {
            return;
        }
        if absent {
            self.keys().iter().for_each(|key| self.observe_deleted(key, None));
        }
        self.notify((None, None));
    }

    /// Calls `listener` with each change from now on. It must not block.
    pub(crate) fn listen(&self, listener: impl Fn(Seen<'_, K>) + Send + Sync + 'static) {
        lock(&self.listeners).push(Box::new(listener));
    }

    /// Stores the answer to one of our writes, unless a newer version is known.
    pub(crate) fn observe(&self, object: K) {
        self.apply(object, true);
    }

    /// Removes an object that an answer reports as deleted.
    pub(crate) fn observe_deleted(&self, key: &Key, uid: Option<&str>) {
        let former = {
            let mut content = self.write();
            let known = content.objects.get(key).and_then(|object| object.meta().uid.clone());
            if let Some(gone) = uid.map(str::to_owned).or_else(|| known.clone()) {
                content.bury(&gone);
            }
            if uid.is_some() && known.as_deref() != uid {
                return;
            }
            content.remove(key)
        };
        if let Some(former) = former {
            self.notify((Some(&former), None));
        }
    }

    /// Returns true when the object with this UID is known to be deleted. Only the latest deletions are remembered, so false
    /// proves nothing.
    #[must_use]
    pub(crate) fn is_gone(&self, uid: &str) -> bool {
        self.read().is_buried(uid)
    }

    /// Drops the objects of an index entry that no watch shows.
    pub(crate) fn forget_unseen(&self, index: &K::Index) {
        for object in self.by(index).into_iter().filter(|object| object.is_unseen()) {
            self.observe_deleted(&Key::of(object.meta()), object.meta().uid.as_deref());
        }
    }

    /// Handles an object that a watch shows no longer. `last` is its last version, if the watch reported one. An object
    /// whose end was not seen stays as [`Cached::unseen`] returns it, if `is_kept` returns true.
    fn lose(&self, key: &Key, uid: Option<&str>, last: Option<K>, is_kept: impl Fn(&K) -> bool) {
        let known = self.get(key).filter(|known| uid.is_none() || known.meta().uid.as_deref() == uid);
        let kept = known.and_then(|known| last.as_ref().unwrap_or(&*known).unseen()).filter(is_kept);
        let Some(kept) = kept else {
            self.observe_deleted(key, uid);
            return;
        };
        let kept = Arc::new(kept);
        let former = self.write().insert(key.clone(), kept.clone());
        self.notify((former.as_deref(), Some(&kept)));
    }

    fn apply(&self, mut object: K, is_answer: bool) {
        let key = Key::of(object.meta());
        // The watch brings back each of our writes.
        if self.content.read().unwrap_or_else(PoisonError::into_inner).has(&key, object.meta()) {
            return;
        }
        object.trim();
        let object = Arc::new(object);
        let former = {
            let mut content = self.write();
            if content.has(&key, object.meta()) {
                return;
            }
            if is_answer && object.meta().uid.as_ref().is_some_and(|uid| content.is_buried(uid)) {
                return;
            }
            // The end of an object that is being deleted may have been seen before more deletions than are remembered.
            if is_answer && object.meta().deletion_timestamp.is_some() && !content.objects.contains_key(&key) {
                return;
            }
            content.insert(key, object.clone())
        };
        self.notify((former.as_deref(), Some(&object)));
    }

    fn notify(&self, seen: Seen<'_, K>) {
        for listener in lock(&self.listeners).iter() {
            listener(seen);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Content<K>> {
        #[cfg(test)]
        self.is_read.store(true, Ordering::Relaxed);
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Content<K>> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    fn visit(&self, objects: usize) {
        self.visited.fetch_add(objects, Ordering::Relaxed);
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    fn visit(&self, _objects: usize) {}

    /// Returns the number of objects that lookups returned or passed so far.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn visited(&self) -> usize {
        self.visited.load(Ordering::Relaxed)
    }

    /// Returns true if the cache was read since the last call.
    #[cfg(test)]
    pub(crate) fn take_read(&self) -> bool {
        self.is_read.swap(false, Ordering::Relaxed)
    }
}

/// Drops the parts of metadata that no controller reads.
pub(crate) fn trim_meta(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
    meta.self_link = None;
    if let Some(annotations) = &mut meta.annotations {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
}
