//! BIOS boot loader for disks: `e2e/guests/boot/loader.S` with a table of extents.
//!
//! GRUB reads a disk in pieces of 16 KiB on average. Under software emulation each piece takes milliseconds, which was half of
//! the small guest's boot. This loader reads 64 KiB at a time and knows no file system: its table lists the sectors of the
//! files, so they must not be moved.

use std::{fs, ops::Range, path::Path};

use crate::{
    error::{At, Error, Result},
    kernel::{self, Header},
    tool,
};

/// Sectors of the loader with its table, boot sector included.
pub const SECTORS: u32 = 9;
const SECTOR: u32 = 512;
/// Block size of the file system.
const BLOCK: u32 = 4096;
const SECTORS_PER_BLOCK: u32 = BLOCK / SECTOR;
/// Load address of the kernel's 16-bit part.
const SETUP_ADDRESS: u32 = 0x9_0000;
/// Load address of the loader.
const ADDRESS: u32 = 0x7c00;
/// Sizes of the program, of the addresses before the arguments, and of both including the arguments.
const PROGRAM: usize = 1024;
const ADDRESSES: usize = 8;
const BEFORE_TABLE: usize = 512;

/// Paths of kernel and initramfs on the file system, and the kernel arguments.
#[derive(Debug, Clone)]
pub struct Boot<'a> {
    /// Path of the kernel, for BIOS.
    pub kernel: &'a str,
    /// Path of the kernel, for UEFI.
    pub uefi_kernel: &'a str,
    /// Path of the initramfs.
    pub initrd: &'a str,
    /// Kernel command line.
    pub arguments: &'a str,
    /// Additional arguments of the kernel for UEFI.
    pub uefi_arguments: &'a str,
}

/// Contiguous sectors on the disk and their load address.
#[derive(Debug, PartialEq, Eq)]
struct Extent {
    sector: u32,
    sectors: u32,
    address: u32,
}

/// A file and its blocks on the file system.
struct PlacedFile {
    content: Vec<u8>,
    /// Its blocks, counted from the start of the file system.
    blocks: Vec<u32>,
}

impl PlacedFile {
    /// Locates the file `path` of `directory` on the file system in `partition`.
    fn find(tools: &Path, directory: &Path, partition: &Path, path: &str) -> Result<Self> {
        // Kernel paths are links.
        let root = fs::canonicalize(directory).at(directory)?;
        let from = root.join(path.trim_start_matches('/'));
        let from = fs::canonicalize(&from).at(&from)?;
        let misplaced = |detail: String| Error::Layout(format!("{path} on the disk"), detail);
        let inside = from.strip_prefix(&root).map_err(|_| misplaced("a link points outside".to_owned()))?;
        let content = fs::read(&from).at(&from)?;
        let mut command = tool::from_root(tools, "usr/sbin/debugfs");
        command.arg("-R").arg(format!("blocks /{}", inside.display())).arg(partition);
        let output = tool::run(&mut command, "from Debian package e2fsprogs")?;
        let output = String::from_utf8_lossy(&output);
        let blocks: Vec<u32> = output.split_whitespace().map_while(|word| word.parse().ok()).collect();
        // Fewer blocks mean that the file has holes, more that its block map lies between them.
        if blocks.len() != content.len().div_ceil(BLOCK as usize) {
            return Err(misplaced(format!("{} bytes in {} blocks", content.len(), blocks.len())));
        }
        Ok(Self { content, blocks })
    }

    /// Returns the extents of a range of the file's sectors. `start` is the first sector of the file system.
    fn extents(&self, start: u32, sectors: Range<u32>, mut address: u32) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for number in sectors {
            let Some(block) = self.blocks.get((number / SECTORS_PER_BLOCK) as usize) else { break };
            let sector = start + block * SECTORS_PER_BLOCK + number % SECTORS_PER_BLOCK;
            match extents.last_mut() {
                Some(last) if last.sector + last.sectors == sector => last.sectors += 1,
                _ => extents.push(Extent { sector, sectors: 1, address }),
            }
            address += SECTOR;
        }
        extents
    }

    fn sectors(&self) -> u32 {
        u32::try_from(self.content.len().div_ceil(SECTOR as usize)).unwrap_or(u32::MAX)
    }
}

/// Builds the first sectors of a disk that boots from the file system in `partition`, which was created from `directory` and
/// begins at sector `start`.
pub fn make(
    tools: &Path,
    directory: &Path,
    partition: &Path,
    start: u32,
    boot: &Boot<'_>,
    work: &Path,
) -> Result<Vec<u8>> {
    let file = PlacedFile::find(tools, directory, partition, boot.kernel)?;
    let initrd = PlacedFile::find(tools, directory, partition, boot.initrd)?;
    let unfit = |what: &str| Error::Layout(what.to_owned(), boot.kernel.to_owned());
    let header = Header::read(&file.content).ok_or_else(|| unfit("the header of the kernel"))?;
    let initrd_address = header.end.next_multiple_of(1 << 20);
    let mut extents = file.extents(start, 0..header.setup_sectors, SETUP_ADDRESS);
    extents.extend(file.extents(start, header.setup_sectors..file.sectors(), kernel::ADDRESS));
    extents.extend(initrd.extents(start, 0..initrd.sectors(), initrd_address));

    let source = include_str!("../../guests/boot/loader.S");
    let mut loader = tool::assemble(tools, work, "loader", source, ADDRESS)?;
    if loader.len() != PROGRAM {
        return Err(Error::Layout("the boot loader".to_owned(), format!("{} bytes", loader.len())));
    }
    loader.extend_from_slice(&initrd_address.to_le_bytes());
    let size = u32::try_from(initrd.content.len()).map_err(|_| unfit("the initial RAM file system"))?;
    loader.extend_from_slice(&size.to_le_bytes());
    // At least one byte stays zero and terminates the text.
    if boot.arguments.len() + ADDRESSES >= BEFORE_TABLE {
        return Err(unfit("the command line of the kernel"));
    }
    loader.extend_from_slice(boot.arguments.as_bytes());
    loader.resize(PROGRAM + BEFORE_TABLE, 0);
    for Extent { sector, sectors, address } in &extents {
        [sector, sectors, address].iter().for_each(|number| loader.extend_from_slice(&number.to_le_bytes()));
    }
    let room = (SECTORS * SECTOR) as usize;
    // An extent without sectors ends the table.
    if loader.len() + size_of::<Extent>() > room {
        return Err(unfit("the boot loader with its table of extents"));
    }
    loader.resize(room, 0);
    Ok(loader)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_follow_the_blocks_and_split_where_they_do() {
        let file = PlacedFile { content: vec![0; 3 * 4096 - 100], blocks: vec![10, 11, 20] };
        assert_eq!(file.sectors(), 24);
        let extent = |sector, sectors, address| Extent { sector, sectors, address };
        assert_eq!(file.extents(2048, 0..5, 0x9_0000), [extent(2128, 5, 0x9_0000)]);
        assert_eq!(
            file.extents(2048, 5..24, 0x10_0000),
            [extent(2133, 11, 0x10_0000), extent(2208, 8, 0x10_0000 + 11 * 512)]
        );
        assert_eq!(file.extents(2048, 24..30, 0), []);
    }
}
