//! Definitions of networks (Multus NetworkAttachmentDefinitions).

use api::constants::annotation;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;

use super::metadata::slim;
use crate::cache::Cached;

/// Feature gate under which other programs add the resources of networks to pods.
pub(crate) const EXTERNAL_RESOURCES: api::FeatureGate = api::FeatureGate::ExternalNetResourceInjection;

/// The definition of a network beside the pods' own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedNetwork {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Resource of a node that each pod on the network takes one of.
    pub resource: Option<String>,
}

impl Cached for CachedNetwork {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<DynamicObject> for CachedNetwork {
    fn from(definition: DynamicObject) -> Self {
        let annotations = definition.metadata.annotations.as_ref();
        let resource = annotations.and_then(|annotations| annotations.get(annotation::RESOURCE_NAME)).cloned();
        Self { resource: resource.filter(|name| !name.is_empty()), metadata: slim(definition.metadata) }
    }
}
