//! Disk images: overlays over container disks, claims, host disks and empty disks.

use std::{
    fs::DirBuilder,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use api::{VirtualMachineInstance, vmi::volumes::ContainerDiskSource};

use super::Tolerance;
use crate::{
    files::{FileError, UntrustedDir},
    paths::Paths,
    storage::{
        Access, Backend, ContainerDiskError, DiskError, DiskSource,
        access::Refusal,
        check_access,
        claims::{CLAIM_IMAGE, MEBIBYTE, claim_info, claim_size, device_size},
        grow,
        image::{self, ImageFormat},
    },
};

/// Finds the image file of a container disk: the spec's path, else the only file in `/disk`.
pub(super) fn container_disk(volume: &str, directory: &Path, disk: &ContainerDiskSource) -> Result<PathBuf, DiskError> {
    let image = UntrustedDir::open(directory);
    let image = image.map_err(|source| DiskError::File { volume: volume.to_owned(), source })?;
    disk_in(&image, disk.path.as_deref()).map_err(|source| DiskError::ContainerDisk {
        volume: volume.to_owned(),
        image: disk.image.clone(),
        source,
    })
}

fn disk_in(image: &UntrustedDir, path: Option<&str>) -> Result<PathBuf, ContainerDiskError> {
    if let Some(path) = path.filter(|path| !path.is_empty()) {
        return Ok(image.regular_file(Path::new(path))?);
    }
    let entries = image.entries(Path::new("disk"))?;
    let [only] = entries.as_slice() else { return Err(ContainerDiskError::NotOneFile(entries.len())) };
    Ok(image.regular_file(&Path::new("disk").join(only))?)
}

/// Creates a writable overlay over an image.
pub(super) fn layer(
    volume: &str,
    backing: PathBuf,
    format: ImageFormat,
    size: u64,
    paths: &Paths,
) -> Result<DiskSource, DiskError> {
    let path = paths.overlay(volume);
    make_parent(&path)?;
    // A disk has whole sectors; a raw file may not.
    let size = size.next_multiple_of(512);
    image::create_qcow2(&path, size, Some((&backing, format)))
        .map_err(|source| DiskError::Image { volume: volume.to_owned(), source })?;
    let direct_io = image::supports_direct_io(&path) && image::supports_direct_io(&backing);
    let backend = Backend::File { path, format: ImageFormat::Qcow2 };
    Ok(DiskSource { backing: Some((backing, format)), ..DiskSource::new(backend, direct_io) })
}

/// Image that is created if it is missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewImage<'a> {
    /// Size in bytes.
    pub(super) size: u64,
    /// Size in bytes that it needs, whatever is tolerated.
    pub(super) least: u64,
    /// Limits of the cluster.
    pub(super) tolerance: &'a Tolerance,
}

/// Returns the device of a claim, or the image in its file system.
pub(crate) fn claim_backend(volume: &str, block: bool, paths: &Paths) -> Backend {
    if block {
        return Backend::Block { path: paths.block_volume(volume) };
    }
    Backend::File { path: paths.filesystem_volume(volume).join(CLAIM_IMAGE), format: ImageFormat::Raw }
}

/// Returns the source of a claim: a block device, or the image file in its file system. With a tolerance and a least size the
/// image belongs to the VMI: it is created with that size or more if missing, and grows to the claim's capacity.
pub(super) fn claim_source(
    volume: &str,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    own: Option<(&Tolerance, u64)>,
    access: Access,
) -> Result<DiskSource, DiskError> {
    let device = paths.block_volume(volume);
    if image::is_block_device(&device) {
        let direct_io = image::supports_direct_io(&device);
        return Ok(DiskSource::new(claim_backend(volume, true, paths), direct_io));
    }
    let info = claim_info(volume, vmi);
    let own = match (own, info) {
        (Some((tolerance, least)), Some(info)) => claim_size(volume, info)?.map(|size| (size, tolerance, least)),
        _ => None,
    };
    let missing = own.map(|(size, tolerance, least)| NewImage { size: size.max(least), least, tolerance });
    let source = filesystem_disk(volume, &paths.filesystem_volume(volume), CLAIM_IMAGE, missing, access)?;
    // The image of a CD-ROM has its final size, and other VMIs may use it.
    let in_drive = vmi.spec.domain.devices.disks.iter().any(|disk| disk.name == volume && disk.cdrom.is_some());
    if !in_drive
        && let (Backend::File { path, .. }, Some((size, ..))) = (&source.backend, own)
        && let Err(error) =
            grow::grow(path, size, info.and_then(|info| info.filesystem_overhead.as_deref()), source.preallocated)
    {
        // For example a read-only claim. The guest still has its disk.
        tracing::warn!(volume, %error, "cannot resize the image to its claim");
    }
    Ok(source)
}

pub(super) fn filesystem_disk(
    volume: &str,
    directory: &Path,
    file: &str,
    create: Option<NewImage<'_>>,
    access: Access,
) -> Result<DiskSource, DiskError> {
    let refused = |source| DiskError::Refused { volume: volume.to_owned(), source };
    let failed = |source: FileError| match Refusal::of(Access::Search, directory, source.errno()) {
        Some(refusal) => refused(refusal),
        None => DiskError::File { volume: volume.to_owned(), source },
    };
    let dir = UntrustedDir::open(directory).map_err(failed)?;
    if !Paths::is_single_component(file) {
        return Err(DiskError::Name(file.to_owned()));
    }
    let path = match (dir.regular_file(Path::new(file)), create) {
        (Err(FileError::Open { source: rustix::io::Errno::NOENT, .. }), Some(new)) => {
            make_raw(&directory.join(file), directory, new).map_err(|error| {
                let DiskError::Write { source, .. } = &error else { return error };
                let errno = rustix::io::Errno::from_io_error(source);
                Refusal::of(Access::Create, directory, errno).map_or(error, refused)
            })?;
            dir.regular_file(Path::new(file)).map_err(failed)?
        }
        (result, _) => result.map_err(failed)?,
    };
    let mut source = file_source(path.clone(), ImageFormat::Raw);
    check_access(&source.backend, access).map_err(refused)?;
    source.preallocated = image::is_preallocated(&path);
    Ok(source)
}

/// Creates a raw image as a sparse file.
pub(super) fn make_raw(path: &Path, directory: &Path, image: NewImage<'_>) -> Result<(), DiskError> {
    let NewImage { size, least, tolerance } = image;
    let failed = |source| DiskError::Write { path: path.to_owned(), source };
    let stat = rustix::fs::statvfs(directory).map_err(|e| failed(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_sub(tolerance.reserve);
    let mut granted = size;
    if size > free {
        let lack = tolerance.lack_percent;
        if size / 100 * 100_u64.saturating_sub(lack) > free {
            return Err(DiskError::NoSpace { path: path.to_owned(), wanted: size, free, lack });
        }
        granted = free / MEBIBYTE * MEBIBYTE;
        if granted < least {
            return Err(DiskError::NoSpace { path: path.to_owned(), wanted: least, free, lack: 0 });
        }
        tracing::warn!(
            path = %path.display(),
            "PV size too small: expected {size} B, found {free} B. Using it anyway, it is within {lack} % toleration"
        );
    }
    // Exclusive: never replace a file or follow a link that appears meanwhile.
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o660).open(path).map_err(failed)?;
    file.set_len(granted).map_err(failed)
}

/// Checks the claim to which the disk of a volume is copied. The source's launcher, which names the image, must know its path.
pub(super) fn check_destination(volume: &str, source: &DiskSource, paths: &Paths, least: u64) -> Result<(), DiskError> {
    let (Backend::File { path, .. } | Backend::Block { path }) = &source.backend;
    let failed = |source| DiskError::Write { path: path.clone(), source };
    if let Backend::File { path, .. } = &source.backend {
        let directory = std::fs::canonicalize(paths.filesystem_volume(volume)).map_err(failed)?;
        if *path != directory.join(CLAIM_IMAGE) {
            return Err(DiskError::Link(volume.to_owned()));
        }
    }
    let size = device_size(path).map_err(failed)?;
    if size < least { Err(DiskError::Destination { volume: volume.to_owned(), size, least }) } else { Ok(()) }
}

pub(super) fn file_source(path: PathBuf, format: ImageFormat) -> DiskSource {
    let direct_io = image::supports_direct_io(&path);
    DiskSource::new(Backend::File { path, format }, direct_io)
}

pub(super) fn make_parent(path: &Path) -> Result<(), DiskError> {
    let parent = path.parent().unwrap_or(path);
    DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(parent)
        .map_err(|source| DiskError::Write { path: parent.to_owned(), source })
}
