//! Pushes archives to a registry with skopeo, and reads what tags name.

use std::{path::Path, process::Command};

use sha2::{Digest, Sha256};

use crate::{
    cache::hex,
    error::{Error, Result},
    run,
};

/// Debian package of the program.
const HINT: &str = "Debian package skopeo";

/// Texts of registries that do not have a tag or a repository.
const ABSENT: [&str; 5] =
    ["manifest unknown", "name unknown", "statuscode: 404", "unknown: repository", "unknown: artifact"];

/// Returns the manifest that a reference with a tag names; `None` if the registry has none.
pub(crate) fn manifest(reference: &str, plain_http: bool) -> Result<Option<Vec<u8>>> {
    let mut command = Command::new("skopeo");
    command.args(["inspect", "--raw", "--retry-times", "3"]);
    if plain_http {
        command.arg("--tls-verify=false");
    }
    match run::run(command.arg(format!("docker://{reference}")), HINT) {
        Ok(manifest) => Ok(Some(manifest)),
        Err(Error::ToolFailed { output, .. }) if is_absent(&output) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_absent(output: &str) -> bool {
    let output = output.to_lowercase();
    ABSENT.iter().any(|text| output.contains(text))
}

/// Returns the digest of content.
pub(crate) fn digest(content: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(content)))
}

/// Copies one archive to `registry` (host and path) under the image's name and tag, with the same digest. skopeo provides the
/// credentials (`skopeo login`, `REGISTRY_AUTH_FILE`).
pub fn push(archive: &Path, registry: &str, image: &str, tag: &str, plain_http: bool) -> Result<String> {
    let target = format!("{}/{image}:{tag}", registry.trim_end_matches('/'));
    copy(&format!("oci-archive:{}", archive.display()), &target, plain_http)?;
    Ok(target)
}

/// Copies an image from a place in the words of skopeo.
pub(crate) fn copy(source: &str, target: &str, plain_http: bool) -> Result<()> {
    let mut command = Command::new("skopeo");
    command.args(["copy", "--preserve-digests", "--retry-times", "3"]);
    if plain_http {
        command.arg("--dest-tls-verify=false");
    }
    command.arg(source).arg(format!("docker://{target}"));
    run::run(&mut command, HINT).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_about_absence_mean_that_a_tag_is_free() {
        for (output, absent) in [
            ("Error parsing image name: reading manifest 1 in r/a: manifest unknown: manifest unknown", true),
            ("reading manifest 1 in r/a: name unknown: repository name not known to registry", true),
            ("reading manifest 1 in r/a: StatusCode: 404, \"\"", true),
            ("reading manifest 1 in r/a: unknown: artifact a:1 not found", true),
            ("reading manifest 1 in r:4040/a: unauthorized: authentication required", false),
            ("pinging container registry r: Get \"http://r/v2/\": dial tcp: connection refused", false),
        ] {
            assert_eq!(is_absent(output), absent, "{output}");
        }
    }
}
