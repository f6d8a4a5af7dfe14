//! Commit of the sources. virt-api reads it from environment variables of the image, so that another commit recompiles
//! nothing. The date is that of the commit, which keeps images reproducible.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// A commit, and a flag for uncommitted changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    commit: String,
    clean: bool,
    date: String,
}

impl Source {
    /// Reads the commit of a directory. Returns `None` if the directory is not the root of a git repository: an
    /// unpacked archive may lie inside an unrelated one.
    pub fn of(directory: &Path) -> Option<Self> {
        let root = git(directory, &["rev-parse", "--show-toplevel"])?;
        if Path::new(&root).canonicalize().ok()? != directory.canonicalize().ok()? {
            return None;
        }
        Some(Self {
            commit: git(directory, &["rev-parse", "--verify", "HEAD"])?,
            clean: git(directory, &["status", "--porcelain"])?.is_empty(),
            date: git(
                directory,
                &[
                    "-c",
                    "log.showSignature=false",
                    "log",
                    "-1",
                    "--format=%cd",
                    "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
                ],
            )?,
        })
    }

    /// Returns the date of the commit, as RFC 3339.
    pub(crate) fn date(&self) -> &str {
        &self.date
    }

    /// Returns the variables that virt-api reads (see `apiserver/src/discovery/documents.rs`).
    pub fn variables(&self) -> Vec<String> {
        let state = if self.clean { "clean" } else { "dirty" };
        vec![
            format!("FERROVIRT_GIT_COMMIT={}", self.commit),
            format!("FERROVIRT_GIT_TREE_STATE={state}"),
            format!("FERROVIRT_BUILD_DATE={}", self.date),
        ]
    }
}

/// Returns a git command for a directory, independent of the environment that git hooks set.
fn command(directory: &Path) -> Command {
    let mut command = Command::new("git");
    command.arg("--no-optional-locks").arg("-C").arg(directory).env("TZ", "UTC").stdin(Stdio::null());
    for variable in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
        command.env_remove(variable);
    }
    command
}

/// Runs git and returns its output, or `None` if git is missing or fails.
fn git(directory: &Path, arguments: &[&str]) -> Option<String> {
    let output = command(directory).args(arguments).stderr(Stdio::null()).output().ok()?;
    if !output.status.success() {
        return None;
    }
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn commit_has_its_own_date_and_sources_without_history_have_none() {
        let dir = std::env::temp_dir().join(format!("ferrovirt-images-source-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("sub")).unwrap();
        if git(&dir, &["init", "--quiet"]).is_none() {
            skips::skip("git");
            return;
        }
        assert_eq!(Source::of(&dir), None, "there is no commit yet");
        fs::write(dir.join("sub/a"), "1").unwrap();
        git(&dir, &["add", "."]).unwrap();
        let made = command(&dir)
            .args(["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgSign=false"])
            .args(["commit", "--quiet", "--no-verify", "-m", "a"])
            .env("GIT_COMMITTER_DATE", "2026-01-02T03:04:05+02:00")
            .status()
            .unwrap();
        assert!(made.success());
        let source = Source::of(&dir).unwrap();
        assert!(source.commit.len() >= 40 && source.commit.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!((source.clean, source.date.as_str()), (true, "2026-01-02T01:04:05Z"));
        assert_eq!(source.variables()[2], "FERROVIRT_BUILD_DATE=2026-01-02T01:04:05Z");
        assert_eq!(Source::of(&dir.join("sub")), None, "part of the repository of something else");
        fs::write(dir.join("sub/a"), "2").unwrap();
        let changed = Source::of(&dir).unwrap();
        assert_eq!((changed.clean, changed.commit), (false, source.commit));
        fs::remove_dir_all(dir).unwrap();
    }
}
