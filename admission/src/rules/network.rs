//! Interfaces and the networks they connect to.

use std::collections::BTreeSet;

use api::{
    VirtualMachineInstanceSpec,
    config::ClusterConfig,
    vmi::network::{Interface, Network, Port, PortRange},
};

use crate::{
    addresses,
    causes::{Causes, Path},
    names,
};

const MODELS: [&str; 7] = ["e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139", "virtio"];
/// Address of the bridge inside the pod.
const BRIDGE_MAC: &str = "02:00:00:00:00:00";
const PORT_RANGES_MAX: usize = 10;

/// What is wrong with interfaces and networks.
pub(super) fn causes(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig, causes: &mut Causes) {
    let interfaces = &spec.domain.devices.interfaces;
    networks(root, &spec.networks, causes);
    let connected = interfaces.iter().enumerate().map(|(index, interface)| {
        (index, interface, spec.networks.iter().find(|network| network.name == interface.name))
    });
    for (index, interface, network) in connected.clone() {
        state(format_args!("{root}.domain.devices.interfaces[{index}]"), interface, network, causes);
    }
    for (index, interface, network) in connected {
        binding(format_args!("{root}.domain.devices.interfaces[{index}]"), interface, network, config, causes);
    }
    duplicate_names(root, &spec.networks, causes);
    super::dra::networks(root, spec, config, causes);
    matching(root, spec, causes);
    for (index, interface) in interfaces.iter().enumerate() {
        let path = format_args!("{root}.domain.devices.interfaces[{index}]");
        let on_pod = spec.networks.iter().any(|network| network.name == interface.name && network.pod.is_some());
        device(path, interface, causes);
        if on_pod {
            ports(path, &interface.ports, causes);
        }
        port_ranges(path, interface, on_pod, config, causes);
        dhcp(root, path, interface, causes);
    }
}

fn networks(root: &str, networks: &[Network], causes: &mut Causes) {
    let pods = networks.iter().filter(|network| network.pod.is_some()).count();
    let defaults =
        networks.iter().filter(|network| network.multus.as_ref().is_some_and(|multus| multus.default_)).count();
    if pods > 1 {
        causes.duplicate(
            format!("{root}.interfaces"),
            format!("more than one interface is connected to a pod network in {root}.interfaces"),
        );
    }
    if defaults > 1 {
        causes.invalid(format!("{root}.networks"), "Multus CNI should only have one default network");
    }
    if pods > 0 && defaults > 0 {
        causes.invalid(
            format!("{root}.networks"),
            "Pod network cannot be defined when Multus default network is defined",
        );
    }
    for (index, network) in networks.iter().enumerate() {
        let sources = [network.pod.is_some(), network.multus.is_some(), network.resource_claim.is_some()];
        let path = format_args!("{root}.networks[{index}]");
        match sources.iter().filter(|set| **set).count() {
            0 => causes.required(path, "should have a network type"),
            1 => {}
            _ => causes.required(path, "should have only one network type"),
        }
    }
    for (index, pod) in networks.iter().enumerate().filter_map(|(index, network)| Some((index, network.pod.as_ref()?)))
    {
        for (name, range, bits) in
            [("vmNetworkCIDR", &pod.vm_network_cidr, 32), ("vmIPv6NetworkCIDR", &pod.vm_ipv6_network_cidr, 128)]
        {
            let Some(range) = range.as_deref().filter(|range| !range.is_empty()) else { continue };
            if !is_range(range, bits) {
                let field = format!("{root}.networks[{index}].pod.{name}");
                let family = if bits == 32 { "IPv4" } else { "IPv6" };
                let message = format!("{field} '{range}' is not an {family} range with room for two hosts");
                causes.invalid(field, message);
            }
        }
    }
    let unnamed = networks
        .iter()
        .position(|network| network.multus.as_ref().is_some_and(|multus| multus.network_name.is_empty()));
    if let Some(index) = unnamed {
        causes.required(format!("{root}.networks[{index}]"), "CNI delegating plugin must have a networkName");
    }
}

/// Whether a text is a range of addresses, with room for the guest and its gateway.
fn is_range(text: &str, bits: u8) -> bool {
    let Some((start, prefix)) = addresses::range(text) else { return false };
    let family = if start.is_ipv4() { 32 } else { 128 };
    family == bits && prefix <= bits - 2
}

fn state(path: Path<'_>, interface: &Interface, network: Option<&Network>, causes: &mut Causes) {
    let (name, state) = (&interface.name, interface.state.as_deref().unwrap_or_default());
    let field = format_args!("{path}.state");
    match state {
        "" => {}
        "up" | "down" if interface.sriov.is_some() => {
            causes.invalid(field, format!("\"{name}\" interface's state \"{state}\" is not supported for SR-IOV NICs"))
        }
        "up" | "down" => {}
        "absent" => {
            if interface.bridge.is_none() {
                causes.invalid(
                    field,
                    format!("\"{name}\" interface's state \"absent\" is supported only for bridge binding"),
                );
            }
            let is_default = network.is_some_and(|network| {
                network.pod.is_some() || network.multus.as_ref().is_some_and(|multus| multus.default_)
            });
            if is_default {
                causes.invalid(
                    field,
                    format!("\"{name}\" interface's state \"absent\" is not supported on default networks"),
                );
            }
        }
        other => {
            causes.invalid(field, format!("logical {name} interface state value is unsupported: {other}"));
        }
    }
}

fn binding(
    path: Path<'_>,
    interface: &Interface,
    network: Option<&Network>,
    config: &ClusterConfig,
    causes: &mut Causes,
) {
    let bindings = [
        interface.bridge.is_some(),
        interface.masquerade.is_some(),
        interface.sriov.is_some(),
        interface.passt_binding.is_some(),
        interface.binding.is_some(),
    ];
    if bindings.iter().filter(|set| **set).count() != 1 {
        causes.invalid(
            path,
            format!("logical {} interface must have exactly one binding method or binding plugin", interface.name),
        );
    }
    let on_pod = network.is_some_and(|network| network.pod.is_some());
    if interface.masquerade.is_some() {
        if !on_pod {
            causes.invalid(format!("{path}.name"), "Masquerade interface only implemented with pod network");
        }
        if interface.mac().as_deref() == Some(BRIDGE_MAC) {
            causes.invalid(
                format!("{path}.macAddress"),
                "The requested MAC address is reserved for the in-pod bridge. Please choose another one.",
            );
        }
    }
    if interface.bridge.is_some() && on_pod && !config.permit_bridge_interface_on_pod_network {
        causes.invalid(
            format!("{path}.name"),
            "Bridge on pod network configuration is not enabled under kubevirt-config",
        );
    }
    if interface.passt_binding.is_some() {
        if !config.enabled("PasstBinding") {
            causes.invalid(format!("{path}.name"), "PasstBinding feature gate is not enabled");
        }
        if !on_pod {
            causes.invalid(format!("{path}.name"), "PasstBinding interface only implemented with pod network");
        }
    }
}

fn duplicate_names(root: &str, networks: &[Network], causes: &mut Causes) {
    let mut seen = BTreeSet::new();
    for (index, network) in networks.iter().enumerate() {
        if seen.insert(&network.name) {
            continue;
        }
        causes.duplicate(
            format!("{root}.networks[{index}].name"),
            format!("Network with name \"{}\" already exists, every network must have a unique name", network.name),
        );
    }
}

/// Networks and interfaces come in pairs.
fn matching(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let interfaces = &spec.domain.devices.interfaces;
    for (index, network) in spec.networks.iter().enumerate() {
        let field = format_args!("{root}.networks[{index}].name");
        if !interfaces.iter().any(|interface| interface.name == network.name) {
            let message = format!("{field} '{}' not found.", network.name);
            causes.required(field, message);
        }
    }
    let mut seen = BTreeSet::new();
    let field = |index: usize| format!("{root}.domain.devices.interfaces[{index}].name");
    for (index, interface) in interfaces.iter().enumerate() {
        if !seen.insert(&interface.name) {
            causes.duplicate(field(index), "Only one interface can be connected to one specific network");
        }
    }
    for (index, interface) in interfaces.iter().enumerate() {
        if !spec.networks.iter().any(|network| network.name == interface.name) {
            let field = field(index);
            let message = format!("{field} '{}' not found.", interface.name);
            causes.invalid(field, message);
        }
    }
}

fn device(path: Path<'_>, interface: &Interface, causes: &mut Causes) {
    let name = format_args!("{path}.name");
    let well_formed = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if !well_formed(&interface.name) {
        causes.invalid(
            name,
            "Network interface name can only contain alphabetical characters, numbers, dashes (-) or underscores (_)",
        );
    }
    if let Some(model) = interface.model.as_deref().filter(|model| !model.is_empty() && !MODELS.contains(model)) {
        causes.not_supported(
            format!("{path}.model"),
            format!("interface {name} uses model {model} that is not supported."),
        );
    }
    if let Some(mac) = interface.mac_address.as_deref().filter(|mac| !mac.is_empty()) {
        let field = format!("{path}.macAddress");
        match mac_bytes(mac) {
            Some(6) => {}
            Some(_) => causes.invalid(field, format!("interface {name} has too long MAC address ({mac}).")),
            None => causes.invalid(field, format!("interface {name} has malformed MAC address ({mac}).")),
        }
    }
    if let Some(address) = interface.pci_address.as_deref().filter(|address| !address.is_empty())
        && !is_pci_address(address)
    {
        causes
            .invalid(format!("{path}.pciAddress"), format!("interface {name} has malformed PCI address ({address})."));
    }
    if interface.acpi_index.is_some_and(|index| index < 0) {
        causes.invalid(format!("{path}.acpiIndex"), format!("{path}.acpiIndex must be greater than or equal to 0"));
    }
}

/// Bytes of a link-layer address: 6, or more for addresses of other networks. `None` when it is none.
pub(crate) fn mac_bytes(text: &str) -> Option<usize> {
    let separator = text.chars().find(|c| !c.is_ascii_hexdigit())?;
    let (digits, per_group) = match separator {
        ':' | '-' => (2, 1),
        '.' => (4, 2),
        _ => return None,
    };
    let groups: Vec<&str> = text.split(separator).collect();
    let valid = groups.iter().all(|group| group.len() == digits && group.bytes().all(|b| b.is_ascii_hexdigit()));
    let bytes = groups.len() * per_group;
    (valid && [6, 8, 20].contains(&bytes)).then_some(bytes)
}

/// Whether a text is `dddd:bb:ss.f`.
pub(super) fn is_pci_address(text: &str) -> bool {
    let hex = |text: &str, length: usize| text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts: Vec<&str> = text.split(':').collect();
    match parts.as_slice() {
        [domain, bus, rest] => match rest.split_once('.') {
            Some((slot, function)) => {
                hex(domain, 4)
                    && hex(bus, 2)
                    && hex(slot, 2)
                    && matches!(function.as_bytes(), [digit] if (b'0'..=b'7').contains(digit))
            }
            None => false,
        },
        _ => false,
    }
}

fn ports(path: Path<'_>, ports: &[Port], causes: &mut Causes) {
    let mut seen = BTreeSet::new();
    for (index, port) in ports.iter().enumerate() {
        let field = format_args!("{path}.ports[{index}].name");
        if let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) {
            if !seen.insert(name) {
                causes.duplicate(field, format!("Duplicate name of the port: {name}"));
            }
            if !names::is_port_name(name) {
                causes.invalid(field, format!("Invalid name of the port: {name}"));
            }
        }
    }
    for (index, port) in ports.iter().enumerate() {
        let field = |name: &str| format!("{path}.ports[{index}].{name}");
        match port.port {
            0 => causes.required(field("port"), "Port field is mandatory."),
            1..=65535 => {}
            _ => causes.invalid(field("port"), "Port field must be in range 0 < x < 65536."),
        }
        if !["", "TCP", "UDP"].contains(&port.protocol.as_deref().unwrap_or_default()) {
            causes.invalid(field("protocol"), "Unknown protocol, only TCP or UDP allowed");
        }
    }
}

fn port_ranges(path: Path<'_>, interface: &Interface, on_pod: bool, config: &ClusterConfig, causes: &mut Causes) {
    let ranges = &interface.port_ranges;
    if ranges.is_empty() {
        return;
    }
    if !config.enabled("PortRangesSpec") {
        causes.invalid(
            format!("{path}.name"),
            "portRanges is specified on interface but the PortRangesSpec feature gate is not enabled",
        );
        return;
    }
    if on_pod && !interface.ports.is_empty() {
        causes.invalid(format!("{path}.name"), "Cannot define both ports and portRanges on interface");
    }
    if interface.masquerade.is_none() {
        causes.invalid(format!("{path}.name"), "portRanges are only supported on masquerade interfaces");
    }
    if ranges.len() > PORT_RANGES_MAX {
        causes.invalid(format!("{path}.portRanges"), "No more than 10 portRanges are allowed");
        return;
    }
    let is_port = |port: i32| (1..=65535).contains(&port);
    for (index, range) in ranges.iter().enumerate() {
        let field = |name: &str| format!("{path}.portRanges[{index}].{name}");
        if !["TCP", "UDP"].contains(&range.protocol.as_str()) {
            causes.invalid(field("protocol"), "Unknown protocol, only TCP or UDP allowed");
        } else if !is_port(range.start) {
            causes.invalid(field("start"), "Start must be a valid port number, 0 < x < 65536");
        } else if !is_port(range.end) {
            causes.invalid(field("end"), "End must be a valid port number, 0 < x < 65536");
        } else if range.start > range.end {
            causes.invalid(field("start"), "Start must be less than or equal to end");
        }
    }
    for protocol in ["TCP", "UDP"] {
        let mut sorted: Vec<&PortRange> = ranges.iter().filter(|range| range.protocol == protocol).collect();
        sorted.sort_by_key(|range| range.start);
        for pair in sorted.windows(2) {
            if let [one, two] = pair
                && two.start <= one.end
            {
                causes.invalid(
                    format!("{path}.portRanges"),
                    format!(
                        "{protocol} portRanges [{}-{}] and [{}-{}] overlap",
                        one.start, one.end, two.start, two.end
                    ),
                );
            }
        }
    }
}

fn dhcp(root: &str, path: Path<'_>, interface: &Interface, causes: &mut Causes) {
    let Some(options) = &interface.dhcp_options else { return };
    let mut seen = BTreeSet::new();
    if !options.private_options.iter().all(|option| seen.insert(option.option)) {
        causes.invalid(root, "Found Duplicates: you have provided duplicate DHCPPrivateOptions");
    }
    for _ in options.private_options.iter().filter(|option| !(224..=254).contains(&option.option)) {
        causes.invalid(root, "provided DHCPPrivateOptions are out of range, must be in range 224 to 254");
    }
    for (index, server) in options.ntp_servers.iter().enumerate() {
        if addresses::address_v4(server).is_none() {
            causes.invalid(
                format!("{path}.dhcpOptions.ntpServers[{index}]"),
                "NTP servers must be a list of valid IPv4 addresses.",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::rules::testing::*;

    const IF: &str = "spec.domain.devices.interfaces[0]";

    fn interface(extra: Value) -> Value {
        let mut interface = json!({"name": "default", "masquerade": {}});
        for (key, value) in extra.as_object().unwrap() {
            interface[key] = value.clone();
        }
        json!({"domain": {"devices": {"interfaces": [interface]}}})
    }

    #[test]
    fn networks_have_one_source_and_one_name() {
        refuses(json!({"networks": [{"name": "default"}]}), "spec.networks[0]", "should have a network type");
        refuses(
            json!({"networks": [{"name": "default", "pod": {}, "multus": {"networkName": "n"}}]}),
            "spec.networks[0]",
            "should have only one network type",
        );
        refuses(
            json!({"networks": [{"name": "default", "pod": {}}, {"name": "default", "pod": {}}]}),
            "spec.networks[1].name",
            "already exists",
        );
        refuses(
            json!({"networks": [{"name": "default", "pod": {}}, {"name": "b", "pod": {}}]}),
            "spec.interfaces",
            "more than one interface is connected to a pod network",
        );
        refuses(
            json!({"networks": [{"name": "default", "multus": {"networkName": ""}}]}),
            "spec.networks[0]",
            "CNI delegating plugin must have a networkName",
        );
    }

    #[test]
    fn ranges_have_room_for_guest_and_gateway() {
        let pod = |pod: Value| json!({"networks": [{"name": "default", "pod": pod}]});
        accepts(pod(json!({"vmNetworkCIDR": "192.168.7.0/24", "vmIPv6NetworkCIDR": "fd10:0:2::/120"})));
        accepts(pod(json!({"vmNetworkCIDR": "10.10.010.0/24"})));
        for range in ["10.0.2.0", "10.0.2.0/31", "10.0.2.0/40", "fd10::/64", "10.0.2/24", "10.0.2.0/+8"] {
            refuses(pod(json!({"vmNetworkCIDR": range})), "spec.networks[0].pod.vmNetworkCIDR", "is not an IPv4 range");
        }
        refuses(
            pod(json!({"vmIPv6NetworkCIDR": "10.0.2.0/24"})),
            "spec.networks[0].pod.vmIPv6NetworkCIDR",
            "is not an IPv6 range",
        );
    }

    #[test]
    fn interfaces_and_networks_match() {
        refuses(
            json!({"networks": [{"name": "other", "pod": {}}]}),
            "spec.networks[0].name",
            "spec.networks[0].name 'other' not found.",
        );
        refuses(
            json!({"networks": [{"name": "other", "pod": {}}]}),
            "spec.domain.devices.interfaces[0].name",
            "spec.domain.devices.interfaces[0].name 'default' not found.",
        );
        refuses(
            json!({"domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}, {"name": "default", "masquerade": {}}]}}}),
            "spec.domain.devices.interfaces[1].name",
            "Only one interface can be connected to one specific network",
        );
        refuses(interface(json!({"name": "a b"})), &format!("{IF}.name"), "can only contain alphabetical characters");
    }

    #[test]
    fn interface_has_one_binding() {
        refuses(
            json!({"domain": {"devices": {"interfaces": [{"name": "default"}]}}}),
            IF,
            "logical default interface must have exactly one binding method or binding plugin",
        );
        refuses(interface(json!({"bridge": {}})), IF, "must have exactly one binding");
    }

    #[test]
    fn masquerade_is_for_the_pod_network() {
        refuses(
            json!({"networks": [{"name": "default", "multus": {"networkName": "n"}}]}),
            &format!("{IF}.name"),
            "Masquerade interface only implemented with pod network",
        );
    }

    #[test]
    fn link_state_is_a_known_word() {
        accepts(interface(json!({"state": "down"})));
        refuses(
            interface(json!({"state": "sideways"})),
            &format!("{IF}.state"),
            "state value is unsupported: sideways",
        );
        refuses(interface(json!({"state": "absent"})), &format!("{IF}.state"), "supported only for bridge binding");
    }

    #[test]
    fn model_and_addresses_are_well_formed() {
        for model in MODELS {
            accepts(interface(json!({"model": model})));
        }
        accepts(interface(json!({"macAddress": "02:11:22:aa:bb:cc", "pciAddress": "0000:81:00.1"})));
        refuses(
            interface(json!({"model": "ne2000"})),
            &format!("{IF}.model"),
            "uses model ne2000 that is not supported.",
        );
        for mac in ["02:11:22:aa:bb", "de:ad", "xx:11:22:aa:bb:cc", "mac"] {
            refuses(interface(json!({"macAddress": mac})), &format!("{IF}.macAddress"), "malformed MAC address");
        }
        refuses(
            interface(json!({"macAddress": "02:11:22:aa:bb:cc:dd:ee"})),
            &format!("{IF}.macAddress"),
            "too long MAC address",
        );
        for mac in ["02-00-00-00-00-00", "0200.0000.0000"] {
            refuses(
                interface(json!({"macAddress": mac})),
                &format!("{IF}.macAddress"),
                "reserved for the in-pod bridge",
            );
        }
        for mac in ["", "BE-AF-00-00-DE-AD", "beaf.0000.dead"] {
            accepts(interface(json!({"macAddress": mac})));
        }
        for address in ["0000:81:00.8", "81:00.1", "0000:81:100.1"] {
            refuses(interface(json!({"pciAddress": address})), &format!("{IF}.pciAddress"), "malformed PCI address");
        }
    }

    #[test]
    fn ports_are_named_once_and_in_range() {
        accepts(interface(
            json!({"ports": [{"name": "http", "port": 80, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]}),
        ));
        for (port, field, message) in [
            (json!({"port": 0}), "port", "Port field is mandatory."),
            (json!({"port": 70000}), "port", "Port field must be in range 0 < x < 65536."),
            (json!({"port": 1, "protocol": "SCTP"}), "protocol", "Unknown protocol, only TCP or UDP allowed"),
            (json!({"port": 1, "name": "Web Server"}), "name", "Invalid name of the port: Web Server"),
        ] {
            refuses(interface(json!({"ports": [port]})), &format!("{IF}.ports[0].{field}"), message);
        }
        refuses(
            interface(json!({"ports": [{"name": "a", "port": 1}, {"name": "a", "port": 2}]})),
            &format!("{IF}.ports[1].name"),
            "Duplicate name of the port: a",
        );
    }

    #[test]
    fn port_ranges_need_their_gate_and_do_not_overlap() {
        let range = |start: i32, end: i32| json!({"start": start, "end": end, "protocol": "TCP"});
        refuses(interface(json!({"portRanges": [range(1, 2)]})), &format!("{IF}.name"), "feature gate is not enabled");
        let config = ClusterConfig { feature_gates: vec!["PortRangesSpec".to_owned()], ..ClusterConfig::default() };
        let found = |ranges: Value| messages_with(interface(json!({"portRanges": ranges})), &config).join("\n");
        assert!(found(json!([range(1, 5), range(5, 9)])).contains("TCP portRanges [1-5] and [5-9] overlap"));
        assert!(found(json!([range(9, 5)])).contains("Start must be less than or equal to end"));
        assert!(found(json!([range(0, 5)])).contains("Start must be a valid port number"));
    }

    #[test]
    fn dhcp_options_are_in_range() {
        let options = |options: Value| interface(json!({"dhcpOptions": options}));
        refuses(options(json!({"privateOptions": [{"option": 12, "value": "a"}]})), "spec", "range 224 to 254");
        refuses(
            options(json!({"privateOptions": [{"option": 240, "value": "a"}, {"option": 240, "value": "b"}]})),
            "spec",
            "duplicate DHCPPrivateOptions",
        );
        accepts(options(json!({"ntpServers": ["127.0.0.1", "0127.0.0.3"]})));
        refuses(
            options(json!({"ntpServers": ["ntp.example"]})),
            &format!("{IF}.dhcpOptions.ntpServers[0]"),
            "valid IPv4 addresses",
        );
    }
}
