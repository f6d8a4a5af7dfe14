//! The files of the workspace.

use std::path::{Path, PathBuf};

use crate::error::Error;

/// Returns the root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}

pub(crate) fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::File { path: path.to_owned(), source })
}
