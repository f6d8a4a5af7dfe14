//! Writes OCI image archives from layers and reads them for listing.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufWriter, Read, Write},
    path::Path,
};

use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{
    EPOCH, EPOCH_TEXT,
    cache::hex,
    error::{At, Error, Result},
    layer::Layer,
};

const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

/// Annotation with the unpacked size of a layer in bytes.
const UNPACKED: &str = "io.ferrovirt.unpacked-bytes";
/// Annotation with the name of an imported image in containerd.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// Annotation with its name in other tools.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Limits the size of JSON documents in an archive.
const MAX_JSON: u64 = 1 << 20;

/// Runtime configuration of an image.
#[derive(Debug, Clone, Default)]
pub struct Run<'a> {
    /// The command, if the image can be run.
    pub entrypoint: Option<&'a str>,
    /// Numeric user; `None` means root.
    pub user: Option<u32>,
    /// Description for users.
    pub description: &'a str,
    /// Environment variables as `NAME=VALUE`.
    pub variables: Vec<String>,
}

/// Summary of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Full name with tag.
    pub reference: String,
    /// Digest of the manifest, which identifies the image.
    pub digest: String,
    /// Bytes to transfer.
    pub compressed: u64,
    /// Bytes of files when unpacked.
    pub unpacked: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Descriptor {
    #[serde(rename = "mediaType")]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    platform: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    #[serde(rename = "mediaType")]
    media_type: String,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    #[serde(rename = "mediaType")]
    media_type: String,
    manifests: Vec<Descriptor>,
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

fn descriptor(media_type: &str, bytes: &[u8]) -> Descriptor {
    Descriptor {
        media_type: media_type.to_owned(),
        digest: digest(bytes),
        size: bytes.len() as u64,
        annotations: BTreeMap::new(),
        platform: None,
    }
}

/// Writes the archive of an image to `path` and returns its summary. An archive of the same image stays untouched. Another one
/// is replaced atomically.
pub fn write(path: &Path, reference: &str, run: &Run<'_>, layers: &[Layer]) -> Result<Summary> {
    let config = config(run, layers)?;
    let manifest = Manifest {
        schema_version: 2,
        media_type: MANIFEST_TYPE.to_owned(),
        config: descriptor(CONFIG_TYPE, &config),
        layers: layers
            .iter()
            .map(|layer| Descriptor {
                media_type: LAYER_TYPE.to_owned(),
                digest: layer.facts.digest.clone(),
                size: layer.facts.size,
                annotations: BTreeMap::from([(UNPACKED.to_owned(), layer.facts.unpacked.to_string())]),
                platform: None,
            })
            .collect(),
    };
    let manifest = serde_json::to_vec(&manifest)?;
    let summary = Summary {
        reference: reference.to_owned(),
        digest: digest(&manifest),
        compressed: layers.iter().map(|layer| layer.facts.size).sum(),
        unpacked: layers.iter().map(|layer| layer.facts.unpacked).sum(),
    };
    if path.exists() && read(path).is_ok_and(|old| old == summary) {
        return Ok(summary);
    }

    let mut entry = descriptor(MANIFEST_TYPE, &manifest);
    let tag = reference.rsplit(':').next().unwrap_or("latest");
    entry.annotations.insert(CONTAINERD_NAME.to_owned(), reference.to_owned());
    entry.annotations.insert(REF_NAME.to_owned(), tag.to_owned());
    let platform = [("architecture", "amd64"), ("os", "linux")];
    entry.platform = Some(platform.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    let index = Index { schema_version: 2, media_type: INDEX_TYPE.to_owned(), manifests: vec![entry] };

    let new = path.with_extension("tar.new");
    let mut archive = tar::Builder::new(BufWriter::new(File::create(&new).at(&new)?));
    // Metadata comes first so that a reader can skip the layers.
    put(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    put(&mut archive, "index.json", &serde_json::to_vec(&index)?)?;
    put(&mut archive, &blob(&digest(&manifest)), &manifest)?;
    put(&mut archive, &blob(&digest(&config)), &config)?;
    let mut written = Vec::new();
    for layer in layers {
        if !written.contains(&&layer.facts.digest) {
            written.push(&layer.facts.digest);
            let file = File::open(&layer.blob).at(&layer.blob)?;
            let mut header = header(layer.facts.size);
            archive.append_data(&mut header, blob(&layer.facts.digest), file.take(layer.facts.size)).at(&new)?;
        }
    }
    archive.into_inner().and_then(|mut writer| writer.flush()).at(&new)?;
    fs::rename(&new, path).at(path)?;
    Ok(summary)
}

fn config(run: &Run<'_>, layers: &[Layer]) -> Result<Vec<u8>> {
    let path = "PATH=/usr/sbin:/usr/bin";
    let variables: Vec<&str> = [path].into_iter().chain(run.variables.iter().map(String::as_str)).collect();
    let mut config = json!({
        "Env": variables,
        "WorkingDir": "/",
        "Labels": {
            "org.opencontainers.image.title": run.description,
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    });
    if let Some(entrypoint) = run.entrypoint {
        config["Entrypoint"] = json!([entrypoint]);
    }
    if let Some(user) = run.user {
        config["User"] = json!(format!("{user}:{user}"));
    }
    let history: Vec<_> = layers.iter().map(|_| json!({"created": EPOCH_TEXT, "created_by": "images build"})).collect();
    Ok(serde_json::to_vec(&json!({
        "created": EPOCH_TEXT,
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| &layer.facts.diff_id).collect::<Vec<_>>()},
        "history": history,
    }))?)
}

fn blob(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_mtime(EPOCH);
    header.set_size(size);
    header
}

fn put<W: Write>(archive: &mut tar::Builder<W>, name: &str, bytes: &[u8]) -> Result<()> {
    let mut header = header(bytes.len() as u64);
    archive.append_data(&mut header, name, bytes).at(name)
}

/// Reads the summary of an archive written by [`write`].
pub fn read(path: &Path) -> Result<Summary> {
    let bad = |detail: &str| Error::BadArchive { path: path.to_owned(), detail: detail.to_owned() };
    let mut archive = tar::Archive::new(File::open(path).at(path)?);
    let mut index: Option<Index> = None;
    for entry in archive.entries().at(path)? {
        let entry = entry.at(path)?;
        let name = entry.path().at(path)?.to_string_lossy().into_owned();
        let wanted = match &index {
            None => "index.json".to_owned(),
            Some(index) => blob(&index.manifests.first().ok_or_else(|| bad("its index is empty"))?.digest),
        };
        if name != wanted {
            continue;
        }
        let mut bytes = Vec::new();
        entry.take(MAX_JSON).read_to_end(&mut bytes).at(path)?;
        let Some(found) = &index else {
            index = Some(serde_json::from_slice(&bytes)?);
            continue;
        };
        let Some(described) = found.manifests.first() else { break };
        let manifest: Manifest = serde_json::from_slice(&bytes)?;
        return Ok(Summary {
            reference: described.annotations.get(CONTAINERD_NAME).cloned().unwrap_or_default(),
            digest: described.digest.clone(),
            compressed: manifest.layers.iter().map(|layer| layer.size).sum(),
            unpacked: manifest
                .layers
                .iter()
                .filter_map(|layer| layer.annotations.get(UNPACKED)?.parse::<u64>().ok())
                .sum(),
        });
    }
    Err(bad("not an OCI archive, or its index comes last"))
}

/// First bytes of a layer.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Reads the files below a folder from the layers of an archive written by [`write`], by their paths.
pub(crate) fn files(path: &Path, folder: &str) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut archive = tar::Archive::new(File::open(path).at(path)?);
    for entry in archive.entries().at(path)? {
        let mut blob = entry.at(path)?;
        let mut magic = [0; ZSTD_MAGIC.len()];
        if blob.size() < magic.len() as u64 {
            continue;
        }
        blob.read_exact(&mut magic).at(path)?;
        if magic != ZSTD_MAGIC {
            continue;
        }
        let layer = zstd::Decoder::new(magic.chain(blob)).at(path)?;
        let mut layer = tar::Archive::new(layer);
        for entry in layer.entries().at(path)? {
            let entry = entry.at(path)?;
            let name = entry.path().at(path)?.to_string_lossy().into_owned();
            if name.starts_with(folder) && entry.header().entry_type().is_file() {
                let mut bytes = Vec::new();
                entry.take(MAX_JSON).read_to_end(&mut bytes).at(path)?;
                found.insert(name, bytes);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cache::Cache, layer::layer, tree::Tree};

    #[test]
    fn an_archive_is_read_back_and_not_rewritten_when_nothing_changed() {
        let dir = std::env::temp_dir().join(format!("ferrovirt-images-oci-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut tree = Tree::default();
        tree.file("disk/disk.qcow2", 0o440, "abc");
        let layers = [layer(&Cache::at(dir.join("cache")), &tree).unwrap()];
        let run = Run { entrypoint: Some("/usr/bin/x"), user: Some(107), description: "test", variables: vec![] };
        let path = dir.join("x.tar");
        let written = write(&path, "ferrovirt.io/x:devel", &run, &layers).unwrap();
        assert_eq!(read(&path).unwrap(), written);
        assert_eq!((written.reference.as_str(), written.unpacked), ("ferrovirt.io/x:devel", 3));
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        write(&path, "ferrovirt.io/x:devel", &run, &layers).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
        assert_eq!(files(&path, "disk/").unwrap(), [("disk/disk.qcow2".to_owned(), b"abc".to_vec())].into());
        assert!(files(&path, "etc/").unwrap().is_empty());
        let other = Run { variables: vec!["A=b".to_owned()], ..run };
        assert_ne!(write(&path, "ferrovirt.io/x:devel", &other, &layers).unwrap().digest, written.digest);
        fs::write(&path, "not a tar").unwrap();
        assert!(read(&path).is_err());
        fs::remove_dir_all(dir).unwrap();
    }
}
