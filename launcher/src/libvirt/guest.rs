//! What a guest agent says about its guest. Everything here is written by the guest: it is bounded and only shown.

use std::collections::HashMap;

/// Longest text kept of a guest's answer, in characters.
const TEXT_LIMIT: usize = 256;
/// Most interfaces, and most addresses of one interface, that are kept.
const LIST_LIMIT: u64 = 32;

/// Value of one of libvirt's named parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// A text.
    Text(String),
    /// A number.
    Number(u64),
}

/// What the guest agent tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuestFacts {
    /// Operating system and host name.
    pub guest: protocol::GuestInfo,
    /// Interfaces but the loopback one.
    pub interfaces: Vec<protocol::GuestInterface>,
}

/// Reads libvirt's parameters.
pub fn guest_facts_from(parameters: &[(String, Parameter)]) -> GuestFacts {
    let by_name: HashMap<&str, &Parameter> = parameters.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let text = |name: &str| match by_name.get(name) {
        Some(Parameter::Text(text)) => text.chars().filter(|c| !c.is_control()).take(TEXT_LIMIT).collect::<String>(),
        _ => String::new(),
    };
    let number = |name: &str| match by_name.get(name) {
        Some(Parameter::Number(number)) => *number,
        _ => 0,
    };
    let guest = protocol::GuestInfo {
        name: text("os.name"),
        kernel_release: text("os.kernel-release"),
        version: text("os.version"),
        pretty_name: text("os.pretty-name"),
        version_id: text("os.version-id"),
        kernel_version: text("os.kernel-version"),
        machine: text("os.machine"),
        id: text("os.id"),
        hostname: text("hostname"),
        agent_version: String::new(),
    };
    let interfaces = (0..number("if.count").min(LIST_LIMIT))
        .map(|i| protocol::GuestInterface {
            name: text(&format!("if.{i}.name")),
            mac: text(&format!("if.{i}.hwaddr")),
            addresses: (0..number(&format!("if.{i}.addr.count")).min(LIST_LIMIT))
                .map(|j| text(&format!("if.{i}.addr.{j}.addr")))
                .filter(|address| address.parse::<std::net::IpAddr>().is_ok())
                .collect(),
        })
        .filter(|interface| interface.name != "lo")
        .collect();
    GuestFacts { guest, interfaces }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str, value: &str) -> (String, Parameter) {
        (name.into(), Parameter::Text(value.into()))
    }

    #[test]
    fn loopback_is_left_out_and_addresses_are_kept_if_they_are_addresses() {
        let facts = guest_facts_from(&[
            text("os.id", "debian"),
            text("hostname", "a\u{7}b"),
            ("if.count".into(), Parameter::Number(2)),
            text("if.0.name", "lo"),
            text("if.1.name", "eth0"),
            text("if.1.hwaddr", "02:00:00:00:00:01"),
            ("if.1.addr.count".into(), Parameter::Number(2)),
            text("if.1.addr.0.addr", "10.0.2.2"),
            text("if.1.addr.1.addr", "not an address"),
        ]);
        assert_eq!(facts.guest.id, "debian");
        assert_eq!(facts.guest.hostname, "ab");
        assert_eq!(facts.interfaces.len(), 1);
        assert_eq!(facts.interfaces[0].addresses, ["10.0.2.2"]);
    }

    #[test]
    fn a_guest_cannot_make_the_lists_long() {
        let facts = guest_facts_from(&[("if.count".into(), Parameter::Number(u64::MAX))]);
        assert_eq!(facts.interfaces.len(), 32);
    }
}
