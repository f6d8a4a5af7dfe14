//! VirtualMachineRestore: restores a VM from a snapshot, or creates one from it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::condition::FAILURE;
use crate::Condition;

/// A request to restore a VM from a snapshot.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "snapshot.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineRestore",
    plural = "virtualmachinerestores",
    singular = "virtualmachinerestore",
    shortname = "vmrestore",
    shortname = "vmrestores",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A request to restore a VM from a snapshot, or to create one from it.",
    status = "VirtualMachineRestoreStatus",
    printcolumn = r#"{"name":"TargetKind","type":"string","jsonPath":".spec.target.kind"}"#,
    printcolumn = r#"{"name":"TargetName","type":"string","jsonPath":".spec.target.name"}"#,
    printcolumn = r#"{"name":"Complete","type":"boolean","jsonPath":".status.complete"}"#,
    printcolumn = r#"{"name":"RestoreTime","type":"date","jsonPath":".status.restoreTime"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineRestoreSpec {
    /// JSON patches, each one operation as text, applied to the VM that is created if the target does not exist, such as
    /// `{"op": "replace", "path": "/spec/running", "value": false}`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<String>,
    /// The VM to restore; it is created if it does not exist.
    pub target: TypedLocalObjectReference,
    /// Behaviour if the VM runs: `StopTarget`, `WaitGracePeriod` (default: wait 5 minutes until it stops), `FailImmediate` or
    /// `WaitEventually`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_readiness_policy: Option<String>,
    /// Name of the snapshot.
    pub virtual_machine_snapshot_name: String,
    /// Owner of the restored claims: `Vm` (default) or `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_ownership_policy: Option<String>,
    /// Names, labels and annotations of restored claims, by volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_restore_overrides: Vec<VolumeRestoreOverride>,
    /// Naming of restored claims: `RandomizeNames` (default), `InPlace` (the original names, replacing existing claims) or
    /// `PrefixTargetName`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_restore_policy: Option<String>,
}

impl VirtualMachineRestore {
    /// Returns the text by which objects name it.
    pub fn id(&self) -> String {
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        format!("{}-{}", text(&self.metadata.name), text(&self.metadata.uid))
    }

    /// Returns true if claims are deleted and made again under their names.
    pub fn is_in_place(&self) -> bool {
        self.spec.volume_restore_policy.as_deref() == Some("InPlace")
    }

    /// Returns true if it may have deleted such claims, and has not ended.
    pub fn is_begun_in_place(&self) -> bool {
        let is_named = self.status.as_ref().is_some_and(|status| !status.restores.is_empty());
        self.is_in_place() && is_named && !self.is_final()
    }

    /// Returns true if the restore is complete or has failed.
    pub fn is_final(&self) -> bool {
        self.status.as_ref().is_some_and(|status| {
            let failed = |condition: &Condition| condition.type_ == FAILURE && condition.is_true();
            status.complete == Some(true) || status.conditions.iter().any(failed)
        })
    }
}

/// Changes to a restored claim.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRestoreOverride {
    /// Annotations to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Labels to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Name of the restored claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_name: Option<String>,
    /// Name of the volume in the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_name: Option<String>,
}

/// Observed state of a restore.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineRestoreStatus {
    /// True if the restore is complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub complete: Option<bool>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// DataVolumes deleted because restored claims replace theirs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deleted_data_volumes: Vec<String>,
    /// Time of completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_time: Option<Time>,
    /// Restored volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restores: Vec<VolumeRestore>,
}

/// A restored volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRestore {
    /// DataVolume created for the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_volume_name: Option<String>,
    /// Name of the restored claim.
    pub persistent_volume_claim: String,
    /// Name of the volume in the VM.
    pub volume_name: String,
    /// Source volume snapshot.
    pub volume_snapshot_name: String,
}
