//! Formats of disk images: found by their first bytes, and checked for references to other files before QEMU opens them.

use std::{fs::File, io, os::unix::fs::FileExt};

use thiserror::Error;

/// Bytes of a descriptor that QEMU reads, and the offset that it assumes.
const DESCRIPTOR_SIZE: usize = 20 * 512;
const DESCRIPTOR_OFFSET: u64 = 512;
/// Limit for a descriptor at another offset.
const DESCRIPTOR_LIMIT: u64 = 64 << 10;
/// The two copies of the region table of VHDX.
const REGION_TABLES: [u64; 2] = [192 << 10, 256 << 10];
/// Limit of entries of a table of VHDX.
const TABLE_ENTRIES: u16 = 2047;
const METADATA_REGION: [u8; 16] = *b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e";
const FILE_PARAMETERS: [u8; 16] = *b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b";
const PARENT_LOCATOR: [u8; 16] = *b"\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c";
/// Incompatible features of qcow2: dirty, corrupt, compression type, extended L2 entries. An external data file is bit 2.
const QCOW2_DATA_FILE: u64 = 1 << 2;
const QCOW2_FEATURES: u64 = 0b11111;

/// Format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The bytes of the disk.
    Raw,
    /// QEMU's format.
    Qcow2,
    /// VMware's format.
    Vmdk,
    /// Hyper-V's format.
    Vhdx,
    /// VirtualBox's format.
    Vdi,
}

impl Format {
    /// Returns the name of the QEMU driver.
    pub(crate) fn driver(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vdi => "vdi",
        }
    }
}

/// Reason why an image is not accepted.
#[derive(Debug, Error)]
pub enum FormatError {
    /// The image refers to another file.
    #[error("it refers to another file: {0}")]
    Reference(&'static str),
    /// The image has a format or feature that is not supported.
    #[error(
        "{0} is not supported; supported are raw, qcow2, VMDK, VHDX and VDI, plain or compressed by gzip, xz or zstd"
    )]
    Unsupported(&'static str),
    /// The header is invalid.
    #[error("its {0} header is damaged")]
    Damaged(&'static str),
    /// Reading failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// An image that can be read at any offset.
pub trait ReadAt {
    /// Reads into the buffer. Fewer bytes mean the end of the image.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match FileExt::read_at(self, rest, offset.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}

impl ReadAt for &[u8] {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        if let (Some(to), Some(from)) = (buffer.get_mut(..count), rest.get(..count)) {
            to.copy_from_slice(from);
        }
        Ok(count)
    }
}

/// Formats that QEMU can open but that are not accepted, and files that are no disks, by offset and value.
const FOREIGN: &[(usize, &[u8], &str)] = &[
    (0, b"COWD", "VMDK of the kind COWD"),
    (0, b"# Disk DescriptorFile", "VMDK as a descriptor of other files"),
    (0, b"QED\0", "format QED"),
    (0, b"conectix", "format VHD"),
    (0, b"WithoutFreeSpace", "format Parallels"),
    (0, b"WithouFreSpacExt", "format Parallels"),
    (0, b"Bochs Virtual HD Image", "format Bochs"),
    (257, b"ustar", "a tar archive as a disk"),
];

/// Finds the format by the first 512 bytes.
pub fn find(prefix: &[u8]) -> Result<Format, FormatError> {
    let has = |at: usize, magic: &[u8]| prefix.get(at..).is_some_and(|rest| rest.starts_with(magic));
    if let Some((.., name)) = FOREIGN.iter().find(|(at, magic, _)| has(*at, magic)) {
        return Err(FormatError::Unsupported(name));
    }
    let text = prefix.trim_ascii_start();
    let page = |start: &[u8]| text.get(..start.len()).is_some_and(|text| text.eq_ignore_ascii_case(start));
    if page(b"<!doctype html") || page(b"<html") {
        return Err(FormatError::Unsupported("a web page as a disk"));
    }
    Ok(match () {
        () if has(0, b"QFI\xfb") => Format::Qcow2,
        () if has(0, b"KDMV") => Format::Vmdk,
        () if has(0, b"vhdxfile") => Format::Vhdx,
        () if has(64, b"\x7f\x10\xda\xbe") => Format::Vdi,
        () => Format::Raw,
    })
}

/// Rejects an image that refers to another file, or that cannot be judged.
pub fn check(format: Format, image: &impl ReadAt) -> Result<(), FormatError> {
    match format {
        Format::Raw => Ok(()),
        Format::Qcow2 => check_qcow2(&window(image, 0, 112)?),
        Format::Vmdk => check_vmdk(image),
        Format::Vhdx => check_vhdx(image),
        Format::Vdi => check_vdi(&window(image, 0, 512)?),
    }
}

fn check_qcow2(header: &[u8]) -> Result<(), FormatError> {
    let damaged = || FormatError::Damaged("qcow2");
    let be32 = |at| array(header, at).map(u32::from_be_bytes).ok_or_else(damaged);
    let be64 = |at| array(header, at).map(u64::from_be_bytes).ok_or_else(damaged);
    let version = be32(4)?;
    if !(2..=3).contains(&version) {
        return Err(FormatError::Unsupported("qcow of this version"));
    }
    if be64(8)? != 0 || be32(16)? != 0 {
        return Err(FormatError::Reference("qcow2 with a backing file"));
    }
    if be32(32)? != 0 {
        return Err(FormatError::Unsupported("qcow2 with encryption"));
    }
    let features = if version == 3 { be64(72)? } else { 0 };
    if features & QCOW2_DATA_FILE != 0 {
        return Err(FormatError::Reference("qcow2 with an external data file"));
    }
    if features & !QCOW2_FEATURES != 0 {
        return Err(FormatError::Unsupported("qcow2 with unknown features"));
    }
    Ok(())
}

/// Without a capacity in the header, QEMU opens the extents of the descriptor. It looks for the parent at a fixed offset.
fn check_vmdk(image: &impl ReadAt) -> Result<(), FormatError> {
    let header = window(image, 0, 512)?;
    let le64 = |at| array(&header, at).map(u64::from_le_bytes).ok_or(FormatError::Damaged("VMDK"));
    let (capacity, offset, sectors) = (le64(12)?, le64(28)?, le64(36)?);
    if capacity == 0 {
        return Err(FormatError::Reference("VMDK without data of its own"));
    }
    check_descriptor(&window(image, DESCRIPTOR_OFFSET, DESCRIPTOR_SIZE)?)?;
    let (offset, size) = (offset.saturating_mul(512), sectors.saturating_mul(512).min(DESCRIPTOR_LIMIT));
    if offset == 0 || size == 0 {
        return Ok(());
    }
    check_descriptor(&window(image, offset, usize::try_from(size).unwrap_or_default())?)
}

fn check_descriptor(descriptor: &[u8]) -> Result<(), FormatError> {
    let lower = descriptor.to_ascii_lowercase();
    if contains(&lower, b"parentfilenamehint") {
        return Err(FormatError::Reference("VMDK with a parent"));
    }
    let text = lower.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut extents = 0;
    for line in text.split(|byte| matches!(byte, b'\n' | b'\r')).map(<[u8]>::trim_ascii) {
        if line.starts_with(b"createtype")
            && !contains(line, b"monolithicsparse")
            && !contains(line, b"streamoptimized")
        {
            return Err(FormatError::Reference("VMDK of a type that has its data in other files"));
        }
        extents += usize::from([&b"rw "[..], b"rdonly ", b"noaccess "].iter().any(|access| line.starts_with(access)));
    }
    if extents > 1 {
        return Err(FormatError::Reference("VMDK with several extents"));
    }
    Ok(())
}

fn check_vhdx(image: &impl ReadAt) -> Result<(), FormatError> {
    let mut judged = false;
    for table in REGION_TABLES {
        let head = window(image, table, 16)?;
        if !head.starts_with(b"regi") {
            continue;
        }
        let count = array(&head, 8).map(u32::from_le_bytes).unwrap_or_default().min(TABLE_ENTRIES.into());
        let entries = window(image, table + 16, usize::try_from(count).unwrap_or_default() * 32)?;
        let mut regions = entries.chunks_exact(32).filter(|entry| entry.starts_with(&METADATA_REGION));
        let offset = regions.next().and_then(|entry| array(entry, 16)).map(u64::from_le_bytes);
        let (Some(offset), None) = (offset, regions.next()) else { return Err(FormatError::Damaged("VHDX")) };
        judged |= check_vhdx_metadata(image, offset)?;
    }
    if judged { Ok(()) } else { Err(FormatError::Damaged("VHDX")) }
}

/// Returns true if the region has the parameters of the file.
fn check_vhdx_metadata(image: &impl ReadAt, region: u64) -> Result<bool, FormatError> {
    let head = window(image, region, 32)?;
    if !head.starts_with(b"metadata") {
        return Err(FormatError::Damaged("VHDX"));
    }
    let count = array(&head, 10).map(u16::from_le_bytes).unwrap_or_default().min(TABLE_ENTRIES);
    let entries = window(image, region.saturating_add(32), usize::from(count) * 32)?;
    let mut judged = false;
    for entry in entries.chunks_exact(32) {
        if entry.starts_with(&PARENT_LOCATOR) {
            return Err(FormatError::Reference("VHDX with a parent"));
        }
        if entry.starts_with(&FILE_PARAMETERS) {
            let offset = array(entry, 16).map(u32::from_le_bytes).unwrap_or_default();
            let parameters = window(image, region.saturating_add(offset.into()), 8)?;
            let flags = array(&parameters, 4).map(u32::from_le_bytes).ok_or(FormatError::Damaged("VHDX"))?;
            if flags & 2 != 0 {
                return Err(FormatError::Reference("VHDX with a parent"));
            }
            judged = true;
        }
    }
    Ok(judged)
}

fn check_vdi(header: &[u8]) -> Result<(), FormatError> {
    let kind = array(header, 0x4c).map(u32::from_le_bytes).ok_or(FormatError::Damaged("VDI"))?;
    // The UUIDs of the image before and of the parent.
    let parents = header.get(0x1a8..0x1c8).ok_or(FormatError::Damaged("VDI"))?;
    match kind {
        1 | 2 if parents.iter().all(|byte| *byte == 0) => Ok(()),
        1 | 2 | 4 => Err(FormatError::Reference("VDI with a parent")),
        _ => Err(FormatError::Unsupported("VDI of this type")),
    }
}

/// Reads a part of the image, or less at its end.
fn window(image: &impl ReadAt, offset: u64, size: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; size];
    let count = image.read_at(offset, &mut bytes)?;
    bytes.truncate(count);
    Ok(bytes)
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|window| window == word)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
        if image.len() < at + bytes.len() {
            image.resize(at + bytes.len(), 0);
        }
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn image(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut image = vec![0; 512];
        for (at, bytes) in parts {
            put(&mut image, *at, bytes);
        }
        image
    }

    /// Returns the format, or the reason of a refusal.
    fn judge(image: &[u8]) -> String {
        let format = match find(image.get(..512).unwrap_or(image)) {
            Ok(format) => format,
            Err(error) => return error.to_string(),
        };
        match check(format, &image) {
            Ok(()) => format.driver().to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn qcow2_is_accepted_without_references_only() {
        let base = [(0, &b"QFI\xfb\0\0\0\x03"[..]), (24, &[0, 0, 0, 0, 0, 0x10, 0, 0])];
        let with = |parts: &[(usize, &[u8])]| judge(&image(&[&base[..], parts].concat()));
        assert_eq!(with(&[]), "qcow2");
        assert_eq!(with(&[(79, &[0b11011])]), "qcow2");
        assert!(with(&[(15, &[200])]).contains("backing file"));
        assert!(with(&[(19, &[1])]).contains("backing file"));
        assert!(with(&[(79, &[0b100])]).contains("external data file"));
        assert!(with(&[(79, &[0b100000])]).contains("unknown features"));
        assert!(with(&[(35, &[1])]).contains("encryption"));
        assert!(with(&[(7, &[1])]).contains("version"));
        assert!(judge(b"QFI\xfb\0\0\0\x02").contains("damaged"));
    }

    #[test]
    fn vmdk_is_accepted_as_one_file_only() {
        let own = b"# Disk DescriptorFile\ncreateType=\"streamOptimized\"\nRW 2048 SPARSE \"a.vmdk\"\n";
        let with = |capacity: u8, at: usize, descriptor: &[u8]| {
            let sector = [u8::try_from(at / 512).unwrap()];
            judge(&image(&[(0, b"KDMV"), (12, &[capacity]), (28, &sector), (36, &[20]), (at, descriptor)]))
        };
        assert_eq!(with(8, 512, own), "vmdk");
        assert_eq!(with(8, 512, b"\0"), "vmdk");
        assert!(with(0, 512, own).contains("without data of its own"));
        for at in [512, 24 << 9] {
            assert!(with(8, at, b"createType=\"vmfs\"\n").contains("other files"));
            assert!(with(8, at, b"CID=1\nparentFileNameHint=\"base\"\n").contains("parent"));
            assert!(with(8, at, b"RW 1 SPARSE \"a\"\nRW 1 SPARSE \"b\"\n").contains("several"));
        }
        assert!(judge(b"# Disk DescriptorFile\n").contains("descriptor"));
        assert!(judge(b"KDMV").contains("damaged"));
    }

    #[test]
    fn vhdx_is_accepted_without_a_parent_only() {
        let with = |table: usize, item: &[u8; 16], flags: u8| {
            judge(&image(&[
                (0, b"vhdxfile"),
                (table, b"regi\0\0\0\0\x01\0\0\0"),
                (table + 16, &METADATA_REGION),
                (table + 32, &(1_u64 << 20).to_le_bytes()),
                (1 << 20, b"metadata\0\0\x01"),
                ((1 << 20) + 32, item),
                ((1 << 20) + 48, &65536_u32.to_le_bytes()),
                ((1 << 20) + 65536, &[0, 0, 16, 0, flags, 0, 0, 0]),
            ]))
        };
        for table in REGION_TABLES.map(|table| usize::try_from(table).unwrap()) {
            assert_eq!(with(table, &FILE_PARAMETERS, 1), "vhdx");
            assert!(with(table, &FILE_PARAMETERS, 2).contains("parent"));
            assert!(with(table, &PARENT_LOCATOR, 0).contains("parent"));
            assert!(with(table, &[0; 16], 0).contains("damaged"));
        }
        assert!(judge(&image(&[(0, b"vhdxfile")])).contains("damaged"));
    }

    #[test]
    fn vdi_is_accepted_without_a_parent_only() {
        let with = |kind: u8, parts: &[(usize, &[u8])]| {
            let base = [(0x40, &b"\x7f\x10\xda\xbe"[..]), (0x4c, std::slice::from_ref(&kind))];
            judge(&image(&[&base[..], parts].concat()))
        };
        assert_eq!(with(1, &[]), "vdi");
        assert_eq!(with(2, &[]), "vdi");
        assert!(with(4, &[]).contains("parent"));
        assert!(with(1, &[(0x1c7, &[1])]).contains("parent"));
        assert!(with(9, &[]).contains("type"));
    }

    #[test]
    fn other_formats_are_refused_and_the_rest_is_raw() {
        assert_eq!(judge(b"\xeb\x63\x90"), "raw");
        assert_eq!(judge(b""), "raw");
        assert!(judge(b"\n<!DOCTYPE HTML><html>").contains("web page"));
        assert!(judge(&image(&[(257, b"ustar")])).contains("tar archive"));
        assert!(judge(b"conectix").contains("VHD"));
    }
}
