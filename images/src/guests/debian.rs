//! The full guest: Debian with systemd, cloud-init, guest agent and SSH server.

use std::{fs, path::PathBuf};

use super::{
    GuestFile,
    disk::{self, FileSystem},
    grub::Linux,
    install_script, key,
};
use crate::{
    cache::Cache,
    error::{At, Result},
    packages::{self, Request, Root, Variant},
};

/// Installed packages besides the required ones.
const PACKAGES: [&str; 24] = [
    "cloud-guest-utils",
    "cloud-init",
    "curl",
    "dbus",
    "e2fsprogs",
    "fdisk",
    "initramfs-tools",
    "iproute2",
    "iputils-ping",
    "kmod",
    "less",
    "linux-image-cloud-amd64",
    "netbase",
    "netcat-openbsd",
    "openssh-server",
    "procps",
    "qemu-guest-agent",
    "sudo",
    "systemd",
    "systemd-resolved",
    "systemd-sysv",
    "systemd-timesyncd",
    "udev",
    "zstd",
];

/// Files of the guest.
const FILES: &[GuestFile] = &[
    ("etc/initramfs-tools/conf.d/ferrovirt.conf", 0o644, guest_file!("debian/initramfs.conf")),
    ("etc/initramfs-tools/modules", 0o644, guest_file!("debian/initramfs-modules")),
    ("etc/fstab", 0o644, "LABEL=debian / ext4 discard,errors=remount-ro 0 1\n"),
    ("etc/hostname", 0o644, "debian\n"),
    ("etc/hosts", 0o644, "127.0.0.1 localhost\n127.0.1.1 debian\n::1 localhost ip6-localhost ip6-loopback\n"),
    // On a busy host an emulated guest finds its console after minutes. Without it nobody can log in.
    ("etc/systemd/system.conf.d/ferrovirt.conf", 0o644, "[Manager]\nDefaultDeviceTimeoutSec=15min\n"),
    ("etc/systemd/network/50-dhcp.network", 0o644, guest_file!("debian/50-dhcp.network")),
    ("etc/systemd/system/ssh.service.d/keys.conf", 0o644, guest_file!("debian/ssh-keys.conf")),
    ("etc/ssh/sshd_config.d/ferrovirt.conf", 0o644, guest_file!("debian/sshd.conf")),
    ("etc/cloud/cloud.cfg.d/90-ferrovirt.cfg", 0o644, guest_file!("debian/cloud.cfg")),
];

/// Returns the directory with `disk.qcow2`.
pub(super) fn build(cache: &Cache, tools: &Root) -> Result<PathBuf> {
    let hooks = [install_script(FILES, guest_file!("debian/customize.sh"))];
    let request = Request { variant: Variant::Installed, packages: &PACKAGES, hooks: &hooks };
    let root = packages::root(cache, &request)?;
    let key = key(tools, FILES).with(&root.key).finish();
    cache.entry("guests", &format!("debian-{key}"), |dir| {
        eprintln!("images: building the disk of the Debian guest ...");
        let work = dir.join("work");
        fs::create_dir(&work).at(&work)?;
        let system = FileSystem { uuid: "7a61e2b4-0c2f-4a5e-9d1b-5f1c3a7e9b02", size: 2047 << 20, journal: true };
        let linux = Linux {
            label: "debian",
            kernel: "/vmlinuz",
            initrd: "/initrd.img",
            arguments: "root=LABEL=debian ro console=tty0 console=ttyS0,115200 net.ifnames=0 quiet",
            signed: false,
        };
        let raw = work.join("disk.raw");
        disk::build(&tools.path, &root.path, &system, &linux, &work, &raw)?;
        disk::to_qcow2(&tools.path, &raw, &dir.join("disk.qcow2"))?;
        fs::remove_dir_all(&work).at(&work)
    })
}
