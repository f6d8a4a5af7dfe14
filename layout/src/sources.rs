//! The text of all Rust sources.

use std::path::{Path, PathBuf};

use crate::{Error, read};

/// Returns path and text of each Rust file of the workspace, without build results and the helper for skips.
///
/// # Errors
/// When a file or folder cannot be read.
pub fn sources(root: &Path) -> Result<Vec<(PathBuf, String)>, Error> {
    let mut found = Vec::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(folder) = waiting.pop() {
        let failed = |source| Error::File { path: folder.clone(), source };
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type().map_err(failed)?.is_dir() {
                let name = name.to_string_lossy();
                if !name.starts_with('.') && !["build", "target", "skips", "node_modules"].contains(&name.as_ref()) {
                    waiting.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = read(&path)?;
                found.push((path, text));
            }
        }
    }
    Ok(found)
}

/// Most lines of a file.
pub const MOST_LINES: usize = 500;

/// Returns the number of lines of a file, if it is too long.
#[must_use]
pub fn too_long(text: &str) -> Option<usize> {
    Some(text.lines().count()).filter(|lines| *lines > MOST_LINES)
}

/// Returns the lines that print that a test was skipped.
pub fn own_skips(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| {
        let lower = line.to_lowercase();
        lower.contains("print") && lower.contains("ln!(\"skipped")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_skips_are_found() {
        let text = "println!(\"SKIPPED in part\");\neprintln!(\"skipped: no tool\");\nskips::skip(\"tool\");\nprintln!(\"done\");";
        assert_eq!(own_skips(text).count(), 2);
    }
}
