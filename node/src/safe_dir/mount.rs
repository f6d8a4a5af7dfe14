//! The file system type of a descriptor, read without access to that file system.
//!
//! `fstat` and `statfs` are requests to a FUSE or network file system, which may never answer. The kernel's own tables
//! always answer: `fdinfo` contains the mount number of a descriptor, `mountinfo` the type of each mount. The descriptor
//! holds its mount, so that the number is not reused meanwhile.

use std::{
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use super::{Error, SafeDir};

/// Largest `mountinfo`: some thousand mounts.
pub(super) const LIMIT: usize = 1 << 20;
/// Largest `fdinfo`.
const FDINFO_LIMIT: usize = 4096;

/// Permitted file systems.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    types: &'static [&'static str],
    text: &'static str,
}

/// Types for the root directory of a container, as used by container runtimes. An overlay can contain others.
pub(super) const ROOT: Allowed = Allowed {
    types: &[
        "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "erofs", "squashfs", "tmpfs",
    ],
    text: "one of those that container runtimes use",
};
/// Types for a container's `/dev`: container runtimes mount a tmpfs. The node's own devtmpfs does not belong to the
/// container.
pub(super) const DEV: Allowed = Allowed { types: &["tmpfs"], text: "tmpfs" };

/// Rejects a descriptor on another file system type. `mounts` is the `mountinfo` of a process that sees the mount, read
/// after the descriptor was opened; `path` is for messages.
pub(super) fn require(fd: impl AsFd, path: &str, mounts: &[u8], allowed: Allowed) -> Result<(), Error> {
    let number = fd.as_fd().as_raw_fd().to_string();
    let fdinfo = SafeDir::trusted(Path::new("/proc/self/fdinfo"))?.read_bounded(number, FDINFO_LIMIT)?;
    let found = mount_of(&fdinfo).and_then(|mount| type_of(mounts, mount));
    match found {
        Some(found) if allowed.types.iter().any(|known| known.as_bytes() == found) => Ok(()),
        other => Err(Error::FileSystem {
            path: path.into(),
            found: other.map_or("unknown".into(), |found| String::from_utf8_lossy(found).into_owned()),
            expected: allowed.text,
        }),
    }
}

/// Parses the mount number in `fdinfo`.
fn mount_of(fdinfo: &[u8]) -> Option<&[u8]> {
    fdinfo.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"mnt_id:")).map(<[u8]>::trim_ascii)
}

/// Parses the type of a mount in `mountinfo`: `36 35 98:0 /root /mnt rw,noatime shared:1 - ext4 /dev/sda rw`.
fn type_of<'a>(mounts: &'a [u8], mount: &[u8]) -> Option<&'a [u8]> {
    mounts.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        if fields.next() != Some(mount) {
            return None;
        }
        // Spaces in paths are octal escapes, so that the single hyphen is the separator.
        fields.find(|field| *field == b"-")?;
        fields.next()
    })
}

/// Returns the names on which mounts are attached in the directory of hot-plugged volumes, from the mounts of a launcher.
pub(super) fn attached(mounts: &[u8]) -> Vec<String> {
    let name = |line: &[u8]| {
        let point = std::str::from_utf8(line.split(|byte| *byte == b' ').nth(4)?).ok()?;
        let name = ["/var/run", "/run"]
            .iter()
            .find_map(|run| point.strip_prefix(run)?.strip_prefix("/kubevirt/hotplug-disks/"))?;
        (!name.contains('/')).then(|| name.to_owned())
    };
    mounts.split(|byte| *byte == b'\n').filter_map(name).collect()
}

/// Returns number and point of the mount of a volume with a file system, from the mounts of a launcher. The last one at a point
/// is the one that is seen.
pub(super) fn of_volume<'a>(mounts: &'a [u8], volume: &str) -> Option<(&'a [u8], &'a str)> {
    let places = ["/var/run", "/run"].map(|run| format!("{run}/kubevirt-private/vmi-disks/{volume}"));
    mounts.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let number = fields.next()?;
        let point = std::str::from_utf8(fields.nth(3)?).ok()?;
        places.iter().any(|place| place == point).then_some((number, point))
    })
}

/// Rejects a descriptor on another mount than that with this number.
pub(super) fn require_number(fd: impl AsFd, path: &str, number: &[u8]) -> Result<(), Error> {
    let own = fd.as_fd().as_raw_fd().to_string();
    let fdinfo = SafeDir::trusted(Path::new("/proc/self/fdinfo"))?.read_bounded(own, FDINFO_LIMIT)?;
    if mount_of(&fdinfo) == Some(number) { Ok(()) } else { Err(Error::Escape(path.into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"1 0 0:20 / / rw - overlay overlay rw,lowerdir=/a\n\
        22 1 0:21 / /dev rw,nosuid shared:2 master:1 - tmpfs tmpfs rw\n\
        23 22 0:45 / /dev\\040- rw - fuse.sshfs x rw\n\
        2 1 0:5 / /x rw\n";

    #[test]
    fn the_type_of_a_mount_is_read_from_the_line_with_its_number() {
        for (mount, expected) in [
            ("1", Some("overlay")),
            ("22", Some("tmpfs")),
            ("23", Some("fuse.sshfs")),
            // A line without a type, and parts of numbers.
            ("2", None),
            ("3", None),
            ("", None),
        ] {
            let found = type_of(MOUNTS, mount.as_bytes()).map(|found| std::str::from_utf8(found).unwrap());
            assert_eq!(found, expected, "{mount:?}");
        }
    }

    #[test]
    fn the_mount_of_a_descriptor_is_read_from_fdinfo() {
        assert_eq!(mount_of(b"pos:\t0\nflags:\t012100000\nmnt_id:\t29\nino:\t1\n"), Some(&b"29"[..]));
        assert_eq!(mount_of(b"pos:\t0\n"), None);
    }

    #[test]
    fn file_systems_are_told_apart_by_their_types() {
        let mounts = SafeDir::trusted(Path::new("/proc/self")).unwrap().read_bounded("mountinfo", LIMIT).unwrap();
        let proc = SafeDir::trusted(Path::new("/proc")).unwrap();
        let refused = require(&proc, "/proc", &mounts, DEV).unwrap_err();
        assert!(matches!(&refused, Error::FileSystem { found, .. } if found == "proc"), "{refused}");
        assert!(require(&proc, "/proc", &mounts, Allowed { types: &["proc"], text: "" }).is_ok());
        // A mount that the process does not see.
        let hidden = require(&proc, "/proc", b"", DEV).unwrap_err();
        assert!(matches!(&hidden, Error::FileSystem { found, .. } if found == "unknown"), "{hidden}");
    }

    #[test]
    fn the_mount_of_a_volume_is_the_last_at_its_place() {
        let mounts = b"36 35 98:0 / / rw - ext4 /dev/sda rw\n\
            40 36 98:0 /data /run/kubevirt-private/vmi-disks/data rw - ext4 /dev/sda rw\n\
            41 36 98:0 /other /run/kubevirt-private/vmi-disks/other rw - ext4 /dev/sda rw\n\
            42 40 98:0 /more /run/kubevirt-private/vmi-disks/data rw - ext4 /dev/sda rw\n\
            43 36 98:0 /x /run/kubevirt-private/vmi-disks/data/below rw - ext4 /dev/sda rw\n";
        let (number, point) = of_volume(mounts, "data").unwrap();
        assert_eq!((number, point), (&b"42"[..], "/run/kubevirt-private/vmi-disks/data"));
        for volume in ["dat", "absent", "", "data/below/.."] {
            assert_eq!(of_volume(mounts, volume), None, "{volume}");
        }
    }

    #[test]
    fn a_descriptor_on_another_mount_is_rejected() {
        let proc = SafeDir::trusted(Path::new("/proc")).unwrap();
        assert!(matches!(require_number(&proc, "p", b"0"), Err(Error::Escape(_))));
    }

    #[test]
    fn mounts_of_hot_plugged_volumes_are_found_by_their_place() {
        let mounts = "\
36 35 98:0 / / rw,noatime - ext4 /dev/sda rw
40 36 98:0 /pods/x /run/kubevirt/hotplug-disks rw - ext4 /dev/sda rw
41 40 7:1 /disk.img /run/kubevirt/hotplug-disks/data.img rw - ext4 /dev/loop1 rw
42 40 98:0 /pods/y/v/9 /var/run/kubevirt/hotplug-disks/raw rw - ext4 /dev/sda rw
43 40 98:0 / /run/kubevirt/hotplug-disks/a/b rw - ext4 /dev/sda rw
44 40 98:0 / /elsewhere/run/kubevirt/hotplug-disks/c rw - ext4 /dev/sda rw
";
        assert_eq!(attached(mounts.as_bytes()), ["data.img", "raw"]);
        assert_eq!(attached(b"\xff \n\n1 2"), Vec::<String>::new());
    }
}
