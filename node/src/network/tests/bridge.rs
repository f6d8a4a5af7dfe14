//! Guests on the network of their pod's link.

use std::time::Duration;

use tokio::sync::mpsc;

use super::{namespaces::*, *};

const MAC: [u8; 6] = [0x0a, 0x58, 0, 0, 0, 7];

/// Returns a VMI with the pod network and another one.
fn two_networks() -> VirtualMachineInstance {
    let mut vmi = vmi(
        &json!([{"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}}]),
        &json!([{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "lan"}}]),
    );
    vmi.metadata.uid = Some("u-1".into());
    vmi
}

fn lan() -> Request {
    requests(&two_networks()).unwrap().remove(1)
}

/// Returns the pod of a VMI with two networks: eth0, and a link with addresses, a gateway and another route.
fn pod(addresses: &[&str]) -> Observed {
    let mut observed = eth0(&["10.244.0.7"]);
    let link = Link { index: 3, name: "pod094a367b026".into(), mtu: 1400, ..observed.links[1].clone() };
    observed.links.push(link);
    observed.addresses.extend(addresses.iter().map(|text| Address {
        link: 3,
        ip: ip(text),
        prefix: if ip(text).is_ipv4() { 24 } else { 64 },
    }));
    let v4 = |text: &str| text.parse::<Ipv4Addr>().unwrap();
    let route = |destination: &str, prefix, gateway: Option<&str>| Route {
        link: 3,
        destination: v4(destination),
        prefix,
        gateway: gateway.map(v4),
    };
    observed.routes = vec![
        Route { link: 2, ..route("0.0.0.0", 0, Some("10.244.0.1")) },
        route("0.0.0.0", 0, Some("192.168.5.1")),
        route("192.168.5.0", 24, None),
        route("172.16.0.0", 12, Some("192.168.5.2")),
        route("169.254.1.1", 32, None),
    ];
    observed
}

#[test]
fn each_interface_has_its_link_and_its_address() {
    let found = requests(&two_networks()).unwrap();
    let names: Vec<_> = found.iter().map(|request| (request.name.as_str(), request.pod_link.as_str())).collect();
    assert_eq!(names, [("default", "eth0"), ("lan", "pod094a367b026")]);
    assert_eq!(found[1].binding, Binding::Bridge { server: Ipv4Addr::new(169, 254, 75, 11) });
    // An interface behind NAT has a stable address of its own; a bridged one has that of the pod's link.
    let mac = found[0].mac.clone().unwrap();
    assert!(mac.starts_with("02:") && mac.len() == 17, "{mac}");
    assert_eq!(found[0].mac, requests(&two_networks()).unwrap()[0].mac);
    assert_eq!(found[1].mac, None);
    let mut other = two_networks();
    other.metadata.uid = Some("u-2".into());
    assert_ne!(found[0].mac, requests(&other).unwrap()[0].mac);
}

#[test]
fn the_pod_network_can_be_bridged_and_replaced() {
    let bridged = [
        json!([{"name": "default", "pod": {}}]),
        json!([{"name": "default", "multus": {"networkName": "n", "default": true}}]),
    ];
    for networks in bridged {
        let found = requests(&vmi(&json!([{"name": "default", "bridge": {}}]), &networks)).unwrap();
        assert_eq!(found[0].pod_link, "eth0");
        let plan = decide(&found[0], &eth0(&["10.244.0.7"])).unwrap();
        let nic = &plan.network.nics[0];
        assert_eq!((nic.tap.as_str(), nic.bridge.as_str()), ("tap0", "k6t-eth0"));
        assert!(plan.steps.contains(&Step::Rename { from: "eth0".into(), to: "eth0-nic".into() }));
    }
    let many: Vec<Value> = (0..65).map(|number| json!({"name": format!("n{number}"), "bridge": {}})).collect();
    let networks: Vec<Value> =
        (0..65).map(|number| json!({"name": format!("n{number}"), "multus": {"networkName": "n"}})).collect();
    let error = requests(&vmi(&json!(many), &json!(networks))).unwrap_err();
    assert!(error.to_string().contains("more than 64 interfaces"), "{error}");
}

#[test]
fn the_guest_gets_the_configuration_of_the_cni_plugins() {
    let plan = decide(&lan(), &pod(&["192.168.5.7", "fd00:5::7", "fe80::7"])).unwrap();
    assert_eq!(
        kinds(&plan),
        [
            "bridge", "address", "bridge", "address", "address", "mark", "rename", "take", "mac", "rename", "set",
            "port", "kernel", "tap", "set", "mark"
        ]
    );
    let nic = &plan.network.nics[0];
    assert_eq!((nic.tap.as_str(), nic.bridge.as_str(), nic.mtu), ("tap094a367b026", "k6t-094a367b026", 1400));
    assert_eq!(nic.mac, "0a:58:00:00:00:07");
    let lease = nic.dhcp.as_ref().unwrap();
    assert_eq!((lease.address.as_str(), lease.gateway.as_str()), ("192.168.5.7/24", "192.168.5.1"));
    assert_eq!(lease.server, "169.254.75.11");
    let routes: Vec<_> = lease.routes.iter().map(|r| (r.destination.as_str(), r.gateway.as_str())).collect();
    assert_eq!(routes, [("172.16.0.0/12", "192.168.5.2"), ("169.254.1.1/32", "")]);
    let interface = &plan.network.interfaces[0];
    assert_eq!(
        (interface.pod_interface_name.as_str(), &interface.ips[..]),
        ("pod094a367b026", &[ip("192.168.5.7")][..])
    );
    let done = after(pod(&["192.168.5.7", "fd00:5::7", "fe80::7"]), &plan);
    let up: Vec<_> = done.links.iter().filter(|link| link.up).map(|link| link.name.as_str()).collect();
    assert_eq!(up, ["lo", "eth0", "094a367b026-nic", "k6t-094a367b026", "tap094a367b026"]);
    // The link in the pod no longer has the guest's MAC address.
    assert!(plan.steps.iter().all(|step| !matches!(step, Step::SetMac { mac, .. } if *mac == MAC)));
    let requested = Request { mac: Some("02:00:00:00:00:09".into()), ..lan() };
    assert_eq!(decide(&requested, &pod(&[])).unwrap().network.nics[0].mac, "02:00:00:00:00:09");
}

#[test]
fn a_bridge_setup_interrupted_anywhere_is_continued_and_a_complete_one_is_left_alone() {
    for start in [pod(&["192.168.5.7", "fd00:5::7", "fe80::7"]), pod(&[])] {
        let whole = decide(&lan(), &start).unwrap();
        let done = after(start.clone(), &whole);
        for stopped in 0..=whole.steps.len() {
            let part = Plan { steps: whole.steps[..stopped].to_vec(), ..whole.clone() };
            let rest = decide(&lan(), &after(start.clone(), &part)).unwrap();
            let finished = after(after(start.clone(), &part), &rest);
            assert_eq!(finished, done, "stopped after {stopped} steps");
            assert_eq!(rest.network, whole.network, "stopped after {stopped} steps");
            assert!(decide(&lan(), &finished).unwrap().steps.is_empty(), "stopped after {stopped} steps");
        }
    }
}

#[test]
fn a_link_is_given_back_and_an_interrupted_release_is_continued() {
    let start = pod(&["192.168.5.7"]);
    let plan = |steps| Plan { steps, network: PodNetwork::default() };
    let whole = decide(&lan(), &start).unwrap();
    let done = after(start.clone(), &whole);
    let nic = |observed: &Observed| observed.link("pod094a367b026").cloned().unwrap();
    // After a part of the setup, and after a part of the release.
    for set_up in 0..=whole.steps.len() {
        let set_up = after(start.clone(), &plan(whole.steps[..set_up].to_vec()));
        let steps = super::super::bridge::release("pod094a367b026", &set_up).unwrap();
        for stopped in 0..=steps.len() {
            let part = after(set_up.clone(), &plan(steps[..stopped].to_vec()));
            let rest = plan(super::super::bridge::release("pod094a367b026", &part).unwrap());
            let released = after(part, &rest);
            let names: Vec<_> = released.links.iter().map(|link| link.name.as_str()).collect();
            assert_eq!(names, ["lo", "eth0", "pod094a367b026"], "stopped after {stopped} steps");
            assert_eq!((nic(&released).kind.as_str(), nic(&released).mac), ("veth", Some(MAC)));
            assert_eq!(super::super::bridge::release("pod094a367b026", &released).unwrap(), []);
        }
    }
    // The plugins may have removed the link already.
    let gone = Observed { links: vec![], ..done };
    assert_eq!(super::super::bridge::release("pod094a367b026", &gone).unwrap(), []);
}

#[test]
fn server_of_a_bridge_stays_when_another_interface_leaves() {
    let start = pod(&["192.168.5.7"]);
    let done = after(start.clone(), &decide(&lan(), &start).unwrap());
    let moved = Request { binding: Binding::Bridge { server: Ipv4Addr::new(169, 254, 75, 10) }, ..lan() };
    let plan = decide(&moved, &done).unwrap();
    assert_eq!((plan.steps.len(), plan.network.nics[0].dhcp.as_ref().unwrap().server.as_str()), (0, "169.254.75.11"));
}

#[test]
fn a_link_without_an_address_gives_none_to_the_guest() {
    let nic = decide(&lan(), &pod(&["fe80::7"])).unwrap().network.nics.remove(0);
    assert_eq!((nic.dhcp, nic.bridge.as_str()), (None, ""));
}

#[test]
fn a_guest_on_the_pod_network_gets_the_default_route_and_no_ipv6_address() {
    let plain = vmi(&json!([{"name": "default", "bridge": {}}]), &json!([{"name": "default", "pod": {}}]));
    let request = requests(&plain).unwrap().remove(0);
    let mut dual = eth0(&["10.244.0.7", "fd00:1::7"]);
    dual.routes.push(Route {
        link: 2,
        destination: Ipv4Addr::UNSPECIFIED,
        prefix: 0,
        gateway: Some(Ipv4Addr::new(10, 244, 0, 1)),
    });
    let network = decide(&request, &dual).unwrap().network;
    assert_eq!(network.interfaces[0].ips, [ip("10.244.0.7")]);
    let lease = network.nics[0].dhcp.as_ref().unwrap();
    assert_eq!((lease.address.as_str(), lease.gateway.as_str()), ("10.244.0.7/24", "10.244.0.1"));
    // The guest is on the link and can get an address there.
    let v6 = decide(&request, &eth0(&["fd00:1::7"])).unwrap().network;
    assert!(v6.interfaces[0].ips.is_empty() && v6.nics[0].dhcp.is_none(), "{v6:?}");
}

#[test]
fn routes_that_need_the_dense_form_are_kept() {
    let mut start = pod(&["192.168.5.7"]);
    let route = start.routes[3];
    start.routes.extend((0..9).map(|number| Route {
        destination: Ipv4Addr::new(172, 20, number, 0),
        prefix: 24,
        ..route
    }));
    start.routes.push(Route { destination: Ipv4Addr::new(10, 128, 0, 0), prefix: 9, gateway: None, ..route });
    let whole = decide(&lan(), &start).unwrap();
    let lease = whole.network.nics[0].dhcp.clone().unwrap();
    assert_eq!((lease.gateway.as_str(), lease.routes.len()), ("192.168.5.1", 12));
    let again = decide(&lan(), &after(start, &whole)).unwrap();
    assert_eq!((again.steps, again.network), (vec![], whole.network));
}

#[test]
fn missing_links_and_too_many_routes_are_errors() {
    assert!(matches!(decide(&lan(), &eth0(&[])), Err(Error::PodLinkMissing(_))));
    let mut lost = pod(&["192.168.5.7"]);
    lost.links[2].name = "094a367b026-nic".into();
    assert!(matches!(decide(&lan(), &lost), Err(Error::PodLinkMissing(_))), "a renamed link without its keeper");
    let mut wide = pod(&["192.168.5.7"]);
    let route = wide.routes[3];
    wide.routes.extend((0..20).map(|number| Route {
        destination: Ipv4Addr::new(172, 20, number, 0),
        prefix: 24,
        ..route
    }));
    let error = decide(&lan(), &wide).unwrap_err();
    assert!(error.is_permanent() && error.to_string().contains("23 routes"), "{error}");
    let mut tunnel = pod(&["192.168.5.7"]);
    tunnel.links[2].mac = None;
    assert!(matches!(decide(&lan(), &tunnel), Err(Error::NoMac(_))));
}

#[tokio::test]
async fn a_guest_is_reached_on_its_second_network_under_the_pods_own_address() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, outside) = pod_and_outside().await;
    let target = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&outside));
    ip_in(
        &pod,
        &[
            &format!(
                "ip link add pod094a367b026 mtu 1400 address 0a:58:00:00:00:07 type veth peer name lan0 netns {target}"
            ),
            "ip address add 192.168.5.7/24 dev pod094a367b026",
            "ip address add fd00:5::7/64 dev pod094a367b026 nodad",
            "ip link set pod094a367b026 up",
            "ip route add 172.16.0.0/12 via 192.168.5.1",
        ],
    )
    .await;
    ip_in(&outside, &["ip address add 192.168.5.1/24 dev lan0", "ip link set lan0 up"]).await;

    let both = requests(&two_networks()).unwrap();
    let first = setup_in(inside(&pod), both.clone(), vec![]).await.unwrap();
    assert_eq!(first.interfaces[0].ips, [ip("10.244.0.7"), ip("fd00:1::7")]);
    assert_eq!(first.interfaces[1].ips, [ip("192.168.5.7")]);
    assert_eq!(first.nics[1].mac, "0a:58:00:00:00:07");
    let routes = &first.nics[1].dhcp.as_ref().unwrap().routes;
    assert_eq!((routes[0].destination.as_str(), routes[0].gateway.as_str()), ("172.16.0.0/12", "192.168.5.1"));

    let state = ["ip -4 -o address", "nft -s list ruleset", "cat /proc/sys/net/ipv4/conf/all/arp_ignore"];
    let before = ip_in(&pod, &state).await;
    let nic = ip_in(&pod, &["ip -o -d link show 094a367b026-nic"]).await;
    assert!(nic.contains("master k6t-094a367b026") && nic.contains("learning off"), "{nic}");
    assert!(!nic.contains("link/ether 0a:58:00:00:00:07"), "the guest's address is the guest's alone: {nic}");
    let keeper = ip_in(&pod, &["ip -o link show pod094a367b026", "ip -o address show pod094a367b026"]).await;
    assert!(!keeper.contains("UP") && keeper.contains("192.168.5.7/24") && keeper.contains("fd00:5::7/64"), "{keeper}");
    assert_eq!(setup_in(inside(&pod), both, vec![]).await.unwrap(), first);
    assert_eq!(ip_in(&pod, &state).await, before);

    let guest = new_namespace();
    let (to_guest, from_pod) = mpsc::channel(256);
    let (to_pod, from_guest) = mpsc::channel(256);
    wire(&pod, "tap094a367b026", to_guest, from_guest);
    wire(&guest, "eth1", to_pod, from_pod);
    for _ in 0..100 {
        if ip_in(&guest, &["ip -br link"]).await.contains("eth1") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ip_in(
        &guest,
        &[
            "ip link set eth1 address 0a:58:00:00:00:07 mtu 1400",
            "ip link set eth1 up",
            "ip address add 192.168.5.7/24 dev eth1",
        ],
    )
    .await;
    let server = answer_once(&guest, "192.168.5.7:8080").await;
    assert_eq!(call(&outside, "192.168.5.7:8080").await, "hello");
    assert_eq!(server.await.unwrap().unwrap(), "192.168.5.1");
    let neighbours = ip_in(&outside, &["ip neighbour show dev lan0"]).await;
    assert!(neighbours.contains("192.168.5.7 lladdr 0a:58:00:00:00:07"), "only the guest answers: {neighbours}");
    let server = answer_once(&outside, "192.168.5.1:7000").await;
    assert_eq!(call(&guest, "192.168.5.1:7000").await, "hello");
    assert_eq!(server.await.unwrap().unwrap(), "192.168.5.7");

    let names = ["lan".to_owned()];
    let release = request::releases(&two_networks(), &names);
    for _ in 0..2 {
        let left = setup_in(inside(&pod), vec![], release.clone()).await.unwrap();
        assert_eq!(left.released, names.clone().into());
        let links = ip_in(&pod, &["ip -br link"]).await;
        let of_lan: Vec<_> = links.lines().filter(|line| line.contains("094a367b026")).collect();
        assert!(
            matches!(of_lan[..], [link] if link.starts_with("pod") && link.contains("0a:58:00:00:00:07")),
            "{links}"
        );
        assert!(links.contains("k6t-eth0") && links.contains("tap0"), "{links}");
    }
}
