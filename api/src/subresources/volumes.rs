//! Options of hot-plugging volumes and of memory dumps.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vm::status::HotplugVolumeSource;
use crate::vmi::disks::Disk;

/// Options of `addvolume`, as they come from a client. What is kept in a VM's status is
/// [`AddVolumeOptions`](crate::vm::status::AddVolumeOptions).
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AddVolumeRequest {
    /// The disk; its own name does not count. Required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Name of disk and volume. Required.
    pub name: String,
    /// The volume, a claim or a DataVolume. Required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_source: Option<HotplugVolumeSource>,
}

/// Options of `removevolume`, as they come from a client.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RemoveVolumeRequest {
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Name of the volume, or of the claim or DataVolume behind it. Required.
    pub name: String,
}

/// Options of `memorydump`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryDumpOptions {
    /// Claim that receives the dump; the one of the last dump when empty.
    pub claim_name: String,
}
