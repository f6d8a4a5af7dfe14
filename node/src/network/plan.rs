//! Compares requests with the observed links, and plans the missing steps.
//!
//! The order of steps makes an interrupted setup safe to continue: the tap device, which lets the guest's packets in, comes
//! after the rules, and the mark of a complete setup comes last.

use std::net::{IpAddr, Ipv4Addr};

use sha2::{Digest, Sha256};

use super::{
    Error, PodInterface, PodNetwork, bridge,
    request::{Binding, Masquerade, Pair, Request},
    ruleset::{Translation, ruleset},
};

/// Version of the steps. A new version repeats the setup of running VMIs.
pub(super) const GENERATION: u32 = 1;
/// MAC address of every bridge with address translation: the guest's gateway has the same address on every node.
pub(crate) const BRIDGE_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0];
/// User and group that may open the tap device: the launcher's.
pub(crate) const TAP_OWNER: u32 = 107;
/// Smallest MTU of IPv4, and of a bridge in the kernel.
pub(super) const MIN_MTU: u32 = 68;

/// A link of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// `bridge`, `tun`, `veth` and so on; empty if the kernel does not report it.
    pub kind: String,
    /// MAC address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// MTU.
    pub mtu: u32,
    /// Index of the bridge that it belongs to.
    pub controller: Option<u32>,
    /// It is up.
    pub up: bool,
    /// Alias: a text that the kernel stores with the link.
    pub alias: Option<String>,
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Index of the link.
    pub link: u32,
    /// The address.
    pub ip: IpAddr,
    /// Prefix length.
    pub prefix: u8,
}

/// A route of the main table with one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Index of the link.
    pub link: u32,
    /// Destination.
    pub destination: Ipv4Addr,
    /// Prefix length of the destination.
    pub prefix: u8,
    /// Gateway; `None` for destinations on the link.
    pub gateway: Option<Ipv4Addr>,
}

/// Links, addresses and routes of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// All links.
    pub links: Vec<Link>,
    /// All addresses.
    pub addresses: Vec<Address>,
    /// IPv4 routes in the kernel's order.
    pub routes: Vec<Route>,
}

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Creates a bridge.
    CreateBridge {
        /// Name.
        name: String,
        /// MAC address.
        mac: [u8; 6],
        /// MTU.
        mtu: u32,
        /// Sets it up.
        up: bool,
    },
    /// Creates the tap device.
    CreateTap {
        /// Name.
        name: String,
        /// Number of queues.
        queues: u32,
    },
    /// Changes a link.
    SetLink {
        /// Name.
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
        /// Value.
        value: &'static str,
    },
    /// Applies rules.
    Rules(String),
    /// Marks a link as complete.
    Mark {
        /// Name of the link.
        link: String,
        /// The mark.
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

/// Plans the steps for one interface.
pub(crate) fn decide(request: &Request, observed: &Observed) -> Result<Plan, Error> {
    match &request.binding {
        Binding::Masquerade(binding) => masquerade(request, binding, observed),
        Binding::Bridge { server } => bridge::decide(request, *server, observed),
    }
}

fn masquerade(request: &Request, binding: &Masquerade, observed: &Observed) -> Result<Plan, Error> {
    let pod_link = observed.link(&request.pod_link).ok_or_else(|| Error::PodLinkMissing(request.pod_link.clone()))?;
    let ips = observed.unicast(pod_link.index);
    if ips.is_empty() {
        return Err(Error::PodAddressMissing(request.pod_link.clone()));
    }
    let bridge = bridge_name(&request.pod_link);
    let tap = tap_name(&request.pod_link);
    let mtu = pod_link.mtu.max(MIN_MTU);
    let pairs: Vec<(IpAddr, Pair)> =
        ips.iter().map(|ip| (*ip, if ip.is_ipv4() { binding.v4 } else { binding.v6 })).collect();
    let translations: Vec<Translation<'_>> = pairs
        .iter()
        .map(|(pod_address, pair)| Translation {
            pod_link: &request.pod_link,
            bridge: &bridge,
            pod_address: *pod_address,
            pair: *pair,
            forwards: &binding.forwards,
            sidecar: binding.sidecar,
        })
        .collect();
    let rules = ruleset(&translations);
    let mark = mark(&rules);

    let bridge_link = observed.own(&bridge, "bridge")?;
    let tap_link = observed.own(&tap, "tun")?;
    let marked = bridge_link.is_some_and(|link| link.alias.as_deref() == Some(mark.as_str()));

    let mut steps = Vec::new();
    match bridge_link {
        None => steps.push(Step::CreateBridge { name: bridge.clone(), mac: BRIDGE_MAC, mtu, up: true }),
        Some(link) => steps.extend(change(link, mtu, None)),
    }
    for (_, pair) in &pairs {
        let there = bridge_link.is_some_and(|link| observed.has(link.index, pair.gateway, pair.prefix));
        if !there {
            steps.push(Step::AddAddress { link: bridge.clone(), ip: pair.gateway, prefix: pair.prefix });
        }
    }
    if !marked {
        steps.extend(pairs.iter().flat_map(|(_, pair)| settings(&bridge, pair.guest)));
        steps.push(Step::Rules(rules));
    }
    steps.extend(tap_steps(request, tap_link, bridge_link, &bridge, mtu));
    if !marked {
        steps.push(Step::Mark { link: bridge.clone(), mark });
    }

    let guest = |v4: bool| pairs.iter().map(|(_, pair)| pair).find(|pair| pair.guest.is_ipv4() == v4);
    let (v4, v6) = (guest(true), guest(false));
    let nic = protocol::Nic {
        name: request.name.clone(),
        tap,
        bridge,
        mtu,
        mac: request.mac.clone().unwrap_or_default(),
        dhcp: v4.map(|pair| protocol::DhcpLease {
            address: format!("{}/{}", pair.guest, pair.prefix),
            gateway: pair.gateway.to_string(),
            server: pair.gateway.to_string(),
            routes: Vec::new(),
        }),
        dhcp6: v6.map(|pair| protocol::DhcpLease6 {
            address: pair.guest.to_string(),
            server_mac: BRIDGE_MAC.map(|byte| format!("{byte:02x}")).join(":"),
        }),
    };
    let interface = PodInterface { name: request.name.clone(), pod_interface_name: request.pod_link.clone(), ips };
    Ok(Plan { steps, network: PodNetwork { nics: vec![nic], interfaces: vec![interface] } })
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

/// Returns the kernel settings for forwarding between the pod's link and the bridge.
fn settings(bridge: &str, guest: IpAddr) -> Vec<Step> {
    if guest.is_ipv4() {
        vec![
            Step::SetKernel { path: "net/ipv4/ip_forward".to_owned(), value: "1" },
            // Packets from the pod's loopback address reach the guest.
            Step::SetKernel { path: format!("net/ipv4/conf/{bridge}/route_localnet"), value: "1" },
        ]
    } else {
        vec![Step::SetKernel { path: "net/ipv6/conf/all/forwarding".to_owned(), value: "1" }]
    }
}

/// Returns the name of the bridge for a pod's link.
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

/// Returns a locally administered MAC address made from the first bytes of a digest.
pub(super) fn local_mac(bytes: &[u8]) -> [u8; 6] {
    let mut mac = [0x02, 0, 0, 0, 0, 0];
    for (to, from) in mac.iter_mut().skip(1).zip(bytes) {
        *to = *from;
    }
    mac
}

/// Returns the mark of a setup with these rules.
fn mark(rules: &str) -> String {
    let digest = Sha256::digest(rules.as_bytes());
    let hex: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("ferrovirt-{GENERATION}-{hex}")
}

impl Observed {
    pub(super) fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.name == name)
    }

    /// Returns the link of this name, which must be of this kind.
    pub(super) fn own(&self, name: &str, kind: &str) -> Result<Option<&Link>, Error> {
        match self.link(name) {
            Some(link) if link.kind != kind => Err(Error::ForeignLink(name.to_owned())),
            other => Ok(other),
        }
    }

    pub(super) fn has(&self, link: u32, ip: IpAddr, prefix: u8) -> bool {
        self.addresses.contains(&Address { link, ip, prefix })
    }

    /// Returns the first global address of each family, IPv4 first.
    fn unicast(&self, link: u32) -> Vec<IpAddr> {
        let all = || self.addresses.iter().filter(|address| address.link == link).map(|address| address.ip);
        let v4 = all().find(|ip| ip.is_ipv4() && is_global_unicast(ip));
        let v6 = all().find(|ip| ip.is_ipv6() && is_global_unicast(ip));
        v4.into_iter().chain(v6).collect()
    }
}

/// Returns true if the address is valid on its link only.
pub(crate) fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Returns true if others can reach the address: not loopback, link-local, multicast, broadcast or unspecified.
fn is_global_unicast(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            !(v4.is_unspecified() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_broadcast())
        }
        IpAddr::V6(v6) => !(v6.is_unspecified() || v6.is_loopback() || v6.is_unicast_link_local() || v6.is_multicast()),
    }
}
