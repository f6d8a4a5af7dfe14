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
fn link_state_is_known() {
    accepts(interface(json!({"state": "down"})));
    refuses(interface(json!({"state": "sideways"})), &format!("{IF}.state"), "state value is unsupported: sideways");
    refuses(interface(json!({"state": "absent"})), &format!("{IF}.state"), "supported only for bridge binding");
}

#[test]
fn model_and_addresses_are_well_formed() {
    for model in interface::MODELS {
        accepts(interface(json!({"model": model})));
    }
    accepts(interface(json!({"macAddress": "02:11:22:aa:bb:cc", "pciAddress": "0000:81:00.1"})));
    refuses(interface(json!({"model": "ne2000"})), &format!("{IF}.model"), "uses model ne2000 that is not supported.");
    for mac in ["02:11:22:aa:bb", "de:ad", "xx:11:22:aa:bb:cc", "mac"] {
        refuses(interface(json!({"macAddress": mac})), &format!("{IF}.macAddress"), "malformed MAC address");
    }
    refuses(
        interface(json!({"macAddress": "02:11:22:aa:bb:cc:dd:ee"})),
        &format!("{IF}.macAddress"),
        "too long MAC address",
    );
    for mac in ["02-00-00-00-00-00", "0200.0000.0000"] {
        refuses(interface(json!({"macAddress": mac})), &format!("{IF}.macAddress"), "reserved for the in-pod bridge");
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
    let on = |is_default: bool, port: Value| {
        json!({
            "domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}, "ports": [port]}]}},
            "networks": [{"name": "default", "multus": {"networkName": "n", "default": is_default}}],
        })
    };
    refuses(on(true, json!({"port": 0})), &format!("{IF}.ports[0].port"), "Port field is mandatory.");
    accepts(on(true, json!({"port": 1, "protocol": "SCTP"})));
    accepts(on(false, json!({"port": 0})));
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

#[test]
fn interface_without_a_network_has_one_error() {
    for binding in ["masquerade", "passtBinding"] {
        let spec = json!({"networks": [{"name": "other", "pod": {}}], "domain": {"devices": {"interfaces": [
            {"name": "default", binding: {}},
        ]}}});
        let errors = messages_with(spec, &ClusterConfig::default());
        let expected = [
            "spec.networks[0].name 'other' not found. No interface has this name.",
            "spec.domain.devices.interfaces[0].name 'default' not found. No network has this name.",
        ];
        assert_eq!(errors, expected, "{binding}");
    }
}
