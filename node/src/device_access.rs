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
    let dev = launcher.root()?.open_dir("dev")?;
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
