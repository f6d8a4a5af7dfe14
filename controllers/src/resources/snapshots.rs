//! Snapshots of volumes, as far as clones read them.

use api::quantity;
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta};
use serde::Deserialize;

use super::{declaration::Declaration, metadata::slim};
use crate::cache::Presence;

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

outside_kind!(
    VolumeSnapshot,
    "VolumeSnapshot",
    "snapshot.storage.k8s.io",
    "v1",
    "volumesnapshots",
    NamespaceResourceScope
);

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

unindexed!(CachedSnapshot);

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
