//! Objects of the installation itself: webhook configurations, API services, cluster roles, Secrets, requests for certificates.

use std::{collections::BTreeMap, sync::Arc};

use api::{KubeVirt, tls, webhook_path};
use k8s_openapi::{
    api::{
        admissionregistration::v1::{
            MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
        },
        certificates::v1::CertificateSigningRequest,
        core::v1::{ConfigMap, Secret},
        rbac::v1::ClusterRole,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};

use super::{Caches, metadata::slim};
use crate::{
    cache::{Cached, Key, trim_meta},
    runtime::Kind,
};

/// Cluster roles whose rights `admin`, `edit` and `view` of each cluster can include.
pub(crate) const AGGREGATED_ROLES: [&str; 3] = ["kubevirt.io:admin", "kubevirt.io:edit", "kubevirt.io:view"];
/// ConfigMap that users can create, with the filter of the metric `kubevirt_vm_labels`.
pub(crate) const VM_LABELS_FILTER: &str = "kubevirt-vm-labels-config";

impl Caches {
    /// Returns a Secret of the installation.
    #[must_use]
    pub(crate) fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(&Key::new(namespace, name))
    }

    /// Returns the CA bundle in force.
    #[must_use]
    pub(crate) fn ca_bundle(&self, namespace: &str) -> Option<String> {
        let map = self.config_maps.get(&Key::new(namespace, tls::CA_CONFIG_MAP))?;
        map.data.as_ref()?.get(tls::CA_BUNDLE_KEY).cloned()
    }

    /// Returns the webhook configurations.
    #[must_use]
    pub(crate) fn webhook_configurations(&self) -> Vec<(Kind, Arc<BundleCarrier>)> {
        let mutating = self.mutating_webhooks.all().into_iter().map(|object| (Kind::MutatingWebhooks, object));
        let validating = self.validating_webhooks.all().into_iter().map(|object| (Kind::ValidatingWebhooks, object));
        mutating.chain(validating).collect()
    }

    /// Returns all objects with the CA bundle: API services and webhook configurations.
    #[must_use]
    pub(crate) fn bundle_carriers(&self) -> Vec<(Kind, Arc<BundleCarrier>)> {
        let services = self.api_services.all().into_iter().map(|object| (Kind::ApiService, object));
        services.chain(self.webhook_configurations()).collect()
    }
}

/// Implements [`Cached`] for an object that is kept whole.
macro_rules! cached_whole {
    ($($kind:ty),+) => {$(
        impl Cached for $kind {
            type Index = ();

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn trim(&mut self) {
                trim_meta(&mut self.metadata);
            }
        }
    )+};
}

cached_whole!(KubeVirt, Secret, ConfigMap);

/// Indices of requests for certificates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RequestIndex {
    /// Requests without an answer.
    Unanswered,
}

impl Cached for CertificateSigningRequest {
    type Index = RequestIndex;

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
    fn indices(&self) -> Vec<RequestIndex> {
        let status = self.status.as_ref();
        let is_answered = status.is_some_and(|status| {
            status.certificate.is_some()
                || status.conditions.iter().flatten().any(|known| ["Denied", "Failed"].contains(&known.type_.as_str()))
        });
        if is_answered { Vec::new() } else { vec![RequestIndex::Unanswered] }
    }
}

/// A cluster role for users.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedRole {
    /// Metadata, reduced, with all labels.
    pub metadata: ObjectMeta,
}

impl Cached for CachedRole {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<ClusterRole> for CachedRole {
    fn from(mut role: ClusterRole) -> Self {
        let labels = role.metadata.labels.take();
        Self { metadata: ObjectMeta { labels, ..slim(role.metadata) } }
    }
}

/// An object that carries a CA bundle, once or once per webhook.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BundleCarrier {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Name of each webhook (empty for an API service) with its bundle.
    pub bundles: Vec<(String, Vec<u8>)>,
    /// The webhooks' paths (none for an API service).
    pub webhooks: Vec<WebhookPath>,
    /// The API server can use the service (API services only).
    pub available: bool,
}

/// The path of a webhook.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct WebhookPath {
    /// Name of the webhook.
    pub name: String,
    /// Path that kube-apiserver uses.
    pub path: Option<String>,
    /// Path behind the segment, which the configuration's annotation names.
    pub wanted_path: Option<String>,
}

impl BundleCarrier {
    fn of_webhooks(metadata: ObjectMeta, webhooks: Vec<(String, WebhookClientConfig)>) -> Self {
        let annotation = metadata.annotations.as_ref().and_then(|annotations| annotations.get(webhook_path::PATHS));
        let mut wanted: BTreeMap<String, String> =
            annotation.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        wanted.retain(|_, path| path.starts_with('/'));
        let mut view = Self { metadata: slim(metadata), available: true, ..Self::default() };
        for (name, config) in webhooks {
            view.webhooks.push(WebhookPath {
                path: config.service.and_then(|service| service.path),
                wanted_path: wanted.remove(&name),
                name: name.clone(),
            });
            view.bundles.push((name, config.ca_bundle.map(|bytes| bytes.0).unwrap_or_default()));
        }
        view
    }
}

impl Cached for BundleCarrier {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<APIService> for BundleCarrier {
    fn from(service: APIService) -> Self {
        let bundle = service.spec.and_then(|spec| spec.ca_bundle).map(|bytes| bytes.0).unwrap_or_default();
        let conditions = service.status.and_then(|status| status.conditions).unwrap_or_default();
        let available = conditions.iter().any(|condition| condition.type_ == "Available" && condition.status == "True");
        Self { metadata: slim(service.metadata), bundles: vec![(String::new(), bundle)], available, ..Self::default() }
    }
}

impl From<MutatingWebhookConfiguration> for BundleCarrier {
    fn from(configuration: MutatingWebhookConfiguration) -> Self {
        let webhooks = configuration.webhooks.unwrap_or_default().into_iter();
        Self::of_webhooks(configuration.metadata, webhooks.map(|hook| (hook.name, hook.client_config)).collect())
    }
}

impl From<ValidatingWebhookConfiguration> for BundleCarrier {
    fn from(configuration: ValidatingWebhookConfiguration) -> Self {
        let webhooks = configuration.webhooks.unwrap_or_default().into_iter();
        Self::of_webhooks(configuration.metadata, webhooks.map(|hook| (hook.name, hook.client_config)).collect())
    }
}
