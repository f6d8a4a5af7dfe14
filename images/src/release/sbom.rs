//! Software bill of materials: SPDX 2.3 as JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{NAME, Released, crates::Crate, debian::Package};
use crate::{cache::hex, packages::SUITE};

/// Value of SPDX for facts that are not stated.
const UNKNOWN: &str = "NOASSERTION";

/// Returns the document: each image with its crates and Debian packages.
pub(super) fn document(version: &str, created: &str, registry: &str, released: &[Released]) -> Value {
    let mut packages = BTreeMap::new();
    let mut relationships = Vec::new();
    let mut hash = Sha256::new();
    for released in released {
        hash.update(&released.digest);
        let id = identifier("Image", &[released.image.name]);
        relationships.push(relation("SPDXRef-DOCUMENT", "DESCRIBES", &id));
        for krate in &released.crates {
            let part = identifier("Crate", &[&krate.name, &krate.version]);
            relationships.push(relation(&id, "CONTAINS", &part));
            packages.entry(part.clone()).or_insert_with(|| of_crate(&part, krate));
        }
        for package in &released.packages {
            let part = identifier("Debian", &[&package.name, &package.version, &package.architecture]);
            relationships.push(relation(&id, "CONTAINS", &part));
            packages.entry(part.clone()).or_insert_with(|| of_debian(&part, package));
        }
        let value = of_image(&id, version, registry, released);
        packages.insert(id, value);
    }
    json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("{NAME}-{version}"),
        "documentNamespace": format!("https://ferrovirt.io/spdx/{NAME}-{version}-{}", hex(&hash.finalize()[..16])),
        "creationInfo": {"created": created, "creators": ["Tool: ferrovirt-images"]},
        "packages": packages.into_values().collect::<Vec<_>>(),
        "relationships": relationships,
    })
}

fn relation(from: &str, kind: &str, to: &str) -> Value {
    json!({"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
}

/// Returns an identifier, which may have letters, digits, `.` and `-`. Other bytes are written in hexadecimal digits, so that
/// different packages stay different.
fn identifier(kind: &str, parts: &[&str]) -> String {
    let mut text = format!("SPDXRef-{kind}");
    for part in parts {
        text.push('-');
        for byte in part.bytes() {
            match byte {
                b'.' | b'-' => text.push(char::from(byte)),
                byte if byte.is_ascii_alphanumeric() => text.push(char::from(byte)),
                byte => text.push_str(&format!(".{byte:02x}.")),
            }
        }
    }
    text
}

/// Encodes a part of a package URL.
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b".-_~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
        encoded
    })
}

fn package_url(url: String) -> Value {
    json!([{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}])
}

fn of_image(id: &str, version: &str, registry: &str, released: &Released) -> Value {
    let image = released.image;
    let name = image.path.rsplit('/').next().unwrap_or(image.path);
    let repository = format!("{registry}/{}", image.path);
    let url = format!(
        "pkg:oci/{}@{}?repository_url={}&tag={}",
        encoded(name),
        encoded(&released.digest),
        encoded(&repository),
        encoded(&image.tag(version))
    );
    json!({
        "SPDXID": id,
        "name": repository,
        "versionInfo": image.tag(version),
        "supplier": "Organization: Ferrovirt",
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [{"algorithm": "SHA256", "checksumValue": released.digest.trim_start_matches("sha256:")}],
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "copyrightText": UNKNOWN,
        "externalRefs": package_url(url),
    })
}

fn of_crate(id: &str, krate: &Crate) -> Value {
    let (name, version) = (encoded(&krate.name), encoded(&krate.version));
    let mut value = json!({
        "SPDXID": id,
        "name": krate.name,
        "versionInfo": krate.version,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "primaryPackagePurpose": "LIBRARY",
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": krate.licence.as_deref().unwrap_or(UNKNOWN),
        "copyrightText": UNKNOWN,
    });
    if krate.ours {
        value["supplier"] = json!("Organization: Ferrovirt");
    } else {
        value["downloadLocation"] = json!(format!("https://crates.io/api/v1/crates/{name}/{version}/download"));
        value["externalRefs"] = package_url(format!("pkg:cargo/{name}@{version}"));
    }
    value
}

fn of_debian(id: &str, package: &Package) -> Value {
    let url = format!(
        "pkg:deb/debian/{}@{}?arch={}&distro={SUITE}",
        encoded(&package.name),
        encoded(&package.version),
        encoded(&package.architecture)
    );
    let mut value = json!({
        "SPDXID": id,
        "name": package.name,
        "versionInfo": package.version,
        "supplier": "Organization: Debian",
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "copyrightText": UNKNOWN,
        "externalRefs": package_url(url),
    });
    if let Some(source) = &package.source {
        value["sourceInfo"] = json!(format!("built from the Debian source package {source}"));
    }
    if !package.maintainer.is_empty() {
        value["comment"] = json!(format!("Maintainer: {}", package.maintainer));
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Image;

    fn released(name: &str) -> Released {
        let krate = Crate {
            name: "serde".to_owned(),
            version: "1.0.0".to_owned(),
            licence: Some("MIT".to_owned()),
            folder: "/x".into(),
            repository: None,
            ours: false,
        };
        let package = Package {
            name: "libstdc++6".to_owned(),
            version: "1:14.2-19".to_owned(),
            architecture: "amd64".to_owned(),
            source: Some("gcc-14".to_owned()),
            maintainer: String::new(),
        };
        Released {
            image: Image::find(name).unwrap(),
            digest: "sha256:aa".to_owned(),
            packages: vec![package],
            crates: vec![krate],
        }
    }

    #[test]
    fn parts_of_several_images_are_described_once_and_related_to_each() {
        let all = [released("virt-api"), released("virt-launcher-debug")];
        let document = document("1.0.0", "2026-01-01T00:00:00Z", "r.example.com/f", &all);
        let packages = document["packages"].as_array().unwrap();
        assert_eq!(packages.len(), 4);
        assert_eq!(document["relationships"].as_array().unwrap().len(), 6);
        let urls: Vec<_> =
            packages.iter().map(|p| p["externalRefs"][0]["referenceLocator"].as_str().unwrap()).collect();
        assert!(urls.contains(&"pkg:deb/debian/libstdc%2B%2B6@1%3A14.2-19?arch=amd64&distro=trixie"), "{urls:?}");
        assert!(urls.contains(&"pkg:cargo/serde@1.0.0"));
        assert!(
            urls.contains(
                &"pkg:oci/virt-launcher@sha256%3Aaa?repository_url=r.example.com%2Ff%2Fvirt-launcher&tag=1.0.0-debug"
            ),
            "{urls:?}"
        );
        for package in packages {
            let id = package["SPDXID"].as_str().unwrap();
            assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'.' || byte == b'-'), "{id}");
        }
    }

    #[test]
    fn similar_names_have_different_identifiers() {
        assert_ne!(identifier("Debian", &["a+b"]), identifier("Debian", &["a_b"]));
    }
}
