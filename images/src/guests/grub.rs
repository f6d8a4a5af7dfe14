//! GRUB for BIOS and for UEFI, each one file with its modules and its configuration; for secure boot Debian's signed files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{At, Result},
    run,
};

/// Default boot loader of a disk under UEFI (UEFI specification, section 3.5.1.1).
const EFI_LOADER: &str = "EFI/BOOT/BOOTX64.EFI";

/// Linux on a file system that GRUB finds by its label.
#[derive(Debug, Clone)]
pub(super) struct Linux<'a> {
    /// Label of the file system.
    pub label: &'a str,
    /// Path of the kernel.
    pub kernel: &'a str,
    /// Path of the initial RAM file system.
    pub initrd: &'a str,
    /// Kernel command line.
    pub arguments: &'a str,
    /// Starts under UEFI by Debian's signed boot loaders, which secure boot accepts.
    pub signed: bool,
}

/// A platform of GRUB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Platform {
    Bios,
    Uefi,
}

impl Platform {
    /// Name of the platform, and of the directory of its modules.
    const fn name(self) -> &'static str {
        match self {
            Self::Bios => "i386-pc",
            Self::Uefi => "x86_64-efi",
        }
    }

    /// Modules that read the disk, find the file system and start Linux. UEFI disks are in the core of GRUB.
    const fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Bios => &["biosdisk", "part_msdos", "ext2", "search_label", "linux"],
            Self::Uefi => &["part_msdos", "ext2", "search_label", "linux"],
        }
    }
}

/// Returns the configuration.
fn config(linux: &Linux<'_>) -> String {
    let Linux { label, kernel, initrd, arguments, signed: _ } = linux;
    format!("search.fs_label {label} root\nlinux {kernel} {arguments}\ninitrd {initrd}\nboot\n")
}

/// Builds GRUB in the directory `work` and returns its path. `tools` is a Debian root with GRUB.
pub(super) fn image(tools: &Path, platform: Platform, linux: &Linux<'_>, work: &Path) -> Result<PathBuf> {
    let name = platform.name();
    let (text, image) = (work.join("grub.cfg"), work.join(format!("grub-{name}")));
    fs::write(&text, config(linux)).at(&text)?;
    let mut command = run::from_root(tools, "usr/bin/grub-mkimage");
    command.args(["-O", name, "-p", "/boot/grub", "-d"]).arg(modules(tools, platform));
    command.arg("-c").arg(&text).arg("-o").arg(&image).args(platform.modules());
    run::run(&mut command, "from Debian package grub-common")?;
    Ok(image)
}

/// A file of the EFI system partition: its path there, and its source.
pub(super) type EfiFile = (&'static str, PathBuf);

/// Returns the boot loader for UEFI, built or copied to the directory `work`.
///
/// The signed chain begins with shim, which Microsoft has signed. It verifies the GRUB beside it with Debian's key, and GRUB
/// verifies the kernel by calling shim. Debian's GRUB reads its configuration from `EFI/debian`.
pub(super) fn efi_files(tools: &Path, linux: &Linux<'_>, work: &Path) -> Result<Vec<EfiFile>> {
    if !linux.signed {
        return Ok(vec![(EFI_LOADER, image(tools, Platform::Uefi, linux, work)?)]);
    }
    let text = work.join("grub-signed.cfg");
    fs::write(&text, config(linux)).at(&text)?;
    Ok(vec![
        (EFI_LOADER, tools.join("usr/lib/shim/shimx64.efi.signed")),
        ("EFI/BOOT/grubx64.efi", tools.join("usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed")),
        ("EFI/debian/grub.cfg", text),
    ])
}

/// Returns GRUB's boot sector. It loads the image for BIOS from the sectors that follow it.
pub(super) fn boot_sector(tools: &Path) -> Result<Vec<u8>> {
    let path = modules(tools, Platform::Bios).join("boot.img");
    fs::read(&path).at(&path)
}

fn modules(tools: &Path, platform: Platform) -> PathBuf {
    tools.join("usr/lib/grub").join(platform.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_finds_the_file_system_by_label_and_boots_linux() {
        let linux = Linux { label: "a", kernel: "/k", initrd: "/i", arguments: "quiet b=c", signed: false };
        assert_eq!(config(&linux), "search.fs_label a root\nlinux /k quiet b=c\ninitrd /i\nboot\n");
    }
}
