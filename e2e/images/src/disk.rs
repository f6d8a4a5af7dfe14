//! Disks that boot by BIOS and by UEFI, put together from files without a loop device.
//!
//! ```text
//! sector 0     boot sector of the loader for BIOS, with the partition table written into it
//! sector 1..   the rest of the loader and its table
//! sector 2048  partition 2: the EFI system partition with GRUB for UEFI, which carries its own configuration
//! sector 6144  partition 1: the file system, last on the disk so that it can grow
//! ```

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use crate::{
    error::{At, Error, Result},
    loader::{self, Boot},
    tool,
};

const SECTOR: u64 = 512;
/// The EFI system partition.
const ESP_START: u32 = 2048;
const ESP_SECTORS: u32 = 4096;
/// The file system's partition.
const PARTITION_START: u32 = ESP_START + ESP_SECTORS;
/// Identity of the EFI system partition's file system, fixed so that the same content gives the same bytes.
const ESP_VOLUME: &str = "46655669";
/// Where UEFI looks on a disk that it has no entry for.
const EFI_LOADER: &str = "::/EFI/BOOT/BOOTX64.EFI";

/// What GRUB needs to read the partition and start Linux.
const GRUB_MODULES: [&str; 4] = ["part_msdos", "ext2", "search_label", "linux"];

/// A file system made from a directory.
#[derive(Debug, Clone)]
pub struct FileSystem<'a> {
    /// Its label.
    pub label: &'a str,
    /// Fixed identity, so that the same content gives the same bytes.
    pub uuid: &'a str,
    /// Size in bytes, a multiple of a megabyte.
    pub size: u64,
    /// Whether it has a journal.
    pub journal: bool,
}

/// Makes `to`, a raw disk image that boots from a file system with the content of `directory`.
///
/// `tools` is a Debian root with binutils, grub-efi-amd64-bin, dosfstools, mtools and e2fsprogs; `work` a directory for
/// intermediate files.
pub fn make(
    tools: &Path,
    directory: &Path,
    system: &FileSystem<'_>,
    boot: &Boot<'_>,
    work: &Path,
    to: &Path,
) -> Result<()> {
    let partition = work.join("partition");
    make_ext4(tools, directory, system, &partition)?;
    let loader = loader::make(tools, directory, &partition, PARTITION_START, boot, work)?;
    let (first, rest) = loader.split_at(SECTOR as usize);
    let esp = make_esp(tools, &make_grub(tools, system, boot, work)?, work)?;
    let mut disk = File::create(to).at(to)?;
    disk.write_all(&boot_sector(first, system.size / SECTOR)?).at(to)?;
    disk.write_all(rest).at(to)?;
    for (start, from) in [(ESP_START, &esp), (PARTITION_START, &partition)] {
        disk.seek(SeekFrom::Start(u64::from(start) * SECTOR)).at(to)?;
        copy_sparse(from, &mut disk).at(to)?;
    }
    disk.set_len(u64::from(PARTITION_START) * SECTOR + system.size).at(to)?;
    fs::remove_file(&partition).at(&partition)
}

/// Converts a raw disk to qcow2.
pub fn to_qcow2(tools: &Path, raw: &Path, qcow2: &Path) -> Result<()> {
    // One coroutine: clusters are then always allocated in the same order.
    let mut command = tool::from_root(tools, "usr/bin/qemu-img");
    command.args(["convert", "-m", "1", "-f", "raw", "-O", "qcow2"]).arg(raw).arg(qcow2);
    tool::run(&mut command, "from Debian package qemu-utils")?;
    Ok(())
}

fn make_ext4(tools: &Path, directory: &Path, system: &FileSystem<'_>, to: &Path) -> Result<()> {
    let mut command = tool::from_root(tools, "usr/sbin/mke2fs");
    command
        .env("SOURCE_DATE_EPOCH", crate::EPOCH.to_string())
        .env("MKE2FS_CONFIG", tools.join("etc/mke2fs.conf"))
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"])
        // GRUB reads none of these two, and a disk that grows later needs no second group descriptor area.
        .args([
            "-O",
            if system.journal {
                "^metadata_csum_seed,^orphan_file"
            } else {
                "^metadata_csum_seed,^orphan_file,^has_journal"
            },
        ])
        .args(["-L", system.label, "-U", system.uuid])
        .arg("-E")
        .arg(format!("hash_seed={},lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0", system.uuid))
        .arg("-d")
        .arg(directory)
        .arg(to)
        .arg(format!("{}k", system.size / 1024));
    tool::run(&mut command, "from Debian package e2fsprogs")?;
    Ok(())
}

/// GRUB for UEFI, with everything it needs in one file. The firmware loads it from the system partition, so that it looks
/// for the file system by its label.
fn make_grub(tools: &Path, system: &FileSystem<'_>, boot: &Boot<'_>, work: &Path) -> Result<PathBuf> {
    let config = work.join("grub.cfg");
    let Boot { uefi_kernel, initrd, arguments, uefi_arguments, .. } = boot;
    let text = format!(
        "search.fs_label {} root\nlinux {uefi_kernel} {arguments} {uefi_arguments}\ninitrd {initrd}\nboot\n",
        system.label
    );
    fs::write(&config, text).at(&config)?;
    let image = work.join("grub.efi");
    let mut command = tool::from_root(tools, "usr/bin/grub-mkimage");
    command
        .args(["-O", "x86_64-efi", "-p", "/boot/grub", "-d"])
        .arg(tools.join("usr/lib/grub/x86_64-efi"))
        .arg("-c")
        .arg(&config)
        .arg("-o")
        .arg(&image)
        .args(GRUB_MODULES);
    tool::run(&mut command, "from Debian package grub-common")?;
    Ok(image)
}

/// The file system of the EFI system partition, with the boot loader where UEFI looks for one.
fn make_esp(tools: &Path, loader: &Path, work: &Path) -> Result<PathBuf> {
    let esp = work.join("esp");
    let mut format = tool::from_root(tools, "usr/sbin/mkfs.fat");
    format.args(["--invariant", "-i", ESP_VOLUME, "-n", "EFI", "-C"]).arg(&esp).arg((ESP_SECTORS / 2).to_string());
    tool::run(&mut format, "from Debian package dosfstools")?;
    let mtools = |name: &str| {
        let mut command = tool::from_root(tools, "usr/bin/mtools");
        command.env("SOURCE_DATE_EPOCH", crate::EPOCH.to_string()).env("TZ", "UTC").args(["-c", name, "-i"]).arg(&esp);
        command
    };
    let mut directories = mtools("mmd");
    directories.args(["::/EFI", "::/EFI/BOOT"]);
    let mut copy = mtools("mcopy");
    copy.arg(loader).arg(EFI_LOADER);
    for command in [&mut directories, &mut copy] {
        tool::run(command, "from Debian package mtools")?;
    }
    Ok(esp)
}

/// The boot sector with two partitions: the active one with Linux, and the EFI system partition.
fn boot_sector(boot: &[u8], sectors: u64) -> Result<[u8; 512]> {
    let mut sector: [u8; 512] =
        boot.try_into().map_err(|_| Error::Layout("the boot sector".to_owned(), format!("{} bytes", boot.len())))?;
    let sectors =
        u32::try_from(sectors).map_err(|_| Error::Layout("the partition".to_owned(), format!("{sectors} sectors")))?;
    // Disk signature, partition entries, end mark.
    sector[440..444].copy_from_slice(b"FeVi");
    sector[444..510].fill(0);
    sector[446..462].copy_from_slice(&entry(true, 0x83, PARTITION_START, sectors));
    sector[462..478].copy_from_slice(&entry(false, 0xef, ESP_START, ESP_SECTORS));
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
    Ok(sector)
}

/// An entry of the partition table. Cylinder addresses are those of "beyond their range".
fn entry(active: bool, kind: u8, start: u32, sectors: u32) -> [u8; 16] {
    let mut entry = [0u8; 16];
    entry[0] = if active { 0x80 } else { 0 };
    entry[1..4].copy_from_slice(&[0xfe, 0xff, 0xff]);
    entry[4] = kind;
    entry[5..8].copy_from_slice(&[0xfe, 0xff, 0xff]);
    entry[8..12].copy_from_slice(&start.to_le_bytes());
    entry[12..16].copy_from_slice(&sectors.to_le_bytes());
    entry
}

/// Copies a file to the writer's position, leaving holes where it has only zeros.
fn copy_sparse(from: &Path, to: &mut File) -> io::Result<()> {
    use std::io::Read;
    let mut from = File::open(from)?;
    let mut block = vec![0u8; 1 << 20];
    loop {
        let mut filled = 0;
        while filled < block.len() {
            match from.read(&mut block[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        if filled == 0 {
            return Ok(());
        }
        if block[..filled].iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(filled as i64))?;
        } else {
            to.write_all(&block[..filled])?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partition_table_holds_linux_and_before_it_the_efi_system_partition() {
        let sector = boot_sector(&[0x90; 512], 8192).unwrap();
        assert_eq!(sector[0], 0x90);
        assert_eq!((sector[446], sector[450]), (0x80, 0x83));
        assert_eq!(sector[454..458], 6144u32.to_le_bytes());
        assert_eq!(sector[458..462], 8192u32.to_le_bytes());
        assert_eq!((sector[462], sector[466]), (0, 0xef));
        assert_eq!(sector[470..474], 2048u32.to_le_bytes());
        assert_eq!(sector[474..478], 4096u32.to_le_bytes());
        assert!(sector[478..510].iter().all(|byte| *byte == 0));
        assert_eq!(sector[510..], [0x55, 0xaa]);
        assert!(boot_sector(&[0; 511], 1).is_err());
    }
}
