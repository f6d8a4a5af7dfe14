//! The only way by which the agent reaches files and sockets.
//!
//! The agent is root on its node, and most directories it looks into belong to pods: whoever may run a command in a
//! pod decides what a name in them stands for, and may change it between two system calls. A [`SafeDir`] therefore
//! holds a directory *file descriptor* and resolves names beneath it by `openat2` with `RESOLVE_BENEATH`,
//! `RESOLVE_NO_SYMLINKS` and `RESOLVE_NO_MAGICLINKS`; what was opened is judged by `fstat` of that very descriptor
//! and used through it. Path functions of `std::fs` and `tokio::fs` are disallowed in this crate by clippy.
//!
//! A system call on a file system that a pod has mounted can take as long as whoever serves that file system likes. Names
//! of pods are therefore resolved without crossing a mount ([`SafeDir::on_one_mount`]), the mounts that a container has of
//! its own are judged by their types before they are used ([`Peer::root`], [`Peer::dev`]), and those calls are made on
//! threads that may hang ([`crate::pod_calls`]).

mod cgroup;
mod error;
mod mount;
mod peer;
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

pub use self::{
    cgroup::Mismatch,
    error::Error,
    peer::Peer,
    socket::{connect_launcher, launcher_socket},
    watch::Changes,
};

/// Names are resolved beneath the directory and through no link.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// `openat2` gives up with EAGAIN when a rename happens meanwhile somewhere on the node; so often it is tried again.
const RESOLVE_ATTEMPTS: u32 = 64;
/// So many names are tried for a temporary file.
const TEMPORARY_ATTEMPTS: u32 = 8;
/// Longest label of SELinux that is read; usual ones have some fifty characters.
const MAX_LABEL: usize = 512;

/// A directory, held by its file descriptor. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SafeDir {
    fd: Arc<OwnedFd>,
    /// Names beneath it are not resolved into other mounts.
    one_mount: bool,
}

/// What a directory entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Link,
    /// Socket.
    Socket,
    /// Character device.
    CharacterDevice,
    /// Block device.
    BlockDevice,
    /// Named pipe.
    Pipe,
    /// The file system does not say.
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
pub struct Entry {
    /// Its name.
    pub name: OsString,
    /// What it was when it was listed; it may be something else by now.
    pub kind: Kind,
}

/// What is known about an entry itself, never about what a link points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
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
    /// Device of the file system it is on.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Seconds and nanoseconds of the last change of content.
    pub modified: (i64, u64),
}

impl SafeDir {
    /// Opens a directory by an absolute path that only the node's administrator can change. Links are followed
    /// (`/var/run` is one on most nodes). Never call it with anything that a pod, a guest or an API object says.
    pub fn trusted(path: &Path) -> Result<Self, Error> {
        if !path.is_absolute() {
            return Err(Error::NotBeneath(path.to_owned()));
        }
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| Error::Io { operation: "open directory", path: path.to_owned(), source: errno.into() })?;
        Ok(Self { fd: Arc::new(fd), one_mount: false })
    }

    /// The same directory, beneath which what is mounted from elsewhere is refused. The kernel refuses it by itself: the
    /// mounted file system does not see the attempt, and so cannot make it last.
    #[must_use]
    pub fn on_one_mount(self) -> Self {
        Self { one_mount: true, ..self }
    }

    /// The label that SELinux has given to the directory itself; `None` where nothing is labelled.
    pub fn security_label(&self) -> Result<Option<String>, Error> {
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

    /// The directory `path` beneath this one.
    pub fn open_dir(&self, path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = beneath(path.as_ref())?;
        let fd = self.resolve("open directory", path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty(), BENEATH)?;
        Ok(Self { fd: Arc::new(fd), one_mount: self.one_mount })
    }

    /// The regular file `path`, for reading. Nothing but a regular file is opened, so that no device is touched and
    /// no pipe blocks.
    pub fn open_file(&self, path: impl AsRef<Path>) -> Result<File, Error> {
        self.reopen(path.as_ref(), OFlags::RDONLY)
    }

    /// The content of a regular file of at most `limit` bytes.
    pub fn read_bounded(&self, path: impl AsRef<Path>, limit: usize) -> Result<Vec<u8>, Error> {
        let path = path.as_ref();
        let file = self.open_file(path)?;
        let mut content = Vec::new();
        // One byte more than allowed tells a file of exactly the limit from a longer one.
        file.take(u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1))
            .read_to_end(&mut content)
            .map_err(|source| Error::Io { operation: "read", path: path.to_owned(), source })?;
        if content.len() > limit {
            return Err(Error::TooLarge { path: path.to_owned(), limit });
        }
        Ok(content)
    }

    /// The content of a regular file of at most `limit` bytes, which has to be UTF-8.
    pub fn read_text(&self, path: impl AsRef<Path>, limit: usize) -> Result<String, Error> {
        let path = path.as_ref();
        String::from_utf8(self.read_bounded(path, limit)?).map_err(|_| Error::NotText(path.to_owned()))
    }

    /// A new regular file; whatever is at `path` already is an error.
    pub fn create_new(&self, path: impl AsRef<Path>, mode: u32) -> Result<File, Error> {
        let path = beneath(path.as_ref())?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        Ok(File::from(self.resolve("create", path, flags, Mode::from_raw_mode(mode & 0o7777), BENEATH)?))
    }

    /// Puts a file with `content` at `path`, complete or not at all. A link at `path` is replaced, not followed.
    pub fn write_atomic(&self, path: impl AsRef<Path>, content: &[u8], mode: u32) -> Result<(), Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        for _ in 0..TEMPORARY_ATTEMPTS {
            let mut temporary = OsString::from(".");
            temporary.push(&name);
            temporary.push(format!(".{:016x}", rand_suffix()));
            let mut file = match parent.create_new(&temporary, mode) {
                Err(error) if error.already_exists() => continue,
                other => other?,
            };
            let written = file
                .write_all(content)
                .map_err(|source| Error::Io { operation: "write", path: path.to_owned(), source })
                .and_then(|()| parent.rename(&temporary, &name));
            if written.is_err() {
                // The failure to write is what counts; a temporary file left behind harms nobody.
                let _ = parent.remove_file(&temporary);
            }
            return written;
        }
        Err(Error::Io { operation: "create", path: path.to_owned(), source: Errno::EXIST.into() })
    }

    /// Writes `content` to the regular file at `path` in one call, as a kernel setting wants it. The file has to exist.
    pub fn write_existing(&self, path: impl AsRef<Path>, content: &[u8]) -> Result<(), Error> {
        let path = path.as_ref();
        let mut file = self.reopen(path, OFlags::WRONLY)?;
        file.write_all(content).map_err(|source| Error::Io { operation: "write", path: path.to_owned(), source })
    }

    /// Makes a directory, unless there is one.
    pub fn create_dir(&self, path: impl AsRef<Path>, mode: u32) -> Result<(), Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        match rustix::fs::mkdirat(&*parent.fd, &*name, Mode::from_raw_mode(mode & 0o7777)) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => parent.open_dir(&name).map(drop),
            Err(errno) => Err(Error::io("create directory", path, errno)),
        }
    }

    /// Removes what is not a directory; a link itself, not what it points to.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.unlink(path.as_ref(), AtFlags::empty())
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.unlink(path.as_ref(), AtFlags::REMOVEDIR)
    }

    /// Renames an entry beneath this directory; an existing file `to` is replaced.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), Error> {
        let (from_parent, from_name) = self.parent(from.as_ref())?;
        let (to_parent, to_name) = self.parent(to.as_ref())?;
        rustix::fs::renameat(&*from_parent.fd, &*from_name, &*to_parent.fd, &*to_name)
            .map_err(|errno| Error::io("rename", from.as_ref(), errno))
    }

    /// The entries of this directory, sorted by name; an error if there are more than `limit`.
    pub fn list(&self, limit: usize) -> Result<Vec<Entry>, Error> {
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

    /// What is at `path`: the entry itself, also if it is a link.
    pub fn stat(&self, path: impl AsRef<Path>) -> Result<Stat, Error> {
        let path = beneath(path.as_ref())?;
        let fd = self.resolve("look at", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        stat_of(&fd, path)
    }

    /// The text of the link at `path`, which is not followed.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf, Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path)?;
        let target = rustix::fs::readlinkat(&*parent.fd, &*name, Vec::<u8>::new())
            .map_err(|errno| Error::io("read link", path, errno))?;
        Ok(OsString::from_vec(target.into_bytes()).into())
    }

    /// Whether there is anything at `path`. What cannot be reached without a link is an error, not an absence.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        match self.stat(path) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Opens and closes the character device at `path`, which makes the kernel load the driver behind a node that was
    /// made ahead of it. It has to be the device `major:minor`.
    pub fn touch_device(&self, path: impl AsRef<Path>, device: (u32, u32)) -> Result<(), Error> {
        let path = beneath(path.as_ref())?;
        let named = self.resolve("open", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        require_device(stat_of(&named, path)?, path, device)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        rustix::fs::open(descriptor_path(&named), flags, Mode::empty())
            .map(drop)
            .map_err(|errno| Error::io("open", path, errno))
    }

    /// Gives the character device at `path` to a user. It has to be the device `major:minor`, and a node of the
    /// directory's own file system: a node mounted from elsewhere (the host's) is refused.
    pub fn chown_device(&self, path: impl AsRef<Path>, device: (u32, u32), uid: u32, gid: u32) -> Result<(), Error> {
        self.chown_node(path.as_ref(), uid, gid, |stat, path| require_device(stat, path, device))
    }

    /// Gives the block device at `path` to a user. It has to be a node of the directory's own file system.
    pub fn chown_block_device(&self, path: impl AsRef<Path>, uid: u32, gid: u32) -> Result<(), Error> {
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

    /// `openat2` beneath this directory.
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

    /// Opens a regular file in two steps: a descriptor that only names it, which is judged, and from that very
    /// descriptor the one that reads or writes. The link in `/proc/self/fd` is followed only once it is known that
    /// there is a regular file behind it: a descriptor of a symbolic link would lead on to its target
    /// (CVE-2026-13201).
    fn reopen(&self, path: &Path, flags: OFlags) -> Result<File, Error> {
        let path = beneath(path)?;
        let named = self.resolve("open", path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), BENEATH)?;
        require_kind(stat_of(&named, path)?, path, Kind::File)?;
        let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        rustix::fs::open(descriptor_path(&named), flags, Mode::empty())
            .map(File::from)
            .map_err(|errno| Error::io("open", path, errno))
    }

    fn unlink(&self, path: &Path, flags: AtFlags) -> Result<(), Error> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&*parent.fd, &*name, flags).map_err(|errno| Error::io("remove", path, errno))
    }

    /// The directory that holds `path`, and the last name.
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

/// Accepts a path made of plain names only. The kernel would refuse the rest as well (`..` only where it leads out);
/// what is known to be wrong need not get there.
fn beneath(path: &Path) -> Result<&Path, Error> {
    let plain = path.components().all(|component| matches!(component, Component::Normal(_)));
    // `components` leaves out NUL bytes' meaning: the system call would end there.
    if !plain || path.as_os_str().is_empty() || path.as_os_str().as_bytes().contains(&0) {
        return Err(Error::NotBeneath(path.to_owned()));
    }
    Ok(path)
}

/// Names of `path` one by one.
fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.components().map(Component::as_os_str)
}

/// What a descriptor refers to.
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

/// The path under which the kernel offers one of our own descriptors.
fn descriptor_path(fd: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

/// Something to tell temporary files apart; collisions are handled where it is used.
fn rand_suffix() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
