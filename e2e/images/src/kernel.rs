//! Kernels: what their header says, and packing them so that they are unpacked quickly.
//!
//! Debian packs its kernel with zstd. Unpacking it is a third of what the small guest's start costs under software
//! emulation, where every bit of an entropy coder is dear. LZ4 makes the kernel half as large again and is unpacked in a
//! tenth of the time. Since a kernel carries the program that unpacks it, this takes one of our own,
//! `e2e/guests/boot/unpack.S`.
//!
//! ```text
//! the kernel's 16-bit part, with a few fields of its header changed | unpack.S | packed kernel
//! ```
//!
//! The result is a kernel as any loader for BIOS knows it. UEFI firmware cannot start it: that entry is in the part that
//! is left out.

use std::{fs, ops::Range, path::Path};

use elf::{ElfBytes, abi::PT_LOAD, endian::LittleEndian};

use crate::{
    error::{At, Error, Result},
    tool,
};

/// Where the part behind the 16-bit one goes.
pub const ADDRESS: u32 = 0x10_0000;
const SECTOR: usize = 512;
/// Size of the program: in its second half are the kernel's own arguments, at its end four numbers that it goes by.
const PROGRAM: usize = 1024;
const ARGUMENTS: usize = 512;
const NUMBERS: usize = 16;
/// First bytes of what `lz4 -l` writes. Blocks follow, each with its length before it.
const LZ4_LEGACY: [u8; 4] = 0x184c_2102u32.to_le_bytes();
/// More than any kernel takes.
const SIZE_LIMIT: u64 = 256 << 20;

/// What a kernel says about itself in its first sectors, see Documentation/arch/x86/boot.rst of Linux.
#[derive(Debug, PartialEq, Eq)]
pub struct Header {
    /// Sectors of its 16-bit part.
    pub setup_sectors: u32,
    /// First address behind what it needs to unpack itself.
    pub end: u32,
    /// The packed kernel within the file.
    payload: Range<usize>,
}

impl Header {
    /// Reads the header.
    pub fn read(image: &[u8]) -> Option<Self> {
        if image.get(0x202..0x206)? != b"HdrS" {
            return None;
        }
        let number = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?));
        let setup = u32::from(*image.get(0x1f1)?);
        let setup_sectors = if setup == 0 { 5 } else { setup + 1 };
        let preferred = u64::from_le_bytes(image.get(0x258..0x260)?.try_into().ok()?);
        let end = u32::try_from(preferred).ok()?.checked_add(number(0x260)?)?;
        let start = (setup_sectors as usize * SECTOR).checked_add(number(0x248)? as usize)?;
        let payload = start..start.checked_add(number(0x24c)? as usize)?;
        Some(Self { setup_sectors, end, payload })
    }
}

/// A kernel as it lies in memory when it is entered.
#[derive(Debug, PartialEq, Eq)]
struct Unpacked {
    base: u32,
    entry: u32,
    bytes: Vec<u8>,
}

impl Unpacked {
    /// Lays the segments of a kernel out.
    fn read(kernel: &[u8]) -> Result<Self> {
        let object = || "the kernel".to_owned();
        let broken = |source| Error::Elf { object: object(), source };
        let file = ElfBytes::<LittleEndian>::minimal_parse(kernel).map_err(broken)?;
        let segments: Vec<_> = file.segments().into_iter().flatten().filter(|s| s.p_type == PT_LOAD).collect();
        let base = segments.iter().map(|s| s.p_paddr).min().unwrap_or_default();
        let end =
            segments.iter().map(|s| s.p_paddr.saturating_add(s.p_memsz.max(s.p_filesz))).max().unwrap_or_default();
        let misplaced = || Error::Layout(object(), format!("{base:#x} to {end:#x}"));
        let (Ok(start), Ok(entry)) = (u32::try_from(base), u32::try_from(file.ehdr.e_entry)) else {
            return Err(misplaced());
        };
        // The program that unpacks it and its tables lie below.
        if start < 0x100_0000
            || end > u64::from(u32::MAX)
            || end - base > SIZE_LIMIT
            || !(base..end).contains(&entry.into())
        {
            return Err(misplaced());
        }
        let mut bytes = vec![0; usize::try_from(end - base).map_err(|_| misplaced())?];
        for segment in &segments {
            let data = file.segment_data(segment).map_err(broken)?;
            let at = usize::try_from(segment.p_paddr - base).map_err(|_| misplaced())?;
            bytes.get_mut(at..at + data.len()).ok_or_else(misplaced)?.copy_from_slice(data);
        }
        Ok(Self { base: start, entry, bytes })
    }
}

/// The kernel `image`, packed so that it is unpacked quickly, with arguments of its own that come before those of whoever
/// starts it.
///
/// `tools` is a Debian root with binutils and lz4, `work` a directory for intermediate files.
pub fn repack(tools: &Path, image: &[u8], arguments: &str, work: &Path) -> Result<Vec<u8>> {
    let unfit = || Error::Layout("the kernel".to_owned(), "its header is not a known one".to_owned());
    let header = Header::read(image).ok_or_else(unfit)?;
    // The last four bytes are the size.
    let payload = image.get(header.payload.clone()).and_then(|p| p.split_last_chunk::<4>()).ok_or_else(unfit)?.0;
    let file = work.join("vmlinux");
    let kernel = Unpacked::read(&zstd::decode_all(payload).at(&file)?)?;

    fs::write(&file, &kernel.bytes).at(&file)?;
    let mut command = tool::from_root(tools, "usr/bin/lz4");
    let packed = tool::run(command.args(["-l", "-12", "-c"]).arg(&file), "from Debian package lz4")?;
    let packed = blocks(&packed).ok_or_else(unfit)?;
    let program = tool::assemble(tools, work, "unpack", include_str!("../../guests/boot/unpack.S"), ADDRESS)?;
    let program = with_arguments(program, arguments)
        .ok_or_else(|| Error::Layout("the kernel".to_owned(), "its own arguments are too long".to_owned()))?;
    put_together(image, &header, &kernel, program, &packed).ok_or_else(unfit)
}

/// The blocks of an LZ4 file in its oldest form, with an end mark, as whole double words.
fn blocks(file: &[u8]) -> Option<Vec<u8>> {
    let mut blocks = file.strip_prefix(&LZ4_LEGACY)?.to_vec();
    blocks.extend([0; 4]);
    blocks.resize(blocks.len().next_multiple_of(4), 0);
    Some(blocks)
}

/// The program with the kernel's own arguments filled in. A zero stays behind them.
fn with_arguments(mut program: Vec<u8>, arguments: &str) -> Option<Vec<u8>> {
    let text = arguments.split_whitespace().fold(String::new(), |text, argument| text + argument + " ");
    let room = program.get_mut(ARGUMENTS..PROGRAM - NUMBERS - 1)?;
    room.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
    Some(program)
}

/// The parts of the new kernel, or nothing if one does not fit the others.
fn put_together(
    image: &[u8],
    header: &Header,
    kernel: &Unpacked,
    mut program: Vec<u8>,
    packed: &[u8],
) -> Option<Vec<u8>> {
    let length = u32::try_from(packed.len()).ok()?;
    let end = kernel.base.checked_add(u32::try_from(kernel.bytes.len()).ok()?)?;
    // Behind the kernel, so that unpacking it does not reach what is not unpacked yet.
    let target = end.checked_next_multiple_of(4096)?;
    program.truncate(PROGRAM - NUMBERS);
    [target, length / 4, kernel.base, kernel.entry].iter().for_each(|n| program.extend_from_slice(&n.to_le_bytes()));
    if program.len() != PROGRAM {
        return None;
    }
    program.extend_from_slice(packed);
    program.resize(program.len().next_multiple_of(16), 0);

    let mut made = image.get(..header.setup_sectors as usize * SECTOR)?.to_vec();
    let paragraphs = u32::try_from(program.len() / 16).ok()?;
    let fields: [(usize, &[u8]); 9] = [
        (0, &[0; 2]),                                                        // no program for UEFI
        (0x1f4, &paragraphs.to_le_bytes()),                                  // size of all but the 16-bit part
        (0x234, &[0]),                                                       // runs at its address only
        (0x236, &[0; 2]),                                                    // no other entries
        (0x248, &[0; 8]),                                                    // nothing that others could unpack
        (0x258, &u64::from(kernel.base).to_le_bytes()),                      // its address
        (0x260, &(target.checked_add(length)? - kernel.base).to_le_bytes()), // memory it needs from there on
        (0x264, &[0; 4]),                                                    // no entry for UEFI
        (0x268, &[0; 4]),                                                    // no further table
    ];
    for (at, bytes) in fields {
        made.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
    }
    made.extend_from_slice(&program);
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Vec<u8> {
        let mut image = vec![0xee; 40 * SECTOR + 0x400];
        image[0x1f1] = 39;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&0x100u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&0x200u32.to_le_bytes());
        image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
        image[0x260..0x264].copy_from_slice(&0x20_0000u32.to_le_bytes());
        image
    }

    #[test]
    fn the_kernel_says_where_it_ends_and_what_is_packed() {
        let mut image = image();
        let header = Header::read(&image).unwrap();
        assert_eq!((header.setup_sectors, header.end), (40, 0x120_0000));
        assert_eq!(header.payload, 40 * SECTOR + 0x100..40 * SECTOR + 0x300);
        assert_eq!(Header::read(&image[..0x260]), None);
        image[0x202] = 0;
        assert_eq!(Header::read(&image), None);
    }

    #[test]
    fn segments_are_laid_out_by_their_physical_addresses() {
        // Two segments, the later one first, and one byte of memory behind the last that the file does not hold.
        let segment = |offset: u64, address: u64, size: u64, memory: u64| {
            let mut header = vec![1, 0, 0, 0, 7, 0, 0, 0];
            [offset, 0xffff_ffff_8000_0000 + address, address, size, memory, 0x1000]
                .iter()
                .for_each(|number| header.extend_from_slice(&number.to_le_bytes()));
            header
        };
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
        [0x100_0002u64, 64, 0].iter().for_each(|number| file.extend_from_slice(&number.to_le_bytes()));
        file.extend([0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        file.extend(segment(64 + 112 + 4, 0x100_0006, 2, 3));
        file.extend(segment(64 + 112, 0x100_0000, 4, 4));
        file.extend(b"abcdef");
        let kernel = Unpacked::read(&file).unwrap();
        assert_eq!(kernel, Unpacked { base: 0x100_0000, entry: 0x100_0002, bytes: b"abcd\0\0ef\0".to_vec() });
        assert!(Unpacked::read(b"\x7fELF").is_err());
        file[24] = 0x80;
        assert!(Unpacked::read(&file).is_err(), "entered outside of what is loaded");
    }

    #[test]
    fn own_arguments_are_parted_from_what_follows_and_have_to_fit() {
        let program = with_arguments(vec![0; PROGRAM], "a  b=c").unwrap();
        assert_eq!(program[ARGUMENTS..ARGUMENTS + 7], *b"a b=c \0");
        assert!(with_arguments(vec![0; PROGRAM], &"x".repeat(493)).is_some());
        assert_eq!(with_arguments(vec![0; PROGRAM], &"x".repeat(495)), None);
        assert_eq!(with_arguments(vec![0; 8], ""), None);
    }

    #[test]
    fn the_new_kernel_has_the_old_setup_and_knows_its_size() {
        let image = image();
        let header = Header::read(&image).unwrap();
        let kernel = Unpacked { base: 0x100_0000, entry: 0x100_0010, bytes: vec![0; 0x1001] };
        let packed = blocks(&[&LZ4_LEGACY[..], &[1, 0, 0, 0, 9]].concat()).unwrap();
        assert_eq!(packed, [1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        let made = put_together(&image, &header, &kernel, vec![0x90; PROGRAM], &packed).unwrap();
        let new = Header::read(&made).unwrap();
        assert_eq!((new.setup_sectors, new.end), (40, 0x100_2000 + 12));
        assert_eq!(made.len(), 40 * SECTOR + PROGRAM + 16);
        assert_eq!(made[0x1f4..0x1f8], u32::try_from((PROGRAM + 16) / 16).unwrap().to_le_bytes());
        assert_eq!(made[0x300], 0xee);
        let numbers = &made[40 * SECTOR + PROGRAM - NUMBERS..40 * SECTOR + PROGRAM];
        assert_eq!(numbers[..8], [0, 0x20, 0, 1, 3, 0, 0, 0]);
        assert_eq!(numbers[8..], [0, 0, 0, 1, 0x10, 0, 0, 1]);
        assert_eq!(made[40 * SECTOR + PROGRAM..][..12], packed);
        assert_eq!(put_together(&image, &header, &kernel, vec![0; 8], &packed), None);
        assert_eq!(blocks(b"other"), None);
    }
}
