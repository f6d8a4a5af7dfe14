//! Addresses that kubelet's probes of this pod come from.
//!
//! The address depends on the network plugin: with a bridge on each node it is the bridge's address, which is the pod's default
//! gateway, otherwise an address of the node.

use std::{
    fs::File,
    io::Read,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// Variable with the addresses of the node (`status.hostIPs` of the pod).
const HOST_IPS: &str = "HOST_IPS";
/// Most bytes read of a table of routes.
const MAX_ROUTES: u64 = 64 << 10;
/// Most addresses of each kind.
const MAX_ADDRESSES: usize = 8;

/// Addresses that probes come from. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ProbeAddresses(Arc<[IpAddr]>);

impl ProbeAddresses {
    /// Returns the addresses of the node and the gateways of the pod's network, as they are now.
    #[must_use]
    pub fn of_this_pod() -> Self {
        let hosts = std::env::var(HOST_IPS).unwrap_or_default();
        let (ipv4, ipv6) = (read("/proc/net/route"), read("/proc/net/ipv6_route"));
        let addresses = parse_host_ips(&hosts).chain(parse_ipv4_gateways(&ipv4)).chain(parse_ipv6_gateways(&ipv6));
        Self(addresses.map(|address| address.to_canonical()).collect())
    }

    /// Returns true when probes come from this address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromIterator<IpAddr> for ProbeAddresses {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        Self(addresses.into_iter().collect())
    }
}

/// Reads a table of routes; one that cannot be read is empty.
fn read(path: &str) -> String {
    let mut text = String::new();
    match File::open(path).and_then(|file| file.take(MAX_ROUTES).read_to_string(&mut text)) {
        Ok(_) => text,
        Err(error) => {
            tracing::debug!(path, %error, "routes cannot be read");
            String::new()
        }
    }
}

fn parse_host_ips(text: &str) -> impl Iterator<Item = IpAddr> {
    text.split(',').filter_map(|address| address.trim().parse().ok()).take(MAX_ADDRESSES)
}

/// Parses the default gateways of `/proc/net/route`: addresses are in the byte order of the processor.
fn parse_ipv4_gateways(routes: &str) -> impl Iterator<Item = IpAddr> {
    let gateway = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, destination, gateway, _, _, _, _, mask, ..] = fields.as_slice() else { return None };
        let gateway = u32::from_str_radix(gateway, 16).ok().filter(|gateway| *gateway != 0)?;
        let default = *destination == "00000000" && *mask == "00000000";
        default.then(|| Ipv4Addr::from(gateway.to_ne_bytes()).into())
    };
    routes.lines().skip(1).filter_map(gateway).take(MAX_ADDRESSES)
}

/// Parses the default gateways of `/proc/net/ipv6_route`.
fn parse_ipv6_gateways(routes: &str) -> impl Iterator<Item = IpAddr> {
    let gateway = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, prefix, _, _, gateway, ..] = fields.as_slice() else { return None };
        let gateway = u128::from_str_radix(gateway, 16).ok().filter(|gateway| *gateway != 0)?;
        (*prefix == "00").then(|| Ipv6Addr::from(gateway).into())
    };
    routes.lines().filter_map(gateway).take(MAX_ADDRESSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(found: impl Iterator<Item = IpAddr>) -> Vec<String> {
        found.map(|address| address.to_string()).collect()
    }

    #[test]
    fn addresses_of_the_node_are_read() {
        for (text, expected) in [
            ("", &[][..]),
            ("10.0.0.7", &["10.0.0.7"]),
            ("10.0.0.7,fd00::7", &["10.0.0.7", "fd00::7"]),
            ("10.0.0.7, x,,10.0.0.8", &["10.0.0.7", "10.0.0.8"]),
        ] {
            assert_eq!(addresses(parse_host_ips(text)), expected, "{text:?}");
        }
        assert_eq!(parse_host_ips(&"10.0.0.7,".repeat(100)).count(), MAX_ADDRESSES);
    }

    #[test]
    fn default_gateways_are_found_among_the_routes() {
        // As the kernel prints them on a little-endian processor.
        let ipv4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
             eth0\t00000000\t0101D30A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
             eth0\t0000D30A\t0101D30A\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
             eth0\t0001D30A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
             eth1\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n\
             eth2\t00000000\tnonsense\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
             short\t00000000\n";
        if cfg!(target_endian = "little") {
            assert_eq!(addresses(parse_ipv4_gateways(ipv4)), ["10.211.1.1"]);
        }
        let none = "0".repeat(32);
        let ipv6 = format!(
            "{none} 00 {none} 00 fd000000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n\
             fd000000000000000000000000000000 40 {none} 00 {none} 00000100 00000001 00000000 00000001 eth0\n\
             {none} 00 {none} 00 {none} ffffffff 00000001 00000000 00200200 lo\n\
             nonsense\n"
        );
        assert_eq!(addresses(parse_ipv6_gateways(&ipv6)), ["fd00::1"]);
        assert!(parse_ipv4_gateways("").next().is_none() && parse_ipv6_gateways("").next().is_none());
    }

    #[test]
    fn mapped_addresses_are_the_same() {
        let probes: ProbeAddresses = [IpAddr::from([10, 0, 0, 7])].into_iter().collect();
        assert!(probes.contains(Ipv4Addr::new(10, 0, 0, 7).to_ipv6_mapped().into()));
        assert!(!probes.contains(IpAddr::from([10, 0, 0, 8])));
        // Independent of the routes of this host.
        assert!(ProbeAddresses::of_this_pod().0.len() <= 3 * MAX_ADDRESSES);
    }
}
