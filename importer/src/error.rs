//! Failures of an import, with their class for the report.

use std::{io, path::PathBuf};

use thiserror::Error;

use crate::{
    http::SourceError,
    task::{Outcome, Reason, Report},
};

/// Failure of an import.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The size of the disk is known, and the claim is smaller.
    #[error("DataVolume too small to contain image: the disk has {needed} bytes, the claim has space for {available}")]
    TooSmall {
        /// Size of the disk.
        needed: u64,
        /// Size that the claim has for it.
        available: u64,
    },
    /// The claim was full before the disk was complete.
    #[error(
        "DataVolume too small to contain image: no space after {written} bytes, the claim had space for {available}"
    )]
    Full {
        /// Bytes of the disk before the failure.
        written: u64,
        /// Size that the claim has for it.
        available: u64,
    },
    /// The file has another checksum.
    #[error("checksum {algorithm} of {source_name} is {actual}, but {expected} is required")]
    Checksum {
        /// Name of the algorithm.
        algorithm: &'static str,
        /// URL.
        source_name: String,
        /// Checksum of the file.
        actual: String,
        /// Checksum of the task.
        expected: String,
    },
    /// The image is not accepted.
    #[error("image is refused: {0}")]
    Refused(String),
    /// The source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The source holds nothing that can be imported.
    #[error("{0}")]
    Content(String),
    /// The task cannot be carried out.
    #[error("cannot carry out the import: {0}")]
    Task(String),
    /// A file or device belongs to another user.
    #[error(
        "cannot open {}: it belongs to user {owner} and group {group} with mode {mode:o}, and imports run as user and group {user}; \
         {remedy}",
        path.display()
    )]
    Denied {
        /// The file.
        path: PathBuf,
        /// Its user.
        owner: u32,
        /// Its group.
        group: u32,
        /// Its permissions.
        mode: u32,
        /// User of this process.
        user: u32,
        /// Action for the user.
        remedy: &'static str,
    },
    /// A call of the operating system failed.
    #[error("cannot {attempt} {path}: {source}")]
    Io {
        /// The step that was attempted.
        attempt: &'static str,
        /// On which file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A program failed.
    #[error("qemu-img {command} failed: {message}")]
    Qemu {
        /// Its command.
        command: &'static str,
        /// End of its output.
        message: String,
    },
    /// Nothing moved for a long time.
    #[error("the import made no progress for {0} seconds")]
    Stalled(u64),
}

/// Adds the attempt and the path to an error of the operating system.
pub(crate) trait At<T> {
    fn at(self, attempt: &'static str, path: impl Into<PathBuf>) -> Result<T, ImportError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, attempt: &'static str, path: impl Into<PathBuf>) -> Result<T, ImportError> {
        self.map_err(|source| ImportError::Io { attempt, path: path.into(), source: source.into() })
    }
}

impl ImportError {
    /// Returns the error of reading a stream: that of the download, or of the decompression.
    pub(crate) fn of_stream(error: io::Error) -> Self {
        match error.downcast::<SourceError>() {
            Ok(source) => source.into(),
            Err(error) => Self::Content(format!("cannot read the image: {error}")),
        }
    }

    fn class(&self) -> (Reason, bool) {
        match self {
            Self::TooSmall { .. } | Self::Full { .. } => (Reason::TooSmall, false),
            Self::Checksum { .. } => (Reason::ChecksumError, true),
            Self::Refused(_) => (Reason::RefusedImage, true),
            Self::Source(_) | Self::Content(_) => (Reason::SourceError, false),
            Self::Task(_) | Self::Denied { .. } | Self::Io { .. } | Self::Qemu { .. } | Self::Stalled(_) => {
                (Reason::Error, false)
            }
        }
    }

    /// Returns the report of this failure.
    pub fn report(&self) -> Report {
        let (reason, fatal) = self.class();
        Report {
            result: Outcome::Failed,
            reason,
            message: self.to_string(),
            fatal,
            virtual_size: None,
            labels: Default::default(),
        }
    }
}
