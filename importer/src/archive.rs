//! Unpacks a tar archive into a claim.
//!
//! All is unpacked into a hidden folder and moved at the end, so that a claim has all files or none of them. Paths are opened
//! beneath that folder without following links. Links must stay inside; devices and pipes are rejected. Holes of sparse files stay holes
//! if the archive is in the pax format.

use std::{
    cell::Cell,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Component, Path, PathBuf},
    rc::Rc,
};

use rustix::{
    fs::{
        AtFlags, CWD, Mode, OFlags, RenameFlags, ResolveFlags, fstatvfs, linkat, mkdirat, openat2, renameat_with,
        symlinkat,
    },
    io::Errno,
};
use tar::{Entry, EntryType};

use crate::{
    error::{At, ImportError},
    meter::Meter,
    space::Space,
    sparse::{Extent, Sparse, read_map},
};

const PART: &str = ".archive.part";
/// Folder that a new file system has.
const LOST: &str = "lost+found";
const ENTRIES: u64 = 1_000_000;
const DEPTH: usize = 128;
/// Bytes of headers and long names before an entry.
const HEADERS: u64 = 1 << 20;
const BUFFER: usize = 256 << 10;
const FOLDER_MODE: u32 = 0o770;
const FILE_MODE: u32 = 0o660;

/// An archive on its way into a claim.
pub(crate) struct Unpacked<'a> {
    data: &'a Path,
    part: PathBuf,
    /// Bytes that the files may take, if fewer than the file system has free.
    limit: Option<u64>,
    published: bool,
}

impl<'a> Unpacked<'a> {
    /// Removes what an earlier attempt left, and creates the hidden folder.
    pub(crate) fn new(data: &'a Path, limit: Option<u64>) -> Result<Self, ImportError> {
        let part = data.join(PART);
        if fs::symlink_metadata(&part).is_ok() {
            fs::remove_dir_all(&part).at("remove the incomplete archive", &part)?;
        }
        fs::create_dir(&part).at("create", &part)?;
        Ok(Self { data, part, limit, published: false })
    }

    /// Unpacks an archive. Returns the sum of the sizes of its files.
    pub(crate) fn fill(&self, stream: &mut dyn Read, meter: &Meter) -> Result<u64, ImportError> {
        let root = beneath(CWD, &self.part, OFlags::DIRECTORY | OFlags::RDONLY, 0).at("open", &self.part)?;
        let size = unpack_into(stream, &root, &self.part, self.limit, meter)?;
        rustix::fs::syncfs(&root).at("write", &self.part)?;
        Ok(size)
    }

    /// Moves the files to their places.
    pub(crate) fn publish(mut self) -> Result<(), ImportError> {
        publish(self.data, &self.part)?;
        self.published = true;
        File::open(self.data).and_then(|folder| folder.sync_all()).at("write", self.data)
    }
}

impl Drop for Unpacked<'_> {
    fn drop(&mut self) {
        if !self.published {
            // The next attempt removes what is left.
            let _ = fs::remove_dir_all(&self.part);
        }
    }
}

fn unpack_into(
    stream: &mut dyn Read,
    root: &OwnedFd,
    part: &Path,
    limit: Option<u64>,
    meter: &Meter,
) -> Result<u64, ImportError> {
    let allowed = Rc::new(Cell::new(HEADERS));
    let mut archive = tar::Archive::new(Limited { inner: stream, allowed: allowed.clone() });
    let mut entries = archive.entries().map_err(ImportError::of_stream)?;
    let free = fstatvfs(root).at("read the free space of", part)?;
    let free = free.f_bavail.saturating_mul(free.f_frsize);
    let mut space = Space { available: limit.map_or(free, |limit| limit.min(free)), used: 0 };
    let mut count = 0;
    loop {
        allowed.set(HEADERS);
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.map_err(ImportError::of_stream)?;
        allowed.set(u64::MAX);
        count += 1;
        if count > ENTRIES {
            return Err(ImportError::Refused(format!("the archive has more than {ENTRIES} entries")));
        }
        space.used = space.used.saturating_add(unpack_entry(&mut entry, root, part, space, meter)?);
        meter.moved();
    }
    Ok(space.used)
}

/// A reader with a limit, which its user changes.
struct Limited<'a> {
    inner: &'a mut dyn Read,
    allowed: Rc<Cell<u64>>,
}

impl Read for Limited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let allowed = self.allowed.get();
        if allowed == 0 {
            return Err(io::Error::other("the headers of an entry are too long"));
        }
        let size = usize::try_from(allowed).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.inner.read(&mut buffer[..size])?;
        self.allowed.set(allowed - count as u64);
        Ok(count)
    }
}

fn unpack_entry<R: Read>(
    entry: &mut Entry<'_, R>,
    root: &OwnedFd,
    part: &Path,
    space: Space,
    meter: &Meter,
) -> Result<u64, ImportError> {
    let kind = entry.header().entry_type();
    let mut sparse = match kind {
        EntryType::Regular | EntryType::Continuous => {
            entry.pax_extensions().map_err(ImportError::of_stream)?.and_then(Sparse::find)
        }
        // For headers, the crate would read all of the entry.
        _ => None,
    };
    let name = sparse.as_mut().and_then(|sparse| sparse.name.take());
    let name = name.unwrap_or_else(|| PathBuf::from(OsStr::from_bytes(&entry.path_bytes())));
    let refused = |reason: &str| ImportError::Refused(format!("entry {} of the archive {reason}", name.display()));
    let path = inside(&name).ok_or_else(|| refused("is outside"))?;
    if matches!(kind, EntryType::XGlobalHeader) {
        return Ok(0);
    }
    if path.as_os_str().is_empty() {
        return if kind.is_dir() { Ok(0) } else { Err(refused("has no name")) };
    }
    let at = part.join(&path);
    let (parent, file) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
    let folder = folder(root, parent).at("create the folder of", &at)?;
    let target = entry.link_name_bytes().map(|target| PathBuf::from(OsStr::from_bytes(&target)));
    match kind {
        EntryType::Directory => folder_in(&folder, file).at("create", &at).map(|_| 0),
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY;
            // An entry that comes twice replaces the first.
            let _ = rustix::fs::unlinkat(&folder, file, AtFlags::empty());
            let mode = FILE_MODE | (entry.header().mode().unwrap_or(0) & 0o110);
            let mut file = File::from(beneath(&folder, Path::new(file), flags, mode).at("create", &at)?);
            let mut buffer = vec![0; BUFFER];
            let Some(sparse) = sparse else { return space.write(entry, &mut file, &mut buffer, &at, meter) };
            let size = sparse.size().map_err(refused)?;
            if size > space.left() {
                return Err(ImportError::TooSmall { needed: size, available: space.left() });
            }
            let stored = entry.size();
            let extents = read_map(entry, stored, size, refused)?;
            file.set_len(size).at("set the size of", &at)?;
            for Extent { offset, length } in extents {
                file.seek(SeekFrom::Start(offset)).at("write", &at)?;
                // The next header cannot be read if the archive ends in this extent.
                space.write(&mut entry.by_ref().take(length), &mut file, &mut buffer, &at, meter)?;
            }
            Ok(size)
        }
        EntryType::Symlink => {
            let target = target.ok_or_else(|| refused("has no target"))?;
            if target.is_absolute() || inside(&parent.join(&target)).is_none() {
                return Err(refused("is a link that leads outside"));
            }
            symlinkat(&target, &folder, file).at("create link", &at).map(|()| 0)
        }
        EntryType::Link => {
            let target = target.as_deref().and_then(inside).ok_or_else(|| refused("is a link that leads outside"))?;
            let (parent, linked) = (target.parent().unwrap_or(Path::new("")), target.file_name().unwrap_or_default());
            let from = beneath(root, parent, OFlags::DIRECTORY | OFlags::RDONLY, 0).at("open the target of", &at)?;
            linkat(&from, linked, &folder, file, AtFlags::empty()).at("create link", &at).map(|()| 0)
        }
        _ => Err(refused("is neither file, folder nor link")),
    }
}

/// Returns a path without `.` and with `..` resolved, or nothing if it leads outside.
fn inside(path: &Path) -> Option<PathBuf> {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => result.push(name),
            Component::CurDir => {}
            Component::ParentDir if result.pop() => {}
            _ => return None,
        }
    }
    (result.components().count() <= DEPTH).then_some(result)
}

/// Opens a folder beneath the root, and creates it and those above it.
fn folder(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let mut folder = root.try_clone()?;
    for name in path.components() {
        folder = folder_in(&folder, name.as_os_str())?;
    }
    Ok(folder)
}

fn folder_in(folder: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    match mkdirat(folder, name, Mode::from_raw_mode(FOLDER_MODE)) {
        Ok(()) | Err(Errno::EXIST) => beneath(folder, Path::new(name), OFlags::DIRECTORY | OFlags::RDONLY, 0),
        Err(error) => Err(error.into()),
    }
}

fn beneath(folder: impl std::os::fd::AsFd, path: &Path, flags: OFlags, mode: u32) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = if path.is_absolute() {
        ResolveFlags::NO_MAGICLINKS
    } else {
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS
    };
    Ok(openat2(folder, path, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::from_raw_mode(mode), resolve)?)
}

/// Moves the unpacked files to their places. What has the same name there is of an earlier attempt, and is removed.
fn publish(data: &Path, part: &Path) -> Result<(), ImportError> {
    for entry in fs::read_dir(part).at("read", part)? {
        let from = entry.at("read", part)?.path();
        let name = from.file_name().unwrap_or_default();
        if name == LOST || name == PART {
            continue;
        }
        let to = data.join(name);
        match renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE) {
            Err(Errno::NOENT) => fs::rename(&from, &to).at("move", &from)?,
            other => other.at("move", &from)?,
        }
    }
    fs::remove_dir_all(part).at("remove", part)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("importer-archive-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn unpack(stream: &mut dyn Read, data: &Path) -> Result<u64, ImportError> {
        unpack_within(stream, data, None)
    }

    fn unpack_within(stream: &mut dyn Read, data: &Path, limit: Option<u64>) -> Result<u64, ImportError> {
        let unpacked = Unpacked::new(data, limit)?;
        let size = unpacked.fill(stream, &Meter::default())?;
        unpacked.publish()?;
        Ok(size)
    }

    /// Builds an archive without the checks of the library.
    fn archive(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(vec![]);
        for (name, kind, content) in entries {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            let link = kind.is_symlink() || kind.is_hard_link();
            header.set_size(if link { 0 } else { content.len() as u64 });
            let raw = header.as_old_mut();
            raw.name[..name.len()].copy_from_slice(name.as_bytes());
            if link {
                raw.linkname[..content.len()].copy_from_slice(content.as_bytes());
            }
            header.set_cksum();
            builder.append(&header, if link { &[] } else { content.as_bytes() }).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn files_folders_and_inner_links_are_unpacked_and_the_rest_of_the_claim_stays() {
        let scratch = Scratch::new("good");
        let data = &scratch.0;
        fs::create_dir_all(data.join(".archive.part/old")).unwrap();
        fs::create_dir_all(data.join("lost+found")).unwrap();
        fs::create_dir_all(data.join("a/former")).unwrap();
        fs::write(data.join("mine"), "kept").unwrap();
        let bytes = archive(&[
            ("./", EntryType::Directory, ""),
            ("a/", EntryType::Directory, ""),
            ("a/b/file", EntryType::Regular, "content"),
            ("a/link", EntryType::Symlink, "b/file"),
            ("hard", EntryType::Link, "a/b/file"),
            ("lost+found/", EntryType::Directory, ""),
        ]);
        assert_eq!(unpack(&mut &bytes[..], data).unwrap(), 7);
        assert_eq!(fs::read_to_string(data.join("a/link")).unwrap(), "content");
        assert_eq!(fs::read_to_string(data.join("hard")).unwrap(), "content");
        assert_eq!(fs::read_to_string(data.join("mine")).unwrap(), "kept");
        assert!(!data.join(PART).exists() && data.join("lost+found").exists());
        // An interrupted move is repeated as a whole.
        unpack(&mut &bytes[..], data).unwrap();
        assert!(!data.join("a/former").exists() && !data.join(PART).exists());
    }

    #[test]
    fn entries_that_leave_the_claim_are_refused() {
        for entries in [
            &[("../out", EntryType::Regular, "x")][..],
            &[("/out", EntryType::Regular, "x")],
            &[("a/../../out", EntryType::Regular, "x")],
            &[("a", EntryType::Symlink, "/etc")],
            &[("a/b", EntryType::Symlink, "../../etc")],
            &[("a", EntryType::Link, "../out")],
            &[("pipe", EntryType::Fifo, "")],
            &[("device", EntryType::Block, "")],
        ] {
            let scratch = Scratch::new("bad");
            let error = unpack(&mut &archive(entries)[..], &scratch.0).unwrap_err();
            assert!(matches!(error, ImportError::Refused(_)), "{entries:?}: {error}");
            assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
        }
        // Through a link.
        let scratch = Scratch::new("through");
        let bytes = archive(&[("a", EntryType::Symlink, "b"), ("a/file", EntryType::Regular, "x")]);
        assert!(unpack(&mut &bytes[..], &scratch.0).is_err());
    }

    #[test]
    fn files_take_no_more_than_the_claim() {
        // The file system may have the space of other claims.
        let bytes = archive(&[("a", EntryType::Regular, "content"), ("b", EntryType::Regular, "hello")]);
        for (limit, expected) in [
            (12, Ok(12)),
            (11, Err("no space after 7 bytes, the claim had space for 11")),
            (6, Err("no space after 0 bytes, the claim had space for 6")),
        ] {
            let scratch = Scratch::new("limit");
            match (unpack_within(&mut &bytes[..], &scratch.0, Some(limit)), expected) {
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{limit}: {error}");
                    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0, "{limit}");
                }
                (found, expected) => assert_eq!(found.ok(), expected.ok(), "{limit}"),
            }
        }
    }

    /// Builds an entry as bsdtar does for a file with holes.
    fn sparse_archive(extensions: &[(&str, &str)], map: &str, data: &str) -> Vec<u8> {
        let mut content = map.as_bytes().to_vec();
        content.resize(content.len().next_multiple_of(512), 0);
        content.extend_from_slice(data.as_bytes());
        let mut builder = tar::Builder::new(vec![]);
        builder.append_pax_extensions(extensions.iter().map(|(key, value)| (*key, value.as_bytes()))).unwrap();
        let mut header = tar::Header::new_ustar();
        header.set_path("GNUSparseFile.0/disk.img").unwrap();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, &content[..]).unwrap();
        builder.into_inner().unwrap()
    }

    fn form<'a>(name: &'a str, size: &'a str) -> [(&'static str, &'a str); 4] {
        [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.name", name), ("GNU.sparse.realsize", size)]
    }

    #[test]
    fn sparse_files_are_expanded_and_keep_their_holes() {
        const SIZE: usize = 8 << 20;
        let block = "x".repeat(512);
        let end = (SIZE - 3).to_string();
        for (map, data, expected) in [
            (
                format!("2\n4194304\n512\n{end}\n3\n"),
                format!("{block}end"),
                [(4_194_304, &block[..]), (SIZE - 3, "end")],
            ),
            (format!("2\n0\n512\n{SIZE}\n0\n"), block.clone(), [(0, &block[..]), (SIZE, "")]),
            (format!("2\n0\n0\n{SIZE}\n0\n"), String::new(), [(0, ""), (SIZE, "")]),
        ] {
            let scratch = Scratch::new("sparse");
            let bytes = sparse_archive(&form("./a/disk.img", &SIZE.to_string()), &map, &data);
            assert_eq!(unpack(&mut &bytes[..], &scratch.0).unwrap(), SIZE as u64, "{map:?}");
            let mut content = vec![0; SIZE];
            for (offset, text) in expected {
                content[offset..offset + text.len()].copy_from_slice(text.as_bytes());
            }
            let path = scratch.0.join("a/disk.img");
            assert!(fs::read(&path).unwrap() == content, "{map:?}");
            assert!(fs::metadata(&path).unwrap().blocks() * 512 < SIZE as u64, "{map:?}");
            assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1);
        }
    }

    #[test]
    fn sparse_files_that_cannot_be_expanded_are_refused_by_name() {
        let map = "1\n0\n3\n";
        for (extensions, map, expected) in [
            (&form("../out", "3")[..], map, "entry ../out of the archive is outside"),
            (&form("/out", "3"), map, "entry /out of the archive is outside"),
            (&form("disk.img", "2"), map, "entry disk.img of the archive is a sparse file whose extents"),
            (&form("disk.img", "x"), map, "entry disk.img of the archive is a sparse file without a valid size"),
            (&form("disk.img", "3"), "1\n0\n", "entry disk.img of the archive is a sparse file with an invalid map"),
            (&form("disk.img", "18446744073709551615"), map, "DataVolume too small"),
            // 0.1 and 0.0.
            (
                &[("GNU.sparse.size", "3"), ("GNU.sparse.map", "0,3"), ("GNU.sparse.name", "disk.img")],
                "",
                "entry disk.img of the archive is a sparse file of an unsupported form",
            ),
            (&[("GNU.sparse.size", "3"), ("GNU.sparse.numblocks", "1")], "", "create the archive without --sparse"),
        ] {
            let scratch = Scratch::new("sparse-bad");
            let error = unpack(&mut &sparse_archive(extensions, map, "abc")[..], &scratch.0).unwrap_err();
            assert!(error.to_string().contains(expected), "{expected}: {error}");
            assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
        }
        // An archive that ends within the data.
        let scratch = Scratch::new("sparse-cut");
        let bytes = sparse_archive(&form("disk.img", "8192"), "2\n0\n1024\n4096\n512\n", &"x".repeat(1536));
        let data = bytes.windows(3).position(|text| text == b"xxx").unwrap();
        assert!(unpack(&mut &bytes[..data + 700], &scratch.0).is_err());
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
    }

    #[test]
    fn long_headers_are_refused() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let mut stream = header.as_bytes().chain(io::repeat(b'a'));
        let scratch = Scratch::new("long");
        let error = unpack(&mut stream, &scratch.0).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
    }
}
