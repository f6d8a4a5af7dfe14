//! Classes of volume snapshots.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::metadata::slim;
use crate::cache::Cached;

/// Annotation of a default class.
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
    /// Value of the annotation of default classes. In KubeVirt, a class that carries it counts whatever its value.
    pub is_default: Option<bool>,
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
        let mark = class.metadata.annotations.as_ref().and_then(|all| all.get(DEFAULT));
        let is_default = mark.map(|value| value == "true");
        Self { is_default, driver: class.driver, metadata: slim(class.metadata) }
    }
}
