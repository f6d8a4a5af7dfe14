//! Options for backups of a running VMI. virt-controller sends them, not users.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Commands for a backup.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum BackupCommand {
    /// Start it.
    #[default]
    Start,
    /// Abort it.
    Abort,
    /// Serve it for download.
    Export,
}

/// Transfer modes of a backup.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum BackupMode {
    /// virt-launcher writes to a claim.
    #[default]
    Push,
    /// A client reads from virt-launcher.
    Pull,
}

/// Options of `backup`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupOptions {
    /// Certificate of the export server, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_cert: Option<String>,
    /// Key of the export server, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_key: Option<String>,
    /// Name of the backup object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_name: Option<String>,
    /// Start time of the backup object, which makes the checkpoint's name unique.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_start_time: Option<Time>,
    /// CA certificate for clients of the export server, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_cert: Option<String>,
    /// The command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmd: Option<BackupCommand>,
    /// Address of the export server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export_server_addr: Option<String>,
    /// Name in the export server's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export_server_name: Option<String>,
    /// Base checkpoint; default: a full backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// Transfer mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<BackupMode>,
    /// Skip freezing the guest's file systems.
    #[serde(skip_serializing_if = "crate::is_false")]
    pub skip_quiesce: bool,
    /// Directory in the launcher for a pushed backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_path: Option<String>,
}

/// Options of `redefine-checkpoint`, which defines a checkpoint in libvirt again.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupCheckpoint {
    /// Creation time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Its name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Volumes of the checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<BackupVolumeInfo>,
}

/// A volume of a checkpoint.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupVolumeInfo {
    /// URL of the content for a pull backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_endpoint: Option<String>,
    /// URL of the map of changed blocks for a pull backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_endpoint: Option<String>,
    /// Name of the volume.
    pub volume_name: String,
}
