//! CDI's own configuration. While its kind is served, CDI carries out DataVolumes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::metadata::slim;

/// A CDI object, as far as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Cdi {
    metadata: ObjectMeta,
}

outside_kind!(Cdi, "CDI", "cdi.kubevirt.io", "v1beta1", "cdis", ClusterResourceScope);

/// An installation of CDI.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedCdi {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
}

unindexed!(CachedCdi);

// The importer begins nothing beside CDI.
kept!(CachedCdi of Cdi, Awaited);

impl From<Cdi> for CachedCdi {
    fn from(cdi: Cdi) -> Self {
        Self { metadata: slim(cdi.metadata) }
    }
}
