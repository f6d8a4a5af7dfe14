//! Snapshots of volumes, as far as clones read them.

use api::quantity;
use k8s_openapi::{
    Metadata, NamespaceResourceScope, Resource,
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};
use serde::Deserialize;

use super::{declaration::Declaration, metadata::slim};
use crate::cache::{Cached, Presence};

/// A VolumeSnapshot, as far as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct VolumeSnapshot {
    metadata: ObjectMeta,
    #[serde(default)]
    status: Option<VolumeSnapshotStatus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeSnapshotStatus {
    #[serde(default)]
    ready_to_use: Option<bool>,
    #[serde(default)]
    restore_size: Option<Quantity>,
}

impl Resource for VolumeSnapshot {
    const API_VERSION: &'static str = "snapshot.storage.k8s.io/v1";
    const GROUP: &'static str = "snapshot.storage.k8s.io";
    const KIND: &'static str = "VolumeSnapshot";
    const VERSION: &'static str = "v1";
    const URL_PATH_SEGMENT: &'static str = "volumesnapshots";
    type Scope = NamespaceResourceScope;
}

impl Metadata for VolumeSnapshot {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// A snapshot of a volume.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedSnapshot {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// It is complete.
    pub ready: bool,
    /// Smallest size of a volume that is made from it, in bytes.
    pub restore_size: Option<i64>,
}

impl Cached for CachedSnapshot {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl Declaration for CachedSnapshot {
    type Wire = VolumeSnapshot;
    type Kept = Self;
    const PRESENCE: Presence = Presence::WhenServed;
}

impl From<VolumeSnapshot> for CachedSnapshot {
    fn from(snapshot: VolumeSnapshot) -> Self {
        let status = snapshot.status.unwrap_or_default();
        Self {
            ready: status.ready_to_use == Some(true),
            restore_size: status.restore_size.and_then(|size| quantity::units(&size).ok()),
            metadata: slim(snapshot.metadata),
        }
    }
}
