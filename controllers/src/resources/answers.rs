//! Answers to writes, stored in the caches.

use api::{
    constants::{component, label},
    instancetype::revision,
};
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        apps::v1::ControllerRevision,
        core::v1::{Event, Node},
        rbac::v1::ClusterRole,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::api::ObjectList;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    Caches,
    attachments::CachedAttachment,
    pod_warnings::{self, PodWarning},
    start_revisions,
    watched_pod::WatchedPod,
};
use crate::{
    cache::{Cache, Cached, Key},
    runtime::{Answers, Kind},
};

/// Stores an object that was written.
fn store<W: DeserializeOwned, K: Cached>(
    cache: &Cache<K>,
    kind: Kind,
    object: Value,
    convert: impl Fn(W) -> Option<K>,
) {
    match serde_json::from_value(object) {
        Ok(object) => {
            if let Some(object) = convert(object) {
                cache.observe(object);
            }
        }
        // The watch delivers the object anyway.
        Err(error) => tracing::warn!(resource = kind.plural(), %error, "answer of the API server cannot be read"),
    }
}

impl Answers for Caches {
    fn is_terminating(&self, namespace: &str) -> bool {
        let known = self.namespaces.get(&Key::cluster_wide(namespace));
        known.is_some_and(|namespace| namespace.metadata.deletion_timestamp.is_some())
    }

    fn written(&self, kind: Kind, object: Value) {
        match kind {
            Kind::VirtualMachine => store(&self.vms, kind, object, Some),
            Kind::Instance => store(&self.vmis, kind, object, Some),
            Kind::Migration => store(&self.migrations, kind, object, Some),
            Kind::ReplicaSet => store(&self.replica_sets, kind, object, Some),
            Kind::Pod if object["metadata"]["labels"][label::APP] == component::HOTPLUG_DISK => {
                store(&self.attachments, kind, object, CachedAttachment::of);
            }
            Kind::Pod => store(&self.pods, kind, object, WatchedPod::into_pod),
            Kind::ControllerRevision => {
                let has = |label: &str| object["metadata"]["labels"].get(label).is_some();
                let (is_start, is_copy) = (has(start_revisions::LABEL), has(revision::OBJECT_KIND));
                if is_start {
                    store(&self.starts, kind, object, |object: ControllerRevision| Some(object.into()));
                } else if is_copy {
                    store(&self.revisions, kind, object, |object: ControllerRevision| Some(object.into()));
                }
            }
            // Nothing depends on what is written.
            Kind::Claim => {}
            Kind::Secret => store(&self.secrets, kind, object, Some),
            Kind::ConfigMap => store(&self.config_maps, kind, object, Some),
            Kind::Node => store(&self.nodes, kind, object, |object: Node| Some(object.into())),
            Kind::KubeVirt => store(&self.kubevirts, kind, object, Some),
            Kind::CertificateSigningRequest => store(&self.requests, kind, object, Some),
            Kind::ApiService => store(&self.api_services, kind, object, |object: APIService| Some(object.into())),
            Kind::MutatingWebhooks => {
                store(&self.mutating_webhooks, kind, object, |object: MutatingWebhookConfiguration| {
                    Some(object.into())
                });
            }
            Kind::ValidatingWebhooks => {
                let convert = |object: ValidatingWebhookConfiguration| Some(object.into());
                store(&self.validating_webhooks, kind, object, convert);
            }
            Kind::ClusterRole => store(&self.roles, kind, object, |object: ClusterRole| Some(object.into())),
        }
    }

    fn deleted(&self, kind: Kind, namespace: Option<&str>, name: &str, uid: Option<&str>) {
        let key = Key::new(namespace.unwrap_or_default(), name);
        match kind {
            Kind::VirtualMachine => self.vms.observe_deleted(&key, uid),
            Kind::Instance => self.vmis.observe_deleted(&key, uid),
            Kind::Migration => self.migrations.observe_deleted(&key, uid),
            Kind::ReplicaSet => self.replica_sets.observe_deleted(&key, uid),
            Kind::Pod => {
                self.pods.observe_deleted(&key, uid);
                self.attachments.observe_deleted(&key, uid);
            }
            Kind::ControllerRevision => {
                self.revisions.observe_deleted(&key, uid);
                self.starts.observe_deleted(&key, uid);
            }
            Kind::CertificateSigningRequest => self.requests.observe_deleted(&key, uid),
            // This process deletes no other objects.
            _ => {}
        }
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
}
