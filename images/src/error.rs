//! Errors of this crate.

use std::{io, path::PathBuf};

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Failure of a build, listing, push, check or release.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error("{}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("cannot run {tool}: is it installed? ({hint})")]
    ToolMissing { tool: String, hint: String, source: io::Error },
    #[error("{tool} failed ({status}):\n{output}")]
    ToolFailed { tool: String, status: String, output: String },
    #[error("unknown image {name}; known images: {known}")]
    UnknownImage { name: String, known: String },
    #[error("binary {name} is not in {}: build it first (cargo build --release)", dir.display())]
    BinaryMissing { name: String, dir: PathBuf },
    #[error("{pattern} matches nothing in {}", root.display())]
    NothingSelected { pattern: String, root: PathBuf },
    #[error("{object} needs library {library}, which no package of the image contains")]
    LibraryMissing { object: String, library: String },
    #[error(
        "{object} needs version {version} of {library}, which the {library} of the image lacks: was it built on a newer system than the base of the image?"
    )]
    LibraryTooOld { object: String, library: String, version: String },
    #[error("cannot parse {object} as an ELF file")]
    Elf { object: String, source: elf::ParseError },
    #[error("{}: {detail}", path.display())]
    BadArchive { path: PathBuf, detail: String },
    #[error("image {name} has {size} bytes unpacked, which exceeds its limit of {limit}")]
    TooLarge { name: String, size: u64, limit: u64 },
    #[error("cannot serialize the image metadata")]
    Json(#[from] serde_json::Error),
    #[error("domain XML is refused:\n{output}\nlibvirtd:\n{log}")]
    DomainsRefused { output: String, log: String },
    #[error("cannot make a release: {0}")]
    NotReleasable(String),
    #[error("{0} does not fit: {1}")]
    Layout(String, String),
}

/// Adds the path to an input or output error.
pub(crate) trait At<T> {
    /// Converts an [`io::Error`] into [`Error::Io`] with `path`.
    fn at(self, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::Io { path: path.into(), source })
    }
}
