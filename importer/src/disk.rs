//! The disk that an import writes.
//!
//! ```text
//! file:   remove disk.img and .disk.img.part ─▶ create the latter ─▶ write ─▶ fsync ─▶ rename to disk.img ─▶ fsync of the folder
//! device: zero all of it ─▶ fsync ─▶ write from 1 MiB on ─▶ fsync ─▶ write the first MiB ─▶ fsync
//! ```
//!
//! The checksum is compared before the last step. A disk that was left at any step does not look whole: the file has another name, the device has no first sectors.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FallocateFlags, OFlags, fallocate},
    io::Errno,
};

use crate::{
    error::{At, ImportError},
    meter::Meter,
    task::{DISK_FILE, Target, Task},
};

/// Name of an incomplete disk.
const PART: &str = ".disk.img.part";
/// Bytes of a device that are written last.
pub(crate) const HEAD: u64 = 1 << 20;
/// Sizes of disks are multiples of a sector.
const SECTOR: u64 = 512;
/// Bytes that are zeroed by one call.
const ZERO_STEP: u64 = 256 << 20;
const PAGE: usize = 4096;
const ZEROS: [u8; PAGE] = [0; PAGE];
const BUFFER: usize = 1 << 20;
/// Group and user may write.
const MODE: u32 = 0o660;

/// The disk that an import writes. All bytes that were not written are zero.
pub(crate) struct Disk {
    pub(crate) file: File,
    kind: Kind,
    /// Largest size of the disk.
    pub(crate) capacity: u64,
    /// Size that the disk shall have at least.
    wanted: u64,
    preallocation: bool,
    /// First bytes of a device.
    head: Vec<u8>,
    /// End of the bytes that are or will be written.
    end: u64,
}

enum Kind {
    /// In this folder.
    File(PathBuf),
    Device(PathBuf),
}

/// Removes an incomplete disk of an earlier attempt.
pub(crate) fn remove_incomplete(data: &Path) -> Result<(), ImportError> {
    remove(data.join(PART), "remove the incomplete disk")
}

/// Removes the disk of an attempt whose success nobody has seen. The new one needs its space.
pub(crate) fn remove_former(data: &Path) -> Result<(), ImportError> {
    remove(data.join(DISK_FILE), "remove the former disk")
}

fn remove(path: PathBuf, attempt: &'static str) -> Result<(), ImportError> {
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at(attempt, path),
        _ => Ok(()),
    }
}

/// Returns the largest size of a disk in a claim.
pub(crate) fn capacity(task: &Task, data: &Path, device: &Path) -> Result<u64, ImportError> {
    if task.target == Target::Block {
        return File::open(device).and_then(|mut file| file.seek(SeekFrom::End(0))).at("read the size of", device);
    }
    let free = rustix::fs::statvfs(data).at("read the free space of", data)?;
    let free = free.f_bavail.saturating_mul(free.f_frsize);
    Ok(task.overhead_free.map_or(free, |limit| limit.min(free)) / SECTOR * SECTOR)
}

impl Disk {
    /// Prepares an empty disk.
    pub(crate) fn prepare(task: &Task, data: &Path, device: &Path, meter: &Meter) -> Result<Self, ImportError> {
        match task.target {
            Target::Filesystem => Self::prepare_file(task, data),
            Target::Block => Self::prepare_device(task, device, meter),
        }
    }

    fn prepare_file(task: &Task, data: &Path) -> Result<Self, ImportError> {
        let part = data.join(PART);
        let capacity = capacity(task, data, Path::new(""))?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(MODE);
        let file = options.open(&part).at("create the disk", &part)?;
        // The process' mask may have removed bits.
        file.set_permissions(fs::Permissions::from_mode(MODE)).at("set the mode of", &part)?;
        let wanted = task.size.unwrap_or(0).min(capacity);
        let kind = Kind::File(data.to_owned());
        Ok(Self { file, kind, capacity, wanted, preallocation: task.preallocation, head: vec![], end: 0 })
    }

    fn prepare_device(task: &Task, device: &Path, meter: &Meter) -> Result<Self, ImportError> {
        let file = OpenOptions::new().read(true).write(true).open(device).map_err(|error| denied(device, error))?;
        let capacity = capacity(task, Path::new(""), device)?;
        let disk = Self {
            file,
            kind: Kind::Device(device.to_owned()),
            capacity,
            wanted: 0,
            preallocation: task.preallocation,
            head: vec![],
            end: 0,
        };
        disk.zero(0, capacity.min(HEAD), meter).at("clear", device)?;
        disk.file.sync_all().at("write", device)?;
        disk.zero(HEAD, capacity, meter).at("clear", device)?;
        disk.file.sync_all().at("write", device)?;
        Ok(disk)
    }

    /// Zeroes a part of a device: discards its blocks if they read as zeros then and need not stay allocated, or else writes.
    fn zero(&self, from: u64, to: u64, meter: &Meter) -> io::Result<()> {
        let mut discard = !self.preallocation;
        let mut at = from;
        while at < to {
            let size = ZERO_STEP.min(to - at);
            let flags = if discard { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
            match fallocate(&self.file, flags | FallocateFlags::KEEP_SIZE, at, size) {
                Ok(()) => {
                    at += size;
                    meter.moved();
                }
                Err(Errno::INTR) => {}
                Err(_) if discard => discard = false,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sets the size of a disk file before it is written. Rejects a disk that the claim cannot hold.
    pub(crate) fn reserve(&mut self, size: u64, meter: &Meter) -> Result<(), ImportError> {
        if size > self.capacity {
            return Err(ImportError::TooSmall { needed: size, available: self.capacity });
        }
        self.end = self.end.max(size);
        let Kind::File(data) = &self.kind else { return Ok(()) };
        let size = size.next_multiple_of(SECTOR).max(self.wanted);
        self.file.set_len(size).at("set the size of the disk in", data)?;
        self.allocate(size, false, meter)
    }

    /// Allocates the blocks of a disk file, of which parts are written or none.
    fn allocate(&self, size: u64, is_written: bool, meter: &Meter) -> Result<(), ImportError> {
        let Kind::File(data) = &self.kind else { return Ok(()) };
        if !self.preallocation || size == 0 {
            return Ok(());
        }
        match fallocate(&self.file, FallocateFlags::empty(), 0, size) {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC) => Err(ImportError::TooSmall { needed: size, available: self.capacity }),
            // NFS before version 4.2, for example.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.fill_holes(size, is_written, meter),
            Err(error) => Err(error).at("allocate the disk in", data),
        }
    }

    /// Writes zeros into the holes of a disk file. A file system without `fallocate` may not tell them.
    fn fill_holes(&self, size: u64, is_written: bool, meter: &Meter) -> Result<(), ImportError> {
        let buffer = vec![0; BUFFER];
        let mut at = 0;
        while at < size {
            let (from, to) = if is_written { next_data(&self.file, at, size) } else { (size, size) };
            while at < from {
                let length = (from - at).min(BUFFER as u64);
                let zeros = &buffer[..usize::try_from(length).unwrap_or(BUFFER)];
                self.file.write_all_at(zeros, at).map_err(|error| self.failed(error, at))?;
                at += length;
                meter.moved();
            }
            at = to;
        }
        Ok(())
    }

    /// Writes bytes. Pages of zeros are left out.
    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), ImportError> {
        let end = at.saturating_add(bytes.len() as u64);
        if end > self.capacity {
            return Err(ImportError::Full { written: at, available: self.capacity });
        }
        self.end = self.end.max(end);
        let held = if matches!(self.kind, Kind::Device(_)) && at < HEAD {
            let held = usize::try_from(HEAD - at).unwrap_or(usize::MAX).min(bytes.len());
            let from = usize::try_from(at).unwrap_or(usize::MAX);
            self.head.resize(self.head.len().max(from + held), 0);
            self.head[from..from + held].copy_from_slice(&bytes[..held]);
            held
        } else {
            0
        };
        let (mut at, mut rest) = (at + held as u64, &bytes[held..]);
        while !rest.is_empty() {
            let (data, length) = run(rest);
            if data {
                self.file.write_all_at(&rest[..length], at).map_err(|error| self.failed(error, at))?;
            }
            at += length as u64;
            rest = &rest[length..];
        }
        Ok(())
    }

    fn failed(&self, source: io::Error, written: u64) -> ImportError {
        if source.kind() == io::ErrorKind::StorageFull || source.kind() == io::ErrorKind::QuotaExceeded {
            return ImportError::Full { written, available: self.capacity };
        }
        ImportError::Io { attempt: "write", path: self.path(), source }
    }

    /// Writes a whole stream.
    pub(crate) fn fill(&mut self, stream: &mut dyn Read, meter: &Meter) -> Result<(), ImportError> {
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        loop {
            let mut filled = 0;
            while filled < BUFFER {
                match stream.read(&mut buffer[filled..]) {
                    Ok(0) => break,
                    Ok(count) => filled += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(ImportError::of_stream(error)),
                }
            }
            if filled == 0 {
                return Ok(());
            }
            self.write(at, &buffer[..filled])?;
            at += filled as u64;
            meter.moved();
        }
    }

    /// Copies a file or device, without the holes of a file.
    pub(crate) fn copy(&mut self, source: &File, size: u64, path: &Path, meter: &Meter) -> Result<(), ImportError> {
        meter.expect(size);
        self.reserve(size, meter)?;
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        while at < size {
            let (from, to) = next_data(source, at, size);
            meter.add(from - at);
            at = from;
            while at < to {
                let length = (to - at).min(BUFFER as u64);
                let part = &mut buffer[..usize::try_from(length).unwrap_or(BUFFER)];
                source.read_exact_at(part, at).at("read", path)?;
                self.write(at, part)?;
                at += length;
                meter.add(length);
            }
        }
        Ok(())
    }

    /// Makes the disk whole. Returns its size.
    pub(crate) fn finish(self, meter: &Meter) -> Result<u64, ImportError> {
        let path = self.path();
        match &self.kind {
            Kind::File(data) => {
                let size = self.end.next_multiple_of(SECTOR).max(self.wanted);
                self.file.set_len(size).at("set the size of", &path)?;
                self.allocate(size, true, meter)?;
                self.file.sync_all().map_err(|error| self.failed(error, size))?;
                fs::rename(&path, data.join(DISK_FILE)).at("rename", &path)?;
                File::open(data).and_then(|folder| folder.sync_all()).at("write", data)?;
                Ok(size)
            }
            Kind::Device(_) => {
                self.file.sync_all().at("write", &path)?;
                self.file.write_all_at(&self.head, 0).at("write the first MiB of", &path)?;
                self.file.sync_all().at("write", &path)?;
                Ok(self.capacity)
            }
        }
    }

    /// Returns the path of the disk while it is incomplete.
    pub(crate) fn path(&self) -> PathBuf {
        match &self.kind {
            Kind::File(data) => data.join(PART),
            Kind::Device(device) => device.clone(),
        }
    }

    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind, Kind::Device(_))
    }
}

/// Returns the length of the run of pages at the start that hold data, or that are zero.
fn run(bytes: &[u8]) -> (bool, usize) {
    let is_data = |page: &[u8]| page != &ZEROS[..page.len()];
    let mut pages = bytes.chunks(PAGE);
    let Some(first) = pages.next() else { return (false, 0) };
    let data = is_data(first);
    let more: usize = pages.take_while(|page| is_data(page) == data).map(<[u8]>::len).sum();
    (data, first.len() + more)
}

/// Returns the next part of a file that is no hole. A device has no holes.
fn next_data(file: &File, at: u64, size: u64) -> (u64, u64) {
    let from = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(from) => from.min(size),
        Err(Errno::NXIO) => return (size, size),
        Err(_) => return (at, size),
    };
    let to = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(from)).unwrap_or(size);
    (from, to.clamp(from, size))
}

/// Opens a file that is not followed if it is a link.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64), ImportError> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| denied(path, error))?;
    let size = file.seek(SeekFrom::End(0)).at("read the size of", path)?;
    file.rewind().at("read", path)?;
    Ok((file, size))
}

/// Names the owner of a file or device that cannot be opened.
fn denied(path: &Path, source: io::Error) -> ImportError {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let Some(meta) = fs::metadata(path).ok().filter(|_| source.kind() == io::ErrorKind::PermissionDenied) else {
        return ImportError::Io { attempt: "open", path: path.to_owned(), source };
    };
    let remedy = if meta.file_type().is_block_device() {
        "give devices to the user of pods by the setting device_ownership_from_security_context of the container runtime"
    } else {
        "make it readable for that group"
    };
    ImportError::Denied {
        path: path.to_owned(),
        owner: meta.uid(),
        group: meta.gid(),
        mode: meta.mode() & 0o777,
        user: rustix::process::geteuid().as_raw(),
        remedy,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// As on storage without `fallocate`, before the disk is written and after.
    #[test]
    fn holes_are_filled_with_zeros_and_written_parts_stay() {
        const SIZE: u64 = 5 << 20;
        for (is_written, kept) in [(true, b"data".as_slice()), (false, &[0; 4])] {
            let data = std::env::temp_dir().join(format!("ferrovirt-holes-{}-{is_written}", std::process::id()));
            fs::create_dir_all(&data).unwrap();
            let path = data.join(PART);
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
            file.set_len(SIZE).unwrap();
            file.write_all_at(b"data", 2 << 20).unwrap();
            let kind = Kind::File(data.clone());
            let disk = Disk { file, kind, capacity: SIZE, wanted: SIZE, preallocation: true, head: vec![], end: SIZE };
            disk.fill_holes(SIZE, is_written, &Meter::default()).unwrap();
            disk.file.sync_all().unwrap();
            let mut expected = vec![0; SIZE as usize];
            expected[2 << 20..(2 << 20) + 4].copy_from_slice(kept);
            assert!(fs::read(&path).unwrap() == expected, "{is_written}");
            assert!(disk.file.metadata().unwrap().blocks() * 512 >= SIZE, "{is_written}");
            fs::remove_dir_all(&data).unwrap();
        }
    }
}
