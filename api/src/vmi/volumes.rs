//! Volumes: sources of disks.

use k8s_openapi::api::core::v1::DownwardAPIVolumeFile;
use k8s_openapi::api::core::v1::LocalObjectReference;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One volume; exactly one source is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// cloud-init data as ConfigDrive image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_init_config_drive: Option<Box<CloudInitConfigDriveSource>>,
    /// cloud-init data as NoCloud image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_init_no_cloud: Option<Box<CloudInitNoCloudSource>>,
    /// Files of a ConfigMap as image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map: Option<Box<ConfigMapVolumeSource>>,
    /// Disk image in a container image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_disk: Option<Box<ContainerDiskSource>>,
    /// Path of the launcher container, shared with the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_path: Option<ContainerPathVolumeSource>,
    /// Claim populated by a DataVolume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_volume: Option<DataVolumeSource>,
    /// Fields of the pod as image.
    #[serde(rename = "downwardAPI", skip_serializing_if = "Option::is_none")]
    pub downward_api: Option<Box<DownwardApiVolumeSource>>,
    /// Host metrics as a small disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downward_metrics: Option<DownwardMetricsVolumeSource>,
    /// Empty disk with the lifetime of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty_disk: Option<EmptyDiskSource>,
    /// Copy-on-write overlay of a claim, deleted with the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<EphemeralVolumeSource>,
    /// Image file on the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_disk: Option<Box<HostDisk>>,
    /// Claim for memory dumps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_dump: Option<MemoryDumpVolumeSource>,
    /// Name that disks refer to.
    pub name: String,
    /// Claim used as disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimVolumeSource>,
    /// Files of a Secret as image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<Box<SecretVolumeSource>>,
    /// Token of a service account as image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account: Option<ServiceAccountVolumeSource>,
    /// Answer file for Windows Setup as CD-ROM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sysprep: Option<Box<SysprepSource>>,
}

/// cloud-init data for the ConfigDrive source.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloudInitConfigDriveSource {
    /// Network configuration, inline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data: Option<String>,
    /// Network configuration, inline and base64 encoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data_base64: Option<String>,
    /// Secret with key `networkdata`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data_secret_ref: Option<LocalObjectReference>,
    /// Secret with key `userdata`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalObjectReference>,
    /// User data, inline, at most 2048 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// User data, inline and base64 encoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data_base64: Option<String>,
}

/// cloud-init data for the NoCloud source.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloudInitNoCloudSource {
    /// Network configuration, inline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data: Option<String>,
    /// Network configuration, inline and base64 encoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data_base64: Option<String>,
    /// Secret with key `networkdata`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data_secret_ref: Option<LocalObjectReference>,
    /// Secret with key `userdata`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalObjectReference>,
    /// User data, inline, at most 2048 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// User data, inline and base64 encoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data_base64: Option<String>,
}

/// A ConfigMap in the VMI's namespace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapVolumeSource {
    /// Name of the ConfigMap.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Start even if it does not exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optional: Option<bool>,
    /// Label of the guest's file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_label: Option<String>,
}

/// A disk image inside a container image.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDiskSource {
    /// Image reference.
    pub image: String,
    /// Pull policy of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Secret with the registry's credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_secret: Option<String>,
    /// Absolute path of the image file; default: the only file under `/disk`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// A path of the launcher container.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPathVolumeSource {
    /// Absolute path.
    pub path: String,
    /// Mount read-only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// Claim populated by a DataVolume.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataVolumeSource {
    /// Permit unplugging the volume while the VMI runs.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub hotpluggable: bool,
    /// Name of the DataVolume and its claim.
    pub name: String,
}

/// Fields of the pod.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DownwardApiVolumeSource {
    /// Files to create.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<DownwardAPIVolumeFile>,
    /// Label of the guest's file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_label: Option<String>,
}

/// Marker for host metrics.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DownwardMetricsVolumeSource {}

/// Empty disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EmptyDiskSource {
    /// Size of the disk.
    pub capacity: Quantity,
}

/// Copy-on-write overlay of a claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EphemeralVolumeSource {
    /// Claim used as disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<k8s_openapi::api::core::v1::PersistentVolumeClaimVolumeSource>,
}

/// Image file on the node.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostDisk {
    /// Size of a file that is created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Quantity>,
    /// Absolute path on the node.
    pub path: String,
    /// True if several VMIs use the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
    /// `Disk` for an existing file, `DiskOrCreate` to create it.
    pub type_: String,
}

impl HostDisk {
    /// Returns directory and name of the file. `None` for a path that is not absolute and plain, or right beneath the root
    /// directory of the node.
    #[must_use]
    pub fn place(&self) -> Option<(&str, &str)> {
        let (directory, file) = self.path.rsplit_once('/')?;
        let is_plain = |name: &str| !name.is_empty() && name != "." && name != "..";
        let mut above = directory.strip_prefix('/')?.split('/');
        (is_plain(file) && above.all(is_plain)).then_some((directory, file))
    }
}

/// Claim for memory dumps.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryDumpVolumeSource {
    /// Name of the claim.
    pub claim_name: String,
    /// Permit unplugging the volume while the VMI runs.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub hotpluggable: bool,
    /// Mount read-only.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub read_only: bool,
}

/// A claim in the VMI's namespace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaimVolumeSource {
    /// Name of the claim.
    pub claim_name: String,
    /// Permit unplugging the volume while the VMI runs.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub hotpluggable: bool,
    /// Mount read-only.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub read_only: bool,
}

/// A Secret in the VMI's namespace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretVolumeSource {
    /// Start even if it does not exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optional: Option<bool>,
    /// Name of the Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_name: Option<String>,
    /// Label of the guest's file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_label: Option<String>,
}

/// Token of a service account.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccountVolumeSource {
    /// Name of the service account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
}

/// Answer file for Windows Setup; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SysprepSource {
    /// ConfigMap with the answer file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map: Option<LocalObjectReference>,
    /// Secret with the answer file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<LocalObjectReference>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_host_disk_names_a_directory_and_a_file() {
        let place = |path: &str| {
            let disk = HostDisk { path: path.to_owned(), ..HostDisk::default() };
            disk.place().map(|(directory, file)| (directory.to_owned(), file.to_owned()))
        };
        assert_eq!(place("/data/vms/a.img"), Some(("/data/vms".to_owned(), "a.img".to_owned())));
        for path in
            ["", "/", "a.img", "data/a.img", "/a.img", "/data/", "/data/..", "/data/../a", "/./a", "//a", "/a//b"]
        {
            assert_eq!(place(path), None, "{path}");
        }
    }
}
