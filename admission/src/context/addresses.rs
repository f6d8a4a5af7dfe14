//! IP addresses in manifests.
//!
//! IPv4 addresses with leading zeros (`010.0.0.1`) used to be valid and are in manifests. They are parsed as decimal numbers
//! and stored in canonical form, so that no other process sees them.

use std::net::{IpAddr, Ipv4Addr};

use api::VirtualMachineInstanceSpec;

/// Longest number in an address.
const DIGITS_MAX: usize = 8;

/// Parses an address.
pub(crate) fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().or_else(|| padded(text).map(IpAddr::V4))
}

/// Parses an IPv4 address.
pub(crate) fn address_v4(text: &str) -> Option<Ipv4Addr> {
    text.parse::<Ipv4Addr>().ok().or_else(|| padded(text))
}

/// Parses an address with a prefix length.
pub(crate) fn range(text: &str) -> Option<(IpAddr, u8)> {
    let (start, prefix) = text.split_once('/')?;
    Some((address(start)?, number(prefix)?))
}

/// Parses four decimal numbers with leading zeros.
fn padded(text: &str) -> Option<Ipv4Addr> {
    let mut parts = text.split('.').map(number);
    let mut next = || parts.next().flatten();
    let address = Ipv4Addr::new(next()?, next()?, next()?, next()?);
    parts.next().is_none().then_some(address)
}

/// Parses a decimal number, which can have leading zeros but no sign.
fn number(text: &str) -> Option<u8> {
    let plain = text.len() <= DIGITS_MAX && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

/// Changes the addresses of a spec to their canonical form. Invalid addresses stay as they are.
pub(crate) fn normalize(spec: &mut VirtualMachineInstanceSpec) {
    let name_servers = spec.dns_config.iter_mut().filter_map(|config| config.nameservers.as_mut()).flatten();
    let options = spec.domain.devices.interfaces.iter_mut().filter_map(|interface| interface.dhcp_options.as_mut());
    let time_servers = options.flat_map(|options| &mut options.ntp_servers);
    for text in name_servers.chain(time_servers) {
        if let Some(address) = address(text) {
            *text = address.to_string();
        }
    }
    let ranges = spec.networks.iter_mut().filter_map(|network| network.pod.as_mut()?.vm_network_cidr.as_mut());
    for text in ranges {
        if let Some((start, prefix)) = range(text) {
            *text = format!("{start}/{prefix}");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn leading_zeros_are_ignored() {
        for (text, want) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("01.1.1.1", Some("1.1.1.1")),
            ("0127.0.0.3", Some("127.0.0.3")),
            ("010.010.000.009", Some("10.10.0.9")),
            ("FD00::01", Some("fd00::1")),
            ("10.0.0.0256", None),
            ("10.0.0.+1", None),
            ("10.0.0", None),
            ("10.0.0.1.", None),
            ("10.0.0.1.2", None),
            ("10.0..1", None),
            ("10.0.0.000000001", None),
            ("ntp.example", None),
            ("", None),
        ] {
            assert_eq!(address(text).map(|address| address.to_string()).as_deref(), want, "{text}");
        }
        assert_eq!(address_v4("010.0.0.1"), Some(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(address_v4("fd00::1"), None);
    }

    #[test]
    fn ranges_have_a_prefix() {
        for (text, want) in [
            ("10.10.010.0/24", Some(("10.10.10.0", 24))),
            ("fd10:0:2::/120", Some(("fd10:0:2::", 120))),
            ("10.0.2.0/024", Some(("10.0.2.0", 24))),
            ("10.0.2.0/+8", None),
            ("10.0.2.0/", None),
            ("10.0.2.0", None),
            ("10.0.2/24", None),
            ("10.0.2.0/300", None),
        ] {
            let read = range(text).map(|(start, prefix)| (start.to_string(), prefix));
            assert_eq!(read, want.map(|(start, prefix)| (start.to_owned(), prefix)), "{text}");
        }
    }

    #[test]
    fn addresses_of_a_spec_become_canonical_unless_invalid() {
        let spec = |servers: Value, times: Value, range: &str| {
            json!({
                "dnsConfig": {"nameservers": servers},
                "domain": {"devices": {"interfaces": [{"name": "default", "dhcpOptions": {"ntpServers": times}}]}},
                "networks": [{"name": "default", "pod": {"vmNetworkCIDR": range}}],
            })
        };
        for (before, want) in [
            (
                spec(json!(["01.1.1.1", "FD00::1"]), json!(["0127.0.0.3"]), "10.10.010.0/24"),
                spec(json!(["1.1.1.1", "fd00::1"]), json!(["127.0.0.3"]), "10.10.10.0/24"),
            ),
            (
                spec(json!(["dns"]), json!(["ntp.example"]), "10.0.2.0/x"),
                spec(json!(["dns"]), json!(["ntp.example"]), "10.0.2.0/x"),
            ),
        ] {
            let mut found: VirtualMachineInstanceSpec = serde_json::from_value(before).unwrap();
            normalize(&mut found);
            let want: VirtualMachineInstanceSpec = serde_json::from_value(want).unwrap();
            assert_eq!(found, want);
        }
    }
}
