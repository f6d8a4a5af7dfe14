//! The mounts of an import pod, and time limits.

use std::{path::PathBuf, time::Duration};

use crate::task;

/// Places of the import pod.
#[derive(Clone, Debug)]
pub struct Places {
    /// The claim in file-system mode.
    pub data: PathBuf,
    /// The claim in block mode.
    pub device: PathBuf,
    /// The image of a registry source.
    pub image: PathBuf,
    /// The claim that is copied, in file-system mode.
    pub source: PathBuf,
    /// The claim that is copied, in block mode.
    pub source_device: PathBuf,
    /// Scratch space.
    pub scratch: PathBuf,
    /// Certificates of authorities.
    pub certs: PathBuf,
    /// Credentials.
    pub secret: PathBuf,
    /// The program qemu-img.
    pub qemu_img: PathBuf,
    /// Time without data after which a connection is given up.
    pub silence: Duration,
    /// Time without any progress after which the import fails.
    pub stall: Duration,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            data: task::DATA_DIR.into(),
            device: task::BLOCK_DEVICE.into(),
            image: task::IMAGE_DIR.into(),
            source: task::SOURCE_DIR.into(),
            source_device: task::SOURCE_DEVICE.into(),
            scratch: task::SCRATCH_DIR.into(),
            certs: task::CERTS_DIR.into(),
            secret: task::SECRET_DIR.into(),
            qemu_img: "/usr/bin/qemu-img".into(),
            silence: Duration::from_secs(60),
            stall: Duration::from_secs(600),
        }
    }
}
