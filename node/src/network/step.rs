//! The steps of a setup, those that all bindings share, and the names of the links that they create.

use std::net::IpAddr;

use super::{PodNetwork, observed::Link, request::Request};

/// Version of the steps. A new version repeats the setup of running VMIs.
pub(super) const GENERATION: u32 = 1;
/// MAC address of every bridge with address translation: the guest's gateway has the same address on every node.
pub(crate) const BRIDGE_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0];
/// User and group that may open the tap device: the launcher's.
pub(crate) const TAP_OWNER: u32 = 107;
/// Smallest MTU of IPv4, and of a bridge in the kernel.
pub(super) const MIN_MTU: u32 = 68;

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Creates a bridge.
    CreateBridge {
        name: String,
        /// MAC address.
        mac: [u8; 6],
        mtu: u32,
        /// Sets it up.
        up: bool,
    },
    /// Creates the tap device.
    CreateTap {
        name: String,
        /// Number of queues.
        queues: u32,
    },
    /// Changes a link.
    SetLink {
        name: String,
        /// New MTU.
        mtu: Option<u32>,
        /// New bridge.
        controller: Option<String>,
        /// Sets it up.
        up: bool,
    },
    /// Adds an address to a link.
    AddAddress {
        /// Name of the link.
        link: String,
        /// The address.
        ip: IpAddr,
        /// Prefix length.
        prefix: u8,
    },
    /// Sets a link down and renames it.
    Rename {
        /// Name.
        from: String,
        /// New name.
        to: String,
    },
    /// Changes the MAC address of a link.
    SetMac {
        /// Name.
        link: String,
        /// The address.
        mac: [u8; 6],
    },
    /// Deletes a link.
    Delete {
        /// Name.
        link: String,
    },
    /// Removes all addresses of a link except link-local ones.
    TakeAddresses {
        /// Name.
        link: String,
    },
    /// Disables learning on a bridge port.
    StopLearning {
        /// Name of the port's link.
        link: String,
    },
    /// Changes a kernel setting.
    SetKernel {
        /// Path beneath `/proc/sys`.
        path: String,
        value: &'static str,
    },
    /// Applies rules.
    Rules(String),
    /// Marks a link as complete.
    Mark {
        /// Name of the link.
        link: String,
        mark: String,
    },
}

/// The missing steps and the resulting network.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// Steps in order; empty if the setup is complete.
    pub steps: Vec<Step>,
    /// The network after the steps.
    pub network: PodNetwork,
}

/// Returns the steps that create the tap device and attach it to the bridge.
pub(super) fn tap_steps(
    request: &Request,
    tap: Option<&Link>,
    bridge_link: Option<&Link>,
    bridge: &str,
    mtu: u32,
) -> Vec<Step> {
    let Some(link) = tap else {
        let name = tap_name(&request.pod_link);
        return vec![
            Step::CreateTap { name: name.clone(), queues: request.queues },
            Step::SetLink { name, mtu: Some(mtu), controller: Some(bridge.to_owned()), up: true },
        ];
    };
    let attached = link.controller.is_some() && link.controller == bridge_link.map(|link| link.index);
    change(link, mtu, (!attached).then_some(bridge)).into_iter().collect()
}

/// Returns the step that corrects an existing link, if any.
pub(super) fn change(link: &Link, mtu: u32, controller: Option<&str>) -> Option<Step> {
    let new_mtu = (link.mtu != mtu).then_some(mtu);
    if new_mtu.is_none() && controller.is_none() && link.up {
        return None;
    }
    Some(Step::SetLink { name: link.name.clone(), mtu: new_mtu, controller: controller.map(str::to_owned), up: true })
}

pub(super) fn bridge_name(pod_link: &str) -> String {
    format!("k6t-{}", pod_link.strip_prefix("pod").unwrap_or(pod_link))
}

/// Returns the name of the tap device for a pod's link.
pub(super) fn tap_name(pod_link: &str) -> String {
    match pod_link {
        "eth0" => "tap0".to_owned(),
        other => format!("tap{}", other.get(3..).unwrap_or_default()),
    }
}
