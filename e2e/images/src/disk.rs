//! Bootable disks for BIOS machines, put together from files without a loop device.
//!
//! ```text
//! sector 0     boot sector of the loader with the partition table written into it
//! sector 1..   the rest of the loader and its table
//! sector 2048  one partition: the file system
//! ```

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    path::Path,
};

use crate::{
    error::{At, Error, Result},
    loader::{self, Boot},
    tool,
};

const SECTOR: u64 = 512;
const PARTITION_START: u32 = 2048;

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
/// `tools` is a Debian root with binutils and e2fsprogs; `work` a directory for intermediate files.
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
    let mut disk = File::create(to).at(to)?;
    disk.write_all(&boot_sector(first, system.size / SECTOR)?).at(to)?;
    disk.write_all(rest).at(to)?;
    disk.seek(SeekFrom::Start(u64::from(PARTITION_START) * SECTOR)).at(to)?;
    copy_sparse(&partition, &mut disk).at(to)?;
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
        // Boot loaders read none of these two, and a disk that grows later needs no second group descriptor area.
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

/// The boot sector with one active Linux partition from sector 2048 on.
fn boot_sector(boot: &[u8], sectors: u64) -> Result<[u8; 512]> {
    let mut sector: [u8; 512] =
        boot.try_into().map_err(|_| Error::Layout("the boot sector".to_owned(), format!("{} bytes", boot.len())))?;
    let sectors =
        u32::try_from(sectors).map_err(|_| Error::Layout("the partition".to_owned(), format!("{sectors} sectors")))?;
    // Disk signature, partition entry, end mark. Cylinder addresses are those of "beyond their range".
    sector[440..444].copy_from_slice(b"FeVi");
    let mut entry = [0u8; 16];
    entry[0] = 0x80;
    entry[1..4].copy_from_slice(&[0xfe, 0xff, 0xff]);
    entry[4] = 0x83;
    entry[5..8].copy_from_slice(&[0xfe, 0xff, 0xff]);
    entry[8..12].copy_from_slice(&PARTITION_START.to_le_bytes());
    entry[12..16].copy_from_slice(&sectors.to_le_bytes());
    sector[444..446].fill(0);
    sector[446..510].fill(0);
    sector[446..462].copy_from_slice(&entry);
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
    Ok(sector)
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
    fn the_partition_table_holds_one_active_partition() {
        let sector = boot_sector(&[0x90; 512], 4096).unwrap();
        assert_eq!(sector[0], 0x90);
        assert_eq!((sector[446], sector[450]), (0x80, 0x83));
        assert_eq!(sector[454..458], 2048u32.to_le_bytes());
        assert_eq!(sector[458..462], 4096u32.to_le_bytes());
        assert_eq!(sector[510..], [0x55, 0xaa]);
        assert!(boot_sector(&[0; 511], 1).is_err());
    }
}
