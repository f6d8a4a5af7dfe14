//! Requests to the guest agent and its reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::status::VirtualMachineInstanceGuestOsInfo;

/// Options of `freeze`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FreezeUnfreezeTimeout {
    /// Time after which the guest is unfrozen automatically, such as `5m0s`; `0s`: never. Required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unfreeze_timeout: Option<String>,
}

/// Answer of `guestosinfo`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestAgentInfo {
    /// `frozen` while guest file systems are frozen.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fs_freeze_status: String,
    /// Version of the guest agent.
    pub fs_info: GuestFileSystemInfo,
    /// Version of the agent.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub guest_agent_version: String,
    /// Host name of the guest, including its domain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hostname: String,
    /// The operating system.
    pub os: VirtualMachineInstanceGuestOsInfo,
    /// Commands that the guest agent supports.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub supported_commands: Vec<GuestAgentCommandInfo>,
    /// Time zone with its offset in seconds, such as `UTC, 0`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub timezone: String,
    /// Users logged in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub user_list: Vec<GuestUser>,
}

/// A command of the guest agent.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestAgentCommandInfo {
    /// True if the command is enabled in the guest.
    #[serde(skip_serializing_if = "crate::is_false")]
    pub enabled: bool,
    /// Its name.
    pub name: String,
}

/// Mounted file systems, as part of [`GuestAgentInfo`].
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestFileSystemInfo {
    /// The file systems.
    pub disks: Vec<GuestFileSystem>,
}

/// Answer of `userlist`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestUserList {
    /// Users logged in.
    pub items: Vec<GuestUser>,
    /// Empty; expected by clients of lists.
    pub metadata: ListMeta,
}

/// A user logged in to the guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestUser {
    /// Domain of the user, on Windows.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Time of the user's earliest login in seconds since 1970, with a fraction.
    #[serde(skip_serializing_if = "is_zero")]
    pub login_time: f64,
    /// Name of the user.
    pub user_name: String,
}

/// Answer of `filesystemlist`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestFileSystemList {
    /// Mounted file systems.
    pub items: Vec<GuestFileSystem>,
    /// Empty; expected by clients of lists.
    pub metadata: ListMeta,
}

/// A file system mounted in the guest.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestFileSystem {
    /// Disks of the file system.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk: Vec<GuestFileSystemDisk>,
    /// Name of the block device, such as `vda1`.
    pub disk_name: String,
    /// Type, such as `ext4`.
    pub file_system_type: String,
    /// Mount point.
    pub mount_point: String,
    /// Size in bytes.
    pub total_bytes: i64,
    /// Used bytes.
    pub used_bytes: i64,
}

/// A disk of a file system.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestFileSystemDisk {
    /// Bus of the disk, such as `virtio`.
    pub bus_type: String,
    /// Serial number of the disk.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub serial: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_have_the_keys_that_clients_read() {
        assert_eq!(json!(GuestUserList::default()), json!({"items": [], "metadata": {}}));
        let user = GuestUser { user_name: "fedora".into(), login_time: 1.5, ..Default::default() };
        assert_eq!(json!(user), json!({"userName": "fedora", "loginTime": 1.5}));
        let system = GuestFileSystem { disk_name: "vda1".into(), total_bytes: 10, ..Default::default() };
        assert_eq!(
            json!(system),
            json!({"diskName": "vda1", "mountPoint": "", "fileSystemType": "", "usedBytes": 0, "totalBytes": 10})
        );
        assert_eq!(json!(GuestAgentInfo::default()), json!({"fsInfo": {"disks": []}, "os": {}}));
    }
}
