//! The comparison of a cache with the API server.
//!
//! A cache lacks no change up to the version of the last event. A second watch begins there and delivers what has changed since. It ends
//! with a bookmark, which kube-apiserver sends two seconds before the time limit of a watch. Both must reach the version of a list. Where
//! no bookmark comes, the list goes on.

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
    sync::atomic::Ordering,
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Resource,
    api::{ListParams, ObjectList, PartialObjectMeta, WatchEvent, WatchParams},
};
use serde::de::DeserializeOwned;

use super::{CompareError, Watch};
use crate::cache::{
    Cached, Key,
    content::{parse_version, version},
};

/// Objects on a page of a list of metadata. Labels and managed fields alone can have 1.5 MiB, too.
const METADATA_PAGE: u32 = 50;
/// Time limit of a watch of changes in seconds: the least with which kube-apiserver sends a bookmark, about a second after the start.
const CHANGES_TIMEOUT: u32 = 3;

/// A difference between a cache and the API server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// The cache holds no version of the object that is as new.
    Newer { key: Key, uid: String, version: u64 },
    /// The cache holds an object that did not exist at this version.
    Gone { key: Key, version: u64 },
}

impl Difference {
    /// Returns the difference as long as the cache lacks this version of an object.
    pub(super) fn newer(meta: &ObjectMeta) -> Self {
        Self::Newer { key: Key::of(meta), uid: meta.uid.clone().unwrap_or_default(), version: version(meta) }
    }
}

impl<W, K> Watch<W, K>
where
    K: Cached,
    W: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Returns the differences between the cache and the API server, whose pages take at most `limit` each. The version that the cache must
    /// have is that of the first page. Few objects are listed before a bookmark comes, and of many it comes first.
    pub(super) async fn differences(&self, limit: Duration) -> Result<Vec<Difference>, CompareError> {
        // Without a resource version the API server answers with the newest state.
        let parameters = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            ..ListParams::default().limit(METADATA_PAGE)
        };
        let first = self.page(&parameters, limit).await?;
        let wanted = parse_version(first.metadata.resource_version.as_deref());
        tokio::select! {
            // In this order, a list of one page needs no watch.
            biased;
            differences = self.listed(first, parameters, limit) => differences,
            Some(differences) = self.changed(wanted) => Ok(differences),
        }
    }

    /// Returns the differences by what has changed since the last event. `None` if nothing proves that no change up to `wanted` is
    /// missing.
    async fn changed(&self, wanted: u64) -> Option<Vec<Difference>> {
        let known = self.complete_to.load(Ordering::Relaxed);
        if known == 0 || wanted == 0 {
            return None;
        }
        if known >= wanted {
            return Some(Vec::new());
        }
        let parameters = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            ..WatchParams::default().timeout(CHANGES_TIMEOUT)
        };
        let events = self.api.watch_metadata(&parameters, &known.to_string()).await.ok()?;
        let mut events = std::pin::pin!(events);
        let mut changes = HashMap::new();
        while let Some(Ok(event)) = events.next().await {
            if record(&mut changes, event, self.selects)? >= wanted {
                return Some(changes.into_values().filter(|difference| !self.is_settled(difference)).collect());
            }
        }
        None
    }

    /// Returns the differences between the cache and the list of metadata that begins with this page.
    async fn listed(
        &self,
        mut page: ObjectList<PartialObjectMeta<W>>,
        mut parameters: ListParams,
        limit: Duration,
    ) -> Result<Vec<Difference>, CompareError> {
        let mut differences = Vec::new();
        let mut listed: HashSet<Key> = HashSet::new();
        loop {
            let list_version = parse_version(page.metadata.resource_version.as_deref());
            for object in page.items.into_iter().filter(|object| (self.selects)(&object.metadata)) {
                listed.insert(Key::of(&object.metadata));
                differences.push(Difference::newer(&object.metadata));
            }
            differences.retain(|difference| !self.is_settled(difference));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => {
                    parameters = parameters.continue_token(&token);
                    page = self.page(&parameters, limit).await?;
                }
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
    pub(super) fn is_settled(&self, difference: &Difference) -> bool {
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

/// Records a change that a watch reports. Returns the version up to which no change is missing; `None` if the watch has failed.
pub(super) fn record<W>(
    changes: &mut HashMap<Key, Difference>,
    event: WatchEvent<PartialObjectMeta<W>>,
    selects: fn(&ObjectMeta) -> bool,
) -> Option<u64> {
    let (meta, exists) = match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object) => (object.metadata, true),
        WatchEvent::Deleted(object) => (object.metadata, false),
        WatchEvent::Bookmark(bookmark) => return Some(parse_version(Some(&bookmark.metadata.resource_version))),
        WatchEvent::Error(_) => return None,
    };
    let (key, version) = (Key::of(&meta), version(&meta));
    // An object that is not kept may have been kept before.
    let difference = if exists && selects(&meta) {
        Difference::newer(&meta)
    } else {
        Difference::Gone { key: key.clone(), version }
    };
    changes.insert(key, difference);
    Some(version)
}
