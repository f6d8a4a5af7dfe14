//! Resource quotas, as far as launcher pods depend on them.

use k8s_openapi::{api::core::v1::ResourceQuota, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::metadata::slim;
use crate::cache::Cached;

/// Indices of quotas.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum QuotaIndex {
    /// Name of the namespace.
    Namespace(String),
}

/// A resource quota.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedQuota {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// It limits memory limits.
    pub memory_limits: bool,
    /// It limits CPU limits.
    pub cpu_limits: bool,
}

impl Cached for CachedQuota {
    type Index = QuotaIndex;
    reduced!();

    fn indices(&self) -> Vec<QuotaIndex> {
        self.metadata.namespace.clone().map(QuotaIndex::Namespace).into_iter().collect()
    }
}

kept!(CachedQuota of ResourceQuota);

impl From<ResourceQuota> for CachedQuota {
    fn from(quota: ResourceQuota) -> Self {
        let hard = quota.spec.and_then(|spec| spec.hard).unwrap_or_default();
        Self {
            metadata: slim(quota.metadata),
            memory_limits: hard.contains_key("limits.memory"),
            cpu_limits: hard.contains_key("limits.cpu"),
        }
    }
}
