//! Grants device nodes in a launcher's container to its user.
//!
//! kubelet creates the nodes in the container with the owner and mode that they have on the node, where usually only root
//! may open them. The launcher runs as an unprivileged user, so its own copies are given to that user; the node's are not
//! changed.

pub(crate) mod host;

use api::VirtualMachineInstance;

use crate::{
    devices::{Device, KVM, TUN, USERFAULTFD, VHOST_NET, VHOST_VSOCK, is_present, number},
    safe_dir::{Error, SafeDir},
};

/// Devices that launchers open.
const OPENED: [Device; 5] = [KVM, TUN, VHOST_NET, VHOST_VSOCK, USERFAULTFD];

/// Returns the volumes that can be block devices. The device node in the container shows which ones are.
pub(crate) fn claim_volumes(vmi: &VirtualMachineInstance) -> Vec<String> {
    let has_claim = |volume: &&api::vmi::volumes::Volume| {
        volume.persistent_volume_claim.is_some() || volume.data_volume.is_some() || volume.ephemeral.is_some()
    };
    vmi.spec.volumes.iter().filter(has_claim).map(|volume| volume.name.clone()).collect()
}

/// Gives the devices in `dev`, the `/dev` of the launcher's container, to its user: those that launchers open, and the block
/// devices of `volumes`. Returns their names. Devices that the pod does not have are left out. `node` is the node's `/dev`.
pub(crate) fn grant(dev: &SafeDir, node: &SafeDir, volumes: &[String], user: u32) -> Result<Vec<String>, Error> {
    let devices = OPENED.iter().filter_map(|device| {
        let number = device.number.or_else(|| number(node, *device))?;
        Some((device.name, dev.chown_device(device.node, number, user, user)))
    });
    let blocks = volumes.iter().map(|volume| (volume.as_str(), dev.chown_block_device(volume, user, user)));
    // A volume with a file system can have the name of any entry of `/dev`.
    let blocks = blocks.filter(|(_, outcome)| !matches!(outcome, Err(Error::WrongKind { .. })));
    let mut granted = Vec::new();
    for (name, outcome) in devices.chain(blocks) {
        if is_granted(name, outcome)? {
            granted.push(name.to_owned());
        }
    }
    Ok(granted)
}

/// Returns true if a device was granted, false if the container does not have it.
pub(crate) fn is_granted(name: &str, outcome: Result<(), Error>) -> Result<bool, Error> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        // The node's own device, mounted into the container: its owner is not changed.
        Err(Error::Escape(_)) => {
            tracing::warn!(device = name, "the device is mounted into the launcher, its owner is not changed");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns true if a launcher's `/dev` contains `/dev/kvm`. One that is mounted from the node counts.
pub(crate) fn has_kvm(dev: &SafeDir) -> bool {
    is_present(dev, KVM) || matches!(dev.stat(KVM.node), Err(Error::Escape(_)))
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
        path::Path,
    };

    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

    use super::*;
    use crate::safe_dir::Kind;

    fn node(path: &Path, major: u32, minor: u32) -> bool {
        node_of(FileType::CharacterDevice, path, major, minor)
    }

    fn node_of(kind: FileType, path: &Path, major: u32, minor: u32) -> bool {
        let mode = Mode::from_raw_mode(0o600);
        if mknodat(CWD, path, kind, mode, makedev(major, minor)).is_ok() {
            return true;
        }
        skips::skip("permission to make device nodes: root");
        false
    }

    #[test]
    fn only_the_devices_that_launchers_open_are_granted() {
        let path = std::env::temp_dir().join(format!("ferrovirt-dev-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("net")).unwrap();
        if !node(&path.join("net/tun"), 10, 200) || !node(&path.join("other"), 10, 229) {
            fs::remove_dir_all(path).unwrap();
            return;
        }
        let dev = SafeDir::trusted(&path).unwrap();
        let grant = |dev: &SafeDir, volumes: &[String], user| super::grant(dev, dev, volumes, user);
        assert_eq!(grant(&dev, &[], 107).unwrap(), ["tun"]);
        // The kernel chooses the number of this device, which the node has, too.
        node(&path.join("userfaultfd"), 10, 126);
        assert_eq!(grant(&dev, &[], 107).unwrap(), ["tun", "userfaultfd"]);
        fs::remove_file(path.join("userfaultfd")).unwrap();
        node(&path.join("userfaultfd"), 1, 1);
        assert_eq!(grant(&dev, &[], 107).unwrap(), ["tun"], "no device of this kind");
        fs::remove_file(path.join("userfaultfd")).unwrap();
        let tun = fs::metadata(path.join("net/tun")).unwrap();
        assert_eq!((tun.uid(), tun.gid(), tun.mode() & 0o777), (107, 107, 0o600));
        assert_eq!(fs::metadata(path.join("other")).unwrap().uid(), 0);
        assert!(is_present(&dev, TUN) && !is_present(&dev, KVM));
        // Another device under the name of a granted one.
        node(&path.join("kvm"), 1, 1);
        assert!(matches!(grant(&dev, &[], 107), Err(Error::WrongDevice { .. })));
        assert!(!is_present(&dev, KVM));
        fs::remove_file(path.join("kvm")).unwrap();
        symlink("/dev/null", path.join("kvm")).unwrap();
        assert!(matches!(grant(&dev, &[], 107), Err(Error::WrongKind { found: Kind::Link, .. })));
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn cve_2025_64437_a_link_instead_of_a_device_is_not_granted() {
        let path = std::env::temp_dir().join(format!("ferrovirt-dev-link-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        symlink("/etc/passwd", path.join("kvm")).unwrap();
        let dev = SafeDir::trusted(&path).unwrap();
        let granted = grant(&dev, &dev, &[], 107);
        assert!(matches!(granted, Err(Error::WrongKind { found: Kind::Link, .. })), "{granted:?}");
        // A link instead of a directory on the path.
        fs::remove_file(path.join("kvm")).unwrap();
        symlink("/dev/net", path.join("net")).unwrap();
        // Not changed: the target of the link is the node's.
        assert_eq!(grant(&dev, &dev, &[], 107).unwrap(), Vec::<String>::new());
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn only_block_devices_of_claims_are_granted() {
        let path = std::env::temp_dir().join(format!("ferrovirt-dev-block-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("shm")).unwrap();
        let made = node_of(FileType::BlockDevice, &path.join("data"), 7, 200)
            && node_of(FileType::BlockDevice, &path.join("other"), 7, 201)
            && node(&path.join("null"), 1, 3);
        if made {
            symlink("other", path.join("link")).unwrap();
            let dev = SafeDir::trusted(&path).unwrap();
            let grant = |dev: &SafeDir, volumes: &[String], user| super::grant(dev, dev, volumes, user);
            let granted = grant(&dev, &["data", "shm", "null", "absent"].map(str::to_owned), 107).unwrap();
            assert_eq!(granted, ["data"]);
            assert_eq!(fs::metadata(path.join("data")).unwrap().uid(), 107);
            assert_eq!(grant(&dev, &["link".to_owned()], 107).unwrap(), Vec::<String>::new());
            for left in ["other", "null"] {
                assert_eq!(fs::metadata(path.join(left)).unwrap().uid(), 0, "{left}");
            }
            assert!(matches!(grant(&dev, &["../data".to_owned()], 107), Err(Error::NotBeneath(_))));
        }
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn only_volumes_with_claims_can_be_block_devices() {
        let vmi: VirtualMachineInstance = serde_json::from_value(serde_json::json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {"domain": {"devices": {}}, "volumes": [
                {"name": "a", "containerDisk": {"image": "i"}},
                {"name": "b", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "c", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}},
            ]},
        }))
        .unwrap();
        assert_eq!(claim_volumes(&vmi), ["b", "c"]);
    }
}
