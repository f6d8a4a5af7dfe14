//! Devices of the node for launcher pods.
//!
//! [`inventory`] finds the PCI and USB devices that the cluster configuration permits, [`plugin`] offers these and the devices
//! that every launcher opens to kubelet, one of them only while [`post_copy`] is permitted. [`grant`] gives the device nodes in a
//! launcher's container to its user, and [`cgroup`] permits a running launcher to open further block devices.

pub(crate) mod cgroup;
pub(crate) mod character;
pub(crate) mod grant;
pub(crate) mod inventory;
pub(crate) mod plugin;
pub(crate) mod post_copy;

pub(crate) use character::{Device, KVM, TUN, USERFAULTFD, VHOST_NET, VHOST_VSOCK, is_present, number};
