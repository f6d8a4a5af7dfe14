//! cloud-init's data as the files of an image: NoCloud and ConfigDrive.

use std::path::Path;

use api::{VirtualMachineInstance, vmi::access::AccessCredential};
use base64::Engine;
use serde_json::{Map, Value, json};

use super::{DiskError, iso::Files};
use crate::{
    files::{FileError, UntrustedDir},
    paths::Paths,
};

/// Largest user data or network data, in bytes: a secret's largest size.
const DATA_LIMIT: u64 = 1024 * 1024;
/// Largest SSH key file.
const KEY_LIMIT: u64 = 64 * 1024;

/// Where cloud-init looks for its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSource {
    /// A filesystem labelled `cidata`.
    NoCloud,
    /// A filesystem labelled `config-2`.
    ConfigDrive,
}

impl DataSource {
    /// Label of the image.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoCloud => "cidata",
            Self::ConfigDrive => "config-2",
        }
    }
}

/// A cloud-init volume, whichever of the two kinds.
#[derive(Clone, Debug)]
pub struct CloudInitVolume<'a> {
    /// Kind.
    pub source: DataSource,
    /// Name of the volume.
    pub name: &'a str,
    /// Inline user data.
    pub user_data: Option<&'a str>,
    /// Inline user data, encoded.
    pub user_data_base64: Option<&'a str>,
    /// Inline network data.
    pub network_data: Option<&'a str>,
    /// Inline network data, encoded.
    pub network_data_base64: Option<&'a str>,
    /// User data comes from a mounted secret.
    pub user_data_secret: bool,
    /// Network data comes from a mounted secret.
    pub network_data_secret: bool,
}

/// User data and network data of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudInitData {
    /// User data.
    pub user: Vec<u8>,
    /// Network data.
    pub network: Vec<u8>,
    /// SSH keys.
    pub keys: Vec<String>,
}

/// Collects a volume's data from the spec and from mounted secrets.
///
/// # Errors
/// When there is none, it is not valid, or a secret cannot be read.
pub fn collect(
    volume: &CloudInitVolume<'_>,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
) -> Result<CloudInitData, DiskError> {
    let failed = |message: &str| DiskError::Content { volume: volume.name.to_owned(), message: message.to_owned() };
    let inline = |text: Option<&str>, encoded: Option<&str>| match (text, encoded) {
        (Some(text), _) if !text.is_empty() => Ok(text.as_bytes().to_vec()),
        (_, Some(encoded)) => base64::engine::general_purpose::STANDARD
            // Lines may be broken, as encoders do.
            .decode(encoded.trim().replace(['\r', '\n'], ""))
            .map_err(|_| failed("cloud-init data is not valid base64")),
        _ => Ok(Vec::new()),
    };
    let mut data = CloudInitData {
        user: inline(volume.user_data, volume.user_data_base64)?,
        network: inline(volume.network_data, volume.network_data_base64)?,
        keys: Vec::new(),
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
            read_keys(&paths.secret(&format!("{secret}-access-cred")), &mut data.keys)
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
    for name in directory.entries(Path::new("."))? {
        let content = directory.read(Path::new(&name), KEY_LIMIT)?;
        let key = String::from_utf8_lossy(&content).trim().to_owned();
        if !key.is_empty() {
            keys.push(key);
        }
    }
    Ok(())
}

/// Content of the first of some files that exists; `None` if none does.
fn first_of(directory: &Path, names: &[&str]) -> Option<Result<Vec<u8>, FileError>> {
    let directory = match UntrustedDir::open(directory) {
        Ok(directory) => directory,
        Err(error) => return Some(Err(error)),
    };
    names.iter().find_map(|name| match directory.read(Path::new(name), DATA_LIMIT) {
        // A key that the secret does not have is mounted as an empty directory.
        Err(FileError::Open { .. } | FileError::NotRegular(_)) => None,
        result => Some(result),
    })
}

/// Host name of the guest.
pub fn hostname(vmi: &VirtualMachineInstance) -> String {
    match vmi.spec.hostname.as_deref() {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => {
            let name = vmi.metadata.name.as_deref().unwrap_or_default();
            name.split('.').next().unwrap_or_default().chars().take(63).collect()
        }
    }
}

/// The files of the image.
pub fn files(source: DataSource, vmi: &VirtualMachineInstance, data: CloudInitData) -> Files {
    let name = vmi.metadata.name.clone().unwrap_or_default();
    let namespace = vmi.metadata.namespace.clone().unwrap_or_default();
    let uuid = vmi.spec.domain.firmware.as_ref().and_then(|f| f.uuid.clone());
    let annotations = vmi.metadata.annotations.clone().unwrap_or_default();
    let instance_type = ["kubevirt.io/cluster-instancetype-name", "kubevirt.io/instancetype-name"]
        .iter()
        .find_map(|key| annotations.get(*key).filter(|v| !v.is_empty()));
    let keys: Map<String, Value> =
        data.keys.into_iter().enumerate().map(|(i, key)| (i.to_string(), Value::String(key))).collect();
    let mut meta = Map::new();
    let mut files = Files::new();
    match source {
        DataSource::NoCloud => {
            if let Some(kind) = instance_type {
                meta.insert("instance-type".into(), json!(kind));
            }
            let id = uuid.unwrap_or_else(|| vmi.metadata.uid.clone().unwrap_or_default());
            meta.insert("instance-id".into(), json!(id));
            meta.insert("local-hostname".into(), json!(hostname(vmi)));
            if !keys.is_empty() {
                meta.insert("public-keys".into(), Value::Object(keys));
            }
            files.insert("meta-data".into(), Value::Object(meta).to_string().into_bytes());
            files.insert("user-data".into(), data.user);
            if !data.network.is_empty() {
                files.insert("network-config".into(), data.network);
            }
        }
        DataSource::ConfigDrive => {
            if let Some(kind) = instance_type {
                meta.insert("instance_type".into(), json!(kind));
            }
            meta.insert("instance_id".into(), json!(format!("{name}.{namespace}")));
            meta.insert("hostname".into(), json!(hostname(vmi)));
            if let Some(uuid) = uuid {
                meta.insert("uuid".into(), json!(uuid));
            }
            if !keys.is_empty() {
                meta.insert("public_keys".into(), Value::Object(keys));
            }
            files.insert("openstack/latest/meta_data.json".into(), Value::Object(meta).to_string().into_bytes());
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
    fn no_cloud_names_the_host_after_the_first_label_of_the_machine() {
        let data = CloudInitData { user: b"#cloud-config".to_vec(), ..CloudInitData::default() };
        let files = files(DataSource::NoCloud, &vmi("web.example"), data);
        let meta: Value = serde_json::from_slice(&files["meta-data"]).unwrap();
        assert_eq!(meta, json!({"instance-id": "u-1", "local-hostname": "web"}));
        assert_eq!(files["user-data"], b"#cloud-config");
        assert!(!files.contains_key("network-config"));
    }

    #[test]
    fn config_drive_has_openstacks_layout() {
        let data = CloudInitData { user: b"u".to_vec(), network: b"n".to_vec(), keys: vec!["ssh-ed25519 A".into()] };
        let files = files(DataSource::ConfigDrive, &vmi("web"), data);
        let meta: Value = serde_json::from_slice(&files["openstack/latest/meta_data.json"]).unwrap();
        assert_eq!(meta["instance_id"], "web.ns");
        assert_eq!(meta["public_keys"]["0"], "ssh-ed25519 A");
        assert_eq!(files["openstack/latest/network_data.json"], b"n");
    }
}
