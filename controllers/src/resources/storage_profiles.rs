//! Storage profiles of CDI: the access modes that a storage class offers, and the class of its volume snapshots.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::{declaration::Declaration, metadata::slim};
use crate::cache::Presence;

/// A StorageProfile, as far as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct StorageProfile {
    metadata: ObjectMeta,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    claim_property_sets: Vec<PropertySet>,
    #[serde(default)]
    snapshot_class: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PropertySet {
    #[serde(default)]
    access_modes: Vec<String>,
    #[serde(default)]
    volume_mode: Option<String>,
}

outside_kind!(StorageProfile, "StorageProfile", "cdi.kubevirt.io", "v1beta1", "storageprofiles", ClusterResourceScope);

/// The profile of the storage class of its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedStorageProfile {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Access modes of claims with a file system.
    pub file_system_modes: Vec<String>,
    /// Class of its volume snapshots.
    pub snapshot_class: Option<String>,
}

unindexed!(CachedStorageProfile);

impl Declaration for CachedStorageProfile {
    type Wire = StorageProfile;
    type Kept = Self;
    const PRESENCE: Presence = Presence::WhenServed;
}

impl From<StorageProfile> for CachedStorageProfile {
    fn from(profile: StorageProfile) -> Self {
        let status = profile.status.unwrap_or_default();
        let sets = status.claim_property_sets.into_iter();
        let of_file_systems = sets.filter(|set| set.volume_mode.as_deref() == Some("Filesystem"));
        Self {
            metadata: slim(profile.metadata),
            file_system_modes: of_file_systems.flat_map(|set| set.access_modes).collect(),
            snapshot_class: status.snapshot_class.filter(|class| !class.is_empty()),
        }
    }
}
