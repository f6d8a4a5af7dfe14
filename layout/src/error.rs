//! The error of this crate.

use std::path::PathBuf;

/// The reason why the workspace could not be examined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{path}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A source file is not valid Rust.
    #[error("{path}")]
    Rust {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: syn::Error,
    },
    /// A list could not be read from the sources.
    #[error("{path}: {reason}")]
    List {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// cargo did not describe the workspace.
    #[error("cargo metadata failed: {0}")]
    Metadata(String),
    /// A document lacks the markers between which a generated part stands.
    #[error("{path} has no part between {begin} and {end}")]
    Markers {
        /// The document.
        path: PathBuf,
        /// The first marker.
        begin: String,
        /// The last marker.
        end: String,
    },
}
