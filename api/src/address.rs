//! Addresses that a component may connect to if another program has named them.
//!
//! The components are inside the cluster's network, and virt-handler on a node: an address under control of a guest, a user or
//! another node would open that network to them.

use std::net::{IpAddr, Ipv4Addr};

/// Returns true if an address can be a pod's. Loopback and link-local addresses would serve an attacker.
#[must_use]
pub fn is_dialable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_dialable_v4(ip),
        IpAddr::V6(ip) => match ip.to_ipv4() {
            // Mapped and compatible forms; the latter covers `::` and `::1`.
            Some(ip) => ip.octets()[0] != 0 && is_dialable_v4(ip),
            None => !(ip.is_unicast_link_local() || ip.is_multicast()),
        },
    }
}

fn is_dialable_v4(ip: Ipv4Addr) -> bool {
    let [first, ..] = ip.octets();
    // 0.0.0.0/8 is "this host", 240.0.0.0/4 is reserved and holds the broadcast address.
    !(first == 0 || first >= 240 || ip.is_loopback() || ip.is_link_local() || ip.is_multicast())
}
