//! Checks domain XML with the programs of the launcher image.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    cache::Cache,
    error::{Error, Result},
    packages, run, services, tools,
    tree::QEMU_USER,
};

/// Checks files with virt-xml-validate, and defines each as a domain with libvirtd. Both are those of the launcher image, in
/// its packages as they were unpacked for it. Requires root.
///
/// # Errors
/// Fails if a file is refused, if a counter-check is accepted, or if a program is missing.
pub fn check(cache: &Cache, files: &[PathBuf]) -> Result<()> {
    if !Path::new("/dev/kvm").exists() {
        skips::skip("/dev/kvm, for defining domains that use it");
    }
    let root = packages::root(cache, &services::packages_of_launcher())?;
    let tools = tools::root(cache)?;
    let log = std::env::temp_dir().join(format!("ferrovirt-libvirtd-{}.log", std::process::id()));
    let mut command = Command::new("unshare");
    command
        .args([
            "--mount",
            "--pid",
            "--net",
            "--ipc",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            include_str!("check-domains.sh"),
            "sh",
        ])
        .args(files)
        .env("ROOT", &root.path)
        .env("BUSYBOX", tools.path.join("usr/bin/busybox"))
        .env("UID_GID", format!("{QEMU_USER}:{QEMU_USER}"))
        .env("LOG", &log);
    let outcome = run::run(&mut command, "Debian package util-linux");
    let written = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    match outcome {
        Err(Error::ToolFailed { output, .. }) => Err(Error::DomainsRefused { output, log: written }),
        outcome => outcome.map(drop),
    }
}
