//! Definitions of networks (Multus NetworkAttachmentDefinitions).

use api::{FeatureGate, constants::annotation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::{declaration::Declaration, metadata::slim};
use crate::cache::Presence;

/// Feature gate under which other programs add the resources of networks to pods.
pub(crate) const EXTERNAL_RESOURCES: FeatureGate = FeatureGate::ExternalNetResourceInjection;

/// A NetworkAttachmentDefinition, as far as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NetworkAttachmentDefinition {
    metadata: ObjectMeta,
}

outside_kind!(
    NetworkAttachmentDefinition,
    "NetworkAttachmentDefinition",
    "k8s.cni.cncf.io",
    "v1",
    "network-attachment-definitions",
    NamespaceResourceScope
);

/// The definition of a network beside the pods' own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedNetwork {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Resource of a node that each pod on the network takes one of.
    pub resource: Option<String>,
}

unindexed!(CachedNetwork);

impl Declaration for CachedNetwork {
    type Wire = NetworkAttachmentDefinition;
    type Kept = Self;
    const PRESENCE: Presence = Presence::WhenServed;
    const UNLESS: Option<FeatureGate> = Some(EXTERNAL_RESOURCES);
}

impl From<NetworkAttachmentDefinition> for CachedNetwork {
    fn from(definition: NetworkAttachmentDefinition) -> Self {
        let annotations = definition.metadata.annotations.as_ref();
        let resource = annotations.and_then(|annotations| annotations.get(annotation::RESOURCE_NAME)).cloned();
        Self { resource: resource.filter(|name| !name.is_empty()), metadata: slim(definition.metadata) }
    }
}
