//! Storage profiles of CDI: the modes that a storage class offers, how its claims are cloned, and the class of its volume snapshots.

use api::quantity;
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta};
use serde::Deserialize;

use super::metadata::slim;

/// Annotation with the least size of a claim.
const MINIMUM: &str = "cdi.kubevirt.io/minimumSupportedPvcSize";

/// A StorageProfile, as far as it is read. CDI copies the spec to the status, where it adds what it knows itself.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct StorageProfile {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Option<Properties>,
    #[serde(default)]
    status: Option<Properties>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Properties {
    #[serde(default)]
    claim_property_sets: Vec<PropertySet>,
    #[serde(default)]
    clone_strategy: Option<String>,
    #[serde(default)]
    snapshot_class: Option<String>,
}

/// Modes of a claim that go together.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PropertySet {
    /// How it may be attached.
    #[serde(default)]
    pub access_modes: Vec<String>,
    /// `Block` or `Filesystem`.
    #[serde(default)]
    pub volume_mode: Option<String>,
}

outside_kind!(StorageProfile, "StorageProfile", "cdi.kubevirt.io", "v1beta1", "storageprofiles", ClusterResourceScope);

/// The profile of the storage class of its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedStorageProfile {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Modes of claims, the preferred ones first.
    pub sets: Vec<PropertySet>,
    /// Its claims are cloned by pods that copy.
    pub copies: bool,
    /// Class of its volume snapshots.
    pub snapshot_class: Option<String>,
    /// Least size of a claim, in bytes.
    pub minimum: Option<i64>,
}

unindexed!(CachedStorageProfile);

impl CachedStorageProfile {
    /// Returns the access modes of claims with a file system.
    pub(crate) fn file_system_modes(&self) -> impl Iterator<Item = &String> {
        let of_file_systems = self.sets.iter().filter(|set| set.volume_mode.as_deref() == Some("Filesystem"));
        of_file_systems.flat_map(|set| &set.access_modes)
    }
}

kept!(CachedStorageProfile of StorageProfile, WhenServed);

impl From<StorageProfile> for CachedStorageProfile {
    fn from(profile: StorageProfile) -> Self {
        let (spec, status) = (profile.spec.unwrap_or_default(), profile.status.unwrap_or_default());
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let minimum = profile.metadata.annotations.as_ref().and_then(|all| all.get(MINIMUM)).cloned();
        let strategy = set(&spec.clone_strategy).or_else(|| set(&status.clone_strategy));
        Self {
            minimum: minimum.and_then(|size| quantity::units(&Quantity(size)).ok()),
            metadata: slim(profile.metadata),
            copies: strategy.as_deref() == Some("copy"),
            snapshot_class: set(&spec.snapshot_class).or_else(|| set(&status.snapshot_class)),
            sets: if spec.claim_property_sets.is_empty() {
                status.claim_property_sets
            } else {
                spec.claim_property_sets
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn spec_comes_before_the_status() {
        let sets = |mode: &str| json!([{"accessModes": [mode], "volumeMode": "Filesystem"}]);
        let of = |spec: Value, status: Value| {
            let metadata = json!({"name": "fast", "annotations": {MINIMUM: "4Gi"}});
            let profile = json!({"metadata": metadata, "spec": spec, "status": status});
            CachedStorageProfile::from(serde_json::from_value::<StorageProfile>(profile).unwrap())
        };
        let status = json!({"claimPropertySets": sets("a"), "cloneStrategy": "copy", "snapshotClass": "s"});
        for (spec, mode, copies, class) in [
            (json!({}), "a", true, "s"),
            (
                json!({"claimPropertySets": sets("b"), "cloneStrategy": "snapshot", "snapshotClass": "t"}),
                "b",
                false,
                "t",
            ),
        ] {
            let found = of(spec, status.clone());
            assert_eq!(found.file_system_modes().collect::<Vec<_>>(), [mode]);
            assert_eq!(
                (found.copies, found.snapshot_class.as_deref(), found.minimum),
                (copies, Some(class), Some(4 << 30))
            );
        }
        assert!(of(json!(null), json!(null)).sets.is_empty());
    }
}
