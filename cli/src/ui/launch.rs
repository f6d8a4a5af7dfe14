//! Opens the browser.

use std::{
    fs::{DirBuilder, OpenOptions},
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
};

use crate::Error;

/// Program that opens files in the user's browser.
const OPENER: &str = "xdg-open";

/// A file that leads a browser to the page, removed when dropped. Arguments of programs can be read by all users of a host;
/// the file, which contains the URL with its token, only by the user.
pub(super) struct Bookmark(PathBuf);

impl Bookmark {
    /// Writes the file into a new folder.
    fn create(url: &str) -> Result<Self, Error> {
        let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir());
        let parent = own.unwrap_or_else(std::env::temp_dir);
        let folder = parent.join(format!("kubectl-virt-ui-{}", std::process::id()));
        let failed = || Error::io(format!("cannot create {}", folder.display()));
        DirBuilder::new().mode(0o700).create(&folder).map_err(failed())?;
        let this = Self(folder.clone());
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(this.path()).map_err(failed())?;
        let page = format!(
            "<!doctype html><meta charset=\"utf-8\"><title>Virtual machines</title>\
             <meta http-equiv=\"refresh\" content=\"0;url={url}\"><a href=\"{url}\">Virtual machines</a>\n"
        );
        file.write_all(page.as_bytes()).map_err(failed())?;
        Ok(this)
    }

    fn path(&self) -> PathBuf {
        self.0.join("open.html")
    }
}

impl Drop for Bookmark {
    fn drop(&mut self) {
        // The system clears both folders, too.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Opens a URL in the user's browser. The result must be kept until the browser has read it.
pub(super) fn browser(url: &str) -> Result<Bookmark, Error> {
    let bookmark = Bookmark::create(url)?;
    detached(OPENER, &bookmark.path()).spawn().map_err(Error::io(format!("cannot start {OPENER}")))?;
    Ok(bookmark)
}

/// Returns a command in a process group of its own: the Ctrl+C that ends the server must not end a browser that it has started.
fn detached(program: &str, file: &Path) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(program);
    command.arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn url_is_kept_from_other_users_and_removed() {
        let bookmark = Bookmark::create("http://127.0.0.1:1/secret/").unwrap();
        let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(bookmark.0.clone()), mode(bookmark.path())), (0o700, 0o600));
        assert!(std::fs::read_to_string(bookmark.path()).unwrap().contains("url=http://127.0.0.1:1/secret/\""));
        let folder = bookmark.0.clone();
        drop(bookmark);
        assert!(!folder.exists());
    }

    #[tokio::test]
    async fn browser_has_a_process_group_of_its_own() {
        // The file is the argument of sleep here.
        let mut browser = detached("sleep", Path::new("60")).spawn().unwrap();
        let id = browser.id().unwrap().to_string();
        let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
        browser.kill().await.unwrap();
        // After the name of the program in parentheses: state, parent, process group.
        let (_, state) = state.rsplit_once(") ").unwrap();
        assert_eq!(state.split(' ').nth(2), Some(id.as_str()), "{state}");
    }
}
