//! Character devices that launchers open.

use crate::safe_dir::{Kind, SafeDir};

/// A character device that launchers use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Name of the resource after `devices.kubevirt.io/`.
    pub name: &'static str,
    /// Device node beneath `/dev`.
    pub node: &'static str,
    /// Major and minor number; `None`: the node's kernel chooses it.
    pub number: Option<(u32, u32)>,
    /// The node exists before its driver is loaded; virt-handler loads the driver by opening the node.
    pub autoload: bool,
}

/// Hardware virtualization.
pub(crate) const KVM: Device = Device { name: "kvm", node: "kvm", number: Some((10, 232)), autoload: false };
/// Tap devices.
pub(crate) const TUN: Device = Device { name: "tun", node: "net/tun", number: Some((10, 200)), autoload: true };
/// Network devices of the kernel.
pub(crate) const VHOST_NET: Device =
    Device { name: "vhost-net", node: "vhost-net", number: Some((10, 238)), autoload: true };
/// VSOCK of the kernel. The first VMI that opens the node loads the driver, because most nodes have no such VMI.
pub(crate) const VHOST_VSOCK: Device =
    Device { name: "vhost-vsock", node: "vhost-vsock", number: Some((10, 241)), autoload: false };

/// Faults of user space, with which QEMU fetches missing pages in post-copy. Without the device, since Linux 6.1, only privileged
/// processes may create such a descriptor on most nodes.
pub(crate) const USERFAULTFD: Device =
    Device { name: "userfaultfd", node: "userfaultfd", number: None, autoload: false };

/// Major number of devices whose minor number the kernel chooses (`misc`).
const MISC: u32 = 10;

impl Device {
    /// Returns the name of the resource that pods request.
    pub(crate) fn resource(&self) -> String {
        format!("devices.kubevirt.io/{}", self.name)
    }
}

/// Returns true if the device exists in a device directory.
pub(crate) fn is_present(dev: &SafeDir, device: Device) -> bool {
    number(dev, device).is_some()
}

/// Returns the number that the device has in a device directory; `None` if it is not there.
pub(crate) fn number(dev: &SafeDir, device: Device) -> Option<(u32, u32)> {
    let found = dev.stat(device.node).ok().filter(|stat| stat.kind == Kind::CharacterDevice)?.rdev;
    let is_right = device.number.map_or(found.0 == MISC, |number| found == number);
    is_right.then_some(found)
}
