//! qemu-img, which converts images.
//!
//! It gets formats and files by name and opens nothing else: the format is given, the backing file is switched off, and files are
//! descriptors of this process, so that a file that was checked is the file that is converted.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    os::{fd::AsRawFd, unix::fs::FileTypeExt},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

use crate::{
    disk::{Disk, HEAD},
    error::{At, ImportError},
    format::Format,
    meter::Meter,
};

/// Limits of the output that is read.
const INFO_LIMIT: u64 = 1 << 20;
const MESSAGE_LIMIT: u64 = 4096;
/// Memory for the tables of qcow2: enough for a window of 32 GiB with the default clusters.
const TABLES: u64 = 4 << 20;
/// Interval for watching a conversion.
const WATCH: Duration = Duration::from_secs(5);

/// An image for qemu-img.
pub(crate) struct Image {
    pub(crate) format: Format,
    pub(crate) node: Value,
}

impl Image {
    /// Returns an image in an open file.
    pub(crate) fn of_file(format: Format, file: &File) -> Self {
        Self { format, node: file_node(file) }
    }

    /// Returns an image that is served on a socket.
    pub(crate) fn of_socket(format: Format, socket: &Path) -> Self {
        Self { format, node: json!({"driver": "nbd", "server": {"type": "unix", "path": socket}}) }
    }

    fn options(&self) -> Value {
        let mut options =
            json!({"driver": self.format.driver(), "read-only": true, "backing": null, "file": self.node});
        if self.format == Format::Qcow2 {
            options["l2-cache-size"] = TABLES.into();
        }
        options
    }
}

/// Returns a path at which a child process opens a file of this process.
fn descriptor(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Returns the size of an image's disk. Rejects an image that refers to another file.
pub(crate) fn virtual_size(program: &Path, image: &Image) -> Result<u64, ImportError> {
    let mut child = start(program, &["info", "--output=json"], &[image.options()])?;
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(INFO_LIMIT).read_to_end(&mut output).at("read the output of", program)?;
    }
    end(child, "info", program)?;
    let failed = |message: &str| ImportError::Qemu { command: "info", message: message.to_owned() };
    let info: Value = serde_json::from_slice(&output).map_err(|error| failed(&error.to_string()))?;
    let data_file = info.pointer("/format-specific/data/data-file");
    if info.get("backing-filename").is_some() || data_file.is_some() {
        return Err(ImportError::Refused("it refers to another file".to_owned()));
    }
    info["virtual-size"].as_u64().ok_or_else(|| failed("no virtual size in its output"))
}

/// Converts an image into a disk. The first part of a device goes to the disk that holds it back.
pub(crate) fn convert(program: &Path, image: &Image, disk: &mut Disk, meter: &Meter) -> Result<(), ImportError> {
    let size = virtual_size(program, image)?;
    disk.reserve(size, meter)?;
    if !disk.is_device() {
        let target = json!({"driver": "raw", "file": file_node(&disk.file)});
        return run_convert(program, image.options(), target, disk, meter);
    }
    let head = head(program, image, HEAD.min(size), disk)?;
    disk.write(0, &head)?;
    if size <= HEAD {
        return Ok(());
    }
    let rest = |node: Value| json!({"driver": "raw", "offset": HEAD, "file": node});
    run_convert(program, rest(image.options()), rest(file_node(&disk.file)), disk, meter)
}

/// Returns the first bytes of an image's disk.
fn head(program: &Path, image: &Image, size: u64, disk: &Disk) -> Result<Vec<u8>, ImportError> {
    let mut file = File::from(memfd_create("head", MemfdFlags::CLOEXEC).at("create", "memory file")?);
    file.set_len(size).at("set the size of", "memory file")?;
    let source = json!({"driver": "raw", "offset": 0, "size": size, "file": image.options()});
    let target = json!({"driver": "raw", "file": file_node(&file)});
    run_convert(program, source, target, disk, &Meter::default())?;
    let mut head = Vec::new();
    file.read_to_end(&mut head).at("read", "memory file")?;
    Ok(head)
}

fn file_node(file: &File) -> Value {
    let block = file.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    let driver = if block { "host_device" } else { "file" };
    json!({"driver": driver, "filename": descriptor(file), "locking": "off"})
}

fn run_convert(program: &Path, source: Value, target: Value, disk: &Disk, meter: &Meter) -> Result<(), ImportError> {
    let mut child = start(program, &["convert", "-p", "-n", "--target-is-zero", "-W"], &[source, target])?;
    let stdout = child.stdout.take();
    let io_counters = format!("/proc/{}/io", child.id());
    thread::scope(|scope| {
        let (ended, end_of_child) = mpsc::channel::<()>();
        scope.spawn(move || {
            let mut before = String::new();
            while end_of_child.recv_timeout(WATCH) == Err(mpsc::RecvTimeoutError::Timeout) {
                let now = fs::read_to_string(&io_counters).unwrap_or_default();
                if now != before {
                    meter.moved();
                    before = now;
                }
            }
        });
        if let Some(stdout) = stdout {
            follow(stdout, meter);
        }
        drop(ended);
    });
    end(child, "convert", program).map_err(|error| match error {
        ImportError::Qemu { message, .. } if message.contains("No space left on device") => {
            use std::os::unix::fs::MetadataExt;
            let written = disk.file.metadata().map_or(0, |meta| meta.blocks().saturating_mul(512));
            ImportError::Full { written, available: disk.capacity }
        }
        error => error,
    })
}

/// Reads lines such as `    (12.34/100%)` that end with a carriage return.
fn follow(stdout: impl Read, meter: &Meter) {
    let mut stdout = BufReader::new(stdout);
    let mut line = Vec::new();
    while (&mut stdout).take(MESSAGE_LIMIT).read_until(b'\r', &mut line).is_ok_and(|count| count > 0) {
        let text = String::from_utf8_lossy(&line);
        let percent = text.trim().strip_prefix('(').and_then(|text| text.split('/').next()?.parse().ok());
        if let Some(percent) = percent {
            meter.converted(percent);
        }
        line.clear();
    }
}

fn start(program: &Path, options: &[&str], images: &[Value]) -> Result<Child, ImportError> {
    let mut command = Command::new(program);
    command.env_clear().args(options);
    command.args(images.iter().map(|image| format!("json:{image}")));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().at("run", program)
}

/// Waits for the end of a program whose output was read.
fn end(mut child: Child, command: &'static str, program: &Path) -> Result<(), ImportError> {
    let mut message = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        let mut stderr = stderr.take(MESSAGE_LIMIT);
        stderr.read_to_end(&mut message).at("read the messages of", program)?;
        // More must not block the program.
        io::copy(&mut stderr.into_inner(), &mut io::sink()).at("read the messages of", program)?;
    }
    let status = child.wait().at("wait for", program)?;
    if status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&message);
    let message = message.trim();
    let message = if message.is_empty() { status.to_string() } else { message.replace('\n', "; ") };
    Err(ImportError::Qemu { command, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_of_a_conversion_is_followed() {
        let meter = Meter::default();
        follow(&b"    (0.00/100%)\r    (42.50/100%)\rnoise\r"[..], &meter);
        assert_eq!(meter.progress().percent, Some((100.0 + 42.5) / 2.0));
    }

    #[test]
    fn options_name_format_and_file_and_switch_the_backing_file_off() {
        let image = Image::of_socket(Format::Vmdk, Path::new("/scratch/nbd"));
        let file = json!({"driver": "nbd", "server": {"type": "unix", "path": "/scratch/nbd"}});
        assert_eq!(image.options(), json!({"driver": "vmdk", "read-only": true, "backing": null, "file": file}));
    }
}
