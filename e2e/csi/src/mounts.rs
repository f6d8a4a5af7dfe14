//! Mounts of a node.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount},
};
use tonic::Status;

use crate::store::failed;

const TABLE: &str = "/proc/self/mountinfo";

/// Mounts the file system ext4 of a device.
pub(crate) fn mount_ext4(device: &Path, target: &Path) -> Result<(), Status> {
    mount(device, target, "ext4", MountFlags::empty(), None).map_err(|error| failed("mount", target, error.into()))
}

/// Mounts a file or directory at a second path.
pub(crate) fn bind(source: &Path, target: &Path, read_only: bool) -> Result<(), Status> {
    let mounted = |error: Errno| failed("mount", target, error.into());
    mount_bind(source, target).map_err(mounted)?;
    if read_only {
        mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, "").map_err(mounted)?;
    }
    Ok(())
}

/// Returns true if something is mounted at a path.
pub(crate) fn is_mounted(target: &Path) -> Result<bool, Status> {
    let table = fs::read(TABLE).map_err(|error| failed("read", Path::new(TABLE), error))?;
    Ok(mount_points(&table).any(|point| point == target))
}

/// Removes all mounts at a path.
pub(crate) fn unmount(target: &Path) -> Result<(), Status> {
    while is_mounted(target)? {
        rustix::mount::unmount(target, UnmountFlags::empty())
            .map_err(|error| failed("unmount", target, error.into()))?;
    }
    Ok(())
}

/// Returns the mount points of a table in the format of `/proc/self/mountinfo`.
fn mount_points(table: &[u8]) -> impl Iterator<Item = PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4).map(unescape))
}

/// Replaces `\040` and the like.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            bytes.push(byte);
            rest = &tail[3..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_from_the_table() {
        let table = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            30 22 7:0 / /var/lib/a\\040b rw - ext4 /dev/loop0 rw\n\
            31 22 0:5 /loop0 /x\\134y\\ rw - devtmpfs devtmpfs rw\n";
        let points: Vec<PathBuf> = mount_points(table).collect();
        assert_eq!(points, [Path::new("/"), Path::new("/var/lib/a b"), Path::new("/x\\y\\")]);
    }

    #[test]
    fn root_is_mounted_and_a_path_that_does_not_exist_is_not() {
        assert!(is_mounted(Path::new("/proc")).unwrap() && !is_mounted(Path::new("/nowhere")).unwrap());
    }
}
