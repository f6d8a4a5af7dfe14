//! Options of volume hotplug and of memory dumps.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error};
use serde_json::Value;

use crate::vm::status::HotplugVolumeSource;
use crate::vmi::disks::Disk;

/// Options of `addvolume` as sent by a client. The VM's status stores
/// [`AddVolumeOptions`](crate::vm::status::AddVolumeOptions).
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AddVolumeRequest {
    /// The disk; its name is ignored. Required.
    #[serde(deserialize_with = "nameless", skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Name of disk and volume. Required.
    #[serde(deserialize_with = "super::or_default")]
    pub name: String,
    /// The volume source, a claim or a DataVolume. Required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_source: Option<HotplugVolumeSource>,
}

/// Options of `removevolume` as sent by a client.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RemoveVolumeRequest {
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Name of the volume, or of its claim or DataVolume. Required.
    #[serde(deserialize_with = "super::or_default")]
    pub name: String,
}

/// Options of `memorydump`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryDumpOptions {
    /// Claim for the dump; default: that of the last dump.
    #[serde(deserialize_with = "super::or_default")]
    pub claim_name: String,
}

/// Options of `hibernate`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HibernateOptions {
    /// Claim for the memory; default: one that is made for it and removed afterwards.
    #[serde(deserialize_with = "super::or_default")]
    pub claim_name: String,
    /// Remove the saved memory: the next start boots.
    #[serde(deserialize_with = "super::or_default")]
    pub discard: bool,
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
}

/// Parses a disk without requiring its name, since the name of the request applies.
fn nameless<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Disk>, D::Error> {
    let Some(mut disk) = Option::<Value>::deserialize(deserializer)? else { return Ok(None) };
    if let Some(fields) = disk.as_object_mut() {
        fields.entry("name").or_insert_with(|| Value::String(String::new()));
    }
    serde_json::from_value(disk).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn disk_needs_no_name_of_its_own() {
        let read = |body: Value| serde_json::from_value::<AddVolumeRequest>(body);
        let request = read(json!({"name": "a", "disk": {"disk": {"bus": "scsi"}}})).unwrap();
        assert_eq!(request.disk.and_then(|disk| disk.disk).and_then(|disk| disk.bus).as_deref(), Some("scsi"));
        assert_eq!(read(json!({"name": "a", "disk": null})).unwrap().disk, None);
        assert_eq!(read(json!({"name": "a"})).unwrap().disk, None);
        assert!(read(json!({"disk": {"disk": 1}})).is_err());
    }
}
