//! Pushes archives to a registry with skopeo.

use std::{path::Path, process::Command};

use crate::{error::Result, run};

/// Copies one archive to `registry` (host and path) under the image's name and tag, with the same digest. skopeo provides the
/// credentials (`skopeo login`, `REGISTRY_AUTH_FILE`).
pub fn push(archive: &Path, registry: &str, image: &str, tag: &str, plain_http: bool) -> Result<String> {
    let target = format!("{}/{image}:{tag}", registry.trim_end_matches('/'));
    let mut command = Command::new("skopeo");
    command.args(["copy", "--preserve-digests", "--retry-times", "3"]);
    if plain_http {
        command.arg("--dest-tls-verify=false");
    }
    command.arg(format!("oci-archive:{}", archive.display())).arg(format!("docker://{target}"));
    run::run(&mut command, "Debian package skopeo")?;
    Ok(target)
}
