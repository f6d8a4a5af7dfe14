//! From what is asked for and what there is to what has to be done.
//!
//! The order of steps makes an interrupted set-up safe to go on with: the tap device, which lets the guest's packets in,
//! comes after the rules, and the mark that says that all is done comes last.

use std::net::{IpAddr, Ipv4Addr};

use sha2::{Digest, Sha256};

use super::{
    Error, PodInterface, PodNetwork, bridge,
    request::{Binding, Masquerade, Pair, Request},
    ruleset::{Translation, ruleset},
};

/// Raise it when steps change in a way that machines set up before have to be set up again.
pub(super) const GENERATION: u32 = 1;
/// MAC address of every bridge before which addresses are translated. The guest sees it as its gateway's, wherever it runs.
pub const BRIDGE_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0];
/// User and group that may open the tap device: the launcher's.
pub const TAP_OWNER: u32 = 107;
/// Smallest MTU that IPv4 allows; the kernel's own smallest for a bridge.
pub(super) const MIN_MTU: u32 = 68;

/// A link of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// `bridge`, `tun`, `veth` and so on; empty if the kernel does not say.
    pub kind: String,
    /// Its MAC address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// Its MTU.
    pub mtu: u32,
    /// Number of the link that it belongs to.
    pub controller: Option<u32>,
    /// Whether it is switched on.
    pub up: bool,
    /// A text kept with it.
    pub alias: Option<String>,
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Number of the link.
    pub link: u32,
    /// The address.
    pub ip: IpAddr,
    /// Length of its prefix.
    pub prefix: u8,
}

/// A route of the main table by one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Number of the link.
    pub link: u32,
    /// Where it leads.
    pub destination: Ipv4Addr,
    /// Length of the destination's prefix.
    pub prefix: u8,
    /// Who passes packets on; nobody where the destination is on the link itself.
    pub gateway: Option<Ipv4Addr>,
}

/// Links, addresses and routes of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// All links.
    pub links: Vec<Link>,
    /// All addresses.
    pub addresses: Vec<Address>,
    /// Routes for IPv4, in the kernel's order.
    pub routes: Vec<Route>,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make a bridge.
    CreateBridge {
        /// Its name.
        name: String,
        /// Its MAC address.
        mac: [u8; 6],
        /// Its MTU.
        mtu: u32,
        /// Switch it on.
        up: bool,
    },
    /// Make the tap device.
    CreateTap {
        /// Its name.
        name: String,
        /// Its number of queues.
        queues: u32,
    },
    /// Change a link.
    SetLink {
        /// Its name.
        name: String,
        /// Its new MTU.
        mtu: Option<u32>,
        /// The bridge that it shall belong to.
        controller: Option<String>,
        /// Switch it on.
        up: bool,
    },
    /// Give a link an address.
    AddAddress {
        /// Name of the link.
        link: String,
        /// The address.
        ip: IpAddr,
        /// Length of its prefix.
        prefix: u8,
    },
    /// Switch a link off and give it another name.
    Rename {
        /// Its name.
        from: String,
        /// Its new name.
        to: String,
    },
    /// Give a link another MAC address.
    SetMac {
        /// Its name.
        link: String,
        /// The address.
        mac: [u8; 6],
    },
    /// Take a link's addresses away, but for link-local ones.
    TakeAddresses {
        /// Its name.
        link: String,
    },
    /// Have a bridge not learn who is behind one of its ports.
    StopLearning {
        /// Name of the port's link.
        link: String,
    },
    /// Set a kernel setting.
    SetKernel {
        /// Path beneath `/proc/sys`.
        path: String,
        /// Value.
        value: &'static str,
    },
    /// Put rules in force.
    Rules(String),
    /// Note on a link that all is done.
    Mark {
        /// Name of the link.
        link: String,
        /// The mark.
        mark: String,
    },
}

/// What is to be done, and what the network is afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What to do, in this order. Empty: all is in place.
    pub steps: Vec<Step>,
    /// The network when it is done.
    pub network: PodNetwork,
}

/// Decides what to do for one interface.
pub fn decide(request: &Request, observed: &Observed) -> Result<Plan, Error> {
    match &request.binding {
        Binding::Masquerade(asked) => masquerade(request, asked, observed),
        Binding::Bridge { server } => bridge::decide(request, *server, observed),
    }
}

fn masquerade(request: &Request, asked: &Masquerade, observed: &Observed) -> Result<Plan, Error> {
    let pod_link = observed.link(&request.pod_link).ok_or_else(|| Error::PodLinkMissing(request.pod_link.clone()))?;
    let ips = observed.unicast(pod_link.index);
    if ips.is_empty() {
        return Err(Error::PodAddressMissing(request.pod_link.clone()));
    }
    let bridge = bridge_name(&request.pod_link);
    let tap = tap_name(&request.pod_link);
    let mtu = pod_link.mtu.max(MIN_MTU);
    let pairs: Vec<(IpAddr, Pair)> =
        ips.iter().map(|ip| (*ip, if ip.is_ipv4() { asked.v4 } else { asked.v6 })).collect();
    let translations: Vec<Translation<'_>> = pairs
        .iter()
        .map(|(pod_address, pair)| Translation {
            pod_link: &request.pod_link,
            bridge: &bridge,
            pod_address: *pod_address,
            pair: *pair,
            forwards: &asked.forwards,
            sidecar: asked.sidecar,
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

/// What makes the tap device and ties it to the bridge.
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

/// The step that makes an existing link as it should be, if there is anything to change.
pub(super) fn change(link: &Link, mtu: u32, controller: Option<&str>) -> Option<Step> {
    let new_mtu = (link.mtu != mtu).then_some(mtu);
    if new_mtu.is_none() && controller.is_none() && link.up {
        return None;
    }
    Some(Step::SetLink { name: link.name.clone(), mtu: new_mtu, controller: controller.map(str::to_owned), up: true })
}

/// Kernel settings that let packets pass between the pod's link and the bridge.
fn settings(bridge: &str, guest: IpAddr) -> Vec<Step> {
    if guest.is_ipv4() {
        vec![
            Step::SetKernel { path: "net/ipv4/ip_forward".to_owned(), value: "1" },
            // Packets from the pod's loopback address are let through to the guest.
            Step::SetKernel { path: format!("net/ipv4/conf/{bridge}/route_localnet"), value: "1" },
        ]
    } else {
        vec![Step::SetKernel { path: "net/ipv6/conf/all/forwarding".to_owned(), value: "1" }]
    }
}

/// The bridge that belongs to a pod's link.
pub(super) fn bridge_name(pod_link: &str) -> String {
    format!("k6t-{}", pod_link.strip_prefix("pod").unwrap_or(pod_link))
}

/// The tap device that belongs to a pod's link.
pub(super) fn tap_name(pod_link: &str) -> String {
    match pod_link {
        "eth0" => "tap0".to_owned(),
        other => format!("tap{}", other.get(3..).unwrap_or_default()),
    }
}

/// A MAC address of one's own, made from the first bytes of something that is different for everybody.
pub(super) fn local_mac(bytes: &[u8]) -> [u8; 6] {
    let mut mac = [0x02, 0, 0, 0, 0, 0];
    for (to, from) in mac.iter_mut().skip(1).zip(bytes) {
        *to = *from;
    }
    mac
}

/// Says which rules are in force.
fn mark(rules: &str) -> String {
    let digest = Sha256::digest(rules.as_bytes());
    let hex: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("ferrovirt-{GENERATION}-{hex}")
}

impl Observed {
    pub(super) fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.name == name)
    }

    /// The link of that name, which has to be of that kind.
    pub(super) fn own(&self, name: &str, kind: &str) -> Result<Option<&Link>, Error> {
        match self.link(name) {
            Some(link) if link.kind != kind => Err(Error::ForeignLink(name.to_owned())),
            other => Ok(other),
        }
    }

    pub(super) fn has(&self, link: u32, ip: IpAddr, prefix: u8) -> bool {
        self.addresses.contains(&Address { link, ip, prefix })
    }

    /// The first address of each family under which others reach the link, IPv4 first.
    fn unicast(&self, link: u32) -> Vec<IpAddr> {
        let all = || self.addresses.iter().filter(|address| address.link == link).map(|address| address.ip);
        let v4 = all().find(|ip| ip.is_ipv4() && is_global_unicast(ip));
        let v6 = all().find(|ip| ip.is_ipv6() && is_global_unicast(ip));
        v4.into_iter().chain(v6).collect()
    }
}

/// Whether the address is of use on its own link only.
pub fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Whether others can reach the address: not loopback, link-local, multicast, broadcast or unspecified.
fn is_global_unicast(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            !(v4.is_unspecified() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_broadcast())
        }
        IpAddr::V6(v6) => !(v6.is_unspecified() || v6.is_loopback() || v6.is_unicast_link_local() || v6.is_multicast()),
    }
}
