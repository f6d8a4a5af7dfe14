//! Namespaces, as far as launcher pods depend on them.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::Namespace, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::metadata::slim;

/// A namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedNamespace {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

unindexed!(CachedNamespace);

kept!(CachedNamespace of Namespace);

impl From<Namespace> for CachedNamespace {
    fn from(mut namespace: Namespace) -> Self {
        let labels = namespace.metadata.labels.take().unwrap_or_default();
        Self { metadata: slim(namespace.metadata), labels }
    }
}
