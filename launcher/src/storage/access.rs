//! Access to images that others have made. QEMU opens them as the user of the launcher; their owner is never changed.

use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::Backend;

/// User and group of the launcher and of QEMU.
const LAUNCHER_ID: u32 = 107;

/// Use of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The image of a read-only disk.
    Read,
    /// The image of a disk.
    Write,
    /// A directory with an image.
    Search,
    /// A directory in which an image is created.
    Create,
}

impl Access {
    /// Returns the access to the image of a disk.
    pub(crate) const fn of(read_only: bool) -> Self {
        if read_only { Self::Read } else { Self::Write }
    }

    /// Bits of a mode that permit it, as for the owner.
    const fn bits(self) -> u32 {
        match self {
            Self::Read => 0o4,
            Self::Write => 0o6,
            Self::Search => 0o1,
            Self::Create => 0o3,
        }
    }

    const fn symbols(self) -> &'static str {
        match self {
            Self::Read => "r",
            Self::Write => "rw",
            Self::Search => "x",
            Self::Create => "rwx",
        }
    }
}

/// Owner and mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    user: u32,
    group: u32,
    mode: u32,
}

/// Access that a volume refuses, or another failure to open its image.
#[derive(Debug, thiserror::Error)]
pub(crate) struct Refusal {
    access: Access,
    path: PathBuf,
    errno: Errno,
    /// `None` if it cannot be read.
    owner: Option<Owner>,
}

/// Cause of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The file system is mounted read-only.
    ReadOnly,
    /// Owner and mode deny the launcher the access.
    Mode(Owner),
    /// Owner and mode permit it.
    Storage(Owner),
    /// A directory above denies the look at the file.
    Hidden,
    /// Nothing that owner and mode are about.
    Other,
}

fn cause(errno: Errno, access: Access, owner: Option<Owner>) -> Cause {
    match errno {
        Errno::ACCESS | Errno::PERM => {}
        Errno::ROFS => return Cause::ReadOnly,
        _ => return Cause::Other,
    }
    let Some(owner) = owner else { return Cause::Hidden };
    let shift = match owner {
        Owner { user: LAUNCHER_ID, .. } => 6,
        Owner { group: LAUNCHER_ID, .. } => 3,
        Owner { .. } => 0,
    };
    let permitted = (owner.mode >> shift) & access.bits() == access.bits();
    if permitted { Cause::Storage(owner) } else { Cause::Mode(owner) }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.access {
            Access::Read => "read",
            Access::Write => "read and write",
            Access::Search => "search",
            Access::Create => "create an image in",
        };
        write!(f, "cannot {verb} {}: {}", self.path.display(), self.errno)?;
        match cause(self.errno, self.access, self.owner) {
            Cause::ReadOnly => f.write_str(
                "; the volume is mounted read-only: set readonly of the disk, or use the claim without readOnly",
            ),
            Cause::Mode(Owner { user, group, mode }) => write!(
                f,
                "; it belongs to user {user} and group {group} with mode {mode:04o}, QEMU runs as user {LAUNCHER_ID} and group \
                 {LAUNCHER_ID}, and the storage has not applied fsGroup: give it to group {LAUNCHER_ID} and run chmod g+{} on it",
                self.access.symbols()
            ),
            Cause::Storage(Owner { user, group, mode }) => write!(
                f,
                "; it belongs to user {user} and group {group} with mode {mode:04o}, which permits that to user {LAUNCHER_ID}: \
                 check the export of the storage's server (squashed users), SELinux labels and access control lists"
            ),
            Cause::Hidden => {
                write!(f, "; a directory above it does not let user {LAUNCHER_ID} pass: run chmod o+x on that")
            }
            Cause::Other => Ok(()),
        }
    }
}

impl Refusal {
    fn new(access: Access, path: &Path, errno: Errno) -> Self {
        let owner = std::fs::metadata(path).ok();
        let owner = owner.map(|meta| Owner { user: meta.uid(), group: meta.gid(), mode: meta.mode() & 0o7777 });
        Self { access, path: path.to_owned(), errno, owner }
    }

    /// Returns the refusal behind an error; `None` for errors of other causes.
    pub(super) fn of(access: Access, path: &Path, errno: Option<Errno>) -> Option<Self> {
        let errno = errno.filter(|errno| matches!(*errno, Errno::ACCESS | Errno::PERM | Errno::ROFS));
        errno.map(|errno| Self::new(access, path, errno))
    }
}

/// Fails if the launcher cannot use the image of a volume. Devices are given to it by virt-handler.
pub(crate) fn check_access(backend: &Backend, access: Access) -> Result<(), Refusal> {
    let Backend::File { path, .. } = backend else { return Ok(()) };
    let flags = if access == Access::Write { OFlags::RDWR } else { OFlags::RDONLY };
    let opened = rustix::fs::open(path, flags | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    opened.map(drop).map_err(|errno| Refusal::new(access, path, errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_owner_or_the_storage() {
        let owned = |user, group, mode| Owner { user, group, mode };
        let (mode, storage) = (Cause::Mode, Cause::Storage);
        for (access, owner, expected) in [
            (Access::Write, owned(0, 0, 0o600), mode as fn(Owner) -> Cause),
            (Access::Write, owned(0, 0, 0o644), mode),
            (Access::Read, owned(0, 0, 0o600), mode),
            (Access::Read, owned(0, 0, 0o644), storage),
            (Access::Write, owned(0, 107, 0o640), mode),
            (Access::Read, owned(0, 107, 0o640), storage),
            (Access::Write, owned(0, 107, 0o660), storage),
            // The bits of the first that matches count.
            (Access::Write, owned(107, 0, 0o466), mode),
            (Access::Write, owned(0, 107, 0o606), mode),
            (Access::Write, owned(107, 107, 0o600), storage),
            (Access::Write, owned(65534, 65534, 0o666), storage),
            (Access::Search, owned(0, 0, 0o700), mode),
            (Access::Create, owned(0, 0, 0o755), mode),
            (Access::Create, owned(0, 107, 0o2775), storage),
        ] {
            for errno in [Errno::ACCESS, Errno::PERM] {
                assert_eq!(cause(errno, access, Some(owner)), expected(owner), "{access:?} {owner:?}");
            }
            assert_eq!(cause(Errno::ROFS, access, Some(owner)), Cause::ReadOnly);
        }
        assert_eq!(cause(Errno::ACCESS, Access::Read, None), Cause::Hidden);
    }

    #[test]
    fn a_message_says_who_owns_the_image_and_what_to_do() {
        let refusal = |errno, access, mode| {
            let owner = Some(Owner { user: 0, group: 0, mode });
            Refusal { access, path: "/d/disk.img".into(), errno, owner }.to_string()
        };
        assert_eq!(
            refusal(Errno::ACCESS, Access::Write, 0o600),
            "cannot read and write /d/disk.img: Permission denied (os error 13); it belongs to user 0 and group 0 with mode 0600, \
             QEMU runs as user 107 and group 107, and the storage has not applied fsGroup: give it to group 107 and run chmod g+rw \
             on it"
        );
        assert!(refusal(Errno::ROFS, Access::Write, 0o666).contains("mounted read-only: set readonly"));
        assert!(refusal(Errno::ACCESS, Access::Write, 0o666).contains("check the export"));
    }

    #[test]
    fn only_refused_access_is_a_refusal() {
        for (errno, refused) in [(Errno::ACCESS, true), (Errno::PERM, true), (Errno::ROFS, true), (Errno::NOENT, false)]
        {
            let found = Refusal::of(Access::Read, Path::new("/"), Some(errno));
            assert_eq!(found.is_some(), refused, "{errno}");
        }
        assert!(Refusal::of(Access::Read, Path::new("/"), None).is_none());
        let absent = Backend::File { path: "/absent".into(), format: super::super::ImageFormat::Raw };
        let error = check_access(&absent, Access::Read).unwrap_err().to_string();
        assert_eq!(error, "cannot read /absent: No such file or directory (os error 2)");
    }
}
