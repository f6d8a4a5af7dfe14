//! The configuration object.

use std::sync::Arc;

use api::KubeVirt;

use super::{Caches, declaration::Declaration};
use crate::runtime::Kind;

impl Caches {
    /// Returns the configuration object, unless it is being deleted.
    #[must_use]
    pub(crate) fn kubevirt(&self) -> Option<Arc<KubeVirt>> {
        self.installation().filter(|object| object.metadata.deletion_timestamp.is_none())
    }

    /// Returns the configuration object, whatever its name. One that is being deleted counts if there is no other.
    #[must_use]
    pub(crate) fn installation(&self) -> Option<Arc<KubeVirt>> {
        self.kubevirts.all().into_iter().min_by_key(|object| object.rank())
    }
}

unindexed!(whole KubeVirt);

impl Declaration for KubeVirt {
    type Wire = Self;
    type Kept = Self;
    const WRITTEN: Option<Kind> = Some(Kind::KubeVirt);
    in_install_namespace!();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn observe(caches: &Caches, name: &str, created: &str, deleted: bool) {
        let object = |version: &str, deleted: Option<&str>| -> KubeVirt {
            serde_json::from_value(json!({
                "metadata": {
                    "name": name, "namespace": "kubevirt", "uid": name, "resourceVersion": version,
                    "creationTimestamp": created, "deletionTimestamp": deleted,
                },
                "spec": {},
            }))
            .unwrap()
        };
        caches.kubevirts.observe(object("1", None));
        // An answer about an object that is being deleted counts only if the object is known.
        if deleted {
            caches.kubevirts.observe(object("2", Some("2030-02-01T00:00:00Z")));
        }
    }

    #[test]
    fn oldest_object_counts_and_a_deleted_one_if_there_is_no_other() {
        let caches = Caches::default();
        let names = || {
            let name = |object: Option<Arc<KubeVirt>>| object.and_then(|object| object.metadata.name.clone());
            (name(caches.installation()), name(caches.kubevirt()))
        };
        let text = |name: &str| Some(name.to_owned());
        assert_eq!(names(), (None, None));
        observe(&caches, "deleted", "2030-01-01T00:00:00Z", true);
        assert_eq!(names(), (text("deleted"), None));
        observe(&caches, "a", "2030-01-03T00:00:00Z", false);
        assert_eq!(names(), (text("a"), text("a")));
        observe(&caches, "b", "2030-01-02T00:00:00Z", false);
        assert_eq!(names(), (text("b"), text("b")));
    }
}
