//! Finds the mark that a migration leaves in the claim from which it took the state of a VMI.

use std::path::{Path, PathBuf};

use api::persistent_state::{META, MIGRATED};
use rustix::io::Errno;

use crate::files::{FileError, UntrustedDir};

/// Longest mark. It is a UID.
const LIMIT: u64 = 128;

/// Returns true if the claim at `directory` has the mark of the migration.
///
/// # Errors
/// When the mark cannot be read.
pub fn run(directory: &Path, migration: &str) -> anyhow::Result<bool> {
    let mark: PathBuf = [META, MIGRATED].iter().collect();
    match UntrustedDir::open(directory)?.read(&mark, LIMIT) {
        Ok(content) => Ok(content.trim_ascii() == migration.as_bytes()),
        Err(error) if error.errno() == Some(Errno::NOENT) => Ok(false),
        // No launcher writes that.
        Err(FileError::TooLong { .. } | FileError::NotRegular(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_counts_for_its_migration_only() {
        let root = std::env::temp_dir().join(format!("ferrovirt-migrated-{}", std::process::id()));
        std::fs::create_dir_all(root.join(META)).unwrap();
        let mark = root.join(META).join(MIGRATED);
        let found = || run(&root, "u").unwrap();
        assert!(!found());
        for (content, expected) in [("u", true), ("u\n", true), ("", false), ("v", false), (&"u".repeat(200), false)] {
            std::fs::write(&mark, content).unwrap();
            assert_eq!(found(), expected, "{content}");
        }
        std::fs::remove_dir_all(&root).unwrap();
        assert!(run(&root, "u").is_err());
    }
}
