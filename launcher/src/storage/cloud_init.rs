//! Files of cloud-init's NoCloud and ConfigDrive images.

use std::{collections::BTreeMap, path::Path};

use api::{
    VirtualMachineInstance,
    vmi::access::{self, AccessCredential},
};
use base64::Engine;
use serde::Serialize;

use super::{DiskError, iso::Files};
use crate::{
    files::{FileError, UntrustedDir},
    paths::Paths,
};

/// Limit of user data and of network data, in bytes: a secret's largest size.
const DATA_LIMIT: u64 = 1024 * 1024;
/// Limit of an SSH key file, in bytes.
const KEY_LIMIT: u64 = 64 * 1024;

/// Data source of cloud-init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataSource {
    /// A filesystem labelled `cidata`.
    NoCloud,
    /// A filesystem labelled `config-2`.
    ConfigDrive,
}

impl DataSource {
    /// Label of the image.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::NoCloud => "cidata",
            Self::ConfigDrive => "config-2",
        }
    }
}

/// A cloud-init volume of either kind.
#[derive(Clone, Debug)]
pub(crate) struct CloudInitVolume<'a> {
    /// Kind.
    pub(crate) source: DataSource,
    /// Name of the volume.
    pub(crate) name: &'a str,
    /// Inline user data.
    pub(crate) user_data: Option<&'a str>,
    /// Inline user data, encoded.
    pub(crate) user_data_base64: Option<&'a str>,
    /// Inline network data.
    pub(crate) network_data: Option<&'a str>,
    /// Inline network data, encoded.
    pub(crate) network_data_base64: Option<&'a str>,
    /// User data comes from a mounted secret.
    pub(crate) user_data_secret: bool,
    /// Network data comes from a mounted secret.
    pub(crate) network_data_secret: bool,
}

/// A tagged device of the guest, as OpenStack describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TaggedDevice {
    /// `nic`, `disk` or `hostdev`.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    /// Bus in libvirt's words.
    pub(crate) bus: String,
    /// Its address in the guest's notation: a PCI address, or numbers of controller, bus, target and unit.
    pub(crate) address: String,
    /// MAC address of an interface.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) mac: String,
    /// Serial number of a disk.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) serial: String,
    pub(crate) tags: [String; 1],
}

/// User data and network data of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CloudInitData {
    /// User data.
    pub(crate) user: Vec<u8>,
    /// Network data.
    pub(crate) network: Vec<u8>,
    /// SSH keys.
    pub(crate) keys: Vec<String>,
    /// Tagged devices; NoCloud cannot hold them.
    pub(crate) devices: Vec<TaggedDevice>,
}

/// Collects a volume's data from the spec and from mounted secrets.
pub(crate) fn collect(
    volume: &CloudInitVolume<'_>,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
) -> Result<CloudInitData, DiskError> {
    let failed = |message: &str| DiskError::Content { volume: volume.name.to_owned(), message: message.to_owned() };
    let inline = |text: Option<&str>, encoded: Option<&str>| match (text, encoded) {
        (Some(text), _) if !text.is_empty() => Ok(text.as_bytes().to_vec()),
        (_, Some(encoded)) => base64::engine::general_purpose::STANDARD
            // Encoders may break lines.
            .decode(encoded.trim().replace(['\r', '\n'], ""))
            .map_err(|_| failed("cloud-init data is not valid base64")),
        _ => Ok(Vec::new()),
    };
    let mut data = CloudInitData {
        user: inline(volume.user_data, volume.user_data_base64)?,
        network: inline(volume.network_data, volume.network_data_base64)?,
        keys: Vec::new(),
        devices: Vec::new(),
    };
    if volume.user_data_secret || volume.network_data_secret {
        let secret = paths.secret(volume.name);
        let user = volume.user_data_secret.then(|| first_of(&secret, &["userdata", "userData"]));
        let network = volume.network_data_secret.then(|| first_of(&secret, &["networkdata", "networkData"]));
        let mut found = false;
        for (content, place) in [(user, &mut data.user), (network, &mut data.network)] {
            if let Some(Some(content)) = content {
                *place = content.map_err(|source| DiskError::File { volume: volume.name.to_owned(), source })?;
                found = true;
            }
        }
        if !found {
            return Err(failed(&format!("no cloud-init data-source found at volume: {}", volume.name)));
        }
    }
    if data.user.is_empty() && data.network.is_empty() {
        return Err(failed(
            "userDataBase64, userData, networkDataBase64 or networkData is required for a cloud-init data source",
        ));
    }
    for credential in &vmi.spec.access_credentials {
        if let Some(secret) = key_secret(credential, volume.source) {
            read_keys(&paths.secret(&access::pod_volume(secret)), &mut data.keys)
                .map_err(|source| DiskError::File { volume: volume.name.to_owned(), source })?;
        }
    }
    Ok(data)
}

fn key_secret(credential: &AccessCredential, source: DataSource) -> Option<&str> {
    let key = credential.ssh_public_key.as_ref()?;
    let applies = match source {
        DataSource::NoCloud => key.propagation_method.no_cloud.is_some(),
        DataSource::ConfigDrive => key.propagation_method.config_drive.is_some(),
    };
    let secret = key.source.secret.as_ref()?;
    (applies && Paths::is_single_component(&secret.secret_name)).then_some(secret.secret_name.as_str())
}

fn read_keys(directory: &Path, keys: &mut Vec<String>) -> Result<(), FileError> {
    let directory = UntrustedDir::open(directory)?;
    for name in directory.keys(Path::new("."))? {
        let content = directory.read(Path::new(&name), KEY_LIMIT)?;
        let key = String::from_utf8_lossy(&content).trim().to_owned();
        if !key.is_empty() {
            keys.push(key);
        }
    }
    Ok(())
}

/// Returns the content of the first existing file; `None` if none exists.
fn first_of(directory: &Path, names: &[&str]) -> Option<Result<Vec<u8>, FileError>> {
    let directory = match UntrustedDir::open(directory) {
        Ok(directory) => directory,
        Err(error) => return Some(Err(error)),
    };
    names.iter().find_map(|name| match directory.read(Path::new(name), DATA_LIMIT) {
        // A missing key of a secret is mounted as an empty directory.
        Err(FileError::Open { .. } | FileError::NotRegular(_)) => None,
        result => Some(result),
    })
}

/// Metadata of NoCloud. The fields' order matches the reference's.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct NoCloudMeta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    instance_type: Option<&'a str>,
    instance_id: String,
    local_hostname: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    public_keys: BTreeMap<String, String>,
}

/// Metadata of ConfigDrive.
#[derive(Serialize)]
struct ConfigDriveMeta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    instance_type: Option<&'a str>,
    instance_id: String,
    hostname: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<TaggedDevice>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    public_keys: BTreeMap<String, String>,
}

fn text(meta: &impl Serialize) -> Vec<u8> {
    // Only maps with keys other than strings fail.
    serde_json::to_vec(meta).unwrap_or_default()
}

/// Returns the files of the image.
pub(crate) fn files(source: DataSource, vmi: &VirtualMachineInstance, data: CloudInitData) -> Files {
    let name = vmi.metadata.name.clone().unwrap_or_default();
    let namespace = vmi.metadata.namespace.clone().unwrap_or_default();
    let uuid = vmi.spec.domain.firmware.as_ref().and_then(|f| f.uuid.clone());
    let annotations = vmi.metadata.annotations.clone().unwrap_or_default();
    let instance_type = ["kubevirt.io/cluster-instancetype-name", "kubevirt.io/instancetype-name"]
        .iter()
        .find_map(|key| annotations.get(*key).map(String::as_str).filter(|kind| !kind.is_empty()));
    let public_keys: BTreeMap<String, String> =
        data.keys.into_iter().enumerate().map(|(index, key)| (index.to_string(), key)).collect();
    let mut files = Files::new();
    match source {
        DataSource::NoCloud => {
            let instance_id = uuid.unwrap_or_else(|| vmi.metadata.uid.clone().unwrap_or_default());
            let meta = NoCloudMeta { instance_type, instance_id, local_hostname: vmi.hostname(), public_keys };
            files.insert("meta-data".into(), text(&meta));
            files.insert("user-data".into(), data.user);
            if !data.network.is_empty() {
                files.insert("network-config".into(), data.network);
            }
        }
        DataSource::ConfigDrive => {
            let meta = ConfigDriveMeta {
                instance_type,
                instance_id: format!("{name}.{namespace}"),
                hostname: vmi.hostname(),
                uuid,
                devices: data.devices,
                public_keys,
            };
            files.insert("openstack/latest/meta_data.json".into(), text(&meta));
            files.insert("openstack/latest/user_data".into(), data.user);
            if !data.network.is_empty() {
                files.insert("openstack/latest/network_data.json".into(), data.network);
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi(name: &str) -> VirtualMachineInstance {
        let mut vmi = VirtualMachineInstance::default();
        vmi.metadata.name = Some(name.into());
        vmi.metadata.namespace = Some("ns".into());
        vmi.metadata.uid = Some("u-1".into());
        vmi
    }

    fn volume(name: &str) -> CloudInitVolume<'_> {
        CloudInitVolume {
            source: DataSource::NoCloud,
            name,
            user_data: None,
            user_data_base64: None,
            network_data: None,
            network_data_base64: None,
            user_data_secret: false,
            network_data_secret: false,
        }
    }

    #[test]
    fn inline_text_wins_over_encoded_text() {
        let volume = CloudInitVolume { user_data: Some("#a"), user_data_base64: Some("I2I="), ..volume("ci") };
        assert_eq!(collect(&volume, &vmi("a"), &Paths::default()).unwrap().user, b"#a");
        let volume = CloudInitVolume { user_data: None, ..volume };
        assert_eq!(collect(&volume, &vmi("a"), &Paths::default()).unwrap().user, b"#b");
    }

    #[test]
    fn a_volume_without_data_and_broken_base64_are_refused() {
        assert!(collect(&volume("ci"), &vmi("a"), &Paths::default()).is_err());
        let broken = CloudInitVolume { user_data_base64: Some("***"), ..volume("ci") };
        assert!(collect(&broken, &vmi("a"), &Paths::default()).is_err());
    }

    #[test]
    fn no_cloud_names_the_host_after_the_first_label_of_the_hostname() {
        let data = CloudInitData { user: b"#cloud-config".to_vec(), ..CloudInitData::default() };
        let files = files(DataSource::NoCloud, &vmi("web.example"), data);
        let meta: Value = serde_json::from_slice(&files["meta-data"]).unwrap();
        assert_eq!(meta, json!({"instance-id": "u-1", "local-hostname": "web"}));
        assert_eq!(files["user-data"], b"#cloud-config");
        assert!(!files.contains_key("network-config"));
    }

    #[test]
    fn metadata_has_the_order_of_the_reference() {
        let mut vmi = vmi("web");
        let name = "kubevirt.io/instancetype-name".to_owned();
        vmi.metadata.annotations = Some(BTreeMap::from([(name, "small".to_owned())]));
        vmi.spec.domain.firmware = serde_json::from_value(json!({"uuid": "f-1"})).unwrap();
        let content = |source: DataSource, file: &str| {
            let (bus, address, mac) = ("pci".to_owned(), "0000:01:00.0".to_owned(), "m".to_owned());
            let device = TaggedDevice { kind: "nic", bus, address, mac, serial: String::new(), tags: ["t".into()] };
            let data = CloudInitData { keys: vec!["k".into()], devices: vec![device], ..CloudInitData::default() };
            String::from_utf8(files(source, &vmi, data)[file].clone()).unwrap()
        };
        assert_eq!(
            content(DataSource::NoCloud, "meta-data"),
            r#"{"instance-type":"small","instance-id":"f-1","local-hostname":"web","public-keys":{"0":"k"}}"#
        );
        let devices = r#"[{"type":"nic","bus":"pci","address":"0000:01:00.0","mac":"m","tags":["t"]}]"#;
        let about = r#""instance_type":"small","instance_id":"web.ns","hostname":"web","uuid":"f-1""#;
        assert_eq!(
            content(DataSource::ConfigDrive, "openstack/latest/meta_data.json"),
            format!(r#"{{{about},"devices":{devices},"public_keys":{{"0":"k"}}}}"#)
        );
    }

    #[test]
    fn config_drive_has_openstacks_layout() {
        let (bus, address, serial) = ("scsi".to_owned(), "0:0:0:1".to_owned(), "s-1".to_owned());
        let disk = TaggedDevice { kind: "disk", bus, address, serial, mac: String::new(), tags: ["backup".into()] };
        let data = CloudInitData {
            user: b"u".to_vec(),
            network: b"n".to_vec(),
            keys: vec!["ssh-ed25519 A".into()],
            devices: vec![disk],
        };
        let files = files(DataSource::ConfigDrive, &vmi("web"), data);
        let meta: Value = serde_json::from_slice(&files["openstack/latest/meta_data.json"]).unwrap();
        assert_eq!(meta["instance_id"], "web.ns");
        assert_eq!(meta["public_keys"]["0"], "ssh-ed25519 A");
        let device = json!({"type": "disk", "bus": "scsi", "address": "0:0:0:1", "serial": "s-1", "tags": ["backup"]});
        assert_eq!(meta["devices"], json!([device]));
        assert_eq!(files["openstack/latest/network_data.json"], b"n");
    }
}
