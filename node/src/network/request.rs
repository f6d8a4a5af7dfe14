//! What a machine asks of the pod's networks.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use api::{
    VirtualMachineInstance,
    vmi::network::{Interface, Network},
};
use sha2::{Digest, Sha256};

use super::{Error, plan::local_mac};

/// Range of the guest's IPv4 address when none is given.
const SUBNET_V4: &str = "10.0.2.0/24";
/// Range of the guest's IPv6 address when none is given.
const SUBNET_V6: &str = "fd10:0:2::/120";
/// Most queues that a network interface may have.
const MAX_QUEUES: u32 = 256;
/// Most forwarded ports and ranges of one interface: what admission lets through, with room to spare.
const MAX_FORWARDS: usize = 4096;
/// Most interfaces of a machine: twice what fits on its PCI buses.
const MAX_INTERFACES: usize = 64;
/// Last part of the address under which the first interface's DHCP server answers, of 169.254.75.0/24.
const FIRST_SERVER: u8 = 10;

/// One interface of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Name of the interface in the machine's specification.
    pub name: String,
    /// The pod's link.
    pub pod_link: String,
    /// MAC address of the guest's interface, if it is not that of the pod's link.
    pub mac: Option<String>,
    /// Queues of the tap device.
    pub queues: u32,
    /// How the guest is connected to the pod's link.
    pub binding: Binding,
}

/// How a guest is connected to a link of its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// Behind the pod's addresses.
    Masquerade(Masquerade),
    /// In place of the pod: the guest is given the pod's addresses.
    Bridge {
        /// Address under which the guest sees its DHCP server. Nothing else ever uses it.
        server: Ipv4Addr,
    },
}

/// What address translation needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masquerade {
    /// IPv4 addresses of bridge and guest.
    pub v4: Pair,
    /// IPv6 addresses of bridge and guest.
    pub v6: Pair,
    /// What is forwarded to the guest; empty: everything.
    pub forwards: Vec<Forward>,
    /// A sidecar proxy shares the pod's network.
    pub sidecar: bool,
}

/// The two addresses of a range that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Of the bridge: the guest's gateway.
    pub gateway: IpAddr,
    /// Of the guest.
    pub guest: IpAddr,
    /// Length of the range's prefix.
    pub prefix: u8,
}

/// Ports forwarded to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Of which protocol.
    pub protocol: Protocol,
    /// Which.
    pub ports: RangeInclusive<u16>,
}

/// Protocols with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
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

/// What the machine asks for, one entry an interface; empty if it has no network.
pub fn requests(vmi: &VirtualMachineInstance) -> Result<Vec<Request>, Error> {
    let spec = &vmi.spec;
    let mut wanted: Vec<Request> = Vec::new();
    let plugged =
        spec.domain.devices.interfaces.iter().filter(|interface| interface.state.as_deref() != Some("absent"));
    for (number, interface) in plugged.enumerate() {
        let unsupported =
            |reason: &str| Error::Unsupported { interface: interface.name.clone(), reason: reason.into() };
        if number >= MAX_INTERFACES {
            return Err(unsupported(&format!("more than {MAX_INTERFACES} interfaces")));
        }
        let network = spec
            .networks
            .iter()
            .find(|network| network.name == interface.name)
            .ok_or_else(|| unsupported("there is no network of that name"))?;
        if network.resource_claim.is_some() || network.pod.is_some() == network.multus.is_some() {
            return Err(unsupported("its network is neither the pod's nor one of Multus"));
        }
        let binding = match (binding(interface)?, &network.pod) {
            (Asked::Bridge, _) => Binding::Bridge { server: server(number) },
            (Asked::Masquerade, Some(pod)) => Binding::Masquerade(Masquerade {
                v4: pair(given(pod.vm_network_cidr.as_ref()).unwrap_or(SUBNET_V4), IpAddr::is_ipv4)?,
                v6: pair(given(pod.vm_ipv6_network_cidr.as_ref()).unwrap_or(SUBNET_V6), IpAddr::is_ipv6)?,
                forwards: forwards(interface)?,
                sidecar: has_sidecar(vmi),
            }),
            (Asked::Masquerade, None) => return Err(unsupported("masquerade is for the pod network only")),
        };
        let mac = match binding {
            Binding::Masquerade(_) => Some(interface.mac().unwrap_or_else(|| own_mac(vmi, &interface.name))),
            Binding::Bridge { .. } => interface.mac(),
        };
        let request = Request {
            name: interface.name.clone(),
            pod_link: pod_link(vmi, network),
            mac,
            queues: queues(vmi, interface),
            binding,
        };
        if wanted.iter().any(|other| other.pod_link == request.pod_link) {
            return Err(unsupported("a network can be used by one interface only"));
        }
        wanted.push(request);
    }
    Ok(wanted)
}

/// The address of an interface's DHCP server, by the interface's number.
fn server(number: usize) -> Ipv4Addr {
    let last = u8::try_from(number).map_or(u8::MAX, |number| FIRST_SERVER.saturating_add(number));
    Ipv4Addr::new(169, 254, 75, last)
}

/// The address of an interface whose user asks for none, and whose guest does not see the pod's link: the same with each
/// start, another for each machine and interface.
fn own_mac(vmi: &VirtualMachineInstance, interface: &str) -> String {
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    let digest = Sha256::digest(format!("{uid}/{interface}"));
    local_mac(&digest).map(|byte| format!("{byte:02x}")).join(":")
}

/// A text that says something: clients send empty ones for what they leave open.
fn given(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

/// The bindings that are carried out.
enum Asked {
    Masquerade,
    Bridge,
}

/// The one binding that an interface asks for.
fn binding(interface: &Interface) -> Result<Asked, Error> {
    let other = [
        ("sriov", interface.sriov.is_some()),
        ("passtBinding", interface.passt_binding.is_some()),
        ("passt", interface.passt.is_some()),
        ("slirp", interface.slirp.is_some()),
        ("macvtap", interface.macvtap.is_some()),
        ("binding", interface.binding.is_some()),
    ]
    .into_iter()
    .find_map(|(name, given)| given.then_some(name));
    let reason = match (other, &interface.masquerade, &interface.bridge) {
        (None, Some(_), None) => return Ok(Asked::Masquerade),
        (None, None, Some(_)) => return Ok(Asked::Bridge),
        (Some(name), ..) => format!("{name} is not supported, only masquerade and bridge are"),
        (None, Some(_), Some(_)) => "more than one binding is given".to_owned(),
        (None, None, None) => "no binding is given".to_owned(),
    };
    Err(Error::Unsupported { interface: interface.name.clone(), reason })
}

/// The pod's link for a network. That of the primary network may be called otherwise, which the status says then.
fn pod_link(vmi: &VirtualMachineInstance, network: &Network) -> String {
    let told = vmi
        .status
        .iter()
        .flat_map(|status| &status.interfaces)
        .find(|known| known.name.as_deref() == Some(network.name.as_str()))
        .and_then(|known| known.pod_interface_name.clone())
        .filter(|name| network.is_primary() && is_link_name(name));
    told.unwrap_or_else(|| network.pod_link())
}

/// Whether text may be the name of a link; with this it is also safe inside the text of rules and in paths. Links made
/// from it get longer names (`k6t-` before it), hence the length.
fn is_link_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !name.is_empty() && name.len() <= 11 && name.bytes().all(plain)
}

/// Queues of the tap device; the launcher gives the guest's interface as many.
pub fn queues(vmi: &VirtualMachineInstance, interface: &Interface) -> u32 {
    let domain = &vmi.spec.domain;
    let virtio = interface.model.as_deref().is_none_or(|model| model.is_empty() || model == "virtio");
    if !virtio || domain.devices.network_interface_multiqueue != Some(true) {
        return 1;
    }
    domain.cpu.as_ref().map_or(1, api::vmi::cpu::Cpu::vcpus).clamp(1, MAX_QUEUES)
}

/// The first two addresses for hosts of a range.
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

/// Whether a service mesh's proxy is injected into the launcher pod, which takes over labels and annotations of the
/// machine.
fn has_sidecar(vmi: &VirtualMachineInstance) -> bool {
    const INJECT: &str = "sidecar.istio.io/inject";
    let metadata = &vmi.metadata;
    [&metadata.labels, &metadata.annotations]
        .into_iter()
        .flatten()
        .any(|map| map.get(INJECT).is_some_and(|value| value.eq_ignore_ascii_case("true")))
}
