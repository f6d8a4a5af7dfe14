//! Addresses that a component may connect to if another program has named them.
//!
//! The components are inside the cluster's network, and virt-handler on a node: an address under control of a guest, a user or
//! another node would open that network to them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Azure's server of credentials for virtual machines, at an address of no special range.
const AZURE: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);
/// Metadata servers of AWS and Google, at unique local addresses. Those of IPv4 are link-local.
const METADATA: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];
/// Prefix of IPv6 addresses that stand for IPv4 addresses (NAT64).
const NAT64: [u16; 2] = [0x64, 0xff9b];

/// Returns true if an address can be a pod's. Loopback, link-local and metadata addresses would serve an attacker.
#[must_use]
pub fn is_dialable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_dialable_v4(ip),
        IpAddr::V6(ip) => match ip.to_ipv4() {
            // Mapped and compatible forms; the latter covers `::` and `::1`.
            Some(ip) => ip.octets()[0] != 0 && is_dialable_v4(ip),
            None => {
                let is_special = ip.is_unicast_link_local() || ip.is_multicast() || METADATA.contains(&ip);
                !(is_special || ip.segments().starts_with(&NAT64))
            }
        },
    }
}

fn is_dialable_v4(ip: Ipv4Addr) -> bool {
    let [first, ..] = ip.octets();
    // 0.0.0.0/8 is "this host", 240.0.0.0/4 is reserved and holds the broadcast address.
    !(first == 0 || first >= 240 || ip.is_loopback() || ip.is_link_local() || ip.is_multicast() || ip == AZURE)
}
