//! StorageProfiles: what CDI knows about a storage class.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of a StorageProfile. Its wishes are found in the status, merged with what CDI knows itself.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "cdi.kubevirt.io",
    version = "v1beta1",
    kind = "StorageProfile",
    plural = "storageprofiles",
    singular = "storageprofile",
    derive = "Default",
    derive = "PartialEq",
    doc = "Properties of a storage class.",
    status = "StorageProfileStatus"
)]
pub struct StorageProfileSpec {}

/// Properties of a storage class.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageProfileStatus {
    /// Modes of claims, the preferred ones first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claim_property_sets: Vec<ClaimPropertySet>,
    /// `copy`, `snapshot` or `csi-clone`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone_strategy: Option<String>,
    /// Class of the volume snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_class: Option<String>,
}

/// Modes of a claim that go together.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimPropertySet {
    /// Access modes.
    #[serde(default)]
    pub access_modes: Vec<String>,
    /// `Block` or `Filesystem`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_mode: Option<String>,
}
