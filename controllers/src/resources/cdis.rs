//! CDI's own configuration. While its kind is served, CDI carries out DataVolumes.

use k8s_openapi::{ClusterResourceScope, Metadata, Resource, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::Deserialize;

use super::{declaration::Declaration, metadata::slim};
use crate::cache::{Cached, Presence};

/// A CDI object, as far as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Cdi {
    metadata: ObjectMeta,
}

impl Resource for Cdi {
    const API_VERSION: &'static str = "cdi.kubevirt.io/v1beta1";
    const GROUP: &'static str = "cdi.kubevirt.io";
    const KIND: &'static str = "CDI";
    const VERSION: &'static str = "v1beta1";
    const URL_PATH_SEGMENT: &'static str = "cdis";
    type Scope = ClusterResourceScope;
}

impl Metadata for Cdi {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// An installation of CDI.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedCdi {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
}

impl Cached for CachedCdi {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl Declaration for CachedCdi {
    type Wire = Cdi;
    type Kept = Self;
    const PRESENCE: Presence = Presence::WhenServed;
}

impl From<Cdi> for CachedCdi {
    fn from(cdi: Cdi) -> Self {
        Self { metadata: slim(cdi.metadata) }
    }
}
