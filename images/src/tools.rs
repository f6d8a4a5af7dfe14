//! Programs from Debian packages that the builds of images run.

use std::process::Command;

use crate::{
    cache::Cache,
    error::Result,
    packages::{self, Request, Root, Variant},
    run,
};

/// Packages for building: kernel and busybox of the small guest, boot loaders, file system tools, disk tools, objcopy.
const PACKAGES: [&str; 13] = [
    "base-files",
    "linux-image-cloud-amd64",
    "busybox-static",
    "binutils",
    "grub-efi-amd64-bin",
    "grub-efi-amd64-signed",
    "shim-signed",
    "grub-pc-bin",
    "grub-common",
    "dosfstools",
    "mtools",
    "e2fsprogs",
    "qemu-utils",
];

/// Returns the root with the unpacked tools.
pub(crate) fn root(cache: &Cache) -> Result<Root> {
    packages::root(cache, &Request { variant: Variant::Extract, packages: &PACKAGES, hooks: &[] })
}

/// Returns the names of the busybox applets in a root.
pub(crate) fn applets(root: &Root) -> Result<Vec<String>> {
    let mut command = Command::new(root.path.join("usr/bin/busybox"));
    command.arg("--list");
    let list = run::run(&mut command, "from Debian package busybox-static")?;
    Ok(String::from_utf8_lossy(&list).lines().map(str::to_owned).collect())
}
