//! Plans of the masquerade binding.

use super::*;

#[test]
fn a_fresh_pod_gets_bridge_rules_and_tap_in_an_order_that_can_be_interrupted() {
    let plan = decide(&request_of(&masquerade()), &eth0(&["10.244.0.7"])).unwrap();
    let kinds = kinds(&plan);
    assert_eq!(kinds, ["bridge", "address", "kernel", "kernel", "rules", "tap", "set", "mark"]);
    let nic = &plan.network.nics[0];
    assert_eq!(
        (nic.name.as_str(), nic.tap.as_str(), nic.bridge.as_str(), nic.mtu),
        ("default", "tap0", "k6t-eth0", 1450)
    );
    let lease = nic.dhcp.as_ref().unwrap();
    assert_eq!((lease.address.as_str(), lease.gateway.as_str()), ("10.0.2.2/24", "10.0.2.1"));
    assert_eq!(nic.dhcp6, None);
    assert_eq!(plan.network.interfaces[0].ips, [ip("10.244.0.7")]);
    assert_eq!(plan.network.interfaces[0].pod_interface_name, "eth0");
}

#[test]
fn a_setup_interrupted_anywhere_is_continued_and_a_complete_one_is_left_alone() {
    let request = request_of(&masquerade());
    let start = eth0(&["10.244.0.7", "fd00:1::7", "fe80::1"]);
    let whole = decide(&request, &start).unwrap();
    let done = after(start.clone(), &whole);
    for stopped in 0..=whole.steps.len() {
        let part = Plan { steps: whole.steps[..stopped].to_vec(), ..whole.clone() };
        let rest = decide(&request, &after(start.clone(), &part)).unwrap();
        let finished = after(after(start.clone(), &part), &rest);
        assert_eq!(finished, done, "stopped after {stopped} steps");
        assert_eq!(rest.network, whole.network);
        assert!(decide(&request, &finished).unwrap().steps.is_empty());
    }
}

#[test]
fn changed_rules_replace_the_former_ones() {
    let start = eth0(&["10.244.0.7"]);
    let mut request = request_of(&masquerade());
    let done = after(start.clone(), &decide(&request, &start).unwrap());
    nat(&mut request).forwards = vec![Forward { protocol: Protocol::Tcp, ports: 80..=80 }];
    let steps = decide(&request, &done).unwrap().steps;
    assert!(matches!(&steps[..], [Step::SetKernel { .. }, Step::SetKernel { .. }, Step::Rules(_), Step::Mark { .. }]));
}

#[test]
fn families_follow_the_addresses_of_the_pod() {
    let request = request_of(&masquerade());
    let v6 = decide(&request, &eth0(&["fe80::2", "fd00:1::7"])).unwrap();
    assert!(v6.steps.contains(&Step::SetKernel { path: "net/ipv6/conf/all/forwarding".into(), value: "1" }));
    assert!(!v6.steps.iter().any(|step| matches!(step, Step::SetKernel { path, .. } if path.contains("ipv4"))));
    assert_eq!(v6.network.nics[0].dhcp, None);
    assert_eq!(v6.network.nics[0].bridge, "k6t-eth0");
    let lease = v6.network.nics[0].dhcp6.clone().unwrap();
    assert_eq!((lease.address.as_str(), lease.server_mac.as_str()), ("fd10:0:2::2", "02:00:00:00:00:00"));
    assert_eq!(v6.network.interfaces[0].ips, [ip("fd00:1::7")]);
    let both = decide(&request, &eth0(&["fd00:1::7", "10.244.0.7", "10.244.0.8"])).unwrap();
    assert_eq!(both.network.interfaces[0].ips, [ip("10.244.0.7"), ip("fd00:1::7")]);
    let links = both.steps.iter().filter(|step| matches!(step, Step::AddAddress { .. })).count();
    assert_eq!(links, 2);
}

#[test]
fn a_pod_that_is_not_ready_is_retried() {
    let request = request_of(&masquerade());
    let missing = decide(&request, &Observed::default()).unwrap_err();
    assert_eq!(missing.to_string(), "pod link (eth0) is missing");
    assert!(!missing.is_permanent());
    for addresses in [&[][..], &["fe80::1", "169.254.0.1", "224.0.0.1"][..]] {
        assert!(matches!(decide(&request, &eth0(addresses)), Err(Error::PodAddressMissing(_))));
    }
}

#[test]
fn links_of_other_owners_are_not_used() {
    let mut observed = eth0(&["10.244.0.7"]);
    observed.links.push(Link { name: "tap0".into(), kind: "dummy".into(), index: 9, ..observed.links[0].clone() });
    assert!(matches!(decide(&request_of(&masquerade()), &observed), Err(Error::ForeignLink(_))));
}

#[test]
fn links_of_a_renamed_primary_network_are_named_after_it() {
    let mut vmi = masquerade();
    let status = json!({"interfaces": [{"name": "default", "podInterfaceName": "ovn-udn1"}]});
    vmi.status = Some(serde_json::from_value(status).unwrap());
    let mut observed = eth0(&["10.244.0.7"]);
    observed.links[1].name = "ovn-udn1".into();
    let nic = decide(&request_of(&vmi), &observed).unwrap().network.nics.remove(0);
    assert_eq!((nic.tap.as_str(), nic.bridge.as_str()), ("tap-udn1", "k6t-ovn-udn1"));
    // Text that is not a valid name is ignored.
    let status = json!({"interfaces": [{"name": "default", "podInterfaceName": "x\" drop; #"}]});
    vmi.status = Some(serde_json::from_value(status).unwrap());
    assert_eq!(request_of(&vmi).pod_link, "eth0");
}
