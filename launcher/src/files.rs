//! Files in directories with untrusted content: images from a registry, mounted volumes.
//!
//! Every lookup stays beneath the directory's descriptor and follows no symbolic link out of it. Every read is bounded.

use std::{
    fs::File,
    io::Read,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Dir, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2},
    io::Errno,
};
use thiserror::Error;

/// Limit of entries of a directory.
const ENTRY_LIMIT: usize = 1024;

/// Failure to open or read a file beneath a directory.
#[derive(Debug, Error)]
pub(crate) enum FileError {
    /// The directory cannot be opened.
    #[error("cannot open {path}: {source}")]
    Directory { path: PathBuf, source: Errno },
    /// The file cannot be opened.
    #[error("cannot open {path}: {source}")]
    Open { path: PathBuf, source: Errno },
    /// The entry is not a regular file.
    #[error("{0} is not a regular file")]
    NotRegular(PathBuf),
    /// The file exceeds the limit.
    #[error("{path} is longer than {limit} bytes")]
    TooLong { path: PathBuf, limit: u64 },
    /// The directory holds too many entries.
    #[error("{0} has too many entries")]
    TooMany(PathBuf),
    /// Reading failed.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
}

impl FileError {
    /// Returns the error of the kernel at opening a directory or file.
    pub(crate) fn errno(&self) -> Option<Errno> {
        match self {
            Self::Directory { source, .. } | Self::Open { source, .. } => Some(*source),
            Self::NotRegular(_) | Self::TooLong { .. } | Self::TooMany(_) | Self::Read { .. } => None,
        }
    }
}

/// A directory with untrusted content.
#[derive(Debug)]
pub(crate) struct UntrustedDir {
    fd: OwnedFd,
    path: PathBuf,
}

impl UntrustedDir {
    /// Opens a directory of the pod's mounts. Its own path is trusted, its content is not.
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let fd = open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|source| FileError::Directory { path: path.to_owned(), source })?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Opens the directory or file at `relative`. Symbolic links may not leave this directory (mounted configMaps and
    /// secrets consist of links within); a leading slash is ignored.
    fn open_beneath(&self, relative: &Path, flags: OFlags) -> Result<OwnedFd, FileError> {
        let relative = relative.strip_prefix("/").unwrap_or(relative);
        openat2(
            self.fd.as_fd(),
            relative,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
        )
        .map_err(|source| FileError::Open { path: self.path.join(relative), source })
    }

    /// Returns the real path of a regular file beneath this directory, for programs that take paths. It contains no
    /// symbolic link: it is read back from the opened file.
    pub(crate) fn regular_file(&self, relative: &Path) -> Result<PathBuf, FileError> {
        let fd = self.open_beneath(relative, OFlags::PATH)?;
        let shown = self.path.join(relative.strip_prefix("/").unwrap_or(relative));
        let stat = fstat(&fd).map_err(|source| FileError::Open { path: shown.clone(), source })?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(FileError::NotRegular(shown));
        }
        rustix::fs::readlink(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd)), Vec::new())
            .map(|path| PathBuf::from(path.to_string_lossy().into_owned()))
            .map_err(|source| FileError::Open { path: shown, source })
    }

    /// Reads a file of at most `limit` bytes.
    pub(crate) fn read(&self, relative: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
        let path = self.path.join(relative);
        let fd = self.open_beneath(relative, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let stat = fstat(&fd).map_err(|source| FileError::Open { path: path.clone(), source })?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(FileError::NotRegular(path));
        }
        let mut content = Vec::new();
        File::from(fd)
            .take(limit.saturating_add(1))
            .read_to_end(&mut content)
            .map_err(|source| FileError::Read { path: path.clone(), source })?;
        if content.len() as u64 > limit {
            return Err(FileError::TooLong { path, limit });
        }
        Ok(content)
    }

    /// Returns the names in the directory `relative`, sorted, without those that start with a dot.
    pub(crate) fn entries(&self, relative: &Path) -> Result<Vec<String>, FileError> {
        self.names(relative, ".")
    }

    /// Returns the names of keys in the directory `relative` of a mounted configMap or secret, sorted. Keys may start with a dot;
    /// names that start with two are kubelet's.
    pub(crate) fn keys(&self, relative: &Path) -> Result<Vec<String>, FileError> {
        self.names(relative, "..")
    }

    /// Returns the names in a directory, sorted, without `.` and those with the prefix.
    fn names(&self, relative: &Path, left_out: &str) -> Result<Vec<String>, FileError> {
        let path = self.path.join(relative);
        let fd = self.open_beneath(relative, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut names = Vec::new();
        for entry in Dir::new(fd).map_err(|source| FileError::Directory { path: path.clone(), source })? {
            let entry = entry.map_err(|source| FileError::Directory { path: path.clone(), source })?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == "." || name.starts_with(left_out) {
                continue;
            }
            if names.len() == ENTRY_LIMIT {
                return Err(FileError::TooMany(path));
            }
            names.push(name);
        }
        names.sort();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("launcher-files-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(path.join("image/disk")).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn cve_2022_1798_a_path_does_not_leave_the_image() {
        let scratch = Scratch::new("cve-2022-1798");
        std::fs::write(scratch.0.join("host-secret"), "secret").unwrap();
        std::fs::write(scratch.0.join("image/disk/ok.img"), "disk").unwrap();
        symlink("../../host-secret", scratch.0.join("image/disk/up.img")).unwrap();
        symlink(scratch.0.join("host-secret"), scratch.0.join("image/disk/absolute.img")).unwrap();
        symlink("ok.img", scratch.0.join("image/disk/inner.img")).unwrap();
        let image = UntrustedDir::open(&scratch.0.join("image")).unwrap();
        for path in ["../host-secret", "/../host-secret", "disk/../../host-secret", "disk/up.img", "disk/absolute.img"]
        {
            assert!(image.regular_file(Path::new(path)).is_err(), "{path}");
            assert!(image.read(Path::new(path), 100).is_err(), "{path}");
        }
        let real = std::fs::canonicalize(scratch.0.join("image/disk/ok.img")).unwrap();
        assert_eq!(image.regular_file(Path::new("/disk/ok.img")).unwrap(), real);
        assert_eq!(image.regular_file(Path::new("disk/inner.img")).unwrap(), real);
    }

    #[test]
    fn long_files_directories_and_pipes_are_refused() {
        let scratch = Scratch::new("kinds");
        std::fs::write(scratch.0.join("image/long"), "0123456789").unwrap();
        let image = UntrustedDir::open(&scratch.0.join("image")).unwrap();
        assert!(matches!(image.read(Path::new("long"), 9), Err(FileError::TooLong { .. })));
        assert_eq!(image.read(Path::new("long"), 10).unwrap(), b"0123456789");
        assert!(matches!(image.read(Path::new("disk"), 9), Err(FileError::NotRegular(_))));
        for hidden in [".dockerconfigjson", "..data"] {
            std::fs::write(scratch.0.join("image").join(hidden), "").unwrap();
        }
        assert_eq!(image.entries(Path::new(".")).unwrap(), ["disk", "long"]);
        assert_eq!(image.keys(Path::new(".")).unwrap(), [".dockerconfigjson", "disk", "long"]);
    }
}
