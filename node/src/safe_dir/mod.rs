//! The only access to files and sockets in this crate.
//!
//! virt-handler is root on its node, and most directories that it reads belong to pods: a user of a pod controls what a name
//! refers to and can change it between two system calls. A [`SafeDir`] therefore holds a directory *file descriptor* and
//! resolves names beneath it with `openat2` and `RESOLVE_BENEATH`, `RESOLVE_NO_SYMLINKS` and `RESOLVE_NO_MAGICLINKS`. The
//! opened descriptor is checked with `fstat` and used directly. clippy disallows the path functions of `std::fs` and
//! `tokio::fs` in this crate.
//!
//! A system call on a file system that a pod mounted can block as long as the server of that file system likes. Names of
//! pods are therefore resolved without crossing a mount ([`SafeDir::on_one_mount`]), the types of a container's own mounts
//! are checked before they are used ([`Peer::root`], [`Peer::dev`]), and such calls are made on separate threads
//! ([`pod_calls`]).

mod cgroup;
mod error;
mod mount;
pub(crate) mod namespace;
mod peer;
pub(crate) mod pod_calls;
mod socket;
mod watch;

use std::{
    ffi::{OsStr, OsString},
    fmt,
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid},
    io::Errno,
};

pub(crate) use self::{
    cgroup::Mismatch,
    error::Error,
    peer::Peer,
    socket::{connect_launcher, connect_migration, connect_pod},
    watch::Changes,
};

/// Resolves names beneath the directory and through no link.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// Attempts after EAGAIN, which `openat2` returns during renames anywhere on the node.
const RESOLVE_ATTEMPTS: u32 = 64;
/// Longest SELinux label; usual ones have some fifty characters.
const MAX_LABEL: usize = 512;

/// A directory, held by its file descriptor. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct SafeDir {
    fd: Arc<OwnedFd>,
    /// Names beneath it are not resolved into other mounts.
    one_mount: bool,
}

/// Kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    File,
    Directory,
    /// Symbolic link.
    Link,
    Socket,
    CharacterDevice,
    BlockDevice,
    /// Named pipe.
    Pipe,
    /// Not reported by the file system.
    Unknown,
}

impl From<FileType> for Kind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Link,
            FileType::Socket => Self::Socket,
            FileType::CharacterDevice => Self::CharacterDevice,
            FileType::BlockDevice => Self::BlockDevice,
            FileType::Fifo => Self::Pipe,
            FileType::Unknown => Self::Unknown,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "regular file",
            Self::Directory => "directory",
            Self::Link => "symbolic link",
            Self::Socket => "socket",
            Self::CharacterDevice => "character device",
            Self::BlockDevice => "block device",
            Self::Pipe => "named pipe",
            Self::Unknown => "thing of unknown kind",
        })
    }
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub name: OsString,
    /// Kind when it was listed; it may have changed.
    pub kind: Kind,
}

/// Status of an entry itself, never of a link's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Owning user.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Major and minor number of a device node.
    pub rdev: (u32, u32),
    /// Device of the file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Seconds and nanoseconds of the last change of content.
    pub modified: (i64, u64),
}

impl SafeDir {
    /// Opens a directory by an absolute path that only the node's administrator can change. Links are followed (`/var/run`
    /// is one on most nodes). Paths from pods, guests or API objects must never be used here.
    pub(crate) fn trusted(path: &Path) -> Result<Self, Error> {
        if !path.is_absolute() {
            return Err(Error::NotBeneath(path.to_owned()));
        }
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| Error::Io { operation: "open directory", path: path.to_owned(), source: errno.into() })?;
        Ok(Self { fd: Arc::new(fd), one_mount: false })
    }

    /// Returns the same directory without access to other mounts beneath it. The kernel rejects the access itself, so that
    /// the mounted file system cannot delay it.
    #[must_use]
    pub(crate) fn on_one_mount(self) -> Self {
        Self { one_mount: true, ..self }
    }

    /// Returns the SELinux label of the directory; `None` without labels.
    pub(crate) fn security_label(&self) -> Result<Option<String>, Error> {
        let mut label = [0_u8; MAX_LABEL];
        match rustix::fs::fgetxattr(&self.fd, "security.selinux", &mut label[..]) {
            Ok(length) => {
                let text = String::from_utf8_lossy(label.get(..length).unwrap_or_default());
                Ok(Some(text.trim_end_matches('\0').to_owned()))
            }
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(errno) => Err(Error::io("read the label of", ".", errno)),
        }
    }

    /// Opens the directory `path` beneath this one.
    pub(crate) fn open_dir(&self, path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = beneath(path.as_ref())?;
        let fd = self.resolve("open directory", path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty(), BENEATH)?;
        Ok(Self { fd: Arc::new(fd), one_mount: self.one_mount })
    }

    /// Opens the regular file `path` for reading. Other kinds are not opened, so that no device is touched and no pipe
    /// blocks.
    pub(crate) fn open_file(&self, path: impl AsRef<Path>) -> Result<File, Error> {
        self.reopen(path.as_ref(), OFlags::RDONLY)
    }

    /// Reads a regular file of at most `limit` bytes.
    pub(crate) fn read_bounded(&self, path: impl AsRef<Path>, limit: usize) -> Result<Vec<u8>, Error> {
        let path = path.as_ref();
        let file = self.open_file(path)?;
        let mut content = Vec::new();
        // One byte more distinguishes a file of exactly the limit from a longer one.
        file.take(u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1))
            .read_to_end(&mut content)
            .map_err(|source| Error::Io { operation: "read", path: path.to_owned(), source })?;
        if content.len() > limit {
            return Err(Error::TooLarge { path: path.to_owned(), limit });
        }
        Ok(content)
    }

    /// Reads a regular file of at most `limit` bytes as UTF-8.
    pub(crate) fn read_text(&self, path: impl AsRef<Path>, limit: usize) -> Result<String, Error> {
        let path = path.as_ref();
        String::from_utf8(self.read_bounded(path, limit)?).map_err(|_| Error::NotText(path.to_owned()))
    }

    /// Writes `content` to the existing regular file `path` in one call, as kernel settings require.
    pub(crate) fn write_existing(&self, path: impl AsRef<Path>, content: &[u8]) -> Result<(), Error> {
        let path = path.as_ref();
        let mut file = self.reopen(path, OFlags::WRONLY)?;
        file.write_all(content).map_err(|source| Error::Io { operation: "write", path: path.to_owned(), source })
    }

    /// Creates an empty regular file `name` in this directory that only root can open.
    pub(crate) fn create_file(&self, name: impl AsRef<Path>) -> Result<(), Error> {
        let path = beneath(name.as_ref())?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        self.resolve("create", path, flags, Mode::RUSR | Mode::WUSR, BENEATH).map(drop)
    }

    /// Creates a sparse file `name` of this size in this directory for a user. Fails if anything has the name. The file gets its
    /// name when it is complete, except on file systems without files that have none.
    pub(crate) fn create_sparse(&self, name: &str, size: u64, user: u32) -> Result<(), Error> {
        let path = beneath(name.as_ref())?;
        let failed = |errno| Error::io("create", path, errno);
        let (owner, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(user)));
        let complete = |file: &OwnedFd| {
            rustix::fs::ftruncate(file, size).and_then(|()| rustix::fs::fchown(file, owner, group)).map_err(failed)
        };
        let mode = Mode::RUSR | Mode::WUSR;
        let unnamed = self.resolve("create", Path::new("."), OFlags::WRONLY | OFlags::TMPFILE, mode, BENEATH);
        if let Ok(file) = unnamed {
            complete(&file)?;
            let from = descriptor_path(&file);
            return rustix::fs::linkat(rustix::fs::CWD, from, &*self.fd, path, AtFlags::SYMLINK_FOLLOW).map_err(failed);
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let file = self.resolve("create", path, flags, mode, BENEATH)?;
        complete(&file).inspect_err(|_| {
            // An incomplete file would be taken for a disk at the next attempt.
            if let Err(error) = self.remove_file(path) {
                tracing::warn!(%error, "cannot remove a file that was created in part");
            }
        })
    }

    /// Returns the bytes that users can still write to the file system.
    pub(crate) fn free_bytes(&self) -> Result<u64, Error> {
        let stat = rustix::fs::fstatvfs(&self.fd).map_err(|errno| Error::io("read the free space of", ".", errno))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Creates a directory `name` in this directory that only root can enter.
    pub(crate) fn create_dir(&self, name: impl AsRef<Path>) -> Result<(), Error> {
        let path = beneath(name.as_ref())?;
        let (parent, name) = self.parent(path)?;
        rustix::fs::mkdirat(&*parent.fd, &*name, Mode::RWXU).map_err(|errno| Error::io("create directory", path, errno))
    }

    /// Removes an empty directory.
    pub(crate) fn remove_dir(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&*parent.fd, &*name, AtFlags::REMOVEDIR)
            .map_err(|errno| Error::io("remove directory", path, errno))
    }

    /// Removes an entry other than a directory; a link itself, not its target.
    pub(crate) fn remove_file(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&*parent.fd, &*name, AtFlags::empty()).map_err(|errno| Error::io("remove", path, errno))
    }

    /// Lists the entries, sorted by name; fails if there are more than `limit`.
    pub(crate) fn list(&self, limit: usize) -> Result<Vec<Entry>, Error> {
        let failed = |errno| Error::io("list", ".", errno);
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::read_from(&*self.fd).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if entries.len() == limit {
                return Err(Error::TooManyEntries(limit));
            }
            entries.push(Entry { name: OsString::from_vec(name.to_vec()), kind: entry.file_type().into() });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Returns the status of the entry at `path`, also of a link itself.
    pub(crate) fn stat(&self, path: impl AsRef<Path>) -> Result<Stat, Error> {
        let path = beneath(path.as_ref())?;
        let fd = self.resolve("look at", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        stat_of(&fd, path)
    }

    /// Returns the status of what `path` leads to, through links that stay in this directory. Only for directories of the node.
    pub(crate) fn stat_through_links(&self, path: impl AsRef<Path>) -> Result<Stat, Error> {
        let path = beneath(path.as_ref())?;
        let resolve = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
        stat_of(&self.resolve("look at", path, OFlags::PATH, Mode::empty(), resolve)?, path)
    }

    /// Reads the link at `path` without following it.
    pub(crate) fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf, Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        let target = rustix::fs::readlinkat(&*parent.fd, &*name, Vec::<u8>::new())
            .map_err(|errno| Error::io("read link", path, errno))?;
        Ok(OsString::from_vec(target.into_bytes()).into())
    }

    /// Returns true if something exists at `path`. A path through a link is an error, not an absence.
    pub(crate) fn exists(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        match self.stat(path) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Opens and closes the character device at `path`, so that the kernel loads its driver. It must be the device
    /// `major:minor`.
    pub(crate) fn touch_device(&self, path: impl AsRef<Path>, device: (u32, u32)) -> Result<(), Error> {
        let path = beneath(path.as_ref())?;
        let named = self.resolve("open", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        require_device(stat_of(&named, path)?, path, device)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        rustix::fs::open(descriptor_path(&named), flags, Mode::empty())
            .map(drop)
            .map_err(|errno| Error::io("open", path, errno))
    }

    /// Changes the owner of the character device at `path`. It must be the device `major:minor`, and a node on the
    /// directory's own file system: a node mounted from elsewhere, such as the host's, is rejected.
    pub(crate) fn chown_device(
        &self,
        path: impl AsRef<Path>,
        device: (u32, u32),
        uid: u32,
        gid: u32,
    ) -> Result<(), Error> {
        self.chown_node(path.as_ref(), uid, gid, |stat, path| require_device(stat, path, device))
    }

    /// Changes the owner of the block device at `path`. It must be a node on the directory's own file system.
    pub(crate) fn chown_block_device(&self, path: impl AsRef<Path>, uid: u32, gid: u32) -> Result<(), Error> {
        self.chown_node(path.as_ref(), uid, gid, |stat, path| require_kind(stat, path, Kind::BlockDevice))
    }

    fn chown_node(
        &self,
        path: &Path,
        uid: u32,
        gid: u32,
        require: impl FnOnce(Stat, &Path) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let path = beneath(path)?;
        let resolve = BENEATH.union(ResolveFlags::NO_XDEV);
        let fd = self.resolve("look at", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), resolve)?;
        require(stat_of(&fd, path)?, path)?;
        rustix::fs::chownat(&fd, "", Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)
            .map_err(|errno| Error::io("change owner of", path, errno))
    }

    /// Calls `openat2` beneath this directory.
    fn resolve(
        &self,
        operation: &'static str,
        path: &Path,
        flags: OFlags,
        mode: Mode,
        resolve: ResolveFlags,
    ) -> Result<OwnedFd, Error> {
        let resolve = if self.one_mount { resolve.union(ResolveFlags::NO_XDEV) } else { resolve };
        for _ in 0..RESOLVE_ATTEMPTS {
            match rustix::fs::openat2(&*self.fd, path, flags | OFlags::CLOEXEC, mode, resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(Error::io(operation, path, errno)),
                Ok(fd) => return Ok(fd),
            }
        }
        Err(Error::Io { operation, path: path.to_owned(), source: Errno::AGAIN.into() })
    }

    /// Opens a regular file in two steps: a descriptor that only names it is checked, and that descriptor is then reopened
    /// for reading or writing. The link in `/proc/self/fd` is followed only after the check for a regular file: a descriptor
    /// of a symbolic link would lead to its target (CVE-2026-13201).
    fn reopen(&self, path: &Path, flags: OFlags) -> Result<File, Error> {
        let path = beneath(path)?;
        let named = self.resolve("open", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        require_kind(stat_of(&named, path)?, path, Kind::File)?;
        let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        rustix::fs::open(descriptor_path(&named), flags, Mode::empty())
            .map(File::from)
            .map_err(|errno| Error::io("open", path, errno))
    }

    /// Opens the parent directory of `path`, and returns the last name.
    fn parent(&self, path: &Path) -> Result<(Self, OsString), Error> {
        let path = beneath(path)?;
        let name = path.file_name().ok_or_else(|| Error::NotBeneath(path.to_owned()))?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => self.open_dir(parent)?,
            _ => self.clone(),
        };
        Ok((parent, name.to_owned()))
    }
}

impl AsFd for SafeDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Accepts paths of plain names only. The kernel rejects others as well, `..` only if it leads out.
fn beneath(path: &Path) -> Result<&Path, Error> {
    let plain = path.components().all(|component| matches!(component, Component::Normal(_)));
    // `components` ignores NUL bytes: the path of the system call would end there.
    if !plain || path.as_os_str().is_empty() || path.as_os_str().as_bytes().contains(&0) {
        return Err(Error::NotBeneath(path.to_owned()));
    }
    Ok(path)
}

fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.components().map(Component::as_os_str)
}

/// Returns the status of a descriptor.
fn stat_of(fd: impl AsFd, path: &Path) -> Result<Stat, Error> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| Error::io("look at", path, errno))?;
    #[allow(clippy::unnecessary_cast, clippy::useless_conversion, reason = "the widths differ between architectures")]
    Ok(Stat {
        kind: FileType::from_raw_mode(stat.st_mode).into(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        rdev: (rustix::fs::major(stat.st_rdev as u64), rustix::fs::minor(stat.st_rdev as u64)),
        device: stat.st_dev as u64,
        inode: stat.st_ino as u64,
        modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
    })
}

fn require_kind(stat: Stat, path: &Path, expected: Kind) -> Result<(), Error> {
    if stat.kind == expected {
        return Ok(());
    }
    Err(Error::WrongKind { path: path.to_owned(), expected, found: stat.kind })
}

fn require_device(stat: Stat, path: &Path, (major, minor): (u32, u32)) -> Result<(), Error> {
    require_kind(stat, path, Kind::CharacterDevice)?;
    if stat.rdev == (major, minor) {
        return Ok(());
    }
    let (found_major, found_minor) = stat.rdev;
    Err(Error::WrongDevice { path: path.to_owned(), major, minor, found_major, found_minor })
}

/// Returns the path of one of our own descriptors.
fn descriptor_path(fd: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

#[cfg(test)]
mod tests;
