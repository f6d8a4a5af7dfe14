//! Guests for tests: a small one that starts in seconds, and a full Debian.
//!
//! A container disk image has one file below `/disk`; the image for kernel boot has kernel and initial RAM file system below
//! `/boot`. The files of the guests are in `e2e/guests`. A guest is rebuilt when one of its inputs changes: packages,
//! files, or this code.

/// Includes a file of the guests.
macro_rules! guest_file {
    ($name:literal) => {
        include_str!(concat!("../../../e2e/guests/", $name))
    };
}

mod debian;
mod disk;
mod grub;
mod kernel;
mod newc;
pub mod node;
mod tiny;

use std::path::Path;

use crate::{
    Options,
    cache::Key,
    error::{Error, Result},
    layer, oci,
    packages::Root,
    tools,
    tree::{QEMU_USER, Tree},
};

/// A file of a guest: path, mode, content.
type GuestFile = (&'static str, u32, &'static str);

/// The code that builds guests, an input of their cache keys.
const CODE: [&str; 8] = [
    include_str!("mod.rs"),
    include_str!("debian.rs"),
    include_str!("disk.rs"),
    include_str!("grub.rs"),
    include_str!("kernel.rs"),
    include_str!("newc.rs"),
    include_str!("tiny.rs"),
    include_str!("../run.rs"),
];

/// Builds a guest image.
pub(crate) fn build(name: &str, reference: &str, archive: &Path, options: &Options) -> Result<oci::Summary> {
    let cache = &options.cache;
    let tools = tools::root(cache)?;
    let mut tree = Tree::default();
    let description = match name {
        "guest-debian" => {
            container_disk(&mut tree, &debian::build(cache, &tools)?);
            "Debian with cloud-init, guest agent and SSH, as container disk"
        }
        "guest-tiny" => {
            container_disk(&mut tree, &tiny::build(cache, &tools)?);
            "Small guest (Linux and busybox), as container disk"
        }
        "guest-tiny-signed" => {
            container_disk(&mut tree, &tiny::build_signed(cache, &tools)?);
            "Small guest for secure boot, as container disk"
        }
        "guest-tiny-kernel" => {
            kernel_boot(&mut tree, &tiny::build(cache, &tools)?);
            "Small guest (Linux and busybox), as kernel and initial RAM file system"
        }
        "guest-tiny-arm64" => {
            kernel_boot(&mut tree, &tiny::build_arm64(cache, &tools)?);
            "Small guest of arm64, as kernel and initial RAM file system"
        }
        _ => return Err(Error::UnknownImage { name: name.to_owned(), known: "see images list".to_owned() }),
    };
    let layers = [layer::layer(cache, &tree)?];
    oci::write(archive, reference, &oci::Run { description, ..Default::default() }, &layers)
}

/// Adds kernel and initial RAM file system of the guest in a directory.
fn kernel_boot(tree: &mut Tree, guest: &Path) {
    tree.dir("boot", 0o555, QEMU_USER);
    for name in ["vmlinuz", "initrd"] {
        tree.copy(&format!("boot/{name}"), 0o444, QEMU_USER, guest.join(name));
    }
}

/// Adds the disk of the guest in a directory.
fn container_disk(tree: &mut Tree, guest: &Path) {
    tree.dir("disk", 0o555, QEMU_USER);
    tree.copy("disk/disk.qcow2", 0o440, QEMU_USER, guest.join("disk.qcow2"));
}

/// Returns the key of a guest: tools, code, and its own files.
fn key(tools: &Root, files: &[GuestFile]) -> Key {
    let mut key = Key::default().with(&tools.key);
    CODE.iter().for_each(|code| key.add(code));
    for (path, mode, content) in files {
        key.add(format!("{path} {mode:o}"));
        key.add(content);
    }
    key
}

/// Returns the shell commands that write files of a guest and then run its script, with the root directory as `$1`.
fn install_script(files: &[GuestFile], script: &str) -> String {
    let mut text = String::from("set -e\n");
    for (path, mode, content) in files {
        let (dir, _) = path.rsplit_once('/').unwrap_or(("", path));
        text.push_str(&format!("mkdir -p \"$1/{dir}\"\ncat > \"$1/{path}\" <<'END-OF-FILE'\n{content}END-OF-FILE\nchmod {mode:o} \"$1/{path}\"\n"));
    }
    text + script
}
