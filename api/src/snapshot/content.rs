//! VirtualMachineSnapshotContent: what was kept of a VM. Made by the controller, never by users.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use crate::{VirtualMachineSpec, VirtualMachineStatus};

/// What was kept of a VM.
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
    doc = "What a snapshot kept of a VM: its spec, and a volume snapshot for each of its claims.",
    status = "VirtualMachineSnapshotContentStatus",
    printcolumn = r#"{"name":"ReadyToUse","type":"boolean","jsonPath":".status.readyToUse"}"#,
    printcolumn = r#"{"name":"CreationTime","type":"date","jsonPath":".status.creationTime"}"#,
    printcolumn = r#"{"name":"Error","type":"string","jsonPath":".status.error.message"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotContentSpec {
    /// The object as it was.
    pub source: SourceSpec,
    /// Snapshot this belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_snapshot_name: Option<String>,
    /// What was kept of each claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_backups: Vec<VolumeBackup>,
}

/// The object a snapshot was taken of.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceSpec {
    /// A VM, the only kind there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine: Option<SourceVirtualMachine>,
}

/// A VM as it was.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceVirtualMachine {
    /// Its metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Its spec; of a running VM, the one it was started with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<VirtualMachineSpec>,
    /// Its status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<VirtualMachineStatus>,
}

/// What was kept of one claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeBackup {
    /// The claim as it was.
    pub persistent_volume_claim: SourceClaim,
    /// Name of the volume in the VM.
    pub volume_name: String,
    /// Name of the volume snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_name: Option<String>,
}

/// A claim as it was.
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

/// What is observed of kept content.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotContentStatus {
    /// When all volume snapshots were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Last thing that went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// Whether all volume snapshots can be restored from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// The volume snapshots, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_snapshot_status: Vec<VolumeSnapshotStatus>,
}

/// What is observed of one volume snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotStatus {
    /// When it was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Last thing that went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// Whether it can be restored from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// Name of the volume snapshot.
    pub volume_snapshot_name: String,
}
