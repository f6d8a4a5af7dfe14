//! VirtualMachineBackup and VirtualMachineBackupTracker: full and incremental backups of a running VM's disks.

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
    /// Claim with a filesystem. Stores the backup in mode `Push`, and changed blocks in mode `Pull`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc_name: Option<String>,
    /// Skip freezing the guest's filesystems.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub skip_quiesce: bool,
    /// Source of the backup: a VirtualMachine (`kubevirt.io`) for a full backup, or a VirtualMachineBackupTracker
    /// (`backup.kubevirt.io`) for the changes since its last checkpoint.
    pub source: TypedLocalObjectReference,
    /// Secret with the token that downloads must present; required for mode `Pull`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<String>,
    /// Time after creation during which the backup can be pulled, such as `1h30m`; default: 2 hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_duration: Option<String>,
}

/// Observed state of a backup.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupStatus {
    /// Checkpoint created by this backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_name: Option<String>,
    /// Conditions, one per type: `Progressing`, `Complete`, `Failed`, `Quiesced`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// CA certificate of the server, PEM, while the backup can be pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint_cert: Option<String>,
    /// UID of the export through which the backup is pulled.
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
    /// Returns true if the backup has ended.
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
    /// URL of the list of allocated ranges, while the backup can be pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_endpoint: Option<String>,
    /// Name of the volume in the VM.
    pub volume_name: String,
}

/// The checkpoint of the last backup of a VM, for incremental backups.
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
    doc = "The checkpoint of the last backup of a VM, for incremental backups.",
    status = "VirtualMachineBackupTrackerStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"LatestCheckpoint","type":"string","jsonPath":".status.latestCheckpoint.name"}"#,
    printcolumn = r#"{"name":"CheckpointTime","type":"date","jsonPath":".status.latestCheckpoint.creationTime"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupTrackerSpec {
    /// The VM, in the namespace of the tracker.
    pub source: TypedLocalObjectReference,
}

/// Observed state of a tracker.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineBackupTrackerStatus {
    /// True if the checkpoint must be redefined for the restarted VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_redefinition_required: Option<bool>,
    /// Checkpoint set by the last backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latest_checkpoint: Option<BackupCheckpoint>,
}

/// Point in time from which changes are tracked.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupCheckpoint {
    /// Creation time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Name of the checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Volumes tracked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<BackupVolumeInfo>,
}
