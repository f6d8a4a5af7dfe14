//! Answers to writes, stored in the caches.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Event, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::api::ObjectList;
use serde_json::Value;

use super::{
    Caches, Resource,
    claim_facts::{ClaimUsers, ClaimWarning},
    declaration::{Declaration, Visitor},
    pod_warnings::{self, PodWarning},
};
use crate::{
    cache::{Cache, Key},
    runtime::{Answers, ClaimUser, Kind},
};

/// Stores an object that was written in the cache that it belongs to.
struct Written {
    kind: Kind,
    object: Option<Value>,
}

impl Visitor for Written {
    fn visit<D: Declaration>(&mut self, _resource: Resource, cache: &Arc<Cache<D::Kept>>) {
        let is_of = |object: &mut Value| D::WRITTEN == Some(self.kind) && D::SELECTION.selects(object);
        let Some(object) = self.object.take_if(is_of) else { return };
        match serde_json::from_value(object) {
            Ok(object) => D::keep(object).into_iter().for_each(|object| cache.observe(object)),
            // The watch delivers the object anyway.
            Err(error) => {
                tracing::warn!(resource = self.kind.plural(), %error, "answer of the API server cannot be read")
            }
        }
    }
}

/// Removes an object that was deleted.
struct Deleted<'a> {
    kind: Kind,
    key: Key,
    uid: Option<&'a str>,
}

impl Visitor for Deleted<'_> {
    fn visit<D: Declaration>(&mut self, _resource: Resource, cache: &Arc<Cache<D::Kept>>) {
        if D::WRITTEN == Some(self.kind) {
            cache.observe_deleted(&self.key, self.uid);
        }
    }
}

impl Answers for Caches {
    fn is_terminating(&self, namespace: &str) -> bool {
        let known = self.namespaces.get(&Key::cluster_wide(namespace));
        known.is_some_and(|namespace| namespace.metadata.deletion_timestamp.is_some())
    }

    fn written(&self, kind: Kind, object: Value) {
        self.each(&mut Written { kind, object: Some(object) });
    }

    fn deleted(&self, kind: Kind, namespace: Option<&str>, name: &str, uid: Option<&str>) {
        self.each(&mut Deleted { kind, key: Key::new(namespace.unwrap_or_default(), name), uid });
    }

    fn warned(&self, namespace: &str, pod: &str, uid: &str, events: &ObjectList<Event>) {
        let known = self.pods.get(&Key::new(namespace, pod));
        let Some(known) = known.filter(|known| known.metadata.uid.as_deref() == Some(uid)) else { return };
        self.warnings.observe(PodWarning {
            metadata: ObjectMeta {
                name: Some(pod.to_owned()),
                namespace: Some(namespace.to_owned()),
                uid: Some(uid.to_owned()),
                resource_version: events.metadata.resource_version.clone(),
                ..ObjectMeta::default()
            },
            read_at: Timestamp::now(),
            warning: pod_warnings::newest(&events.items, known.has_network),
        });
    }
    fn warned_of_claim(&self, namespace: &str, claim: &str, uid: &str, events: &ObjectList<Event>) {
        if let Some(metadata) = self.read_claim(namespace, claim, uid, events.metadata.resource_version.clone()) {
            self.claim_warnings.observe(ClaimWarning::newest(metadata, &events.items));
        }
    }

    fn users(&self, namespace: &str, claim: &str, uid: &str, users: Vec<ClaimUser>, version: Option<String>) {
        if let Some(metadata) = self.read_claim(namespace, claim, uid, version) {
            self.claim_users.observe(ClaimUsers { metadata, read_at: Timestamp::now(), users });
        }
    }
}

impl Caches {
    /// Returns the metadata of what was read about a claim, unless another claim has the name now.
    fn read_claim(&self, namespace: &str, claim: &str, uid: &str, version: Option<String>) -> Option<ObjectMeta> {
        let known = self.claims.get(&Key::new(namespace, claim))?;
        (known.metadata.uid.as_deref() == Some(uid)).then(|| ObjectMeta {
            name: Some(claim.to_owned()),
            namespace: Some(namespace.to_owned()),
            uid: Some(uid.to_owned()),
            resource_version: version,
            ..ObjectMeta::default()
        })
    }
}
