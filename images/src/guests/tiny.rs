//! The small guest: Debian's cloud kernel and busybox, all in RAM.

use std::{
    fs::{self, File, FileTimes},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::{
    GuestFile,
    disk::{self, FileSystem},
    grub::Linux,
    kernel::{Kernel, modules},
    key, newc,
};
use crate::{
    EPOCH,
    cache::Cache,
    error::{At, Result},
    packages::{self, Request, Root, Variant},
    tools,
    tree::Tree,
};

/// Drivers; their dependencies are added.
const MODULES: &[&str] = &[
    "virtio_blk",
    "virtio_net",
    "virtio_scsi",
    "virtio_balloon",
    "virtio_mem",
    "virtio_rng",
    "virtio_input",
    "ahci",
    "sd_mod",
    "sg",
    "sr_mod",
    "isofs",
    "vfat",
    "nls_ascii",
    "nls_cp437",
    "nls_utf8",
    "evdev",
    "button",
    "i6300esb",
    "qemu_fw_cfg",
];

/// Drivers that a kernel of arm64 does not have.
const NOT_ARM64: [&str; 1] = ["i6300esb"];

/// Packages of the guest of arm64.
const ARM64_PACKAGES: [&str; 3] = ["base-files", "linux-image-cloud-arm64", "busybox-static"];

/// Serial consoles of amd64 and arm64.
const CONSOLES: [&str; 2] = ["ttyS0", "ttyAMA0"];

/// Driver of the variables of UEFI, in the guest for secure boot.
const EFI_MODULE: &str = "efivarfs";

/// Kernel arguments on the disk for its consoles.
const ARGUMENTS: &str = "console=tty0 console=ttyS0,115200 quiet";

/// Kernel arguments on the disk that save work under emulation: see the README of the guests.
const SAVING_ARGUMENTS: &str = guest_file!("tiny/kernel-arguments");

/// Saving argument that leaves the kernel without keys for the signatures of modules.
const NO_MODULE_KEYS: &str = ",load_system_certificate_list";

/// File systems of the disks.
const DISK: FileSystem<'_> =
    FileSystem { uuid: "7a61e2b4-0c2f-4a5e-9d1b-5f1c3a7e9b01", size: 46 << 20, journal: false };

/// Files in the initial RAM file system besides busybox and modules.
const FILES: &[GuestFile] = &[
    ("init", 0o755, guest_file!("tiny/init")),
    ("usr/lib/tiny/network", 0o755, guest_file!("tiny/network")),
    ("usr/lib/tiny/lease", 0o755, guest_file!("tiny/lease")),
    ("usr/lib/tiny/user-data", 0o644, guest_file!("tiny/user-data")),
    ("usr/lib/tiny/cloud-config.awk", 0o644, guest_file!("tiny/cloud-config.awk")),
    ("usr/lib/tiny/runcmd", 0o755, guest_file!("tiny/runcmd")),
    ("usr/lib/tiny/power", 0o755, guest_file!("tiny/power")),
    ("etc/inittab", 0o644, guest_file!("tiny/inittab")),
    ("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
    // The password is "ferrovirt".
    ("etc/shadow", 0o600, guest_file!("tiny/shadow")),
    ("etc/group", 0o644, "root:x:0:\ntty:x:5:\nnobody:x:65534:\n"),
    ("etc/hosts", 0o644, "127.0.0.1 localhost tiny\n::1 localhost\n"),
    ("etc/hostname", 0o644, "tiny\n"),
    ("etc/issue", 0o644, "\\n (\\l)\n"),
    ("etc/profile", 0o644, "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nexport HOME=/root\n"),
    ("etc/acpi/PWRF/00000080", 0o755, guest_file!("tiny/power")),
];

/// Returns the directory with `vmlinuz`, `initrd` and `disk.qcow2`.
pub(super) fn build(cache: &Cache, tools: &Root) -> Result<PathBuf> {
    build_variant(cache, tools, false)
}

/// Returns the directory with the same files for secure boot: signed boot loaders, and modules with their signatures.
pub(super) fn build_signed(cache: &Cache, tools: &Root) -> Result<PathBuf> {
    build_variant(cache, tools, true)
}

/// Returns the directory with `vmlinuz` and `initrd` for arm64, for kernel boot.
pub(super) fn build_arm64(cache: &Cache, tools: &Root) -> Result<PathBuf> {
    let request = Request { variant: Variant::ExtractArm64, packages: &ARM64_PACKAGES, hooks: &[] };
    let packages = packages::root(cache, &request)?;
    cache.entry("guests", &format!("tiny-arm64-{}", key(tools, FILES).with(&packages.key).finish()), |dir| {
        eprintln!("images: building the guest tiny-arm64 ...");
        let (work, vmlinuz, initrd) = (dir.join("work"), dir.join("vmlinuz"), dir.join("initrd"));
        fs::create_dir_all(&work).at(&work)?;
        let kernel = Kernel::find(&packages)?;
        fs::copy(&kernel.image, &vmlinuz).at(&vmlinuz)?;
        let mut tree = base_tree(tools, &packages)?;
        let [usual, console] = CONSOLES;
        tree.file("etc/inittab", 0o644, guest_file!("tiny/inittab").replace(usual, console));
        let names: Vec<&str> = MODULES.iter().copied().filter(|name| !NOT_ARM64.contains(name)).collect();
        // The programs that make modules smaller are those of amd64.
        tree.extend(modules(tools, &kernel, &names, true, &work)?);
        fs::write(&initrd, newc::pack(&tree)?).at(&initrd)?;
        fs::remove_dir_all(&work).at(&work)
    })
}

fn build_variant(cache: &Cache, tools: &Root, signed: bool) -> Result<PathBuf> {
    let name = if signed { "tiny-signed" } else { "tiny" };
    cache.entry("guests", &format!("{name}-{}", key(tools, FILES).with(SAVING_ARGUMENTS).finish()), |dir| {
        eprintln!("images: building the guest {name} ...");
        let work = dir.join("work");
        let boot = work.join("disk/boot");
        fs::create_dir_all(&boot).at(&boot)?;
        let kernel = Kernel::find(tools)?;
        let (vmlinuz, initrd) = (dir.join("vmlinuz"), dir.join("initrd"));
        fs::copy(&kernel.image, &vmlinuz).at(&vmlinuz)?;
        // Not compressed: unpacking costs more under emulation than reading.
        fs::write(&initrd, newc::pack(&initrd_tree(tools, &kernel, signed, &work)?)?).at(&initrd)?;
        for from in [&vmlinuz, &initrd] {
            let to = boot.join(from.file_name().unwrap_or_default());
            fs::copy(from, &to).at(&to)?;
            set_time(&to)?;
        }
        let staging = work.join("disk");
        set_time(&boot)?;
        set_time(&staging)?;
        let arguments = format!("{ARGUMENTS} {}", saving_arguments(signed));
        let linux =
            Linux { label: "tiny", kernel: "/boot/vmlinuz", initrd: "/boot/initrd", arguments: &arguments, signed };
        let raw = work.join("disk.raw");
        disk::build(&tools.path, &staging, &DISK, &linux, &work, &raw)?;
        disk::to_qcow2(&tools.path, &raw, &dir.join("disk.qcow2"))?;
        fs::remove_dir_all(&work).at(&work)
    })
}

/// Returns the kernel arguments that save work.
fn saving_arguments(signed: bool) -> String {
    let arguments = SAVING_ARGUMENTS.trim_end();
    if signed { arguments.replace(NO_MODULE_KEYS, "") } else { arguments.to_owned() }
}

/// Returns the content of the initial RAM file system.
fn initrd_tree(tools: &Root, kernel: &Kernel, signed: bool, work: &Path) -> Result<Tree> {
    let mut tree = base_tree(tools, tools)?;
    let names: Vec<&str> = MODULES.iter().copied().chain(signed.then_some(EFI_MODULE)).collect();
    tree.extend(modules(tools, kernel, &names, signed, work)?);
    Ok(tree)
}

/// Returns the content without modules, with the busybox of `packages`.
fn base_tree(tools: &Root, packages: &Root) -> Result<Tree> {
    let mut tree = Tree::default();
    for dir in ["dev", "proc", "sys", "run", "root", "mnt", "var"] {
        tree.dir(dir, 0o755, 0);
    }
    tree.dir("tmp", 0o1777, 0);
    tree.copy("usr/bin/busybox", 0o755, 0, packages.path.join("usr/bin/busybox"));
    for applet in tools::applets(tools)? {
        if applet != "busybox" {
            tree.link(&format!("usr/bin/{applet}"), "busybox");
        }
    }
    for (link, target) in [("bin", "usr/bin"), ("sbin", "usr/bin"), ("usr/sbin", "bin"), ("lib", "usr/lib")] {
        tree.link(link, target);
    }
    tree.link("etc/resolv.conf", "/run/resolv.conf");
    tree.link("var/run", "/run");
    for (path, mode, content) in FILES {
        tree.file(path, *mode, *content);
    }
    Ok(tree)
}

/// Sets both times of a file to [`EPOCH`].
fn set_time(path: &Path) -> Result<()> {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH);
    let times = FileTimes::new().set_accessed(time).set_modified(time);
    File::open(path).and_then(|file| file.set_times(times)).at(path)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn guest_for_secure_boot_keeps_the_keys_of_modules() {
        assert!(saving_arguments(false).contains("load_system_certificate_list"));
        let signed = saving_arguments(true);
        assert!(!signed.contains("load_system_certificate_list"));
        assert_eq!(signed.len() + NO_MODULE_KEYS.len(), saving_arguments(false).len());
    }

    #[test]
    fn cloud_config_becomes_calls_of_shell_functions() {
        // The parser is for busybox; any awk will do to check it, and without one there is nothing to check with.
        let dir = std::env::temp_dir().join(format!("ferrovirt-images-awk-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("parser"), guest_file!("tiny/cloud-config.awk")).unwrap();
        fs::write(dir.join("data"), guest_file!("tiny/cloud-config.test.yaml")).unwrap();
        let output = Command::new("awk").arg("-f").arg(dir.join("parser")).arg(dir.join("data")).output();
        if let Ok(output) = output {
            assert_eq!(String::from_utf8(output.stdout).unwrap(), guest_file!("tiny/cloud-config.test.out"));
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
