//! The node in a VM of the test cluster: Debian with its stock kernel, systemd and runc. The programs of the cluster come on a
//! disk of their own.

use std::fs;

use serde_json::{Value, json};

use super::{
    GuestFile,
    disk::{self, FileSystem},
    install_script, key,
};
use crate::{
    cache::Cache,
    error::{At, Result},
    packages::{self, Request, Variant},
    services, tools,
};

/// Installed packages besides the required ones.
const PACKAGES: [&str; 20] = [
    "apparmor",
    "ca-certificates",
    "conntrack",
    "dbus",
    "e2fsprogs",
    "initramfs-tools",
    "iproute2",
    "iptables",
    "iputils-ping",
    "kmod",
    "linux-image-amd64",
    "netbase",
    "nftables",
    "procps",
    "qemu-guest-agent",
    "runc",
    "systemd",
    "systemd-sysv",
    "udev",
    "zstd",
];

/// Files of the node.
const FILES: &[GuestFile] = &[
    ("etc/initramfs-tools/conf.d/ferrovirt.conf", 0o644, guest_file!("debian/initramfs.conf")),
    ("etc/initramfs-tools/modules", 0o644, guest_file!("node/initramfs-modules")),
    ("etc/modules-load.d/cluster.conf", 0o644, guest_file!("node/modules")),
    ("etc/systemd/system/cluster-node.service", 0o644, guest_file!("node/cluster-node.service")),
    ("etc/fstab", 0o644, "LABEL=node / ext4 errors=remount-ro 0 1\n"),
    ("etc/hosts", 0o644, "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"),
];

/// Size of the file system, of which the most is a hole.
const SIZE: u64 = 12 << 30;

/// Builds the disk of the node, unless it is cached. Returns the folders of the disk with its kernel (`node`), of the packages of
/// the launcher image with QEMU (`qemu`), and of the tools (`tools`).
///
/// # Errors
/// Fails if packages cannot be unpacked or the disk cannot be built.
pub fn node(cache: &Cache) -> Result<Value> {
    let tools = tools::root(cache)?;
    let hooks = [install_script(FILES, guest_file!("node/customize.sh"))];
    let request = Request { variant: Variant::Installed, packages: &PACKAGES, hooks: &hooks };
    let root = packages::root(cache, &request)?;
    let key = key(&tools, FILES).with(include_str!("node.rs")).with(&root.key).finish();
    let node = cache.entry("guests", &format!("node-{key}"), |dir| {
        eprintln!("images: building the disk of the node in a VM ...");
        let system = FileSystem { uuid: "5e0c3b0e-93a4-4a37-8d0c-2f6b7d1c4e35", size: SIZE, journal: true };
        disk::make_ext4(&tools.path, &root.path, &system, "node", &dir.join("disk.raw"))?;
        for (link, name) in [("vmlinuz", "vmlinuz"), ("initrd.img", "initrd")] {
            let from = root.path.join(link);
            fs::copy(&from, dir.join(name)).at(&from)?;
        }
        Ok(())
    })?;
    let qemu = packages::root(cache, &services::packages_of_launcher())?;
    Ok(json!({"node": node, "qemu": qemu.path, "tools": tools.path}))
}
