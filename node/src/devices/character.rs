//! Character devices that launchers open.

use crate::safe_dir::{Kind, SafeDir};

/// A character device that launchers use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Name of the resource after `devices.kubevirt.io/`.
    pub name: &'static str,
    /// Device node beneath `/dev`.
    pub node: &'static str,
    /// Major and minor number.
    pub number: (u32, u32),
    /// The node exists before its driver is loaded; virt-handler loads the driver by opening the node.
    pub autoload: bool,
}

/// Hardware virtualization.
pub(crate) const KVM: Device = Device { name: "kvm", node: "kvm", number: (10, 232), autoload: false };
/// Tap devices.
pub(crate) const TUN: Device = Device { name: "tun", node: "net/tun", number: (10, 200), autoload: true };
/// Network devices of the kernel.
pub(crate) const VHOST_NET: Device = Device { name: "vhost-net", node: "vhost-net", number: (10, 238), autoload: true };
/// VSOCK of the kernel. The first VMI that opens the node loads the driver, because most nodes have no such VMI.
pub(crate) const VHOST_VSOCK: Device =
    Device { name: "vhost-vsock", node: "vhost-vsock", number: (10, 241), autoload: false };

impl Device {
    /// Returns the name of the resource that pods request.
    #[must_use]
    pub(crate) fn resource(&self) -> String {
        format!("devices.kubevirt.io/{}", self.name)
    }
}

/// Returns true if the device exists in a device directory.
pub(crate) fn is_present(dev: &SafeDir, device: Device) -> bool {
    dev.stat(device.node).is_ok_and(|stat| stat.kind == Kind::CharacterDevice && stat.rdev == device.number)
}
