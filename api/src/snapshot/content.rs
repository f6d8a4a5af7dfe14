//! VirtualMachineSnapshotContent: the content of a snapshot. Created only by the controller.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use crate::{QuiesceState, VirtualMachineSpec, VirtualMachineStatus};

/// The content of a snapshot.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "snapshot.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineSnapshotContent",
    plural = "virtualmachinesnapshotcontents",
    singular = "virtualmachinesnapshotcontent",
    shortname = "vmsnapshotcontent",
    shortname = "vmsnapshotcontents",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "The content of a snapshot: the spec of the VM, and a volume snapshot for each of its claims.",
    status = "VirtualMachineSnapshotContentStatus",
    printcolumn = r#"{"name":"ReadyToUse","type":"boolean","jsonPath":".status.readyToUse"}"#,
    printcolumn = r#"{"name":"CreationTime","type":"date","jsonPath":".status.creationTime"}"#,
    printcolumn = r#"{"name":"Error","type":"string","jsonPath":".status.error.message"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotContentSpec {
    /// The snapshotted object.
    pub source: SourceSpec,
    /// Snapshot of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_snapshot_name: Option<String>,
    /// Backups of the claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_backups: Vec<VolumeBackup>,
}

/// The snapshotted object.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceSpec {
    /// A VM, the only supported kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine: Option<SourceVirtualMachine>,
}

/// A snapshotted VM.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceVirtualMachine {
    /// Its metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Its spec; for a running VM the one with which it was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<VirtualMachineSpec>,
    /// Its status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<VirtualMachineStatus>,
}

/// Backup of a claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeBackup {
    /// The snapshotted claim.
    pub persistent_volume_claim: SourceClaim,
    /// Name of the volume in the VM.
    pub volume_name: String,
    /// Name of the volume snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_name: Option<String>,
}

/// A snapshotted claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceClaim {
    /// Its metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Its spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<PersistentVolumeClaimSpec>,
}

/// Observed state of a snapshot content.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotContentStatus {
    /// Time at which all volume snapshots were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// Treatment of the guest's file systems. KubeVirt has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quiesce: Option<Quiesce>,
    /// True if all volume snapshots can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// State of the volume snapshots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_snapshot_status: Vec<VolumeSnapshotStatus>,
}

impl VirtualMachineSnapshotContent {
    /// Returns true if all volume snapshots were taken and the guest runs on.
    pub fn is_taken(&self) -> bool {
        self.status.as_ref().is_some_and(|status| {
            let quiesce = status.quiesce.as_ref();
            status.creation_time.is_some() && quiesce.is_none_or(|quiesce| quiesce.state != QuiesceState::Frozen)
        })
    }

    /// Returns true if the status lacks a volume snapshot.
    pub fn lacks_volumes(&self) -> bool {
        let known = self.status.iter().flat_map(|status| &status.volume_snapshot_status);
        let known: Vec<&str> = known.map(|known| known.volume_snapshot_name.as_str()).collect();
        let mut named = self.spec.volume_backups.iter().filter_map(|backup| backup.volume_snapshot_name.as_deref());
        named.any(|name| !known.contains(&name))
    }
}

/// Treatment of the guest's file systems.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Quiesce {
    /// Human-readable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// `Offline`, `Paused`, `NoAgent`, `Frozen`, `Thawed`, `TimedOut` or `Failed`.
    pub state: QuiesceState,
    /// Time of the freeze.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}

/// Observed state of a volume snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotStatus {
    /// Creation time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// True if it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// Name of the volume snapshot.
    pub volume_snapshot_name: String,
}
