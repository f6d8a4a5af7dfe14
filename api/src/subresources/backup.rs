//! Options of backups of a running machine. They come from virt-controller, not from users.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is to be done with a backup.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum BackupCommand {
    /// Begin it.
    #[default]
    Start,
    /// Give it up.
    Abort,
    /// Serve it to whoever pulls.
    Export,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum BackupMode {
    /// The node writes to a claim.
    #[default]
    Push,
    /// A client reads from the node.
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
    /// When the backup object was begun; makes the checkpoint's name unique.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_start_time: Option<Time>,
    /// Authority that clients of the export server are checked by, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_cert: Option<String>,
    /// What is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmd: Option<BackupCommand>,
    /// Address of the export server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export_server_addr: Option<String>,
    /// Name in the export server's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export_server_name: Option<String>,
    /// Checkpoint that the backup builds on; a full backup when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// Which way the bytes go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<BackupMode>,
    /// Whether guest file systems are left unfrozen.
    #[serde(skip_serializing_if = "crate::is_false")]
    pub skip_quiesce: bool,
    /// Directory in the launcher that a pushed backup is written to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_path: Option<String>,
}

/// Options of `redefine-checkpoint`: a checkpoint that libvirt is to know again.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupCheckpoint {
    /// When it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Its name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Volumes that it covers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<BackupVolumeInfo>,
}

/// A volume that a checkpoint covers.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupVolumeInfo {
    /// Address that the content can be pulled from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_endpoint: Option<String>,
    /// Address that the map of changed blocks can be pulled from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_endpoint: Option<String>,
    /// Name of the volume.
    pub volume_name: String,
}
