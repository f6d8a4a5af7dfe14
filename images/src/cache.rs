//! Cache of directories, each named by the hash of its inputs.
//!
//! An entry is built under a lock beside its final path and then renamed. An interrupted run leaves no incomplete entry, and
//! two runs do not build the same entry twice.

use std::{
    env, fs,
    fs::File,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::error::{At, Result};

/// Root directory of the cache.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Returns the user's cache: `$XDG_CACHE_HOME/ferrovirt` or `~/.cache/ferrovirt`.
    pub fn of_user() -> Self {
        let base = env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
            .unwrap_or_else(|| PathBuf::from("/var/cache"));
        Self::at(base.join("ferrovirt"))
    }

    /// Returns a cache in this directory.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the directory of entry `key` of this `kind`, and builds it with `make` if it is missing.
    pub fn entry<F>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf>
    where
        F: FnOnce(&Path) -> Result<()>,
    {
        let dir = self.root.join(kind);
        let entry = dir.join(key);
        if entry.is_dir() {
            return Ok(entry);
        }
        fs::create_dir_all(&dir).at(&dir)?;
        let lock_path = dir.join(format!(".{key}.lock"));
        let lock = File::create(&lock_path).at(&lock_path)?;
        lock.lock().at(&lock_path)?;
        if entry.is_dir() {
            return Ok(entry);
        }
        let building = dir.join(format!(".{key}.building"));
        if building.exists() {
            fs::remove_dir_all(&building).at(&building)?;
        }
        fs::create_dir_all(&building).at(&building)?;
        let made = make(&building);
        if made.is_ok() {
            fs::rename(&building, &entry).at(&entry)?;
        } else {
            let _ = fs::remove_dir_all(&building);
        }
        let _ = fs::remove_file(&lock_path);
        made.map(|()| entry)
    }
}

/// Hashes the inputs of an entry into its key.
#[derive(Debug, Default)]
pub struct Key(Sha256);

impl Key {
    /// Adds one input with its length, so that adjacent inputs stay distinct.
    #[must_use]
    pub fn with(mut self, input: impl AsRef<[u8]>) -> Self {
        self.add(input);
        self
    }

    /// Adds one input in place.
    pub fn add(&mut self, input: impl AsRef<[u8]>) {
        let input = input.as_ref();
        self.0.update((input.len() as u64).to_le_bytes());
        self.0.update(input);
    }

    /// Returns the key. 128 bits suffice for directory names.
    pub fn finish(self) -> String {
        hex(&self.0.finalize()[..16])
    }
}

/// Formats bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = env::temp_dir().join(format!("ferrovirt-images-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn an_entry_is_made_once_and_a_failed_one_leaves_nothing() {
        let dir = scratch("cache");
        let cache = Cache::at(&dir);
        let failed = cache.entry("things", "a", |path| {
            fs::write(path.join("half"), "x").at(path)?;
            Err(crate::Error::Layout("a".into(), "b".into()))
        });
        assert!(failed.is_err());
        assert!(!dir.join("things/a").exists() && !dir.join("things/.a.building").exists());

        let made = cache.entry("things", "a", |path| fs::write(path.join("file"), "1").at(path)).unwrap();
        let again = cache.entry("things", "a", |_| panic!("made twice")).unwrap();
        assert_eq!(made, again);
        assert_eq!(fs::read_to_string(made.join("file")).unwrap(), "1");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn inputs_of_a_key_do_not_run_together() {
        assert_ne!(Key::default().with("ab").with("c").finish(), Key::default().with("a").with("bc").finish());
    }
}
