//! VirtualMachineBackup and VirtualMachineBackupTracker: the content of a running VM's disks, whole or since last time.

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A request to back up a VM.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "backup.kubevirt.io",
    version = "v1alpha1",
    kind = "VirtualMachineBackup",
    plural = "virtualmachinebackups",
    singular = "virtualmachinebackup",
    shortname = "vmbackup",
    shortname = "vmbackups",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A request to back up the disks of a running VM.",
    status = "VirtualMachineBackupStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"Type","type":"string","jsonPath":".status.type"}"#,
    printcolumn = r#"{"name":"CheckpointName","type":"string","jsonPath":".status.checkpointName"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupSpec {
    /// Back up everything even when the tracker knows a checkpoint.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub force_full_backup: bool,
    /// `Push` (the default) writes into the claim, `Pull` offers the content for download.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Claim with a filesystem: takes the backup, or what is changed while it is pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc_name: Option<String>,
    /// Do not freeze the guest's filesystems first.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub skip_quiesce: bool,
    /// What to back up: a VirtualMachine (`kubevirt.io`), whole, or a VirtualMachineBackupTracker
    /// (`backup.kubevirt.io`), the changes since its last checkpoint.
    pub source: TypedLocalObjectReference,
    /// Secret with the token downloads must present; needed to pull.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// How long after its creation a backup can be pulled, such as `1h30m`; 2 hours when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_duration: Option<String>,
}

/// What is observed of a backup.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupStatus {
    /// Checkpoint set by this backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_name: Option<String>,
    /// Conditions, one entry a type: `Progressing`, `Complete`, `Failed`, `Quiesced`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Certificate of the authority that signed the server's, PEM, while the backup can be pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint_cert: Option<String>,
    /// UID of the export the backup is pulled through.
    #[serde(rename = "exportUID", skip_serializing_if = "Option::is_none")]
    pub export_uid: Option<String>,
    /// Volumes in the backup, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub included_volumes: Vec<BackupVolumeInfo>,
    /// `Full` or `Incremental`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
}

impl VirtualMachineBackupStatus {
    /// Whether the backup is over, well or not.
    pub fn is_done(&self) -> bool {
        self.conditions
            .iter()
            .any(|condition| ["Complete", "Failed"].contains(&condition.type_.as_str()) && condition.status == "True")
    }
}

/// A volume in a backup.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupVolumeInfo {
    /// URL of the content, while the backup can be pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_endpoint: Option<String>,
    /// URL of the list of ranges that hold content, while the backup can be pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_endpoint: Option<String>,
    /// Name of the volume in the VM.
    pub volume_name: String,
}

/// A memory of the last backup of a VM, to which the next adds only what changed.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "backup.kubevirt.io",
    version = "v1alpha1",
    kind = "VirtualMachineBackupTracker",
    plural = "virtualmachinebackuptrackers",
    singular = "virtualmachinebackuptracker",
    shortname = "vmbackuptracker",
    shortname = "vmbackuptrackers",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A memory of the last backup of a VM, to which the next adds only what changed.",
    status = "VirtualMachineBackupTrackerStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"LatestCheckpoint","type":"string","jsonPath":".status.latestCheckpoint.name"}"#,
    printcolumn = r#"{"name":"CheckpointTime","type":"date","jsonPath":".status.latestCheckpoint.creationTime"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupTrackerSpec {
    /// The VM, in the tracker's namespace.
    pub source: TypedLocalObjectReference,
}

/// What is observed of a tracker.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupTrackerStatus {
    /// Whether the restarted machine must be told of the checkpoint again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_redefinition_required: Option<bool>,
    /// Checkpoint set by the last backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latest_checkpoint: Option<BackupCheckpoint>,
}

/// A moment from which on changes are tracked.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupCheckpoint {
    /// When it was set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Name of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Volumes tracked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<BackupVolumeInfo>,
}
