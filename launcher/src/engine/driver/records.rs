//! Records for a restarted worker: the last migration, and the save of the guest's memory in progress.

use std::{
    io::{ErrorKind, Read, Result, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use serde::{Serialize, de::DeserializeOwned};

/// Limit of a record, in bytes.
const LIMIT: u64 = 64 * 1024;

/// Reads the record of a former worker.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let mut text = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(LIMIT).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text)
        .inspect_err(
            |error| tracing::error!(%error, path = %path.display(), "cannot read the record of a former worker"),
        )
        .ok()
}

/// Writes the record, which replaces the former one at once.
pub(super) fn write<T: Serialize>(path: &Path, record: &T) -> Result<()> {
    let staging = path.with_extension("staging");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&staging)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    std::fs::rename(staging, path)
}

/// Removes the record. A missing one is removed.
pub(super) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
