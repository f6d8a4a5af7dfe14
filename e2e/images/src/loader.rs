//! The boot loader of disks for BIOS machines: `e2e/guests/boot/loader.S` with a table of what it loads.
//!
//! GRUB reads a disk in pieces of 16 KiB on average. Each costs milliseconds under software emulation, which made it half
//! of the time that the small guest took to start. This one reads 64 KiB at a time and understands no file system: it is
//! told where the files lie, which holds as long as they are not moved.

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
/// Where the kernel's 16-bit part goes.
const SETUP_ADDRESS: u32 = 0x9_0000;
/// Where the loader is in memory.
const ADDRESS: u32 = 0x7c00;
/// Size of the program, of the addresses before the arguments, and of both with the arguments.
const PROGRAM: usize = 1024;
const ADDRESSES: usize = 8;
const BEFORE_TABLE: usize = 512;

/// Where kernel and initial RAM file system lie on the file system, and the kernel's arguments.
#[derive(Debug, Clone)]
pub struct Boot<'a> {
    /// Path of the kernel, for BIOS.
    pub kernel: &'a str,
    /// Path of the kernel, for UEFI.
    pub uefi_kernel: &'a str,
    /// Path of the initial RAM file system.
    pub initrd: &'a str,
    /// Kernel command line.
    pub arguments: &'a str,
    /// What the kernel for UEFI is told besides.
    pub uefi_arguments: &'a str,
}

/// Sectors that follow each other on the disk, and the memory they go to.
#[derive(Debug, PartialEq, Eq)]
struct Extent {
    sector: u32,
    sectors: u32,
    address: u32,
}

/// A file on the file system.
struct Placed {
    content: Vec<u8>,
    /// Its blocks, counted from the start of the file system.
    blocks: Vec<u32>,
}

impl Placed {
    /// Finds the file `path`, made from `directory`, on the file system in `partition`.
    fn find(tools: &Path, directory: &Path, partition: &Path, path: &str) -> Result<Self> {
        // The paths of kernels are links.
        let root = fs::canonicalize(directory).at(directory)?;
        let from = root.join(path.trim_start_matches('/'));
        let from = fs::canonicalize(&from).at(&from)?;
        let misplaced = |detail: String| Error::Layout(format!("{path} on the disk"), detail);
        let inside = from.strip_prefix(&root).map_err(|_| misplaced("a link leads out of it".to_owned()))?;
        let content = fs::read(&from).at(&from)?;
        let mut command = tool::from_root(tools, "usr/sbin/debugfs");
        command.arg("-R").arg(format!("blocks /{}", inside.display())).arg(partition);
        let output = tool::run(&mut command, "from Debian package e2fsprogs")?;
        let output = String::from_utf8_lossy(&output);
        let blocks: Vec<u32> = output.split_whitespace().map_while(|word| word.parse().ok()).collect();
        // Fewer would mean that the file has holes, more that its map lies between them.
        if blocks.len() != content.len().div_ceil(BLOCK as usize) {
            return Err(misplaced(format!("{} bytes in {} blocks", content.len(), blocks.len())));
        }
        Ok(Self { content, blocks })
    }

    /// The extents of some of the file's sectors. `start` is the first sector of the file system.
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

/// The first sectors of a disk that boots from the file system in `partition`, which was made from `directory` and begins
/// at the sector `start`.
pub fn make(
    tools: &Path,
    directory: &Path,
    partition: &Path,
    start: u32,
    boot: &Boot<'_>,
    work: &Path,
) -> Result<Vec<u8>> {
    let file = Placed::find(tools, directory, partition, boot.kernel)?;
    let initrd = Placed::find(tools, directory, partition, boot.initrd)?;
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
    // One byte at least stays zero: the end of the text.
    if boot.arguments.len() + ADDRESSES >= BEFORE_TABLE {
        return Err(unfit("the command line of the kernel"));
    }
    loader.extend_from_slice(boot.arguments.as_bytes());
    loader.resize(PROGRAM + BEFORE_TABLE, 0);
    for Extent { sector, sectors, address } in &extents {
        [sector, sectors, address].iter().for_each(|number| loader.extend_from_slice(&number.to_le_bytes()));
    }
    let room = (SECTORS * SECTOR) as usize;
    // Behind the last extent there is one without sectors.
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
        let file = Placed { content: vec![0; 3 * 4096 - 100], blocks: vec![10, 11, 20] };
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
