//! Objects with a CA bundle: API services and webhook configurations.

use std::{collections::BTreeMap, sync::Arc};

use api::{tls, webhook_path};
use k8s_openapi::{
    api::admissionregistration::v1::{
        MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};

use super::{
    Caches,
    declaration::{Declaration, Selection},
    metadata::slim,
};
use crate::runtime::Kind;

impl Caches {
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

unindexed!(BundleCarrier);

/// API services with the CA bundle.
pub(crate) enum ApiServices {}

impl Declaration for ApiServices {
    type Wire = APIService;
    type Kept = BundleCarrier;
    const SELECTION: Selection = Selection::Names(&tls::API_SERVICES);
    const WRITTEN: Option<Kind> = Some(Kind::ApiService);
}

/// Mutating webhook configurations with the CA bundle and the path segment.
pub(crate) enum MutatingWebhooks {}

impl Declaration for MutatingWebhooks {
    type Wire = MutatingWebhookConfiguration;
    type Kept = BundleCarrier;
    const SELECTION: Selection = Selection::Names(&[tls::MUTATING_WEBHOOKS]);
    const WRITTEN: Option<Kind> = Some(Kind::MutatingWebhooks);
}

/// Validating webhook configurations with the CA bundle and the path segment.
pub(crate) enum ValidatingWebhooks {}

impl Declaration for ValidatingWebhooks {
    type Wire = ValidatingWebhookConfiguration;
    type Kept = BundleCarrier;
    const SELECTION: Selection = Selection::Names(&tls::VALIDATING_WEBHOOKS);
    const WRITTEN: Option<Kind> = Some(Kind::ValidatingWebhooks);
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
