//! Objects of one cache with their indices. Not synchronized: [`super::Cache`] holds the lock.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Cached, Key};

/// UIDs of deleted objects that are remembered. The answer to a write may arrive after the watch reported the deletion and
/// must not restore the object. A pod that was searched for in vain is not searched for again, so there must be more of them than
/// VMIs that can end at the same time.
const TOMBSTONES: usize = 1 << 16;

/// Objects, indices and tombstones.
pub(super) struct Content<K: Cached> {
    pub(super) objects: HashMap<Arc<Key>, Arc<K>>,
    /// Keys in order, so that lookups are deterministic. They are shared with `objects`: an object has many index entries, most of
    /// which have no other.
    pub(super) indices: BTreeMap<K::Index, BTreeSet<Arc<Key>>>,
    /// Hashes of 64 bits: a UID takes a tenth of the memory, and two of them never meet in practice.
    buried: HashSet<u64>,
    /// The same in order.
    tombstones: VecDeque<u64>,
    hasher: RandomState,
}

impl<K: Cached> Content<K> {
    pub(super) fn new() -> Self {
        Self {
            objects: HashMap::new(),
            indices: BTreeMap::new(),
            buried: HashSet::new(),
            tombstones: VecDeque::new(),
            hasher: RandomState::new(),
        }
    }

    /// Returns true if the object of the key is known in the version of `meta`, or in a newer one.
    pub(super) fn has(&self, key: &Key, meta: &ObjectMeta) -> bool {
        self.objects
            .get(key)
            .map(|known| known.meta())
            .is_some_and(|known| version(known) > version(meta) || known.resource_version == meta.resource_version)
    }

    /// Stores an object. Returns the former one of the key.
    pub(super) fn insert(&mut self, key: Key, object: Arc<K>) -> Option<Arc<K>> {
        let known = self.objects.get_key_value(&key).map(|(key, former)| (key.clone(), former.clone()));
        let (key, former) = known.map_or_else(|| (Arc::new(key), None), |(key, former)| (key, Some(former)));
        let (before, now) = (former.as_ref().map(|former| former.indices()).unwrap_or_default(), object.indices());
        // Few changes concern an index.
        if before != now {
            self.remove_entries(&key, before);
            for index in now {
                self.indices.entry(index).or_default().insert(key.clone());
            }
        }
        self.objects.insert(key, object);
        former
    }

    /// Removes an object with its index entries.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Arc<K>> {
        let former = self.objects.remove(key)?;
        self.remove_entries(key, former.indices());
        Some(former)
    }

    fn remove_entries(&mut self, key: &Key, indices: Vec<K::Index>) {
        for index in indices {
            if let Some(keys) = self.indices.get_mut(&index) {
                keys.remove(key);
                if keys.is_empty() {
                    self.indices.remove(&index);
                }
            }
        }
    }

    /// Remembers that the object with this UID is deleted.
    pub(super) fn bury(&mut self, uid: &str) {
        let uid = self.hasher.hash_one(uid);
        if !self.buried.insert(uid) {
            return;
        }
        if self.tombstones.len() >= TOMBSTONES
            && let Some(oldest) = self.tombstones.pop_front()
        {
            self.buried.remove(&oldest);
        }
        self.tombstones.push_back(uid);
    }

    /// Returns true if a deletion of the object with this UID is remembered.
    pub(super) fn is_buried(&self, uid: &str) -> bool {
        self.buried.contains(&self.hasher.hash_one(uid))
    }
}

/// Returns the resource version as a number. Versions of one resource can be compared (KEP-5504).
pub(super) fn version(meta: &ObjectMeta) -> u64 {
    parse_version(meta.resource_version.as_deref())
}

/// Parses a resource version. Returns 0 if there is none.
pub(super) fn parse_version(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}
