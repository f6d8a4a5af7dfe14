//! The boot loader of disks for BIOS machines: `e2e/guests/boot/loader.S` with a table of what it loads.
//!
//! GRUB reads a disk in pieces of 16 KiB on average. Each costs milliseconds under software emulation, which made it half
//! of the time that the small guest took to start. This one reads 64 KiB at a time and understands no file system: it is
//! told where the files lie, which holds as long as they are not moved.

use std::{fs, ops::Range, path::Path};

use crate::{
    error::{At, Error, Result},
    tool,
};

/// Sectors of the loader with its table, boot sector included.
pub const SECTORS: u32 = 9;
const SECTOR: u32 = 512;
/// Block size of the file system.
const BLOCK: u32 = 4096;
const SECTORS_PER_BLOCK: u32 = BLOCK / SECTOR;
/// Where the kernel's 16-bit part goes, and the rest of it.
const SETUP_ADDRESS: u32 = 0x9_0000;
const KERNEL_ADDRESS: u32 = 0x10_0000;
/// Size of the program, of the addresses before the arguments, and of both with the arguments.
const PROGRAM: usize = 1024;
const ADDRESSES: usize = 8;
const BEFORE_TABLE: usize = 512;

/// Where kernel and initial RAM file system lie on the file system, and the kernel's arguments.
#[derive(Debug, Clone)]
pub struct Boot<'a> {
    /// Path of the kernel.
    pub kernel: &'a str,
    /// Path of the initial RAM file system.
    pub initrd: &'a str,
    /// Kernel command line.
    pub arguments: &'a str,
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

/// What a kernel says about itself in its first sectors.
struct Kernel {
    /// Sectors of its 16-bit part.
    setup_sectors: u32,
    /// First address behind what it needs to unpack itself.
    end: u32,
}

impl Kernel {
    /// Reads the header, see Documentation/arch/x86/boot.rst of Linux.
    fn read(image: &[u8]) -> Option<Self> {
        if image.get(0x202..0x206)? != b"HdrS" {
            return None;
        }
        let setup = u32::from(*image.get(0x1f1)?);
        let preferred = u64::from_le_bytes(image.get(0x258..0x260)?.try_into().ok()?);
        let size = u32::from_le_bytes(image.get(0x260..0x264)?.try_into().ok()?);
        let end = u32::try_from(preferred).ok()?.checked_add(size)?;
        Some(Self { setup_sectors: if setup == 0 { 5 } else { setup + 1 }, end })
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
    let kernel = Kernel::read(&file.content).ok_or_else(|| unfit("the header of the kernel"))?;
    let initrd_address = kernel.end.next_multiple_of(1 << 20);
    let mut extents = file.extents(start, 0..kernel.setup_sectors, SETUP_ADDRESS);
    extents.extend(file.extents(start, kernel.setup_sectors..file.sectors(), KERNEL_ADDRESS));
    extents.extend(initrd.extents(start, 0..initrd.sectors(), initrd_address));

    let mut loader = assemble(tools, work)?;
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

/// The program, from its first sector on.
fn assemble(tools: &Path, work: &Path) -> Result<Vec<u8>> {
    const HINT: &str = "from Debian package binutils";
    let (source, object, binary) = (work.join("loader.S"), work.join("loader.o"), work.join("loader.bin"));
    fs::write(&source, include_str!("../../guests/boot/loader.S")).at(&source)?;
    let mut command = tool::from_root(tools, "usr/bin/x86_64-linux-gnu-as");
    tool::run(command.arg("--32").arg("-o").arg(&object).arg(&source), HINT)?;
    let mut command = tool::from_root(tools, "usr/bin/x86_64-linux-gnu-ld");
    command.args(["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-e", "_start", "-o"]);
    tool::run(command.arg(&binary).arg(&object), HINT)?;
    fs::read(&binary).at(&binary)
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

    #[test]
    fn the_kernel_says_where_it_ends() {
        let mut image = vec![0; 0x300];
        image[0x1f1] = 39;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
        image[0x260..0x264].copy_from_slice(&0x20_0000u32.to_le_bytes());
        let kernel = Kernel::read(&image).unwrap();
        assert_eq!((kernel.setup_sectors, kernel.end), (40, 0x120_0000));
        assert!(Kernel::read(&image[..0x260]).is_none());
        image[0x202] = 0;
        assert!(Kernel::read(&image).is_none());
    }
}
