//! Guests to test with: a small one that is up in seconds, and a full Debian.
//!
//! Container disks are images with one file below `/disk`; the kernel-boot image has kernel and initial RAM file system
//! below `/boot`. The files of the guests lie in `e2e/guests`. A guest is rebuilt when one of its inputs changes:
//! the packages, those files, or the code that puts them together.

use std::{
    fs::{self, File, FileTimes},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use crate::{
    EPOCH, Options,
    cache::{Cache, Key},
    debian::{self, Request, Root, Variant},
    disk::{self, FileSystem},
    error::{At, Error, Result},
    kernel::repack,
    layer,
    loader::Boot,
    newc, oci,
    services::{QEMU_USER, applets},
    tool,
    tree::Tree,
};

/// What both guests are made with, and binaries stripped: kernel, boot loader, file system tools, a packer, disk tools.
const TOOLS: [&str; 11] = [
    "base-files",
    "linux-image-cloud-amd64",
    "busybox-static",
    "binutils",
    "grub-efi-amd64-bin",
    "grub-common",
    "dosfstools",
    "mtools",
    "e2fsprogs",
    "lz4",
    "qemu-utils",
];

macro_rules! guest_file {
    ($name:literal) => {
        include_str!(concat!("../../guests/", $name))
    };
}

/// What images are made with, unpacked.
pub fn tools(cache: &Cache) -> Result<Root> {
    debian::root(cache, &Request { variant: Variant::Extract, packages: &TOOLS, hooks: &[] })
}

/// The code that decides what a guest looks like is one of its inputs.
const CODE: [&str; 8] = [
    include_str!("guests.rs"),
    include_str!("disk.rs"),
    include_str!("loader.rs"),
    guest_file!("boot/loader.S"),
    include_str!("kernel.rs"),
    guest_file!("boot/unpack.S"),
    include_str!("tool.rs"),
    include_str!("newc.rs"),
];

/// Drivers of the small guest; what they depend on comes along.
const TINY_MODULES: &[&str] = &[
    "virtio_blk",
    "virtio_net",
    "virtio_scsi",
    "virtio_balloon",
    "virtio_rng",
    "virtio_input",
    "ahci",
    "sd_mod",
    "sr_mod",
    "isofs",
    "vfat",
    "nls_ascii",
    "nls_cp437",
    "nls_utf8",
    "evdev",
    "button",
];

/// Arguments that the small guest's kernel carries itself: why each of them is there stands in the README of the guests.
const TINY_OWN_ARGUMENTS: &str = "nokaslr cryptomgr.notests noreplace-smp init_on_alloc=0 clearcpuid=erms \
    initcall_blacklist=jent_mod_init,crypto_kdf108_init,init_encrypted,trace_eval_init,tracer_init_tracefs,\
    init_kprobe_trace,load_system_certificate_list,ftrace_check_for_weak_functions";

/// Arguments of the small guest's kernel on a disk. What it carries is added where UEFI starts it as Debian packs it.
const TINY_ARGUMENTS: &str = "console=tty0 console=ttyS0,115200 quiet";

/// Files of the small guest: path, mode, content.
const TINY_FILES: &[(&str, u32, &str)] = &[
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

/// Builds one of the guest images.
pub fn build(name: &str, reference: &str, archive: &Path, options: &Options) -> Result<oci::Summary> {
    let cache = &options.cache;
    let tools = tools(cache)?;
    let mut tree = Tree::default();
    let description;
    if name == "guest-debian" {
        description = "Debian with cloud-init, guest agent and SSH, as container disk";
        let guest = debian_guest(cache, &tools)?;
        tree.dir("disk", 0o555, QEMU_USER);
        tree.copy("disk/disk.qcow2", 0o440, QEMU_USER, guest.join("disk.qcow2"));
    } else {
        let guest = tiny_guest(cache, &tools)?;
        if name == "guest-tiny" {
            description = "Small guest (Linux and busybox), as container disk";
            tree.dir("disk", 0o555, QEMU_USER);
            tree.copy("disk/disk.qcow2", 0o440, QEMU_USER, guest.join("disk.qcow2"));
        } else {
            description = "Small guest (Linux and busybox), as kernel and initial RAM file system";
            tree.dir("boot", 0o555, QEMU_USER);
            for name in ["vmlinuz", "vmlinuz.efi", "initrd"] {
                tree.copy(&format!("boot/{name}"), 0o444, QEMU_USER, guest.join(name));
            }
        }
    }
    let layers = [layer::layer(cache, &tree)?];
    oci::write(archive, reference, &oci::Run { description, ..Default::default() }, &layers)
}

/// A key for a guest: tools, code, and its own files.
fn key(tools: &Root, files: &[(&str, u32, &str)]) -> Key {
    let mut key = Key::default().with(&tools.key);
    CODE.iter().for_each(|code| key.add(code));
    for (path, mode, content) in files {
        key.add(format!("{path} {mode:o}"));
        key.add(content);
    }
    key
}

/// Directory with the small guest's `vmlinuz`, `vmlinuz.efi` (the kernel as Debian packs it), `initrd` and `disk.qcow2`.
fn tiny_guest(cache: &Cache, tools: &Root) -> Result<PathBuf> {
    cache.entry("guests", &format!("tiny-{}", key(tools, TINY_FILES).finish()), |dir| {
        eprintln!("images: making the small guest ...");
        let work = dir.join("work");
        fs::create_dir(&work).at(&work)?;
        let kernel = kernel(tools)?;
        let (vmlinuz, uefi, initrd) = (dir.join("vmlinuz"), dir.join("vmlinuz.efi"), dir.join("initrd"));
        fs::copy(&kernel.image, &uefi).at(&uefi)?;
        let image = fs::read(&kernel.image).at(&kernel.image)?;
        fs::write(&vmlinuz, repack(&tools.path, &image, TINY_OWN_ARGUMENTS, &work)?).at(&vmlinuz)?;
        let archive = newc::pack(&tiny_initrd(tools, &kernel, &work)?)?;
        // Not packed once more: reading what is saved costs less under emulation than unpacking it.
        fs::write(&initrd, archive).at(&initrd)?;

        let staging = work.join("disk");
        let boot = staging.join("boot");
        fs::create_dir_all(&boot).at(&boot)?;
        for name in ["vmlinuz", "vmlinuz.efi", "initrd"] {
            let to = boot.join(name);
            fs::copy(dir.join(name), &to).at(&to)?;
            set_time(&to)?;
        }
        set_time(&boot)?;
        set_time(&staging)?;
        let system =
            FileSystem { label: "tiny", uuid: "7a61e2b4-0c2f-4a5e-9d1b-5f1c3a7e9b01", size: 62 << 20, journal: false };
        let boot = Boot {
            kernel: "/boot/vmlinuz",
            uefi_kernel: "/boot/vmlinuz.efi",
            initrd: "/boot/initrd",
            arguments: TINY_ARGUMENTS,
            uefi_arguments: TINY_OWN_ARGUMENTS,
        };
        let raw = work.join("disk.raw");
        disk::make(&tools.path, &staging, &system, &boot, &work, &raw)?;
        disk::to_qcow2(&tools.path, &raw, &dir.join("disk.qcow2"))?;
        fs::remove_dir_all(&work).at(&work)
    })
}

/// The kernel of a root.
struct Kernel {
    version: String,
    image: PathBuf,
}

fn kernel(tools: &Root) -> Result<Kernel> {
    let boot = tools.path.join("boot");
    let mut names = Vec::new();
    for entry in fs::read_dir(&boot).at(&boot)? {
        names.push(entry.at(&boot)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    names
        .iter()
        .rev()
        .find_map(|name| {
            let version = name.strip_prefix("vmlinuz-")?.to_owned();
            Some(Kernel { image: boot.join(name), version })
        })
        .ok_or_else(|| Error::NothingSelected { pattern: "vmlinuz-*".to_owned(), root: boot })
}

/// Everything the small guest consists of besides its kernel.
fn tiny_initrd(tools: &Root, kernel: &Kernel, work: &Path) -> Result<Tree> {
    let mut tree = Tree::default();
    for dir in ["dev", "proc", "sys", "run", "root", "mnt", "var"] {
        tree.dir(dir, 0o755, 0);
    }
    tree.dir("tmp", 0o1777, 0);
    tree.copy("usr/bin/busybox", 0o755, 0, tools.path.join("usr/bin/busybox"));
    for applet in applets(tools)? {
        if applet != "busybox" {
            tree.link(&format!("usr/bin/{applet}"), "busybox");
        }
    }
    for (link, target) in [("bin", "usr/bin"), ("sbin", "usr/bin"), ("usr/sbin", "bin"), ("lib", "usr/lib")] {
        tree.link(link, target);
    }
    tree.link("etc/resolv.conf", "/run/resolv.conf");
    tree.link("var/run", "/run");
    for (path, mode, content) in TINY_FILES {
        tree.file(path, *mode, *content);
    }
    tree.extend(modules(tools, kernel, TINY_MODULES, work)?);
    Ok(tree)
}

/// The given modules and those they depend on, uncompressed, with the indexes by which modprobe finds them.
fn modules(tools: &Root, kernel: &Kernel, wanted: &[&str], work: &Path) -> Result<Tree> {
    let all = work.join("all-modules");
    depmod(tools, &tools.path, &all, &kernel.version)?;
    let index = format!("lib/modules/{}", kernel.version);
    let dep_path = all.join(&index).join("modules.dep");
    let dep = fs::read_to_string(&dep_path).at(&dep_path)?;
    let mut chosen = Vec::new();
    for name in wanted {
        let line = dep.lines().find(|line| module_name(line.split(':').next().unwrap_or(line)) == *name);
        match line {
            Some(line) => chosen.extend(line.replace(':', "").split_whitespace().map(str::to_owned)),
            // What is built into the kernel needs no module.
            None if is_builtin(&tools.path.join(&index), name)? => {}
            None => return Err(Error::NothingSelected { pattern: format!("module {name}"), root: all }),
        }
    }
    chosen.sort();
    chosen.dedup();

    let small = work.join("modules");
    let mut tree = Tree::default();
    for module in &chosen {
        let from = tools.path.join(&index).join(module);
        let path = format!("{index}/{}", module.trim_end_matches(".xz"));
        let mut command = Command::new(tools.path.join("usr/bin/busybox"));
        let content = if module.ends_with(".xz") {
            tool::run(command.args(["xzcat"]).arg(&from), "from Debian package busybox-static")?
        } else {
            fs::read(&from).at(&from)?
        };
        let content = slim(tools, work, &content)?;
        let to = small.join(&path);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).at(parent)?;
        }
        fs::write(&to, &content).at(&to)?;
        tree.file(&format!("usr/{path}"), 0o644, content);
    }
    for file in ["modules.order", "modules.builtin"] {
        let (from, to) = (tools.path.join(&index).join(file), small.join(&index).join(file));
        fs::copy(&from, &to).at(&to)?;
    }
    depmod(tools, &small, &small, &kernel.version)?;
    for file in ["modules.dep", "modules.alias"] {
        let from = small.join(&index).join(file);
        tree.file(&format!("usr/{index}/{file}"), 0o644, fs::read(&from).at(&from)?);
    }
    Ok(tree)
}

/// What a module carries for those who look into a running kernel, or for defences that this one does not use. Reading it
/// costs more under emulation than all else that loading does.
const UNUSED_SECTIONS: [&str; 7] =
    [".BTF", ".call_sites", ".return_sites", ".retpoline_sites", ".orc_unwind", ".orc_unwind_ip", "__mcount_loc"];

/// A module without those sections, and without the signature behind it, on which this kernel does not insist.
fn slim(tools: &Root, work: &Path, module: &[u8]) -> Result<Vec<u8>> {
    let (from, to) = (work.join("module.ko"), work.join("slim.ko"));
    fs::write(&from, module).at(&from)?;
    let mut command = tool::from_root(&tools.path, "usr/bin/x86_64-linux-gnu-objcopy");
    for section in UNUSED_SECTIONS {
        command.arg(format!("--remove-section={section}"));
    }
    tool::run(command.arg(&from).arg(&to), "from Debian package binutils")?;
    fs::read(&to).at(&to)
}

/// The name of a module from the name of its file.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn is_builtin(index: &Path, name: &str) -> Result<bool> {
    let path = index.join("modules.builtin");
    Ok(fs::read_to_string(&path).at(&path)?.lines().any(|line| module_name(line) == name))
}

fn depmod(tools: &Root, base: &Path, out: &Path, version: &str) -> Result<()> {
    fs::create_dir_all(out).at(out)?;
    let mut command = tool::from_root(&tools.path, "usr/sbin/depmod");
    command.arg("-b").arg(base).arg("-o").arg(out).arg(version);
    tool::run(&mut command, "from Debian package kmod")?;
    Ok(())
}

/// Packages of the Debian guest.
const DEBIAN_PACKAGES: [&str; 24] = [
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

/// Files of the Debian guest, put in place before packages are configured.
const DEBIAN_FILES: &[(&str, u32, &str)] = &[
    ("etc/initramfs-tools/conf.d/ferrovirt.conf", 0o644, guest_file!("debian/initramfs.conf")),
    ("etc/initramfs-tools/modules", 0o644, guest_file!("debian/initramfs-modules")),
    ("etc/fstab", 0o644, "LABEL=debian / ext4 discard,errors=remount-ro 0 1\n"),
    ("etc/hostname", 0o644, "debian\n"),
    ("etc/hosts", 0o644, "127.0.0.1 localhost\n127.0.1.1 debian\n::1 localhost ip6-localhost ip6-loopback\n"),
    ("etc/systemd/network/50-dhcp.network", 0o644, guest_file!("debian/50-dhcp.network")),
    ("etc/systemd/system/ssh.service.d/keys.conf", 0o644, guest_file!("debian/ssh-keys.conf")),
    ("etc/ssh/sshd_config.d/ferrovirt.conf", 0o644, guest_file!("debian/sshd.conf")),
    ("etc/cloud/cloud.cfg.d/90-ferrovirt.cfg", 0o644, guest_file!("debian/cloud.cfg")),
];

/// Directory with `disk.qcow2` of the Debian guest.
fn debian_guest(cache: &Cache, tools: &Root) -> Result<PathBuf> {
    // Files go in first, since the initial RAM file system is made while the kernel package is configured; a second
    // run after everything is installed picks up what came later.
    let mut script = String::from("set -e\n");
    for (path, mode, content) in DEBIAN_FILES {
        let (dir, _) = path.rsplit_once('/').unwrap_or(("", path));
        script.push_str(&format!("mkdir -p \"$1/{dir}\"\ncat > \"$1/{path}\" <<'END-OF-FILE'\n{content}END-OF-FILE\nchmod {mode:o} \"$1/{path}\"\n"));
    }
    script.push_str(guest_file!("debian/customize.sh"));
    let hooks = [script];
    let request = Request { variant: Variant::Installed, packages: &DEBIAN_PACKAGES, hooks: &hooks };
    let root = debian::root(cache, &request)?;
    let key = key(tools, DEBIAN_FILES).with(&root.key).finish();
    cache.entry("guests", &format!("debian-{key}"), |dir| {
        eprintln!("images: making the Debian guest's disk ...");
        let work = dir.join("work");
        fs::create_dir(&work).at(&work)?;
        let system = FileSystem {
            label: "debian",
            uuid: "7a61e2b4-0c2f-4a5e-9d1b-5f1c3a7e9b02",
            size: 2047 << 20,
            journal: true,
        };
        let boot = Boot {
            kernel: "/vmlinuz",
            uefi_kernel: "/vmlinuz",
            initrd: "/initrd.img",
            arguments: "root=LABEL=debian ro console=tty0 console=ttyS0,115200 net.ifnames=0 quiet",
            uefi_arguments: "",
        };
        let raw = work.join("disk.raw");
        disk::make(&tools.path, &root.path, &system, &boot, &work, &raw)?;
        disk::to_qcow2(&tools.path, &raw, &dir.join("disk.qcow2"))?;
        fs::remove_dir_all(&work).at(&work)
    })
}

fn set_time(path: &Path) -> Result<()> {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH);
    let times = FileTimes::new().set_accessed(time).set_modified(time);
    File::open(path).and_then(|file| file.set_times(times)).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_files_and_names_are_matched() {
        assert_eq!(module_name("kernel/drivers/char/hw_random/virtio-rng.ko.xz"), "virtio_rng");
        assert_eq!(module_name("kernel/fs/isofs/isofs.ko"), "isofs");
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
