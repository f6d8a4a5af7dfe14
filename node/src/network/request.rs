//! The interfaces that a VMI requests.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use api::{
    VirtualMachineInstance, VmiPhase, nics,
    vmi::network::{Interface, Network},
};
use sha2::{Digest, Sha256};

use super::{Error, mac::local_mac};

/// Default IPv4 subnet of the guest.
const SUBNET_V4: &str = "10.0.2.0/24";
/// Default IPv6 subnet of the guest.
const SUBNET_V6: &str = "fd10:0:2::/120";
/// Most queues of a network interface.
const MAX_QUEUES: u32 = 256;
/// Most forwarded ports and ranges of one interface: more than admission accepts.
const MAX_FORWARDS: usize = 4096;
/// Most interfaces of a VMI: twice the number that fits on its PCI buses.
const MAX_INTERFACES: usize = 64;
/// Last octet of the first interface's DHCP server address, in 169.254.75.0/24.
const FIRST_SERVER: u8 = 10;

/// A requested interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Name in the VMI's spec.
    pub name: String,
    pub pod_link: String,
    /// MAC address of the guest's interface, if it is not that of the pod's link.
    pub mac: Option<String>,
    /// Queues of the tap device.
    pub queues: u32,
    /// Connection of the guest to the pod's link.
    pub binding: Binding,
}

/// Connection of a guest to a link of its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Binding {
    /// Behind the pod's addresses.
    Masquerade(Masquerade),
    /// In place of the pod: the guest gets the pod's addresses.
    Bridge {
        /// Address of the guest's DHCP server. Nothing else uses it.
        server: Ipv4Addr,
    },
}

/// Input of the address translation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Masquerade {
    /// IPv4 addresses of bridge and guest.
    pub v4: Pair,
    /// IPv6 addresses of bridge and guest.
    pub v6: Pair,
    /// Ports forwarded to the guest; empty: all.
    pub forwards: Vec<Forward>,
    /// A sidecar proxy shares the pod's network.
    pub sidecar: bool,
}

/// The two addresses of a subnet that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Address of the bridge: the guest's gateway.
    pub gateway: IpAddr,
    /// Address of the guest.
    pub guest: IpAddr,
    /// Prefix length of the subnet.
    pub prefix: u8,
}

/// Ports forwarded to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forward {
    pub protocol: Protocol,
    pub ports: RangeInclusive<u16>,
}

/// Protocols with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// An interface that the pod's network is no longer set up for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Release {
    /// Name in the VMI's spec.
    pub name: String,
    pub pod_link: String,
}

/// Returns the releases of these interfaces. Names without a secondary network are ignored.
pub(crate) fn releases(vmi: &VirtualMachineInstance, names: &[String]) -> Vec<Release> {
    let released = nics::secondary(vmi).filter(|(interface, _)| names.contains(&interface.name));
    let release = |(interface, network): (&Interface, &Network)| Release {
        name: interface.name.clone(),
        pod_link: network.pod_link(),
    };
    released.map(release).take(MAX_INTERFACES).collect()
}

/// Returns true if the pod has, or is about to have, the link of an interface. Into the pod of a running VMI the network plugins
/// bring it some time after the interface is added.
pub(crate) fn is_connected(vmi: &VirtualMachineInstance, interface: &Interface) -> bool {
    let is_reported =
        || [nics::DOMAIN, nics::MULTUS].iter().any(|source| nics::has_source(vmi, &interface.name, source));
    let is_secondary = || nics::secondary(vmi).any(|(secondary, _)| secondary.name == interface.name);
    !interface.is_absent() && (*vmi.phase() != VmiPhase::Running || is_reported() || !is_secondary())
}

/// Returns the request of each interface of a VMI, or the reason why there is none, with the interface's name.
pub(crate) fn requests(vmi: &VirtualMachineInstance) -> Vec<(String, Result<Request, Error>)> {
    let interfaces = &vmi.spec.domain.devices.interfaces;
    let (mut requests, mut links) = (Vec::new(), BTreeSet::new());
    for (number, interface) in interfaces.iter().filter(|interface| is_connected(vmi, interface)).enumerate() {
        let request = request(vmi, number, interface).and_then(|request| {
            let is_first = links.insert(request.pod_link.clone());
            let shared = || unsupported(interface, "a network can be used by one interface only");
            is_first.then_some(request).ok_or_else(shared)
        });
        requests.push((interface.name.clone(), request));
    }
    requests
}

/// Returns the request of the interface with this number.
fn request(vmi: &VirtualMachineInstance, number: usize, interface: &Interface) -> Result<Request, Error> {
    if number >= MAX_INTERFACES {
        return Err(unsupported(interface, &format!("more than {MAX_INTERFACES} interfaces")));
    }
    let mut networks = vmi.spec.networks.iter();
    let network = networks
        .find(|network| network.name == interface.name)
        .ok_or_else(|| unsupported(interface, "there is no network of that name"))?;
    if network.resource_claim.is_some() || network.pod.is_some() == network.multus.is_some() {
        return Err(unsupported(interface, "its network is neither the pod's nor one of Multus"));
    }
    let binding = match (binding(interface)?, &network.pod) {
        (BindingKind::Bridge, _) => Binding::Bridge { server: server(number) },
        (BindingKind::Masquerade, Some(pod)) => Binding::Masquerade(Masquerade {
            v4: pair(non_empty(pod.vm_network_cidr.as_ref()).unwrap_or(SUBNET_V4), IpAddr::is_ipv4)?,
            v6: pair(non_empty(pod.vm_ipv6_network_cidr.as_ref()).unwrap_or(SUBNET_V6), IpAddr::is_ipv6)?,
            forwards: forwards(interface)?,
            sidecar: has_sidecar(vmi),
        }),
        (BindingKind::Masquerade, None) => {
            return Err(unsupported(interface, "masquerade is for the pod network only"));
        }
    };
    let mac = match binding {
        Binding::Masquerade(_) => Some(interface.mac().unwrap_or_else(|| own_mac(vmi, &interface.name))),
        Binding::Bridge { .. } => interface.mac(),
    };
    Ok(Request {
        name: interface.name.clone(),
        pod_link: pod_link(vmi, network),
        mac,
        queues: queues(vmi, interface),
        binding,
    })
}

fn unsupported(interface: &Interface, reason: &str) -> Error {
    Error::Unsupported { interface: interface.name.clone(), reason: reason.to_owned() }
}

/// Returns the DHCP server address of an interface, by its number.
fn server(number: usize) -> Ipv4Addr {
    let last = u8::try_from(number).map_or(u8::MAX, |number| FIRST_SERVER.saturating_add(number));
    Ipv4Addr::new(169, 254, 75, last)
}

/// Returns the MAC address of a masquerade interface without one in the spec: the same as long as the VMI exists, different for each
/// VMI (and so with each start of a VM) and interface.
fn own_mac(vmi: &VirtualMachineInstance, interface: &str) -> String {
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    let digest = Sha256::digest(format!("{uid}/{interface}"));
    local_mac(&digest).map(|byte| format!("{byte:02x}")).join(":")
}

/// Returns a text unless it is empty: clients send empty texts for unset fields.
fn non_empty(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

/// The supported bindings.
enum BindingKind {
    Masquerade,
    Bridge,
}

fn binding(interface: &Interface) -> Result<BindingKind, Error> {
    let other = [
        ("sriov", interface.sriov.is_some()),
        ("passtBinding", interface.passt_binding.is_some()),
        ("passt", interface.passt.is_some()),
        ("slirp", interface.slirp.is_some()),
        ("macvtap", interface.macvtap.is_some()),
        ("binding", interface.binding.is_some()),
    ]
    .into_iter()
    .find_map(|(name, set)| set.then_some(name));
    let reason = match (other, &interface.masquerade, &interface.bridge) {
        (None, Some(_), None) => return Ok(BindingKind::Masquerade),
        (None, None, Some(_)) => return Ok(BindingKind::Bridge),
        (Some(name), ..) => format!("{name} is not supported, only masquerade and bridge are"),
        (None, Some(_), Some(_)) => "more than one binding is given".to_owned(),
        (None, None, None) => "no binding is given".to_owned(),
    };
    Err(Error::Unsupported { interface: interface.name.clone(), reason })
}

/// Returns the pod's link of a network. The link of the primary network can have another name, which the status contains.
fn pod_link(vmi: &VirtualMachineInstance, network: &Network) -> String {
    let reported = vmi
        .status
        .iter()
        .flat_map(|status| &status.interfaces)
        .find(|known| known.name.as_deref() == Some(network.name.as_str()))
        .and_then(|known| known.pod_interface_name.clone())
        .filter(|name| network.is_primary() && is_link_name(name));
    reported.unwrap_or_else(|| network.pod_link())
}

/// Returns true if the text is a valid link name. It is then also safe in rules and in paths. Names derived from it are
/// longer (`k6t-` is prefixed), hence the limit.
fn is_link_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !name.is_empty() && name.len() <= 11 && name.bytes().all(plain)
}

/// Returns the queues of the tap device: those that the interface has in the running domain, which the present number of vCPUs does
/// not change. An interface that the domain lacks gets those of the spec, like the launcher's definition.
pub(crate) fn queues(vmi: &VirtualMachineInstance, interface: &Interface) -> u32 {
    let domain = &vmi.spec.domain;
    let running = nics::shown(vmi, &interface.name).filter(|_| nics::has_source(vmi, &interface.name, nics::DOMAIN));
    if let Some(queues) = running.and_then(|shown| u32::try_from(shown.queue_count?).ok()) {
        return queues.clamp(1, MAX_QUEUES);
    }
    let virtio = interface.model.as_deref().is_none_or(|model| model.is_empty() || model == "virtio");
    if !virtio || domain.devices.network_interface_multiqueue != Some(true) {
        return 1;
    }
    domain.cpu.as_ref().map_or(1, api::vmi::cpu::Cpu::vcpus).clamp(1, MAX_QUEUES)
}

/// Returns the first two host addresses of a subnet.
fn pair(cidr: &str, family: fn(&IpAddr) -> bool) -> Result<Pair, Error> {
    let invalid = || Error::InvalidSubnet(cidr.to_owned());
    let (address, prefix) = cidr.split_once('/').ok_or_else(invalid)?;
    let address: IpAddr = address.parse().map_err(|_| invalid())?;
    // `+5` and `05` parse as numbers.
    if !family(&address) || !prefix.bytes().all(|byte| byte.is_ascii_digit()) || prefix.len() > 3 {
        return Err(invalid());
    }
    let prefix: u8 = prefix.parse().map_err(|_| invalid())?;
    let bits = if address.is_ipv4() { 32 } else { 128 };
    if prefix > bits {
        return Err(invalid());
    }
    if bits - prefix < 2 {
        return Err(Error::SubnetTooSmall(cidr.to_owned()));
    }
    let nth = |number: u32| match address {
        IpAddr::V4(v4) => {
            let network = v4.to_bits() & (u32::MAX.checked_shl(u32::from(32 - prefix)).unwrap_or(0));
            IpAddr::V4(Ipv4Addr::from_bits(network | number))
        }
        IpAddr::V6(v6) => {
            let network = v6.to_bits() & (u128::MAX.checked_shl(u32::from(128 - prefix)).unwrap_or(0));
            IpAddr::V6(Ipv6Addr::from_bits(network | u128::from(number)))
        }
    };
    Ok(Pair { gateway: nth(1), guest: nth(2), prefix })
}

fn forwards(interface: &Interface) -> Result<Vec<Forward>, Error> {
    if interface.ports.len() + interface.port_ranges.len() > MAX_FORWARDS {
        return Err(Error::Unsupported {
            interface: interface.name.clone(),
            reason: format!("more than {MAX_FORWARDS} ports"),
        });
    }
    let number = |port: i32| {
        u16::try_from(port)
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| Error::InvalidPort { interface: interface.name.clone(), port })
    };
    let protocol = |name: &str| match name.to_ascii_lowercase().as_str() {
        "" | "tcp" => Ok(Protocol::Tcp),
        "udp" => Ok(Protocol::Udp),
        _ => Err(Error::Unsupported {
            interface: interface.name.clone(),
            reason: format!("protocol {name} is neither TCP nor UDP"),
        }),
    };
    let ports = interface.ports.iter().map(|port| {
        let at = number(port.port)?;
        Ok(Forward { protocol: protocol(port.protocol.as_deref().unwrap_or_default())?, ports: at..=at })
    });
    let ranges = interface.port_ranges.iter().map(|range| {
        let ports = number(range.start)?..=number(range.end)?;
        if ports.is_empty() {
            return Err(Error::InvalidPort { interface: interface.name.clone(), port: range.end });
        }
        Ok(Forward { protocol: protocol(&range.protocol)?, ports })
    });
    ports.chain(ranges).collect()
}

/// Returns true if a service mesh injects its proxy into the launcher pod, which inherits labels and annotations of the VMI.
fn has_sidecar(vmi: &VirtualMachineInstance) -> bool {
    const INJECT: &str = "sidecar.istio.io/inject";
    let metadata = &vmi.metadata;
    [&metadata.labels, &metadata.annotations]
        .into_iter()
        .flatten()
        .any(|map| map.get(INJECT).is_some_and(|value| value.eq_ignore_ascii_case("true")))
}
