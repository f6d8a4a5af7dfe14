//! Disk images: detects a file's format, and creates empty and layered qcow2 images.
//!
//! Images come from registries and volumes and are untrusted. This module reads their header, a few hundred bytes; no
//! program parses an image before it is known to be raw, or qcow2 without references to other files.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;
use thiserror::Error;

use super::Backend;

/// Cluster size of created qcow2 images.
const CLUSTER: u64 = 64 * 1024;
/// Limit of a virtual disk: 64 TiB.
const SIZE_LIMIT: u64 = 64 << 40;
/// qcow2: an incompatible feature bit that names an external data file.
const FEATURE_DATA_FILE: u64 = 1 << 2;
/// qcow2: the supported incompatible feature bits (dirty, corrupt, compression type, extended L2).
const FEATURES_KNOWN: u64 = 0b1_1011;

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageFormat {
    /// The disk's bytes.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

impl ImageFormat {
    /// QEMU's name of the format.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// Failure to use or create an image.
#[derive(Debug, Error)]
pub(crate) enum ImageError {
    /// Reading or writing failed.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// Neither raw nor qcow2.
    #[error("unsupported image format: {0}")]
    Format(&'static str),
    /// The image refers to another file.
    #[error("expected no backing file, but found one")]
    BackingFile,
    /// The image keeps its data in another file.
    #[error("expected no external data file, but found one")]
    DataFile,
    /// The header is invalid.
    #[error("the image's header is invalid")]
    Header,
    /// The size exceeds the limit.
    #[error("a disk of {0} bytes is too large")]
    TooLarge(u64),
}

/// Facts of an image's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageInfo {
    pub(crate) format: ImageFormat,
    /// Size of the disk that the guest sees.
    pub(crate) virtual_size: u64,
}

/// Reads an image's header. Rejects other formats, and references to other files.
pub(crate) fn inspect(path: &Path) -> Result<ImageInfo, ImageError> {
    let failed = |source| ImageError::Io { path: path.to_owned(), source };
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default())
        .open(path)
        .map_err(failed)?;
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let mut header = Vec::with_capacity(512);
    file.take(512).read_to_end(&mut header).map_err(failed)?;
    inspect_header(&header, size)
}

/// Inspects an image by its first bytes and its length.
pub(crate) fn inspect_header(header: &[u8], size: u64) -> Result<ImageInfo, ImageError> {
    for (at, magic, name) in FOREIGN {
        if header.get(*at..).is_some_and(|rest| rest.starts_with(magic)) {
            return Err(ImageError::Format(name));
        }
    }
    if !header.starts_with(b"QFI\xfb") {
        return Ok(ImageInfo { format: ImageFormat::Raw, virtual_size: size });
    }
    let version = be32(header, 4)?;
    if !(2..=3).contains(&version) {
        return Err(ImageError::Format("qcow"));
    }
    if be64(header, 8)? != 0 || be32(header, 16)? != 0 {
        return Err(ImageError::BackingFile);
    }
    if be32(header, 32)? != 0 {
        return Err(ImageError::Format("qcow2 with encryption"));
    }
    if version == 3 {
        let features = be64(header, 72)?;
        if features & FEATURE_DATA_FILE != 0 {
            return Err(ImageError::DataFile);
        }
        if features & !FEATURES_KNOWN != 0 {
            return Err(ImageError::Format("qcow2 with unknown features"));
        }
    }
    let virtual_size = be64(header, 24)?;
    if virtual_size > SIZE_LIMIT {
        return Err(ImageError::TooLarge(virtual_size));
    }
    Ok(ImageInfo { format: ImageFormat::Qcow2, virtual_size })
}

/// Formats that QEMU opens but that are rejected, by offset and value of their magic number.
const FOREIGN: &[(usize, &[u8], &str)] = &[
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0, b"QED\0", "qed"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"LUKS\xba\xbe", "luks"),
    (0, b"Bochs Virtual HD Image", "bochs"),
    (64, &[0x7f, 0x10, 0xda, 0xbe], "vdi"),
];

fn be32(bytes: &[u8], at: usize) -> Result<u32, ImageError> {
    let field = bytes.get(at..at + 4).and_then(|b| <[u8; 4]>::try_from(b).ok());
    field.map(u32::from_be_bytes).ok_or(ImageError::Header)
}

fn be64(bytes: &[u8], at: usize) -> Result<u64, ImageError> {
    let field = bytes.get(at..at + 8).and_then(|b| <[u8; 8]>::try_from(b).ok());
    field.map(u64::from_be_bytes).ok_or(ImageError::Header)
}

/// Creates a qcow2 image, an overlay over `backing` if given. An existing image is kept: a restarted launcher must not
/// lose the guest's data.
pub(crate) fn create_qcow2(path: &Path, size: u64, backing: Option<(&Path, ImageFormat)>) -> Result<(), ImageError> {
    let failed = |source| ImageError::Io { path: path.to_owned(), source };
    if path.exists() {
        return Ok(());
    }
    if size > SIZE_LIMIT {
        return Err(ImageError::TooLarge(size));
    }
    let staging = path.with_extension("staging");
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).open(&staging).map_err(failed)?;
    write_qcow2(&mut file, size, backing).map_err(failed)?;
    std::fs::rename(&staging, path).map_err(failed)
}

/// Layout: cluster 0 header and name of the backing file, 1 refcount table, 2 refcount block, from 3 the L1 table. QEMU
/// allocates the rest as the guest writes.
fn write_qcow2(file: &mut File, size: u64, backing: Option<(&Path, ImageFormat)>) -> std::io::Result<()> {
    // One L2 table maps as many clusters as eight-byte entries fit into a cluster.
    let l1_entries = size.div_ceil(CLUSTER * (CLUSTER / 8)).max(1);
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER);
    let used = 3 + l1_clusters;
    let too_large = || std::io::Error::other("too large");
    let mut header = Vec::with_capacity(512);
    let mut extensions = Vec::new();
    let name = backing.map(|(path, _)| path.as_os_str().as_encoded_bytes()).unwrap_or_default();
    if let Some((_, format)) = backing {
        let format = format.as_str().as_bytes();
        extensions.extend(0xE279_2ACA_u32.to_be_bytes());
        extensions.extend(u32::try_from(format.len()).map_err(|_| too_large())?.to_be_bytes());
        extensions.extend(format);
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    extensions.extend([0; 8]);
    let name_at = 112 + extensions.len() as u64;
    header.extend(b"QFI\xfb");
    header.extend(3_u32.to_be_bytes());
    header.extend(if name.is_empty() { 0 } else { name_at }.to_be_bytes());
    header.extend(u32::try_from(name.len()).map_err(|_| too_large())?.to_be_bytes());
    header.extend(16_u32.to_be_bytes()); // cluster bits
    header.extend(size.to_be_bytes());
    header.extend(0_u32.to_be_bytes()); // no encryption
    header.extend(u32::try_from(l1_entries).map_err(|_| too_large())?.to_be_bytes());
    header.extend((3 * CLUSTER).to_be_bytes()); // L1 table
    header.extend(CLUSTER.to_be_bytes()); // refcount table
    header.extend(1_u32.to_be_bytes()); // its clusters
    header.extend(0_u32.to_be_bytes()); // no snapshots
    header.extend(0_u64.to_be_bytes());
    header.extend(0_u64.to_be_bytes()); // incompatible features
    header.extend(0_u64.to_be_bytes()); // compatible features
    header.extend(0_u64.to_be_bytes()); // autoclear features
    header.extend(4_u32.to_be_bytes()); // refcounts of 16 bit
    header.extend(112_u32.to_be_bytes()); // length of the header
    header.extend([0; 8]); // compression type and padding
    header.extend(&extensions);
    header.extend(name);
    if header.len() as u64 > CLUSTER {
        return Err(too_large());
    }
    file.set_len(used * CLUSTER)?;
    file.write_all(&header)?;
    file.seek(SeekFrom::Start(CLUSTER))?;
    file.write_all(&(2 * CLUSTER).to_be_bytes())?;
    file.seek(SeekFrom::Start(2 * CLUSTER))?;
    for _ in 0..used {
        file.write_all(&1_u16.to_be_bytes())?;
    }
    file.flush()
}

/// Reports support for direct I/O.
pub(crate) fn supports_direct_io(path: &Path) -> bool {
    let flags = OFlags::DIRECT | OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(i32::try_from(flags.bits()).unwrap_or_default()).open(path).is_ok()
}

/// Reports an image file whose blocks are all allocated.
pub(crate) fn is_preallocated(path: &Path) -> bool {
    std::fs::metadata(path)
        .is_ok_and(|meta| meta.is_file() && meta.len() > 0 && meta.blocks().saturating_mul(512) >= meta.len())
}

/// Block sizes behind a disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSizes {
    /// Logical block size: the smallest addressable unit.
    pub(crate) logical: u64,
    /// Physical block size: the smallest unit of a write.
    pub(crate) physical: u64,
    /// Discard granularity; 0 without support for discard.
    pub(crate) discard: u64,
}

/// Returns the block sizes of a device, or of the file system of a file.
pub(crate) fn block_sizes(backend: &Backend) -> std::io::Result<BlockSizes> {
    match backend {
        Backend::Block { path } => {
            let device = File::open(path)?;
            let logical = rustix::fs::ioctl_blksszget(&device)?;
            let physical = rustix::fs::ioctl_blkpbszget(&device)?;
            let number = device.metadata()?.rdev();
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            // A partition has no queue of its own.
            let discard = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/queue/discard_granularity"));
            let discard = discard.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            Ok(of_device(logical.into(), physical.into(), discard))
        }
        Backend::File { path, .. } => {
            let size = rustix::fs::statvfs(path)?.f_bsize;
            Ok(BlockSizes { logical: size, physical: size, discard: size })
        }
    }
}

/// Makes the sizes reported by a device consistent.
fn of_device(logical: u64, physical: u64, discard: u64) -> BlockSizes {
    let larger = logical.max(physical);
    let or_larger = |size: u64| if size == 0 { larger } else { size };
    let (logical, physical) = (or_larger(logical), or_larger(physical));
    let discard = if logical > 0 && !discard.is_multiple_of(logical) { physical } else { discard };
    BlockSizes { logical, physical, discard }
}

/// Reports that a path is a block device.
pub(crate) fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("launcher-image-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn qemu_img(args: &[&str]) -> Option<String> {
        let output = std::process::Command::new("qemu-img").args(args).output().ok()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[test]
    fn a_written_image_is_read_back_and_qemu_finds_no_fault_in_it() {
        let dir = scratch("write");
        for size in [1 << 20, 10 << 30, 3 << 40] {
            let path = dir.join(format!("{size}.qcow2"));
            create_qcow2(&path, size, None).unwrap();
            assert_eq!(inspect(&path).unwrap(), ImageInfo { format: ImageFormat::Qcow2, virtual_size: size });
            if let Some(out) = qemu_img(&["check", path.to_str().unwrap()]) {
                assert!(out.contains("No errors"), "{out}");
            }
        }
        let _ = std::fs::remove_dir_all(dir);
    }

    #[test]
    fn a_layer_names_its_backing_image_and_format_and_is_refused_as_a_container_disk() {
        let dir = scratch("layer");
        let base = dir.join("base.img");
        std::fs::write(&base, vec![7; 1 << 20]).unwrap();
        let path = dir.join("layer.qcow2");
        create_qcow2(&path, 1 << 20, Some((&base, ImageFormat::Raw))).unwrap();
        if let Some(out) = qemu_img(&["info", "--output=json", path.to_str().unwrap()]) {
            let info: serde_json::Value = serde_json::from_str(&out).unwrap();
            assert_eq!(info["backing-filename"], base.to_str().unwrap());
            assert_eq!(info["backing-filename-format"], "raw");
            assert_eq!(info["virtual-size"], 1 << 20);
            qemu_img(&["compare", base.to_str().unwrap(), path.to_str().unwrap()]).unwrap();
        }
        assert!(matches!(inspect(&path), Err(ImageError::BackingFile)));
        let _ = std::fs::remove_dir_all(dir);
    }

    #[test]
    fn block_sizes_of_devices_are_made_consistent() {
        for (said, expected) in [
            ((512, 4096, 4096), (512, 4096, 4096)),
            ((0, 4096, 0), (4096, 4096, 0)),
            ((512, 0, 512), (512, 512, 512)),
            ((4096, 4096, 512), (4096, 4096, 4096)),
            ((0, 0, 512), (0, 0, 512)),
        ] {
            let sizes = of_device(said.0, said.1, said.2);
            assert_eq!((sizes.logical, sizes.physical, sizes.discard), expected, "{said:?}");
        }
        let dir = scratch("blocks");
        let path = dir.join("disk.img");
        std::fs::write(&path, "x").unwrap();
        let sizes = block_sizes(&Backend::File { path, format: ImageFormat::Raw }).unwrap();
        assert!(sizes.logical.is_power_of_two() && sizes.physical == sizes.logical && sizes.discard == sizes.logical);
        let _ = std::fs::remove_dir_all(dir);
    }

    #[test]
    fn an_existing_image_is_kept() {
        let dir = scratch("keep");
        let path = dir.join("disk.qcow2");
        std::fs::write(&path, "written by the guest").unwrap();
        create_qcow2(&path, 1 << 20, None).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"written by the guest");
        let _ = std::fs::remove_dir_all(dir);
    }

    #[test]
    fn foreign_formats_external_data_and_damaged_headers_are_refused() {
        assert!(matches!(inspect_header(b"KDMV....", 8), Err(ImageError::Format("vmdk"))));
        assert!(matches!(inspect_header(b"QFI\xfb\0\0", 6), Err(ImageError::Header)));
        let mut header = vec![0; 112];
        header[..4].copy_from_slice(b"QFI\xfb");
        header[7] = 3;
        header[79] = 4;
        assert!(matches!(inspect_header(&header, 112), Err(ImageError::DataFile)));
        header[79] = 0x20;
        assert!(matches!(inspect_header(&header, 112), Err(ImageError::Format(_))));
        header[79] = 0;
        header[24] = 0xff;
        assert!(matches!(inspect_header(&header, 112), Err(ImageError::TooLarge(_))));
        assert!(inspect_header(&[0; 512], 512).is_ok());
    }
}
