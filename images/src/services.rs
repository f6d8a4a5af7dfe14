//! Images of the project's processes, and the toolbox for tests.
//!
//! Each image is described by binaries of the workspace and files of Debian packages; libraries are added. The Debian part and
//! the binaries are separate layers, so that a new build of a binary changes a few megabytes only.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Options,
    error::{At, Error, Result},
    layer, oci,
    packages::{self, Request, Root, Variant},
    placeholder::{self, Placeholder},
    run, select, tools,
    tree::{QEMU_USER, Tree},
};

/// User of processes without privileges on the node.
const PLAIN_USER: u32 = 65532;

const MEGABYTE: u64 = 1_000_000;

/// Contents of an image.
struct Service {
    description: &'static str,
    /// Binaries of the workspace, installed in `/usr/bin`.
    binaries: &'static [&'static str],
    entrypoint: Option<&'static str>,
    user: Option<u32>,
    packages: &'static [&'static str],
    /// Files of the packages, without libraries.
    files: &'static [&'static str],
    except: &'static [&'static str],
    /// Files of a layer over the others, which makes the image a variant of another one. Empty: no such layer.
    over: &'static [&'static str],
    /// Libraries without code, see [`placeholder`].
    placeholders: &'static [Placeholder],
    /// Size limit, which detects unexpected growth.
    limit: u64,
}

fn service(name: &str) -> Option<Service> {
    let plain = |description, binaries, entrypoint| Service {
        description,
        binaries,
        entrypoint: Some(entrypoint),
        user: Some(PLAIN_USER),
        packages: &["base-files", "libc6", "libgcc-s1"],
        files: &["etc/os-release", "etc/debian_version"],
        except: &[],
        over: &[],
        placeholders: &[],
        limit: 40 * MEGABYTE,
    };
    Some(match name {
        "virt-api" => plain("Ferrovirt API server", &["virt-api"], "/usr/bin/virt-api"),
        "virt-controller" => plain("Ferrovirt cluster controllers", &["virt-controller"], "/usr/bin/virt-controller"),
        "virt-handler" => Service {
            user: None,
            packages: &["base-files", "libc6", "libgcc-s1", "nftables"],
            files: &["etc/os-release", "etc/debian_version", "usr/sbin/nft"],
            ..plain("Ferrovirt node agent", &["virt-handler"], "/usr/bin/virt-handler")
        },
        "virt-launcher-debug" => Service {
            description: "Ferrovirt virtual machine launcher with libvirt, QEMU, a shell and tools",
            over: LAUNCHER_TOOLS,
            limit: 275 * MEGABYTE,
            ..service("virt-launcher")?
        },
        "virt-launcher-arm64" => Service {
            description: "Ferrovirt virtual machine launcher with libvirt and QEMU, and with QEMU for guests of arm64",
            over: LAUNCHER_ARM64,
            limit: 430 * MEGABYTE,
            ..service("virt-launcher")?
        },
        "virt-launcher" => Service {
            description: "Ferrovirt virtual machine launcher with libvirt and QEMU",
            binaries: &["virt-launcher-monitor", "virt-launcher"],
            entrypoint: Some("/usr/bin/virt-launcher-monitor"),
            user: Some(QEMU_USER),
            packages: &[
                "base-files",
                "libc6",
                "libgcc-s1",
                "libvirt-daemon",
                "libvirt-daemon-driver-qemu",
                "libvirt-clients",
                "psmisc",
                "swtpm",
                "swtpm-tools",
                "gnutls-bin",
                "qemu-system-x86",
                "qemu-utils",
                "seabios",
                "ipxe-qemu",
                "ovmf",
                "tzdata",
                "tzdata-legacy",
                "virtiofsd",
                // For the variants; from one root, so that they share the layers of the plain image.
                "qemu-system-arm",
                "qemu-efi-aarch64",
                "bash",
                "busybox-static",
                "coreutils",
                "grep",
                "iproute2",
                "procps",
            ],
            files: LAUNCHER_FILES,
            except: LAUNCHER_EXCEPT,
            over: &[],
            placeholders: LAUNCHER_PLACEHOLDERS,
            limit: 250 * MEGABYTE,
        },
        "virt-importer" => Service {
            user: Some(QEMU_USER),
            packages: &["base-files", "ca-certificates", "libc6", "libgcc-s1", "qemu-utils"],
            // The package's bundle of certificates would be made at its installation.
            files: &["etc/os-release", "etc/debian_version", "usr/bin/qemu-img", "usr/share/ca-certificates/mozilla"],
            ..plain("Ferrovirt importer of disks", &["virt-importer"], "/usr/bin/virt-importer")
        },
        "toolbox" => Service {
            description: "busybox, and what behaves badly, for tests inside a cluster",
            binaries: &["hanging-mount", "hostile-launcher", "image-server"],
            entrypoint: None,
            user: None,
            packages: &["base-files", "busybox-static", "libc6", "libgcc-s1"],
            files: &["etc/os-release", "usr/bin/busybox"],
            except: &[],
            over: &[],
            placeholders: &[],
            limit: 10 * MEGABYTE,
        },
        _ => return None,
    })
}

const LAUNCHER_FILES: &[&str] = &[
    "etc/os-release",
    "etc/debian_version",
    // libvirt: daemon, QEMU driver, CPU models; virsh and killall for debugging in a pod.
    "usr/sbin/libvirtd",
    "usr/bin/virsh",
    "usr/bin/killall",
    // Clients find the socket for virsh by it (openshift-python-wrapper).
    "usr/bin/ls",
    // Writes memory dumps.
    "usr/lib/libvirt/libvirt_iohelper",
    "usr/lib/x86_64-linux-gnu/libvirt",
    "usr/share/libvirt/cpu_map",
    "usr/share/libvirt/schemas",
    // QEMU for this architecture, its modules without desktop dependencies, and the firmware for guests.
    "usr/bin/qemu-system-x86_64",
    "usr/bin/qemu-img",
    // Serves directories to guests.
    "usr/libexec/virtiofsd",
    "usr/lib/x86_64-linux-gnu/qemu/hw-display-virtio-*.so",
    "usr/lib/x86_64-linux-gnu/qemu/hw-uefi-vars.so",
    "usr/lib/x86_64-linux-gnu/qemu/hw-usb-host.so",
    "usr/lib/x86_64-linux-gnu/qemu/hw-usb-redirect.so",
    "usr/share/qemu/efi-*.rom",
    "usr/share/qemu/pxe-*.rom",
    "usr/share/qemu/firmware",
    "usr/share/qemu/keymaps",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/multiboot.bin",
    "usr/share/qemu/multiboot_dma.bin",
    "usr/share/qemu/pvh.bin",
    "usr/share/qemu/qboot.rom",
    "usr/share/seabios",
    "usr/share/OVMF",
    // TPM emulator, its library, which it finds by its name, and the programs that make a TPM with its certificates.
    "usr/bin/swtpm",
    "usr/lib/x86_64-linux-gnu/swtpm/libswtpm_libtpms.so.0*",
    // libvirt offers no TPM without it.
    "usr/bin/swtpm_ioctl",
    "usr/bin/swtpm_setup",
    "usr/bin/swtpm_localca",
    "usr/bin/swtpm_cert",
    "usr/bin/certtool",
    // Time zones for guest clocks.
    "usr/share/zoneinfo",
];

const LAUNCHER_EXCEPT: &[&str] = &[
    "usr/share/OVMF/OVMF_CODE_4M.secboot.strictnx.fd",
    "usr/share/OVMF/OVMF_VARS_4M.snakeoil.fd",
    // libvirt gets the paths of the firmware of arm64, which only one image has.
    "usr/share/qemu/firmware/40-edk2-aarch64-secure-enrolled.json",
    "usr/share/qemu/firmware/50-edk2-aarch64-secure.json",
    "usr/share/qemu/firmware/60-edk2-aarch64.json",
    // Copies of the same zones with and without leap seconds.
    "usr/share/zoneinfo/posix",
    "usr/share/zoneinfo/right",
    // A link to the time zone of the image, which has none.
    "usr/share/zoneinfo/localtime",
];

/// Firmware under the names that KubeVirt has, for which its tests and tools look in the XML of domains. The files keep their names:
/// libvirt's descriptions and the domains of other releases have them.
const FIRMWARE_LINKS: [(&str, &str); 4] = [
    ("OVMF_CODE.fd", "OVMF_CODE_4M.fd"),
    ("OVMF_VARS.fd", "OVMF_VARS_4M.fd"),
    ("OVMF_CODE.secboot.fd", "OVMF_CODE_4M.secboot.fd"),
    ("OVMF_VARS.secboot.fd", "OVMF_VARS_4M.ms.fd"),
];

/// Programs whose options scripts rely on; busybox has the others.
const LAUNCHER_TOOLS: &[&str] = &[
    "usr/bin/bash",
    "usr/bin/busybox",
    "usr/bin/cat",
    "usr/bin/cp",
    "usr/bin/date",
    "usr/bin/dd",
    "usr/bin/df",
    "usr/bin/du",
    "usr/bin/grep",
    "usr/bin/head",
    "usr/bin/readlink",
    "usr/bin/sort",
    "usr/bin/stat",
    "usr/bin/tail",
    "usr/bin/timeout",
    "usr/bin/ip",
    "usr/bin/ss",
    "usr/bin/free",
    "usr/bin/pgrep",
    "usr/bin/pkill",
    "usr/bin/ps",
    "usr/bin/top",
];

/// QEMU and UEFI for guests of arm64, without secure boot.
const LAUNCHER_ARM64: &[&str] =
    &["usr/bin/qemu-system-aarch64", "usr/share/AAVMF/AAVMF_CODE.fd", "usr/share/AAVMF/AAVMF_VARS.fd"];

/// libvirt links clients for remote hosts and other hypervisors (curl, SSH), and SASL, which is off for the sockets of libvirt and
/// QEMU. Its RPC uses no Kerberos. GnuTLS uses no PKCS#11 tokens, libxml2 reads no compressed files, and GIO lists no mounts.
/// Without these and what they link (OpenSSL, LDAP, RTMP, HTTP/3 and others), libvirtd and the worker take 6 MiB less in each
/// launcher pod and start sooner. libvirt's security driver is off. It takes one function of libbsd, which asks for passwords: `virsh
/// secret-set-value --interactive` fails, and all else of an interactive virsh is of readline, which is whole. QEMU's disassembler,
/// persistent memory and RDMA cost 1.9 MiB of relocated pages in each QEMU. Without a disassembler its monitor shows none.
const LAUNCHER_PLACEHOLDERS: &[Placeholder] = &[
    Placeholder::unused("libapparmor.so.1"),
    Placeholder { called: &["readpassphrase"], ..Placeholder::unused("libbsd.so.0") },
    Placeholder { failing: &["cs_open"], ..Placeholder::unused("libcapstone.so.5") },
    Placeholder { called: &["curl_global_init"], ..Placeholder::unused("libcurl-gnutls.so.4") },
    Placeholder::unused("libgssapi_krb5.so.2"),
    Placeholder::unused("libibverbs.so.1"),
    Placeholder::unused("liblzma.so.5"),
    Placeholder::unused("libmount.so.1"),
    Placeholder::unused("libp11-kit.so.0"),
    Placeholder::unused("libpmem.so.1"),
    Placeholder::unused("librdmacm.so.1"),
    Placeholder::unused("libsasl2.so.2"),
    Placeholder::unused("libssh.so.4"),
    Placeholder::unused("libssh2.so.1"),
];

/// Builds a service image.
pub(crate) fn build(name: &str, reference: &str, archive: &Path, options: &Options) -> Result<oci::Summary> {
    let Some(service) = service(name) else {
        return Err(Error::UnknownImage { name: name.to_owned(), known: "see images list".to_owned() });
    };
    let mut binaries = Tree::default();
    for binary in service.binaries {
        let from = options.bin_dir.join(binary);
        if !from.is_file() {
            return Err(Error::BinaryMissing { name: (*binary).to_owned(), dir: options.bin_dir.clone() });
        }
        binaries.copy(&format!("usr/bin/{binary}"), 0o755, 0, strip(&from, options)?);
    }
    let root = packages::root(&options.cache, &request(service.packages))?;
    let placeholders = placeholder::tree(&options.cache, &root, service.placeholders)?;
    let mut base = select::select(&root, service.files, service.except, &binaries, placeholders.clone())?;
    add_common(&mut base, service.user);
    match name {
        "virt-launcher" | "virt-launcher-debug" | "virt-launcher-arm64" => add_launcher(&mut base),
        "toolbox" => add_applets(&mut base, &root)?,
        _ => {}
    }

    let mut layers = vec![layer::layer(&options.cache, &base)?];
    if !service.binaries.is_empty() {
        layers.push(layer::layer(&options.cache, &binaries)?);
    }
    if !service.over.is_empty() {
        let mut whole = base.clone();
        whole.extend(select::select(&root, service.over, service.except, &Tree::default(), placeholders)?);
        if name == "virt-launcher-debug" {
            add_missing_applets(&mut whole, &root)?;
        }
        layers.push(layer::layer(&options.cache, &whole.over(&base))?);
    }
    let variables = match &options.source {
        Some(source) if name == "virt-api" => source.variables(),
        _ => vec![],
    };
    let (entrypoint, user, description) = (service.entrypoint, service.user, service.description);
    let run = oci::Run { entrypoint, user, description, variables };
    let summary = oci::write(archive, reference, &run, &layers)?;
    if summary.unpacked > service.limit {
        return Err(Error::TooLarge { name: name.to_owned(), size: summary.unpacked, limit: service.limit });
    }
    Ok(summary)
}

/// Returns the binaries of the workspace in an image.
pub(crate) fn binaries(name: &str) -> &'static [&'static str] {
    service(name).map_or(&[], |service| service.binaries)
}

fn request(packages: &'static [&'static str]) -> Request<'static> {
    Request { variant: Variant::Extract, packages, hooks: &[] }
}

/// Returns the request for the packages of the launcher image.
pub(crate) fn packages_of_launcher() -> Request<'static> {
    request(service("virt-launcher").map_or(&[], |launcher| launcher.packages))
}

/// Strips the function names from a binary. Profiles can be symbolized with the unstripped binary, which has the same build
/// ID.
fn strip(from: &Path, options: &Options) -> Result<PathBuf> {
    let tools = tools::root(&options.cache)?;
    let folder = options.out.join("stripped");
    fs::create_dir_all(&folder).at(&folder)?;
    let to = folder.join(from.file_name().unwrap_or_default());
    let mut command = run::from_root(&tools.path, "usr/bin/x86_64-linux-gnu-objcopy");
    run::run(command.arg("--strip-all").arg(from).arg(&to), "from Debian package binutils")?;
    Ok(to)
}

/// Adds accounts and the directories that every process expects.
fn add_common(tree: &mut Tree, user: Option<u32>) {
    let (mut passwd, mut group) =
        (String::from("root:x:0:0:root:/root:/usr/sbin/nologin\n"), String::from("root:x:0:\ntty:x:5:\nkvm:x:36:\n"));
    if user == Some(QEMU_USER) {
        passwd.push_str("qemu:x:107:107:qemu:/run/kubevirt-private:/usr/sbin/nologin\n");
        group.push_str("qemu:x:107:\n");
    }
    passwd.push_str("nobody:x:65532:65532:nobody:/:/usr/sbin/nologin\n");
    group.push_str("nobody:x:65532:\n");
    tree.file("etc/passwd", 0o644, passwd);
    tree.file("etc/group", 0o644, group);
    tree.file("etc/nsswitch.conf", 0o644, "passwd: files\ngroup: files\nhosts: files dns\n");
    for dir in ["dev", "proc", "sys", "run", "etc"] {
        tree.dir(dir, 0o755, 0);
    }
    tree.dir("root", 0o700, 0);
    tree.dir("tmp", 0o1777, 0);
    tree.dir("var/tmp", 0o1777, 0);
    tree.link("var/run", "/run");
}

/// Adds the directories and files that libvirt and QEMU expect.
fn add_launcher(tree: &mut Tree) {
    for dir in [
        "run/libvirt",
        "run/kubevirt",
        "run/kubevirt/hotplug-disks",
        "run/kubevirt/sockets",
        "run/kubevirt-private",
        "run/kubevirt-ephemeral-disks",
        "run/kubevirt-image-volume",
        "run/kubevirt-kernel-boot",
        "var/cache/libvirt",
        "var/lib/libvirt",
        "var/lib/libvirt/qemu",
        "var/log/libvirt",
        "var/log/libvirt/qemu",
        "etc/libvirt",
    ] {
        tree.dir(dir, 0o755, QEMU_USER);
    }
    tree.link("usr/bin/qemu-kvm", "qemu-system-x86_64");
    // One program that selects its function by its name.
    tree.link("usr/bin/virt-freezer", "virt-launcher");
    tree.link("usr/bin/virt-probe", "virt-launcher");
    for (link, file) in FIRMWARE_LINKS {
        tree.link(&format!("usr/share/OVMF/{link}"), file);
    }
}

/// Adds a link for each busybox applet, and a shell for root.
fn add_applets(tree: &mut Tree, root: &Root) -> Result<()> {
    for applet in tools::applets(root)? {
        if applet != "busybox" {
            tree.link(&format!("usr/bin/{applet}"), "busybox");
        }
    }
    tree.file("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\nnobody:x:65532:65532:nobody:/:/bin/sh\n");
    // Commands must be found under the paths of other images.
    tree.link("usr/sbin", "bin");
    Ok(())
}

/// Adds a link for each busybox applet whose command is missing, and bash as the shell.
fn add_missing_applets(tree: &mut Tree, root: &Root) -> Result<()> {
    tree.link("usr/bin/sh", "bash");
    for applet in tools::applets(root)? {
        let known = ["usr/bin", "usr/sbin"].iter().any(|folder| tree.get(&format!("{folder}/{applet}")).is_some());
        if !known {
            tree.link(&format!("usr/bin/{applet}"), "busybox");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Content;

    #[test]
    fn every_image_that_is_not_a_guest_is_described() {
        for image in crate::IMAGES {
            assert_eq!(service(image.name).is_some(), !image.name.starts_with("guest-"), "{image:?}");
        }
    }

    #[test]
    fn variants_are_the_plain_launcher_and_a_layer() {
        let [plain, debug, arm64] =
            ["virt-launcher", "virt-launcher-debug", "virt-launcher-arm64"].map(|name| service(name).unwrap());
        // The same inputs of the shared layers.
        for variant in [&debug, &arm64] {
            assert_eq!((plain.packages, plain.files, plain.except), (variant.packages, variant.files, variant.except));
            assert_eq!(
                (plain.binaries, plain.entrypoint, plain.user),
                (variant.binaries, variant.entrypoint, variant.user)
            );
        }
        assert!(plain.over.is_empty() && arm64.over.iter().all(|file| !plain.files.contains(file)));
        for tool in ["bash", "cat", "grep", "ip", "ls", "ps", "stat", "tail"] {
            let path = format!("usr/bin/{tool}");
            let is_plain = plain.files.contains(&path.as_str());
            assert!(is_plain != debug.over.contains(&path.as_str()), "{tool}");
            assert_eq!(is_plain, tool == "ls", "{tool}");
        }
    }

    #[test]
    fn firmware_of_the_launcher_has_the_names_of_the_reference() {
        let mut tree = Tree::default();
        add_launcher(&mut tree);
        for (link, file) in [
            ("OVMF_CODE.fd", "OVMF_CODE_4M.fd"),
            ("OVMF_VARS.fd", "OVMF_VARS_4M.fd"),
            ("OVMF_CODE.secboot.fd", "OVMF_CODE_4M.secboot.fd"),
            ("OVMF_VARS.secboot.fd", "OVMF_VARS_4M.ms.fd"),
        ] {
            let content = tree.get(&format!("usr/share/OVMF/{link}")).map(|node| &node.content);
            assert_eq!(content, Some(&Content::Link(file.to_owned())), "{link}");
            let target = format!("usr/share/OVMF/{file}");
            assert!(!LAUNCHER_EXCEPT.iter().any(|except| target.starts_with(except)), "{target}");
        }
    }
}
