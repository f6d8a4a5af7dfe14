//! Links, addresses and routes of a pod, as observed.

use std::net::{IpAddr, Ipv4Addr};

use super::Error;

/// A link of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub index: u32,
    pub name: String,
    /// `bridge`, `tun`, `veth` and so on; empty if the kernel does not report it.
    pub kind: String,
    /// MAC address, if it has one.
    pub mac: Option<[u8; 6]>,
    pub mtu: u32,
    /// Index of the bridge that it belongs to.
    pub controller: Option<u32>,
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

    /// Returns the address of the DHCP server on a bridge.
    pub(super) fn server(&self, link: u32) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|address| match address.ip {
            IpAddr::V4(ip) if address.link == link && address.prefix == 32 && ip.is_link_local() => Some(ip),
            _ => None,
        })
    }

    /// Returns the first global address of each family, IPv4 first.
    pub(super) fn unicast(&self, link: u32) -> Vec<IpAddr> {
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
