//! The images a machine starts from.
//!
//! [`prepare`] looks at each volume of the machine and makes what is missing: a writable layer over a container disk,
//! an empty disk, an image with cloud-init's data. What it returns, [`DiskSource`] by volume, is what
//! [`crate::domain`] turns into XML. Everything here blocks and runs on a blocking thread.

pub mod cloud_init;
mod grow;
pub mod image;
pub mod iso;
mod prepare;

use std::path::PathBuf;

use thiserror::Error;

pub use self::{
    grow::room,
    image::{BlockSizes, ImageFormat},
    prepare::{Prepared, Tolerance, prepare, tell_interfaces},
};
use crate::files::FileError;

/// Why the images of a machine cannot be made. The start is tried again: an image may be brought, space be freed.
#[derive(Debug, Error)]
pub enum DiskError {
    /// A file of an image or a mounted volume cannot be had.
    #[error("volume {volume}: {source}")]
    File {
        /// The volume.
        volume: String,
        /// Why.
        source: FileError,
    },
    /// The container disk holds no file, or more than one.
    #[error("volume {volume}: the image must hold exactly one file in /disk, it holds {count}")]
    NotOneFile {
        /// The volume.
        volume: String,
        /// Number of files.
        count: usize,
    },
    /// An image cannot be used.
    #[error("volume {volume}: {source}")]
    Image {
        /// The volume.
        volume: String,
        /// Why.
        source: image::ImageError,
    },
    /// The capacity of a volume cannot be used.
    #[error("the size for volume {0} is too low, must be at least 1MiB")]
    TooSmall(String),
    /// A quantity of the machine's spec cannot be understood.
    #[error("volume {0}: capacity is not a quantity")]
    Quantity(String),
    /// There is not enough space for a disk image.
    #[error(
        "unable to create {path}, not enough space, demanded size {wanted} B is bigger than available space {free} B, also after taking {lack} % toleration into account"
    )]
    NoSpace {
        /// The image.
        path: PathBuf,
        /// Its size.
        wanted: u64,
        /// What is free.
        free: u64,
        /// Percent that may be missing.
        lack: u64,
    },
    /// The volume's content is not what it has to be.
    #[error("volume {volume}: {message}")]
    Content {
        /// The volume.
        volume: String,
        /// Why.
        message: String,
    },
    /// The sizes of the blocks behind a volume cannot be had.
    #[error("volume {volume}: the size of its blocks cannot be read: {source}")]
    BlockSizes {
        /// The volume.
        volume: String,
        /// Why.
        source: std::io::Error,
    },
    /// An image with files cannot be made.
    #[error("volume {volume}: {source}")]
    Iso {
        /// The volume.
        volume: String,
        /// Why.
        source: iso::IsoError,
    },
    /// A file of the launcher cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A volume has no kind that this version carries out.
    #[error("disk {0} references an unsupported source")]
    Unsupported(String),
    /// A name would leave the launcher's directories.
    #[error("{0:?} is not a valid name")]
    Name(String),
}

/// What is behind a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSource {
    /// File or device.
    pub backend: Backend,
    /// Read-only image beneath a writable layer.
    pub backing: Option<(PathBuf, ImageFormat)>,
    /// Whether the storage can be used past the page cache.
    pub direct_io: bool,
    /// Whether all of the image's blocks are allocated.
    pub preallocated: bool,
    /// Size in bytes of an image that the launcher made itself; 0 otherwise.
    pub made_size: u64,
}

/// File or device of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// An image file.
    File {
        /// Path.
        path: PathBuf,
        /// Format.
        format: ImageFormat,
    },
    /// A block device, always raw.
    Block {
        /// Path.
        path: PathBuf,
    },
}
