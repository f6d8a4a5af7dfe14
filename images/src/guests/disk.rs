//! Disk images that boot by BIOS and by UEFI, built from files without loop devices and mounts.
//!
//! ```text
//! sector 0     boot sector of GRUB with the partition table
//! sector 1..   GRUB for BIOS
//! sector 2048  partition 2: the EFI system partition with GRUB for UEFI
//! sector 18432 partition 1: the file system, last on the disk so that it can grow
//! ```

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use super::grub::{self, EfiFile, Linux, Platform};
use crate::{
    EPOCH,
    error::{At, Error, Result},
    run,
};

const SECTOR: u64 = 512;
/// First sector of the EFI system partition.
const ESP_START: u32 = 2048;
const ESP_SECTORS: u32 = 16 * 1024;
/// First sector of the file system's partition.
const PARTITION_START: u32 = ESP_START + ESP_SECTORS;
/// Volume ID of the EFI system partition's file system, fixed for reproducible images.
const ESP_VOLUME: &str = "46655669";
/// Directories of the EFI system partition.
const ESP_DIRECTORIES: [&str; 3] = ["::/EFI", "::/EFI/BOOT", "::/EFI/debian"];

/// Parameters of an ext4 file system.
#[derive(Debug, Clone)]
pub(super) struct FileSystem<'a> {
    /// UUID, fixed for reproducible images.
    pub uuid: &'a str,
    /// Size in bytes, a multiple of a megabyte.
    pub size: u64,
    /// Adds a journal.
    pub journal: bool,
}

/// Builds the raw disk image `to` with the content of `directory`, which boots `linux` from it.
///
/// `tools` is a Debian root with GRUB, dosfstools, mtools and e2fsprogs; `work` a directory for intermediate files.
pub(super) fn build(
    tools: &Path,
    directory: &Path,
    system: &FileSystem<'_>,
    linux: &Linux<'_>,
    work: &Path,
    to: &Path,
) -> Result<()> {
    let partition = work.join("partition");
    make_ext4(tools, directory, system, linux.label, &partition)?;
    let bios = grub::image(tools, Platform::Bios, linux, work)?;
    let esp = make_esp(tools, &grub::efi_files(tools, linux, work)?, work)?;
    let mut disk = File::create(to).at(to)?;
    disk.write_all(&boot_sector(&grub::boot_sector(tools)?, system.size / SECTOR)?).at(to)?;
    let bios_size = fs::metadata(&bios).at(&bios)?.len();
    if bios_size > u64::from(ESP_START - 1) * SECTOR {
        return Err(Error::Layout("GRUB for BIOS".to_owned(), format!("{bios_size} bytes")));
    }
    for (start, from) in [(1, &bios), (ESP_START, &esp), (PARTITION_START, &partition)] {
        disk.seek(SeekFrom::Start(u64::from(start) * SECTOR)).at(to)?;
        copy_sparse(from, &mut disk).at(to)?;
    }
    disk.set_len(u64::from(PARTITION_START) * SECTOR + system.size).at(to)?;
    fs::remove_file(&partition).at(&partition)
}

/// Converts a raw disk to qcow2.
pub(super) fn to_qcow2(tools: &Path, raw: &Path, qcow2: &Path) -> Result<()> {
    // A single coroutine allocates clusters always in the same order.
    let mut command = run::from_root(tools, "usr/bin/qemu-img");
    command.args(["convert", "-m", "1", "-f", "raw", "-O", "qcow2"]).arg(raw).arg(qcow2);
    run::run(&mut command, "from Debian package qemu-utils")?;
    Ok(())
}

/// Builds a file system with the content of a directory.
pub(super) fn make_ext4(tools: &Path, directory: &Path, system: &FileSystem<'_>, label: &str, to: &Path) -> Result<()> {
    let mut command = run::from_root(tools, "usr/sbin/mke2fs");
    command
        .env("SOURCE_DATE_EPOCH", EPOCH.to_string())
        .env("MKE2FS_CONFIG", tools.join("etc/mke2fs.conf"))
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"])
        // GRUB cannot read file systems with these two features.
        .args([
            "-O",
            if system.journal {
                "^metadata_csum_seed,^orphan_file"
            } else {
                "^metadata_csum_seed,^orphan_file,^has_journal"
            },
        ])
        .args(["-L", label, "-U", system.uuid])
        .arg("-E")
        .arg(format!("hash_seed={},lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0", system.uuid))
        .arg("-d")
        .arg(directory)
        .arg(to)
        .arg(format!("{}k", system.size / 1024));
    run::run(&mut command, "from Debian package e2fsprogs")?;
    Ok(())
}

/// Builds the file system of the EFI system partition with these files.
fn make_esp(tools: &Path, files: &[EfiFile], work: &Path) -> Result<PathBuf> {
    let esp = work.join("esp");
    let mut format = run::from_root(tools, "usr/sbin/mkfs.fat");
    format.args(["--invariant", "-i", ESP_VOLUME, "-n", "EFI", "-C"]).arg(&esp).arg((ESP_SECTORS / 2).to_string());
    run::run(&mut format, "from Debian package dosfstools")?;
    let mtools = |name: &str| {
        let mut command = run::from_root(tools, "usr/bin/mtools");
        command.env("SOURCE_DATE_EPOCH", EPOCH.to_string()).env("TZ", "UTC").args(["-c", name, "-i"]).arg(&esp);
        command
    };
    run::run(mtools("mmd").args(ESP_DIRECTORIES), "from Debian package mtools")?;
    for (name, from) in files {
        run::run(mtools("mcopy").arg(from).arg(format!("::/{name}")), "from Debian package mtools")?;
    }
    Ok(esp)
}

/// Adds two partitions to a boot sector: the active one with Linux, and the EFI system partition.
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

/// Returns an entry of the partition table. Its cylinder addresses are out of range, as on all disks above 8 GB.
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

/// Copies a file to the position of `to`. Blocks of zeros become holes.
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
    fn partition_table_has_linux_and_before_it_the_efi_system_partition() {
        let sector = boot_sector(&[0x90; 512], 8192).unwrap();
        assert_eq!(sector[0], 0x90);
        assert_eq!((sector[446], sector[450]), (0x80, 0x83));
        assert_eq!(sector[454..458], 18_432u32.to_le_bytes());
        assert_eq!(sector[458..462], 8192u32.to_le_bytes());
        assert_eq!((sector[462], sector[466]), (0, 0xef));
        assert_eq!(sector[470..474], 2048u32.to_le_bytes());
        assert_eq!(sector[474..478], 16_384u32.to_le_bytes());
        assert!(sector[478..510].iter().all(|byte| *byte == 0));
        assert_eq!(sector[510..], [0x55, 0xaa]);
        assert!(boot_sector(&[0; 511], 1).is_err());
    }
}
