//! VirtualMachineSnapshot: a snapshot of a VM and its volumes.

pub mod content;
pub mod restore;

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// A request to snapshot a VM.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "snapshot.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineSnapshot",
    plural = "virtualmachinesnapshots",
    singular = "virtualmachinesnapshot",
    shortname = "vmsnapshot",
    shortname = "vmsnapshots",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A request to snapshot a VM: its spec and the content of its volumes.",
    status = "VirtualMachineSnapshotStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"ReadyToUse","type":"boolean","jsonPath":".status.readyToUse"}"#,
    printcolumn = r#"{"name":"CreationTime","type":"date","jsonPath":".status.creationTime"}"#,
    printcolumn = r#"{"name":"Error","type":"string","jsonPath":".status.error.message"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotSpec {
    /// Treatment of the content when the snapshot is deleted: `Delete` (default) or `Retain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<String>,
    /// Time after which an incomplete snapshot fails, such as `2m30s`; 0 means no limit; default: 5 minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_deadline: Option<String>,
    /// The VM, in the namespace of the snapshot.
    pub source: TypedLocalObjectReference,
}

/// Observed state of a snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Time at which all volume snapshots were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// Old form of `sourceIndications`: names only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub indications: Vec<String>,
    /// `InProgress`, `Succeeded`, `Failed`, `Deleting` or `Unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// True if it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// Included and excluded volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_volumes: Option<SnapshotVolumesLists>,
    /// State of the VM at the time of the snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source_indications: Vec<SourceIndication>,
    /// UID of the VM.
    #[serde(rename = "sourceUID", skip_serializing_if = "Option::is_none")]
    pub source_uid: Option<String>,
    /// Name of the snapshot content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_snapshot_content_name: Option<String>,
}

/// Error of a snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotError {
    /// Human-readable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Time of the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}

/// Included and excluded volumes.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotVolumesLists {
    /// Volumes that could not be snapshotted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded_volumes: Vec<String>,
    /// Volumes in the snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub included_volumes: Vec<String>,
}

/// State of the VM at the time of the snapshot.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceIndication {
    /// CamelCase reason, such as `Online`, `GuestAgent`, `NoGuestAgent`, `QuiesceFailed` or `Paused`.
    pub indication: String,
    /// Human-readable message.
    pub message: String,
}
