//! Disk images and devices behind a VMI's volumes.
//!
//! [`prepare`] inspects each volume and creates missing images: a writable overlay over a container disk, an empty
//! disk, an image with cloud-init's data. It returns one [`DiskSource`] a volume, which [`crate::domain`] renders as
//! XML. Everything here blocks and runs on a blocking thread.

mod access;
mod claims;
pub(crate) mod cloud_init;
mod grow;
mod hotplug;
pub(crate) mod image;
pub(crate) mod iso;
mod metrics_disk;
mod prepare;

use std::path::PathBuf;

use thiserror::Error;

pub(crate) use self::{
    access::{Access, check_access},
    grow::{growable, possible_size},
    hotplug::hotplugged_source,
    image::ImageFormat,
    metrics_disk::write as write_metrics,
    prepare::{Prepared, Purpose, Tolerance, claim_backend, match_sizes, matches_volume, prepare, write_tags},
};
use crate::files::FileError;

/// Failure to find the disk in an image.
#[derive(Debug, Error)]
pub(crate) enum ContainerDiskError {
    /// The file cannot be opened.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is not exactly one file.
    #[error("/disk holds {0} files")]
    NotOneFile(usize),
}

/// Failure to prepare a VMI's disks. The start is retried: an image may appear, space may be freed.
#[derive(Debug, Error)]
pub(crate) enum DiskError {
    /// A file of an image or a mounted volume cannot be opened.
    #[error("volume {volume}: {source}")]
    File { volume: String, source: FileError },
    /// The image of a container disk holds no disk where it must be.
    #[error(
        "volume {volume}: image {image} has no disk: {source}; it must contain exactly one disk image in /disk (raw or qcow2, for \
         example /disk/disk.img), or the volume must name its path"
    )]
    ContainerDisk {
        volume: String,
        /// Reference of the image.
        image: String,
        source: ContainerDiskError,
    },
    /// An image cannot be used.
    #[error("volume {volume}: {source}")]
    Image { volume: String, source: image::ImageError },
    /// An image, or the directory of one, cannot be used.
    #[error("volume {volume}: {source}")]
    Refused { volume: String, source: access::Refusal },
    /// The capacity of a volume is too small.
    #[error("the size for volume {0} is too low, must be at least 1MiB")]
    TooSmall(String),
    /// A capacity is not a quantity.
    #[error("volume {0}: capacity is not a quantity")]
    Quantity(String),
    /// There is not enough space for a disk image.
    #[error(
        "unable to create {path}, not enough space, demanded size {wanted} B is bigger than available space {free} B, also after taking {lack} % toleration into account"
    )]
    NoSpace {
        path: PathBuf,
        /// Its size.
        wanted: u64,
        /// Free space.
        free: u64,
        /// Tolerated lack, in percent.
        lack: u64,
    },
    /// The claim to which a volume moves is too small.
    #[error(
        "volume {volume}: the claim to which it moves holds a disk of {size} B, its present one has at least {least} B"
    )]
    Destination {
        volume: String,
        /// Size of the disk in the new claim.
        size: u64,
        /// Size of the disk in the present claim.
        least: u64,
    },
    /// The image to which a volume is copied has another path than the source's launcher expects.
    #[error("volume {0}: the image in the claim to which it moves must not be a symbolic link")]
    Link(String),
    /// The volume's content is invalid.
    #[error("volume {volume}: {message}")]
    Content { volume: String, message: String },
    /// The block sizes of a volume cannot be read.
    #[error("volume {volume}: cannot read its block sizes: {source}")]
    BlockSizes { volume: String, source: std::io::Error },
    /// An ISO image cannot be created.
    #[error("volume {volume}: {source}")]
    Iso { volume: String, source: iso::IsoError },
    /// A file of the launcher cannot be written.
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    /// A volume has no supported source.
    #[error("disk {0} references an unsupported source")]
    Unsupported(String),
    /// A name is not a plain path component.
    #[error("{0:?} is not a valid name")]
    Name(String),
}

/// Image or device behind a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskSource {
    /// File or device.
    pub(crate) backend: Backend,
    /// Read-only backing image of an overlay.
    pub(crate) backing: Option<(PathBuf, ImageFormat)>,
    /// The storage supports direct I/O.
    pub(crate) direct_io: bool,
    /// All blocks of the image are allocated.
    pub(crate) preallocated: bool,
    /// Size in bytes of an image that the launcher created; 0 otherwise.
    pub(crate) made_size: u64,
}

impl DiskSource {
    /// Returns a source that another has made, without a backing image.
    pub(crate) const fn new(backend: Backend, direct_io: bool) -> Self {
        Self { backend, backing: None, direct_io, preallocated: false, made_size: 0 }
    }
}

/// File or block device of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// An image file.
    File { path: PathBuf, format: ImageFormat },
    /// A block device, always raw.
    Block { path: PathBuf },
}
