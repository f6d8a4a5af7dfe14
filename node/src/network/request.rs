//! What a machine asks of the pod network.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use api::{
    VirtualMachineInstance,
    vmi::network::{Interface, Network},
};

use super::Error;

/// The pod's link when nothing else is said.
const POD_LINK: &str = "eth0";
/// Range of the guest's IPv4 address when none is given.
const SUBNET_V4: &str = "10.0.2.0/24";
/// Range of the guest's IPv6 address when none is given.
const SUBNET_V6: &str = "fd10:0:2::/120";
/// Most queues that a network interface may have.
const MAX_QUEUES: u32 = 256;
/// Most forwarded ports and ranges of one interface: what admission lets through, with room to spare.
const MAX_FORWARDS: usize = 4096;

/// One interface of the machine, behind the addresses of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Name of the interface in the machine's specification.
    pub name: String,
    /// The pod's link.
    pub pod_link: String,
    /// MAC address of the guest's interface, if one was asked for.
    pub mac: Option<String>,
    /// Queues of the tap device.
    pub queues: u32,
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

/// What the machine asks for; `None` if it has no network.
pub fn request(vmi: &VirtualMachineInstance) -> Result<Option<Request>, Error> {
    let spec = &vmi.spec;
    let mut wanted = None;
    for interface in spec.domain.devices.interfaces.iter().filter(|i| i.state.as_deref() != Some("absent")) {
        let unsupported =
            |reason: &str| Error::Unsupported { interface: interface.name.clone(), reason: reason.into() };
        let network = spec
            .networks
            .iter()
            .find(|network| network.name == interface.name)
            .ok_or_else(|| unsupported("there is no network of that name"))?;
        let pod = match network {
            Network { pod: Some(pod), multus: None, resource_claim: None, .. } => pod,
            _ => return Err(unsupported("only the pod network is supported")),
        };
        require_masquerade(interface)?;
        if wanted.is_some() {
            return Err(unsupported("the pod network can be used by one interface only"));
        }
        wanted = Some(Request {
            name: interface.name.clone(),
            pod_link: pod_link(vmi, &interface.name),
            mac: interface.mac(),
            queues: queues(vmi, interface),
            v4: pair(given(pod.vm_network_cidr.as_ref()).unwrap_or(SUBNET_V4), IpAddr::is_ipv4)?,
            v6: pair(given(pod.vm_ipv6_network_cidr.as_ref()).unwrap_or(SUBNET_V6), IpAddr::is_ipv6)?,
            forwards: forwards(interface)?,
            sidecar: has_sidecar(vmi),
        });
    }
    Ok(wanted)
}

/// A text that says something: clients send empty ones for what they leave open.
fn given(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

/// Refuses every binding but masquerade.
fn require_masquerade(interface: &Interface) -> Result<(), Error> {
    let other = [
        ("bridge", interface.bridge.is_some()),
        ("sriov", interface.sriov.is_some()),
        ("passtBinding", interface.passt_binding.is_some()),
        ("passt", interface.passt.is_some()),
        ("slirp", interface.slirp.is_some()),
        ("macvtap", interface.macvtap.is_some()),
        ("binding", interface.binding.is_some()),
    ]
    .into_iter()
    .find_map(|(name, given)| given.then_some(name));
    let reason = match other {
        Some(name) => format!("{name} is not supported, only masquerade is"),
        None if interface.masquerade.is_none() => "no binding is given".to_owned(),
        None => return Ok(()),
    };
    Err(Error::Unsupported { interface: interface.name.clone(), reason })
}

/// The pod's link for an interface: what the status says, else the usual one.
fn pod_link(vmi: &VirtualMachineInstance, interface: &str) -> String {
    vmi.status
        .iter()
        .flat_map(|status| &status.interfaces)
        .find(|known| known.name.as_deref() == Some(interface))
        .and_then(|known| known.pod_interface_name.clone())
        .filter(|name| is_link_name(name))
        .unwrap_or_else(|| POD_LINK.to_owned())
}

/// Whether text may be the name of a link; with this it is also safe inside the text of rules and in paths. Links made
/// from it get longer names (`k6t-` before it), hence the length.
fn is_link_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !name.is_empty() && name.len() <= 11 && name.bytes().all(plain)
}

/// Queues of the tap device; the launcher gives the guest's interface as many.
fn queues(vmi: &VirtualMachineInstance, interface: &Interface) -> u32 {
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
