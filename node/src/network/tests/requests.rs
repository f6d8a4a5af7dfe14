//! Requests of VMIs.

use super::*;

#[test]
fn a_vmi_without_interfaces_has_no_network() {
    assert!(requests(&vmi(&json!([]), &json!([]))).unwrap().is_empty());
    let unplugged = vmi(&json!([{"name": "default", "masquerade": {}, "state": "absent"}]), &json!([]));
    assert!(requests(&unplugged).unwrap().is_empty());
}

#[test]
fn addresses_come_from_the_requested_subnet() {
    let mut request = request_of(&masquerade());
    let requested = nat(&mut request);
    assert_eq!((requested.v4.gateway, requested.v4.guest, requested.v4.prefix), (ip("10.0.2.1"), ip("10.0.2.2"), 24));
    assert_eq!(
        (requested.v6.gateway, requested.v6.guest, requested.v6.prefix),
        (ip("fd10:0:2::1"), ip("fd10:0:2::2"), 120)
    );
    let ranged = |v4: &str, v6: &str| {
        vmi(
            &json!([{"name": "default", "masquerade": {}}]),
            &json!([{"name": "default", "pod": {"vmNetworkCIDR": v4, "vmIPv6NetworkCIDR": v6}}]),
        )
    };
    let mut request = request_of(&ranged("192.168.7.77/28", "fd00::ff/64"));
    let requested = nat(&mut request);
    assert_eq!((requested.v4.gateway, requested.v4.guest), (ip("192.168.7.65"), ip("192.168.7.66")));
    assert_eq!((requested.v6.gateway, requested.v6.guest), (ip("fd00::1"), ip("fd00::2")));
    assert_eq!(nat(&mut request_of(&ranged("0.0.0.0/0", "::/0"))).v4.gateway, ip("0.0.0.1"));
    for (v4, v6) in [("10.0.0.0/31", "::/120"), ("10.0.0.0/32", "::/120"), ("10.0.0.0/24", "::/127")] {
        let error = requests(&ranged(v4, v6)).unwrap_err();
        assert!(error.to_string().starts_with("VM CIDR subnet is too small, at least 2 host addresses"), "{error}");
        assert!(error.is_permanent());
    }
    assert_eq!(nat(&mut request_of(&ranged("", ""))).v4.gateway, ip("10.0.2.1"), "an empty subnet is the default");
    for v4 in [
        "10.0.0.0",
        "10.0.0.0/",
        "10.0.0.0/+8",
        "10.0.0.0/33",
        "10.0.0/24",
        "::/64",
        "10.0.0.0/24/1",
        "x/8",
        "1.1.1.1/0008",
    ] {
        let error = requests(&ranged(v4, "::/64")).unwrap_err();
        assert!(matches!(error, Error::InvalidSubnet(_)), "{v4:?}: {error}");
    }
}

#[test]
fn unsupported_requests_are_rejected_permanently() {
    let pod = json!([{"name": "default", "pod": {}}]);
    let table = [
        (json!([{"name": "default"}]), pod.clone(), "no binding is given"),
        (json!([{"name": "default", "bridge": {}, "masquerade": {}}]), pod.clone(), "more than one binding"),
        (json!([{"name": "default", "masquerade": {}, "sriov": {}}]), pod.clone(), "sriov is not supported"),
        (json!([{"name": "default", "binding": {"name": "x"}}]), pod.clone(), "binding is not supported"),
        (json!([{"name": "default", "passtBinding": {}}]), pod.clone(), "passtBinding is not supported"),
        (json!([{"name": "other", "masquerade": {}}]), pod, "no network of that name"),
        (
            json!([{"name": "default", "masquerade": {}}]),
            json!([{"name": "default", "multus": {"networkName": "x"}}]),
            "masquerade is for the pod network only",
        ),
        (
            json!([{"name": "default", "bridge": {}}]),
            json!([{"name": "default", "resourceClaim": {}}]),
            "neither the pod's nor one of Multus",
        ),
        (
            json!([{"name": "a", "masquerade": {}}, {"name": "b", "masquerade": {}}]),
            json!([{"name": "a", "pod": {}}, {"name": "b", "pod": {}}]),
            "one interface only",
        ),
    ];
    for (interfaces, networks, reason) in table {
        let error = requests(&vmi(&interfaces, &networks)).unwrap_err();
        assert!(error.is_permanent());
        assert!(error.to_string().contains(reason), "{error} / {reason}");
    }
}

#[test]
fn an_unsupported_interface_is_rejected_alone() {
    let interfaces = json!([{"name": "a"}, {"name": "b", "masquerade": {}}, {"name": "c", "masquerade": {}}]);
    let networks = json!([{"name": "a", "pod": {}}, {"name": "b", "pod": {}}, {"name": "c", "pod": {}}]);
    let found = request::requests(&vmi(&interfaces, &networks));
    let found: Vec<_> = found.iter().map(|(name, request)| (name.as_str(), request.is_ok())).collect();
    assert_eq!(found, [("a", false), ("b", true), ("c", false)]);
}

#[test]
fn ports_are_checked() {
    let with = |ports: Value, ranges: Value| {
        requests(&vmi(
            &json!([{"name": "default", "masquerade": {}, "ports": ports, "portRanges": ranges}]),
            &json!([{"name": "default", "pod": {}}]),
        ))
    };
    let mut found = with(
        json!([{"port": 80}, {"port": 53, "protocol": "UDP"}]),
        json!([{"start": 1000, "end": 2000, "protocol": "TCP"}]),
    )
    .unwrap();
    assert_eq!(
        nat(&mut found[0]).forwards,
        [
            Forward { protocol: Protocol::Tcp, ports: 80..=80 },
            Forward { protocol: Protocol::Udp, ports: 53..=53 },
            Forward { protocol: Protocol::Tcp, ports: 1000..=2000 },
        ]
    );
    for port in [0, -1, 65536, i32::MAX] {
        assert!(matches!(with(json!([{"port": port}]), json!([])), Err(Error::InvalidPort { .. })), "{port}");
    }
    assert!(with(json!([{"port": 80, "protocol": "SCTP"}]), json!([])).unwrap_err().is_permanent());
    assert!(with(json!([]), json!([{"start": 2, "end": 1, "protocol": "TCP"}])).is_err());
}

#[test]
fn queues_follow_the_virtual_cpus_of_a_virtio_interface() {
    let queues = |interface: Value, multiqueue: bool, cores: u32| {
        let mut vmi = vmi(&json!([interface]), &json!([{"name": "default", "pod": {}}]));
        vmi.spec.domain.devices.network_interface_multiqueue = Some(multiqueue);
        vmi.spec.domain.cpu = Some(api::vmi::cpu::Cpu { cores: Some(cores), ..Default::default() });
        request_of(&vmi).queues
    };
    let virtio = json!({"name": "default", "masquerade": {}});
    let e1000 = json!({"name": "default", "masquerade": {}, "model": "e1000"});
    assert_eq!(queues(virtio.clone(), false, 4), 1);
    assert_eq!(queues(virtio.clone(), true, 4), 4);
    assert_eq!(queues(virtio, true, 1000), 256);
    assert_eq!(queues(e1000, true, 4), 1);
}

#[test]
fn queues_are_those_of_the_domain_that_arrives() {
    let mut vmi = masquerade();
    vmi.spec.domain.devices.network_interface_multiqueue = Some(true);
    vmi.spec.domain.cpu = Some(api::vmi::cpu::Cpu { sockets: Some(2), ..Default::default() });
    for (source, shown, expected) in [
        ("domain", Some(1), 1),
        ("domain, guest-agent", Some(4), 4),
        ("domain", Some(-1), 2),
        ("domain", Some(0), 1),
        ("domain", Some(i32::MAX), 256),
        ("domain", None, 2),
        // Plugged into the pod only.
        ("multus-status", Some(1), 2),
    ] {
        let interfaces = json!({"interfaces": [{"name": "default", "infoSource": source, "queueCount": shown}]});
        vmi.status = serde_json::from_value(interfaces).unwrap();
        assert_eq!(request_of(&vmi).queues, expected, "{source} {shown:?}");
    }
}
