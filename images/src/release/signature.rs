//! Signatures of a release by a key of the publisher: a detached one of the checksums, and one of each image as cosign stores
//! them, beside the image in the registry.

use std::{
    fs,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, SigningKey};
use serde_json::{Value, json};

use crate::{
    error::{At, Error, Result},
    registry,
};

/// Media type of a signed statement about an image.
const STATEMENT: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// Annotation of its layer with the signature.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";

/// A key that signs.
pub(super) struct Key(KeyPair);

impl Key {
    /// Reads a private key for ECDSA with curve P-256, in PEM (PKCS#8, not encrypted).
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).at(path)?;
        let unfit = || {
            let path = path.display();
            Error::NotReleasable(format!(
                "{path} is not a private key for ECDSA with curve P-256 (PEM of PKCS#8, not encrypted)"
            ))
        };
        match KeyPair::from_pem(&text) {
            Ok(key) if key.algorithm() == &PKCS_ECDSA_P256_SHA256 => Ok(Self(key)),
            _ => Err(unfit()),
        }
    }

    /// Returns the signature of a text, in DER: that of `openssl dgst -sha256 -sign`.
    pub(super) fn sign(&self, text: &[u8]) -> Result<Vec<u8>> {
        self.0.sign(text).map_err(|error| Error::NotReleasable(format!("cannot sign: {error}")))
    }

    /// Writes the signature of an image into `folder`, as an OCI layout. Returns its tag in the repository of the image.
    pub(super) fn write_layout(&self, folder: &Path, repository: &str, digest: &str) -> Result<String> {
        let statement = json!({
            "critical": {
                "identity": {"docker-reference": repository},
                "image": {"docker-manifest-digest": digest},
                "type": "cosign container image signature",
            },
            "optional": null,
        })
        .to_string()
        .into_bytes();
        let signature = STANDARD.encode(self.sign(&statement)?);
        let mut layer = put(folder, STATEMENT, &statement)?;
        layer["annotations"] = json!({SIGNATURE: signature});
        let config = json!({
            "architecture": "", "os": "", "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        });
        let config = put(folder, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer]});
        let manifest = put(folder, kind, manifest.to_string().as_bytes())?;
        let index = json!({"schemaVersion": 2, "manifests": [manifest]});
        for (name, content) in [("index.json", index), ("oci-layout", json!({"imageLayoutVersion": "1.0.0"}))] {
            let path = folder.join(name);
            fs::write(&path, content.to_string()).at(&path)?;
        }
        Ok(format!("{}.sig", digest.replacen(':', "-", 1)))
    }
}

/// Writes a blob and returns its descriptor.
fn put(folder: &Path, kind: &str, content: &[u8]) -> Result<Value> {
    let digest = registry::digest(content);
    let path = folder.join(PathBuf::from(format!("blobs/{}", digest.replacen(':', "/", 1))));
    let parent = path.parent().unwrap_or(folder);
    fs::create_dir_all(parent).at(parent)?;
    fs::write(&path, content).at(&path)?;
    Ok(json!({"mediaType": kind, "digest": digest, "size": content.len()}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(folder: &Path, descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().unwrap().replacen(':', "/", 1);
        let content = fs::read(folder.join("blobs").join(digest)).unwrap();
        assert_eq!(descriptor["size"], content.len());
        content
    }

    #[test]
    fn signature_of_an_image_is_stored_as_that_of_cosign() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-signature-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("key.pem");
        fs::write(&file, "no key").unwrap();
        assert!(Key::read(&file).is_err());
        fs::write(&file, KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap().serialize_pem()).unwrap();
        assert!(Key::read(&file).is_err());
        fs::write(&file, KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap().serialize_pem()).unwrap();
        let key = Key::read(&file).unwrap();
        let tag = key.write_layout(&folder, "registry.example.com/a/virt-api", "sha256:00ff").unwrap();
        assert_eq!(tag, "sha256-00ff.sig");
        let index: Value = serde_json::from_slice(&fs::read(folder.join("index.json")).unwrap()).unwrap();
        let manifest: Value = serde_json::from_slice(&blob(&folder, &index["manifests"][0])).unwrap();
        let layer = &manifest["layers"][0];
        let statement: Value = serde_json::from_slice(&blob(&folder, layer)).unwrap();
        assert_eq!(statement["critical"]["image"]["docker-manifest-digest"], "sha256:00ff");
        assert_eq!(statement["critical"]["identity"]["docker-reference"], "registry.example.com/a/virt-api");
        let config: Value = serde_json::from_slice(&blob(&folder, &manifest["config"])).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], layer["digest"]);
        // A sequence of DER.
        let signature = STANDARD.decode(layer["annotations"][SIGNATURE].as_str().unwrap()).unwrap();
        assert_eq!(signature.first(), Some(&0x30));
        fs::remove_dir_all(&folder).unwrap();
    }
}
