//! Files of the node that are disks of a VMI (`hostDisk`), created where they are missing.
//!
//! virt-handler sees the directory as the launcher's container does: it is the mount that kubelet made of the volume. A file is
//! created beneath its descriptor, and only under a name that nothing has. What exists is never opened, resized or given away.

use api::{VirtualMachineInstance, quantity};

use crate::safe_dir::{self, Peer, SafeDir};

/// The user QEMU runs as in a launcher pod.
const RUNTIME_USER: u32 = 107;
/// Unit of the sizes of created disks.
const MEBIBYTE: u64 = 1 << 20;

/// A file that is created if it is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostDisk {
    /// Name of the volume.
    pub(crate) volume: String,
    /// Path on the node, for messages.
    pub(crate) path: String,
    /// Size in bytes; 0 without a valid capacity.
    pub(crate) size: u64,
}

/// The cluster's limits for files that are created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tolerance {
    /// Percent of the size that may be missing.
    pub(crate) lack_percent: u64,
    /// Bytes to leave free.
    pub(crate) reserve: u64,
}

/// Reason why a file was not created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The directory or the file cannot be used.
    #[error("cannot create the host disk of volume {volume}")]
    Path {
        volume: String,
        /// The error.
        #[source]
        source: safe_dir::Error,
    },
    /// The file is missing, and its size is not known.
    #[error("the host disk {0} does not exist, and its volume has no capacity of at least 1 MiB to create it with")]
    NoCapacity(String),
    /// The file system lacks the space.
    #[error(
        "unable to create {path}, not enough space, demanded size {size} B is bigger than available space {free} B, also after \
         taking {lack_percent} % toleration into account"
    )]
    NoSpace { path: String, size: u64, free: u64, lack_percent: u64 },
}

/// Returns the files that a VMI wants to have created.
pub(crate) fn wanted(vmi: &VirtualMachineInstance) -> Vec<HostDisk> {
    let volumes = vmi.spec.volumes.iter().filter_map(|volume| {
        let disk = volume.host_disk.as_ref().filter(|disk| disk.type_ == "DiskOrCreate")?;
        let bytes = disk.capacity.as_ref().and_then(|capacity| quantity::units(capacity).ok());
        let size = bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0) / MEBIBYTE * MEBIBYTE;
        Some(HostDisk { volume: volume.name.clone(), path: disk.path.clone(), size })
    });
    volumes.collect()
}

/// Creates the files that are missing in the container of a checked launcher. Returns a message for each that is smaller than
/// wanted. The container can hang this call.
pub(crate) fn create(launcher: &Peer, disks: &[HostDisk], tolerance: Tolerance) -> Result<Vec<String>, Error> {
    let mut tolerated = Vec::new();
    for disk in disks {
        let failed = |source| Error::Path { volume: disk.volume.clone(), source };
        let directory = launcher.volume(&disk.volume).map_err(failed)?;
        tolerated.extend(create_in(&directory, disk, tolerance)?);
    }
    Ok(tolerated)
}

fn create_in(directory: &SafeDir, disk: &HostDisk, tolerance: Tolerance) -> Result<Option<String>, Error> {
    let failed = |source| Error::Path { volume: disk.volume.clone(), source };
    let name = disk.path.rsplit('/').next().unwrap_or_default();
    match directory.exists(name) {
        // The launcher refuses what is no disk.
        Ok(true) | Err(safe_dir::Error::Escape(_)) => return Ok(None),
        Ok(false) => {}
        Err(error) => return Err(failed(error)),
    }
    if disk.size == 0 {
        return Err(Error::NoCapacity(disk.path.clone()));
    }
    let free = directory.free_bytes().map_err(failed)?.saturating_sub(tolerance.reserve);
    let granted = granted(disk, free, tolerance.lack_percent)?;
    match directory.create_sparse(name, granted, RUNTIME_USER) {
        Err(error) if error.already_exists() => return Ok(None),
        result => result.map_err(failed)?,
    }
    tracing::info!(volume = disk.volume, path = disk.path, size = granted, "created the file of a host disk");
    let lack = format!(
        "PV size too small: expected {} B, found {free} B. Using it anyway, it is within {} % toleration",
        disk.size, tolerance.lack_percent
    );
    Ok((granted < disk.size).then_some(lack))
}

/// Returns the size that a file gets where so many bytes are free.
fn granted(disk: &HostDisk, free: u64, lack_percent: u64) -> Result<u64, Error> {
    let size = disk.size;
    let least = size / 100 * 100_u64.saturating_sub(lack_percent);
    let granted = if size <= free { size } else { free / MEBIBYTE * MEBIBYTE };
    if granted == 0 || (size > free && least > free) {
        return Err(Error::NoSpace { path: disk.path.clone(), size, free, lack_percent });
    }
    Ok(granted)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use serde_json::json;

    use super::*;

    fn disk(path: &str, size: u64) -> HostDisk {
        HostDisk { volume: "data".into(), path: path.into(), size }
    }

    #[test]
    fn files_to_create_have_whole_mebibytes() {
        let volume = |name: &str, disk: serde_json::Value| json!({"name": name, "hostDisk": disk});
        let volumes = json!([
            volume("a", json!({"path": "/d/a.img", "type": "Disk"})),
            volume("b", json!({"path": "/d/b.img", "type": "DiskOrCreate", "capacity": "2500Ki"})),
            volume("c", json!({"path": "/d/c.img", "type": "DiskOrCreate"})),
            volume("d", json!({"path": "/d/d.img", "type": "DiskOrCreate", "capacity": "-1"})),
            {"name": "e", "emptyDisk": {"capacity": "1Gi"}},
        ]);
        let spec = json!({"domain": {"devices": {}}, "volumes": volumes});
        let vmi = serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap();
        let named: Vec<(String, u64)> = wanted(&vmi).into_iter().map(|disk| (disk.volume, disk.size)).collect();
        assert_eq!(named, [("b".to_owned(), 2 * MEBIBYTE), ("c".to_owned(), 0), ("d".to_owned(), 0)]);
    }

    #[test]
    fn a_shortage_is_tolerated_within_the_limit() {
        let mib = |count: u64| count * MEBIBYTE;
        for (size, free, lack, expected) in [
            (mib(100), mib(200), 10, Some(mib(100))),
            (mib(100), mib(100), 0, Some(mib(100))),
            (mib(100), mib(90), 10, Some(mib(90))),
            (mib(100), mib(95) + 7, 10, Some(mib(95))),
            (mib(100), mib(89), 10, None),
            (mib(100), mib(99), 0, None),
            (mib(100), 0, 100, None),
            (mib(1), 7, 100, None),
            (u64::MAX / MEBIBYTE * MEBIBYTE, mib(1), 10, None),
        ] {
            let granted = granted(&disk("/d/a.img", size), free, lack);
            assert_eq!(granted.as_ref().ok().copied(), expected, "{size} {free} {lack} {granted:?}");
        }
        let refused = granted(&disk("/d/a.img", mib(100)), mib(1), 10).unwrap_err().to_string();
        assert_eq!(
            refused,
            "unable to create /d/a.img, not enough space, demanded size 104857600 B is bigger than available space 1048576 B, \
             also after taking 10 % toleration into account"
        );
    }

    /// The reference followed links, and gave existing files of the node to the guest.
    #[test]
    fn cve_2025_64324_what_exists_is_neither_changed_nor_given_away() {
        let root = std::env::temp_dir().join(format!("ferrovirt-host-disks-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("d/directory")).unwrap();
        fs::write(root.join("secret"), "kept").unwrap();
        fs::write(root.join("d/file.img"), "kept").unwrap();
        symlink("../secret", root.join("d/link.img")).unwrap();
        symlink("../absent", root.join("d/dangling.img")).unwrap();
        let directory = SafeDir::trusted(&root.join("d")).unwrap();
        let owner = |name: &str| fs::symlink_metadata(root.join(name)).unwrap().uid();
        let before = owner("secret");
        let create = |name: &str, size| create_in(&directory, &disk(&format!("/d/{name}"), size), Tolerance::default());
        for name in ["file.img", "link.img", "dangling.img", "directory"] {
            assert_eq!(create(name, MEBIBYTE).unwrap(), None, "{name}");
            assert_eq!(owner(&format!("d/{name}")), before, "{name}");
        }
        for kept in ["secret", "d/file.img"] {
            assert_eq!((fs::read(root.join(kept)).unwrap(), owner(kept)), (b"kept".to_vec(), before), "{kept}");
        }
        assert!(!root.join("absent").exists());
        for bad in ["..", "."] {
            assert!(create(bad, MEBIBYTE).is_err(), "{bad}");
        }
        assert!(matches!(create("new.img", 0), Err(Error::NoCapacity(_))));
        match create("new.img", 3 * MEBIBYTE) {
            Ok(tolerated) => {
                let made = fs::metadata(root.join("d/new.img")).unwrap();
                assert_eq!((tolerated, made.len(), made.uid(), made.mode() & 0o777), (None, 3 << 20, 107, 0o600));
                // Sparse, and not made twice.
                assert_eq!(made.blocks(), 0);
                fs::write(root.join("d/new.img"), "used").unwrap();
                assert_eq!(create("new.img", 3 * MEBIBYTE).unwrap(), None);
                assert_eq!(fs::read(root.join("d/new.img")).unwrap(), b"used");
            }
            Err(error) => {
                skips::skip("permission to give files away: root");
                assert!(!root.join("d/new.img").exists(), "{error}");
            }
        }
        fs::remove_dir_all(root).unwrap();
    }
}
