//! Programs of the host: copies, loop devices and the file system ext4.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::process::Command;
use tonic::Status;

use crate::store::failed;

/// Limit of a program, unless a copy needs longer.
const LIMIT: Duration = Duration::from_secs(60);
const COPY_LIMIT: Duration = Duration::from_secs(1800);
/// Offset and magic number of the superblock of ext4, and the offsets in it of block count and block size.
const SUPERBLOCK: u64 = 1024;
const MAGIC: [u8; 2] = [0x53, 0xef];

/// Runs a program and returns its standard output.
async fn run(limit: Duration, program: &str, arguments: &[&OsStr]) -> Result<String, Status> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).env("LC_ALL", "C").kill_on_drop(true);
    let output = match tokio::time::timeout(limit, command.output()).await {
        Err(_) => return Err(Status::deadline_exceeded(format!("{program} took more than {limit:?}"))),
        Ok(Err(error)) => return Err(failed("start", Path::new(program), error)),
        Ok(Ok(output)) => output,
    };
    // e2fsck reports by 1 that it repaired the file system, such as by the journal of a volume that was copied while in use.
    if output.status.success() || (program == "e2fsck" && output.status.code() == Some(1)) {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let (text, errors) = (format!("{command:?}"), String::from_utf8_lossy(&output.stderr).trim().to_owned());
    let message = format!("{text} failed with {}: {errors}", output.status);
    Err(match errors.contains("No space left") {
        true => Status::resource_exhausted(message),
        false => Status::internal(message),
    })
}

/// Copies a file or directory with all attributes. Holes stay holes.
pub(crate) async fn copy(source: &Path, target: &Path) -> Result<(), Status> {
    let flags = ["--archive", "--reflink=auto", "--sparse=always", "--no-target-directory"].map(OsStr::new);
    run(COPY_LIMIT, "cp", &[&flags[..], &[source.as_os_str(), target.as_os_str()]].concat()).await.map(drop)
}

/// Returns the loop device of a file, if it has one.
pub(crate) async fn device_of(file: &Path) -> Result<Option<PathBuf>, Status> {
    let flags = ["--list", "--noheadings", "--raw", "--output=NAME", "--associated"].map(OsStr::new);
    let devices = run(LIMIT, "losetup", &[&flags[..], &[file.as_os_str()]].concat()).await?;
    Ok(devices.lines().next().map(PathBuf::from))
}

/// Attaches a file to a loop device, if it has none. All nodes have the same device, which keeps their caches the same.
///
/// [`release_with_user`] must follow.
pub(crate) async fn attach(file: &Path) -> Result<PathBuf, Status> {
    let flags = ["--find", "--show", "--nooverlap"].map(OsStr::new);
    run(LIMIT, "losetup", &[&flags[..], &[file.as_os_str()]].concat()).await.map(|device| device.trim().into())
}

/// Makes the kernel detach a loop device when nothing has it mounted or open any more. Nothing is left of a killed driver.
pub(crate) async fn release_with_user(device: &Path) -> Result<(), Status> {
    run(LIMIT, "losetup", &[OsStr::new("--detach"), device.as_os_str()]).await.map(drop)
}

/// Gives a loop device the present size of its file.
pub(crate) async fn refresh_size(device: &Path) -> Result<(), Status> {
    run(LIMIT, "losetup", &[OsStr::new("--set-capacity"), device.as_os_str()]).await.map(drop)
}

/// Makes an empty device a file system.
pub(crate) async fn format(device: &Path) -> Result<(), Status> {
    let flags = ["-q", "-m", "0", "-E", "nodiscard"].map(OsStr::new);
    run(LIMIT, "mkfs.ext4", &[&flags[..], &[device.as_os_str()]].concat()).await.map(drop)
}

/// Grows a file system that is not mounted to the size of its device.
pub(crate) async fn grow_unmounted(device: &Path) -> Result<(), Status> {
    run(LIMIT, "e2fsck", &[OsStr::new("-fp"), device.as_os_str()]).await?;
    run(LIMIT, "resize2fs", &[device.as_os_str()]).await.map(drop)
}

/// Grows a mounted file system to the size of its device. This needs the capability CAP_SYS_RESOURCE.
pub(crate) async fn grow_mounted(device: &Path) -> Result<(), Status> {
    let grown = run(LIMIT, "resize2fs", &[device.as_os_str()]).await.map(drop);
    grown.map_err(|status| match status.message().contains("Permission denied") {
        true => Status::failed_precondition("the host lacks CAP_SYS_RESOURCE: it grows when no pod uses the volume"),
        false => status,
    })
}

/// Returns the size of the file system ext4 of a device, if it has one.
pub(crate) fn ext4_size(device: &Path) -> Result<Option<u64>, Status> {
    let mut superblock = [0; 1024];
    let read = File::open(device).and_then(|file| file.read_exact_at(&mut superblock, SUPERBLOCK));
    match read {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        read => read.map(|()| size_in(&superblock)).map_err(|error| failed("read", device, error)),
    }
}

fn size_in(superblock: &[u8; 1024]) -> Option<u64> {
    let number = |at: usize| -> Option<u64> {
        superblock.get(at..at + 4)?.try_into().ok().map(|bytes| u64::from(u32::from_le_bytes(bytes)))
    };
    let blocks = number(0x4)? | number(0x150)? << 32;
    let block_size = 1024_u64.checked_shl(u32::try_from(number(0x18)?).ok()?)?;
    (superblock.get(0x38..0x3a)? == MAGIC).then(|| blocks.checked_mul(block_size))?
}

/// Writes what the kernel holds in memory for a device to its file.
pub(crate) fn flush(device: &Path) -> io::Result<()> {
    File::options().write(true).open(device)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_read_from_the_superblock() {
        let mut superblock = [0; 1024];
        assert_eq!(size_in(&superblock), None);
        superblock[0x4..0x8].copy_from_slice(&256_u32.to_le_bytes());
        superblock[0x18] = 2;
        superblock[0x38..0x3a].copy_from_slice(&MAGIC);
        assert_eq!(size_in(&superblock), Some(256 * 4096));
        superblock[0x18] = 255;
        assert_eq!(size_in(&superblock), None);
    }

    #[tokio::test]
    async fn failed_program_is_named_with_its_message() {
        let status = copy(Path::new("/nowhere"), Path::new("/nowhere-else")).await.unwrap_err();
        assert!(status.message().contains("cp") && status.message().contains("No such file"), "{status}");
        assert_eq!(run(LIMIT, "no-such-program", &[]).await.unwrap_err().code(), tonic::Code::NotFound);
    }
}
