//! Snapshots of volumes.

use api::quantity;
use k8s_openapi::apimachinery::pkg::{
    api::resource::Quantity,
    apis::meta::v1::{ObjectMeta, Time},
};
use serde::Deserialize;

use super::metadata::slim;

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
    bound_volume_snapshot_content_name: Option<String>,
    #[serde(default)]
    creation_time: Option<Time>,
    #[serde(default)]
    error: Option<SnapshotError>,
    #[serde(default)]
    ready_to_use: Option<bool>,
    #[serde(default)]
    restore_size: Option<Quantity>,
}

/// The last error of a snapshot.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(crate) struct SnapshotError {
    /// Human-readable message.
    #[serde(default)]
    pub message: Option<String>,
    /// Time of the error.
    #[serde(default)]
    pub time: Option<Time>,
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
    /// Name of its VolumeSnapshotContent.
    pub content: Option<String>,
    /// Time at which the content of the volume was fixed.
    pub created: Option<Time>,
    /// Last error.
    pub error: Option<SnapshotError>,
    /// Smallest size of a volume that is made from it, in bytes.
    pub restore_size: Option<i64>,
}

unindexed!(CachedSnapshot);

kept!(CachedSnapshot of VolumeSnapshot written as VolumeSnapshot, WhenServed);

impl From<VolumeSnapshot> for CachedSnapshot {
    fn from(snapshot: VolumeSnapshot) -> Self {
        let status = snapshot.status.unwrap_or_default();
        Self {
            ready: status.ready_to_use == Some(true),
            content: status.bound_volume_snapshot_content_name,
            created: status.creation_time,
            error: status.error,
            restore_size: status.restore_size.and_then(|size| quantity::units(&size).ok()),
            metadata: slim(snapshot.metadata),
        }
    }
}
