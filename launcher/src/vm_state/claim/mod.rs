//! The claim with the state of a VMI (`api::persistent_state`): the directory that holds the state of its TPM.
//!
//! ```text
//!  swtpm/UUID              state of the TPM
//!  swtpm/UUID.MIGRATION    the same, of a guest that came while the state of the source was in the claim
//!  swtpm/UUID.new          a TPM that is being made
//!  meta/migrated           UID of the migration by which the guest has left the launcher that has mounted the claim
//! ```
//! swtpm locks its directory from the first start of the TPM until it ends, so that source and target of a migration cannot share
//! one. The source writes the marker after the end of its QEMU and before the target may run the guest: from then on
//! `UUID.MIGRATION` is the state, and that of the source before. In a claim of its own the source writes it after the target has the
//! guest, since UEFI variables are written to the claim of the target only then. A start moves the state to `UUID`; each step can be
//! repeated.

use std::{
    fs::{DirBuilder, File, OpenOptions},
    io::{ErrorKind, Result, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use api::persistent_state::{LOCAL_CA, META, MIGRATED, NVRAM, SWTPM};
use rustix::io::Errno;

use crate::{
    files::{FileError, UntrustedDir},
    paths::Paths,
};

/// Directory of the TPM 2.0 in a state directory, as libvirt names it.
const TPM2: &str = "tpm2";
/// File with the state that a TPM keeps.
const PERMANENT: &str = "tpm2-00.permall";
/// Limit of the marker in bytes.
const MARKER_LIMIT: u64 = 256;
/// Suffix of a TPM that is being made.
const NEW: &str = "new";

/// The claim with the state of the pod's VMI.
#[derive(Clone, Debug)]
pub(super) struct StateClaim {
    directory: PathBuf,
}

/// A change of the directories of TPMs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Remove(String),
    Rename { from: String, to: String },
}

/// Returns the steps after which `uuid` is the state of the TPM. `entries` are the names in the directory of TPMs, with true for
/// those that hold a state.
fn steps(uuid: &str, marker: &str, entries: &[(String, bool)]) -> Vec<Step> {
    let moved = format!("{uuid}.{marker}");
    let mut steps = Vec::new();
    if entries.iter().any(|(name, has_state)| *name == moved && *has_state) {
        if entries.iter().any(|(name, _)| name == uuid) {
            steps.push(Step::Remove(uuid.to_owned()));
        }
        steps.push(Step::Rename { from: moved.clone(), to: uuid.to_owned() });
    }
    let is_left = |name: &str| {
        suffix(uuid, name).is_some() && !steps.contains(&Step::Rename { from: name.to_owned(), to: uuid.to_owned() })
    };
    if steps.is_empty() && !entries.iter().any(|(name, has_state)| name == uuid && *has_state) {
        return steps;
    }
    let left: Vec<Step> =
        entries.iter().filter(|(name, _)| is_left(name)).map(|(name, _)| Step::Remove(name.clone())).collect();
    steps.into_iter().chain(left).collect()
}

/// Returns the part after `UUID.` of a name.
pub(super) fn suffix<'a>(uuid: &str, name: &'a str) -> Option<&'a str> {
    name.strip_prefix(uuid)?.strip_prefix('.')
}

impl StateClaim {
    /// Returns the claim of the pod, if it has one.
    pub(super) fn of(paths: &Paths) -> Option<Self> {
        paths.vm_state.is_dir().then(|| Self { directory: paths.vm_state.clone() })
    }

    /// Returns the directory of UEFI variables, which is created.
    pub(super) fn variables(&self) -> Result<PathBuf> {
        let directory = self.directory.join(NVRAM);
        make_directory(&directory)?;
        Ok(directory)
    }

    /// Returns the directory of the certificate authority, which is created.
    pub(super) fn local_ca(&self) -> Result<PathBuf> {
        let directory = self.directory.join(LOCAL_CA);
        make_directory(&directory)?;
        Ok(directory)
    }

    /// Returns the directory in which swtpm keeps a state.
    fn tpm(&self, name: &str) -> PathBuf {
        self.directory.join(SWTPM).join(name).join(TPM2)
    }

    /// Returns the state directory of a guest that starts, with the state that a migration has moved.
    pub(super) fn settle(&self, uuid: &str) -> Result<PathBuf> {
        self.settle_by(uuid, &self.marker()?)
    }

    /// Makes the state in the directory `name` that of the next start. The marker is not asked: it may not have been written.
    pub(super) fn keep(&self, uuid: &str, name: &str) -> Result<()> {
        self.settle_by(uuid, suffix(uuid, name).unwrap_or_default()).map(drop)
    }

    fn settle_by(&self, uuid: &str, marker: &str) -> Result<PathBuf> {
        let directory = self.directory.join(SWTPM);
        make_directory(&directory)?;
        for step in steps(uuid, marker, &self.entries()?) {
            tracing::info!(?step, "settling the state of the TPM");
            match step {
                Step::Remove(name) => remove(&directory.join(name))?,
                Step::Rename { from, to } => std::fs::rename(directory.join(from), directory.join(to))?,
            }
            sync(&directory)?;
        }
        Ok(self.tpm(uuid))
    }

    /// Makes the state of a TPM by `make`, which gets its directory, unless there is one. A TPM that was made in part is made anew.
    pub(super) fn make_tpm<E: From<std::io::Error>>(
        &self,
        uuid: &str,
        make: impl FnOnce(&Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        if has_state(&self.tpm(uuid))? {
            return Ok(());
        }
        let name = format!("{uuid}.{NEW}");
        let directory = self.directory.join(SWTPM);
        remove(&directory.join(&name))?;
        make_directory(&self.tpm(&name))?;
        make(&self.tpm(&name))?;
        sync(&self.tpm(&name))?;
        remove(&directory.join(uuid))?;
        std::fs::rename(directory.join(name), directory.join(uuid))?;
        sync(&directory)?;
        Ok(())
    }

    /// Returns the empty state directory of a guest that arrives by this migration.
    pub(super) fn arrive(&self, uuid: &str, migration: &str) -> Result<PathBuf> {
        make_directory(&self.directory.join(SWTPM))?;
        let moved = format!("{uuid}.{migration}");
        let is_other = |name: &str| name != moved && (name == uuid || suffix(uuid, name).is_some());
        let is_beside = self.entries()?.iter().any(|(name, has_state)| *has_state && is_other(name));
        let name = if is_beside { moved } else { uuid.to_owned() };
        remove(&self.directory.join(SWTPM).join(&name))?;
        make_directory(&self.tpm(&name))?;
        Ok(self.tpm(&name))
    }

    /// Records that the guest has left by this migration.
    pub(super) fn mark(&self, migration: &str) -> Result<()> {
        if self.marker()? == migration {
            return Ok(());
        }
        let directory = self.directory.join(META);
        make_directory(&directory)?;
        let staging = directory.join(format!("{MIGRATED}.staging"));
        remove(&staging)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o640).open(&staging)?;
        file.write_all(migration.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(staging, directory.join(MIGRATED))?;
        sync(&directory)
    }

    /// Removes the state in `own` of a guest that has left, if another directory of the claim has it.
    pub(super) fn leave(&self, own: &Path) -> Result<()> {
        let Some((uuid, name)) = self.name_of(own) else { return Ok(()) };
        let moved = format!("{uuid}.{}", self.marker()?);
        if moved != name && has_state(&self.tpm(&moved))? {
            remove(&self.directory.join(SWTPM).join(name))?;
            sync(&self.directory.join(SWTPM))?;
        }
        Ok(())
    }

    /// Returns true if the claim has the state that this migration has brought, beside that of its source. `own` is one of both.
    pub(super) fn has_state_of(&self, own: &Path, migration: &str) -> Result<bool> {
        let Some((uuid, _)) = self.name_of(own) else { return Ok(false) };
        has_state(&self.tpm(&format!("{uuid}.{migration}")))
    }

    /// Returns the UUID and the name of a state directory in the claim.
    pub(super) fn name_of<'a>(&self, directory: &'a Path) -> Option<(&'a str, &'a str)> {
        let name = directory.parent().filter(|parent| parent.parent() == Some(&self.directory.join(SWTPM)))?;
        let name = name.file_name()?.to_str()?;
        Some((name.split('.').next().unwrap_or(name), name))
    }

    fn entries(&self) -> Result<Vec<(String, bool)>> {
        let names = UntrustedDir::open(&self.directory).and_then(|claim| claim.entries(Path::new(SWTPM)));
        let names = names.map_err(std::io::Error::other)?;
        names.into_iter().map(|name| has_state(&self.tpm(&name)).map(|has_state| (name, has_state))).collect()
    }

    /// Returns the marker; empty without one, and for what no launcher writes. One that cannot be read is an error: without it an old
    /// state would be taken for the present one.
    fn marker(&self) -> Result<String> {
        let file = Path::new(META).join(MIGRATED);
        let text = match UntrustedDir::open(&self.directory).and_then(|claim| claim.read(&file, MARKER_LIMIT)) {
            Ok(text) => String::from_utf8(text).unwrap_or_default(),
            Err(FileError::TooLong { .. } | FileError::NotRegular(_)) => String::new(),
            Err(error) => match error.errno() {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => String::new(),
                _ => return Err(std::io::Error::other(error)),
            },
        };
        Ok(Some(text.trim()).filter(|text| Paths::is_single_component(text)).unwrap_or_default().to_owned())
    }
}

/// Returns true if a directory holds the state of a TPM. Storage that does not answer is an error: the state would be made anew.
fn has_state(directory: &Path) -> Result<bool> {
    match std::fs::metadata(directory.join(PERMANENT)) {
        Ok(metadata) => Ok(metadata.is_file()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) fn make_directory(path: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o750).create(path)
}

/// Removes a directory or file and all below, if it exists. Follows no symbolic link.
pub(super) fn remove(path: &Path) -> Result<()> {
    let removed = match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn sync(directory: &Path) -> Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests;
