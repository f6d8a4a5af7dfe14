//! Checks of the structure of this workspace and of its documents. `tests/` applies them; `make docs` renews generated parts.
//!
//! - [`source`]: the modules of a crate and what each of them imports.
//! - [`folders`]: imports between modules, level by level, and their cycles.
//! - [`crates`]: the order of the crates.
//! - [`sources`]: the text of all files.
//! - [`documents`]: paths named in documents, the graph of folders that `docs/architecture.md` shows, decision records.
//! - [`lists`]: annotations, labels, metrics and subresources, read from the sources.
//! - [`values`]: values of the chart.
//! - [`promql`]: metrics in rules and dashboards of the chart.

pub mod crates;
pub mod documents;
pub mod folders;
pub mod lists;
pub mod promql;
pub mod source;
pub mod sources;
pub mod values;

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

/// Returns the root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}

fn read(path: &std::path::Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::File { path: path.to_owned(), source })
}
