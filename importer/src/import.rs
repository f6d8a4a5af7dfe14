//! Carries a task out.
//!
//! ```text
//!   registry ─┐                       ┌ raw ─────────────────────────────────▶ disk
//!   claim ────┼─▶ bytes ─▶ first 512 ─┼ other format ─▶ checked ─▶ qemu-img ─▶ disk
//!   http ─────┘     ▲        │        └ archive ─▶ files
//!                   └────────┘ compressed
//! ```
//!
//! An image of another format that is downloaded goes to the scratch space and is converted at the same time, unless it is compressed.
//! The disk becomes whole after the checksum of the downloaded bytes, which are those that are converted, was compared.

use std::{
    fs::{self, File},
    io::{Cursor, Read},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use crate::{
    archive,
    checksum::{Checked, Checksum},
    compression::{Compression, Stream, read_prefix},
    disk::{Disk, capacity, open_file, remove_former, remove_incomplete},
    error::{At, ImportError},
    format::{self, Format, FormatError, ReadAt},
    http::{Client, download},
    meter::Meter,
    nbd,
    places::Places,
    qemu,
    spool::Spool,
    task::{self, ContentType, HttpSource, Source, Target, Task},
};

/// Folder of the disk in an image.
const IMAGE_FOLDER: &str = "disk";
const SOCKET: &str = "nbd.sock";
/// Bytes of the scratch space beside the image.
const SCRATCH_MARGIN: u64 = 32 << 20;

/// Fills the claim. Returns the size of the disk.
pub async fn import(task: Task, places: Places, meter: Arc<Meter>) -> Result<u64, ImportError> {
    if task.source == (Source::Existing {}) {
        return Ok(0);
    }
    check(&task)?;
    let watched = meter.clone();
    let stall = places.stall;
    let work = async {
        let import = Import { places, meter };
        let http = match &task.source {
            Source::Http(http) => Some(import.request(http).await?),
            _ => None,
        };
        let work = tokio::task::spawn_blocking(move || {
            let data = (task.target == Target::Filesystem).then(|| import.places.data.clone());
            data.as_deref().map_or(Ok(()), remove_incomplete)?;
            let disk = data.as_deref().filter(|_| task.content_type == ContentType::Kubevirt);
            disk.map_or(Ok(()), remove_former)?;
            let result = match http {
                Some((body, length, url)) => import.fill_from_download(&task, body, length, &url),
                None => import.fill(&task),
            };
            if let (Err(_), Some(data)) = (&result, data) {
                remove_incomplete(&data)?;
            }
            result
        });
        work.await.unwrap_or_else(|error| Err(ImportError::Task(error.to_string())))
    };
    tokio::select! {
        result = work => result,
        () = watched.stalled(stall) => Err(ImportError::Stalled(stall.as_secs())),
    }
}

/// Rejects what is not supported.
fn check(task: &Task) -> Result<(), ImportError> {
    let rejected = |reason: &str| Err(ImportError::Task(reason.to_owned()));
    if task.content_type == ContentType::Kubevirt {
        return Ok(());
    }
    match (&task.source, task.target) {
        (_, Target::Block) => rejected("content type archive needs a claim with a file system"),
        (Source::Http(_), Target::Filesystem) => Ok(()),
        _ => rejected("content type archive needs an HTTP source"),
    }
}

type Download = Checked<crate::http::Body>;

struct Import {
    places: Places,
    meter: Arc<Meter>,
}

impl Import {
    async fn request(&self, source: &HttpSource) -> Result<(Download, Option<u64>, String), ImportError> {
        let checksum = source.checksum.as_deref().map(Checksum::parse).transpose()?;
        let client = Arc::new(Client::new(source, &self.places)?);
        let body = download(client.clone(), self.meter.clone()).await?;
        let length = body.length;
        Ok((Checked::new(body, checksum), length, client.url().to_owned()))
    }

    fn fill(&self, task: &Task) -> Result<u64, ImportError> {
        match task.source {
            Source::Registry {} => self.fill_from_registry(task),
            Source::Claim {} => self.fill_from_claim(task),
            Source::Existing {} => Ok(0),
            Source::Blank {} | Source::Http(_) => {
                let mut disk = self.disk(task)?;
                disk.reserve(task.size.unwrap_or(u64::MAX).min(disk.capacity), &self.meter)?;
                disk.finish(&self.meter)
            }
        }
    }

    fn disk(&self, task: &Task) -> Result<Disk, ImportError> {
        Disk::prepare(task, &self.places.data, &self.places.device, &self.meter)
    }

    fn fill_from_registry(&self, task: &Task) -> Result<u64, ImportError> {
        let path = only_file(&self.places.image.join(IMAGE_FOLDER))?;
        let (file, size) = open_file(&path)?;
        if size == 0 {
            return Err(ImportError::Content("the disk in the image is empty".to_owned()));
        }
        let stream = Stream::new(&file).at("read", &path)?;
        if Compression::find(&stream.prefix).is_some() {
            self.meter.expect(size);
            let counted = Counted { inner: stream.all, meter: &self.meter };
            let stream = Stream::new(counted).at("read", &path)?;
            let disk = self.fill_compressed(task, stream)?;
            return disk.finish(&self.meter);
        }
        let format = find(&stream.prefix)?;
        drop(stream);
        if format == Format::Raw {
            let mut disk = self.disk(task)?;
            disk.copy(&file, size, &path, &self.meter)?;
            return disk.finish(&self.meter);
        }
        let disk = self.convert_file(task, format, &file)?;
        disk.finish(&self.meter)
    }

    /// Disks in claims are raw.
    fn fill_from_claim(&self, task: &Task) -> Result<u64, ImportError> {
        let device = &self.places.source_device;
        let path = if device.exists() { device.clone() } else { self.places.source.join(task::DISK_FILE) };
        let (file, size) = open_file(&path)?;
        let mut disk = self.disk(task)?;
        disk.copy(&file, size, &path, &self.meter)?;
        disk.finish(&self.meter)
    }

    fn fill_from_download(
        &self,
        task: &Task,
        mut body: Download,
        length: Option<u64>,
        url: &str,
    ) -> Result<u64, ImportError> {
        let prefix = read_prefix(&mut body).map_err(ImportError::of_stream)?;
        if prefix.is_empty() {
            return Err(ImportError::Content(format!("{url} is empty")));
        }
        if task.content_type == ContentType::Archive {
            return self.unpack_download(task, prefix, body, url);
        }
        let compressed = Compression::find(&prefix).is_some();
        let format = if compressed { Format::Raw } else { find(&prefix)? };
        if format != Format::Raw
            && let Some(length) = length
        {
            return self.convert_download(task, format, prefix, body, length, url)?.finish(&self.meter);
        }
        let stream = Stream::with_prefix(prefix, &mut body);
        let disk = if compressed {
            self.fill_compressed(task, stream)?
        } else {
            self.fill_plain(task, format, stream, length)?
        };
        body.verify(url)?;
        disk.finish(&self.meter)
    }

    fn unpack_download(&self, task: &Task, prefix: Vec<u8>, mut body: Download, url: &str) -> Result<u64, ImportError> {
        let unpacked = archive::Unpacked::new(&self.places.data, task.overhead_free)?;
        let mut stream = Stream::with_prefix(prefix, &mut body).decompressed().map_err(ImportError::of_stream)?;
        let size = unpacked.fill(&mut stream.all, &self.meter)?;
        drop(stream);
        body.verify(url)?;
        unpacked.publish()?;
        Ok(size)
    }

    fn fill_compressed(&self, task: &Task, stream: Stream<'_>) -> Result<Disk, ImportError> {
        let stream = stream.decompressed().map_err(ImportError::of_stream)?;
        if Compression::find(&stream.prefix).is_some() {
            return Err(ImportError::Refused("it is compressed twice".to_owned()));
        }
        let format = find(&stream.prefix)?;
        self.fill_plain(task, format, stream, None)
    }

    /// Fills the disk from an image that is not compressed.
    fn fill_plain(
        &self,
        task: &Task,
        format: Format,
        mut stream: Stream<'_>,
        length: Option<u64>,
    ) -> Result<Disk, ImportError> {
        if format == Format::Raw {
            let mut disk = self.disk(task)?;
            disk.reserve(length.unwrap_or(0), &self.meter)?;
            disk.fill(&mut stream.all, &self.meter)?;
            return Ok(disk);
        }
        let spool = Spool::create(&self.places.scratch)?;
        let limit = self.spool_limit(task)?;
        spool.fill(&mut stream.all, limit, &self.meter)?;
        self.convert_file(task, format, spool.file())
    }

    fn spool_limit(&self, task: &Task) -> Result<u64, ImportError> {
        let capacity = capacity(task, &self.places.data, &self.places.device)?;
        // The size of a disk in a file system is less than the request.
        Ok(spool_limit(capacity, task.overhead_free.or(task.size)))
    }

    fn convert_file(&self, task: &Task, format: Format, file: &File) -> Result<Disk, ImportError> {
        verify(format, file)?;
        let mut disk = self.disk(task)?;
        qemu::convert(&self.places.qemu_img, &qemu::Image::of_file(format, file), &mut disk, &self.meter)?;
        Ok(disk)
    }

    /// Converts an image while it is downloaded.
    fn convert_download(
        &self,
        task: &Task,
        format: Format,
        prefix: Vec<u8>,
        body: Download,
        length: u64,
        url: &str,
    ) -> Result<Disk, ImportError> {
        let spool = Arc::new(Spool::create(&self.places.scratch)?);
        let writer = {
            let (spool, meter, limit) = (spool.clone(), self.meter.clone(), self.spool_limit(task)?);
            thread::spawn(move || {
                let mut all = Cursor::new(prefix).chain(body);
                spool.fill(&mut all, limit, &meter)?;
                Ok(all.into_inner().1)
            })
        };
        let converted = self.convert_spool(task, format, &spool, length);
        let refused =
            matches!(converted, Err(ImportError::Refused(_) | ImportError::TooSmall { .. } | ImportError::Full { .. }));
        if refused {
            // The rest of the download is of no use.
            return converted;
        }
        // If it failed, the conversion failed for that reason.
        let body = writer.join().unwrap_or_else(|_| Err(ImportError::Task("the download ended".to_owned())))?;
        body.verify(url)?;
        converted
    }

    fn convert_spool(&self, task: &Task, format: Format, spool: &Arc<Spool>, length: u64) -> Result<Disk, ImportError> {
        verify(format, &**spool)?;
        let socket = self.places.scratch.join(SOCKET);
        let server = nbd::Server::start(&socket, spool.clone(), length, self.meter.clone()).at("listen on", &socket)?;
        let mut disk = self.disk(task)?;
        qemu::convert(&self.places.qemu_img, &qemu::Image::of_socket(format, server.socket()), &mut disk, &self.meter)?;
        Ok(disk)
    }
}

/// Returns the largest size of an image whose disk the claim can hold: an eighth more, for tables. The scratch space has room for it,
/// unless the device is larger than its claim requests.
fn spool_limit(capacity: u64, request: Option<u64>) -> u64 {
    let largest = capacity.saturating_add(capacity / 8).saturating_add(64 << 20);
    request.map_or(largest, |request| largest.min(task::scratch_limit(request).saturating_sub(SCRATCH_MARGIN)))
}

fn find(prefix: &[u8]) -> Result<Format, ImportError> {
    format::find(prefix).map_err(refuse)
}

fn verify(format: Format, image: &impl ReadAt) -> Result<(), ImportError> {
    format::check(format, image).map_err(refuse)
}

fn refuse(error: FormatError) -> ImportError {
    match error {
        FormatError::Io(error) => ImportError::of_stream(error),
        error => ImportError::Refused(error.to_string()),
    }
}

/// Returns the only file of a folder.
fn only_file(folder: &Path) -> Result<PathBuf, ImportError> {
    let wrong = |found: &str| {
        ImportError::Content(format!(
            "the image must contain exactly one disk in /{IMAGE_FOLDER}, for example /{IMAGE_FOLDER}/disk.img, but {found}"
        ))
    };
    let entries = fs::read_dir(folder).map_err(|error| wrong(&format!("the folder cannot be read: {error}")))?;
    let mut files = Vec::new();
    for entry in entries.take(1000) {
        let entry = entry.at("read", folder)?;
        if entry.file_type().at("read", entry.path())?.is_file() {
            files.push(entry.path());
        }
    }
    match (files.pop(), files.len()) {
        (Some(file), 0) => Ok(file),
        (None, _) => Err(wrong("it has no file there")),
        (Some(_), more) => Err(wrong(&format!("it has {} files there", more + 1))),
    }
}

/// A reader that counts for the progress.
struct Counted<'a, R> {
    inner: R,
    meter: &'a Meter,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.meter.add(count as u64);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_that_is_accepted_fits_into_the_scratch_space() {
        const GIB: u64 = 1 << 30;
        for (capacity, request, expected) in [
            (8 * GIB, Some(8 * GIB), 9 * GIB + (64 << 20)),
            (7 * GIB, Some(8 * GIB), 7 * GIB + 7 * GIB / 8 + (64 << 20)),
            // A device that is larger than its claim requests.
            (16 * GIB, Some(8 * GIB), 9 * GIB + (224 << 20)),
            (8 * GIB, None, 9 * GIB + (64 << 20)),
        ] {
            let limit = spool_limit(capacity, request);
            assert_eq!(limit, expected, "{capacity} {request:?}");
            assert!(request.is_none_or(|request| limit < task::scratch_limit(request)), "{capacity} {request:?}");
        }
    }
}
