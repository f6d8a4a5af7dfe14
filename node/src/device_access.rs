//! Device nodes of a launcher's container.
//!
//! kubelet has the nodes made in the container with the owner and mode that they have on the node, where usually only
//! root may open them. The launcher runs as an unprivileged user: its own copies are given to it, those of the node
//! stay as they are.

use crate::{
    device_plugin::{Device, KVM, TUN, VHOST_NET},
    safe_dir::{Error, Kind, Peer, SafeDir},
};

/// Devices that a launcher opens itself.
const OPENED: [Device; 3] = [KVM, TUN, VHOST_NET];

/// Gives the devices that are in the launcher's container to its user. Returns the names of those; devices that the pod
/// does not have are left out.
pub fn grant(launcher: &Peer, user: u32) -> Result<Vec<String>, Error> {
    grant_in(&launcher.root()?.open_dir("dev")?, user)
}

fn grant_in(dev: &SafeDir, user: u32) -> Result<Vec<String>, Error> {
    let mut granted = Vec::new();
    for device in OPENED {
        match dev.chown_device(device.node, device.number, user, user) {
            Ok(()) => granted.push(device.name.to_owned()),
            Err(error) if error.is_not_found() => {}
            // The node's own device, mounted into the container: its owner is not ours to change.
            Err(Error::Escape(_)) => {
                tracing::warn!(device = device.name, "device is mounted into the launcher, its owner is left as it is");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(granted)
}

/// Whether the launcher has `/dev/kvm`.
#[must_use]
pub fn has_kvm(launcher: &Peer) -> bool {
    launcher.root().and_then(|root| root.open_dir("dev")).is_ok_and(|dev| is_there(&dev, KVM))
}

/// Whether the device is in a directory of devices.
pub(crate) fn is_there(dev: &SafeDir, device: Device) -> bool {
    dev.stat(device.node).is_ok_and(|stat| stat.kind == Kind::CharacterDevice && stat.rdev == device.number)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests set up what the agent then meets")]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
        path::Path,
    };

    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

    use super::*;

    fn node(path: &Path, major: u32, minor: u32) -> bool {
        let mode = Mode::from_raw_mode(0o600);
        if mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor)).is_ok() {
            return true;
        }
        eprintln!("SKIPPED: device nodes cannot be made here; run the test as root");
        false
    }

    #[test]
    fn only_the_devices_that_a_launcher_opens_are_given_to_it() {
        let path = std::env::temp_dir().join(format!("ferrovirt-dev-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("net")).unwrap();
        if !node(&path.join("net/tun"), 10, 200) || !node(&path.join("other"), 10, 229) {
            fs::remove_dir_all(path).unwrap();
            return;
        }
        let dev = SafeDir::trusted(&path).unwrap();
        assert_eq!(grant_in(&dev, 107).unwrap(), ["tun"]);
        let tun = fs::metadata(path.join("net/tun")).unwrap();
        assert_eq!((tun.uid(), tun.gid(), tun.mode() & 0o777), (107, 107, 0o600));
        assert_eq!(fs::metadata(path.join("other")).unwrap().uid(), 0);
        assert!(is_there(&dev, TUN) && !is_there(&dev, KVM));
        // Another device by the name of one that is given away.
        node(&path.join("kvm"), 1, 1);
        assert!(matches!(grant_in(&dev, 107), Err(Error::WrongDevice { .. })));
        assert!(!is_there(&dev, KVM));
        fs::remove_file(path.join("kvm")).unwrap();
        symlink("/dev/null", path.join("kvm")).unwrap();
        assert!(matches!(grant_in(&dev, 107), Err(Error::WrongKind { found: Kind::Link, .. })));
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn cve_2025_64437_a_link_in_place_of_a_device_is_not_given_away() {
        let path = std::env::temp_dir().join(format!("ferrovirt-dev-link-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        symlink("/etc/passwd", path.join("kvm")).unwrap();
        let granted = grant_in(&SafeDir::trusted(&path).unwrap(), 107);
        assert!(matches!(granted, Err(Error::WrongKind { found: Kind::Link, .. })), "{granted:?}");
        // A directory on the way that is a link.
        fs::remove_file(path.join("kvm")).unwrap();
        symlink("/dev/net", path.join("net")).unwrap();
        // Left as it is: what is behind the link is the node's.
        assert_eq!(grant_in(&SafeDir::trusted(&path).unwrap(), 107).unwrap(), Vec::<String>::new());
        fs::remove_dir_all(path).unwrap();
    }
}
