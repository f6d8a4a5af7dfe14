//! Classes of volume snapshots.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::metadata::slim;
use crate::cache::Cached;

/// Annotation of a default class. Its value does not matter, as in KubeVirt.
const DEFAULT: &str = "snapshot.storage.kubernetes.io/is-default-class";

/// A VolumeSnapshotClass, as far as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct VolumeSnapshotClass {
    metadata: ObjectMeta,
    #[serde(default)]
    driver: String,
}

outside_kind!(
    VolumeSnapshotClass,
    "VolumeSnapshotClass",
    "snapshot.storage.k8s.io",
    "v1",
    "volumesnapshotclasses",
    ClusterResourceScope
);

/// A class of volume snapshots.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedSnapshotClass {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// CSI driver.
    pub driver: String,
    /// It is the default of its driver.
    pub is_default: bool,
}

/// Indices of classes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SnapshotClassIndex {
    /// CSI driver.
    Driver(String),
}

impl Cached for CachedSnapshotClass {
    type Index = SnapshotClassIndex;
    reduced!();

    fn indices(&self) -> Vec<SnapshotClassIndex> {
        vec![SnapshotClassIndex::Driver(self.driver.clone())]
    }
}

kept!(CachedSnapshotClass of VolumeSnapshotClass, WhenServed);

impl From<VolumeSnapshotClass> for CachedSnapshotClass {
    fn from(class: VolumeSnapshotClass) -> Self {
        let is_default = class.metadata.annotations.iter().flatten().any(|(key, _)| key == DEFAULT);
        Self { is_default, driver: class.driver, metadata: slim(class.metadata) }
    }
}
