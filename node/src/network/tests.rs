#![allow(clippy::disallowed_methods, reason = "tests set up what the agent then meets")]

mod bridge;

use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr},
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use api::VirtualMachineInstance;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
};

use super::{
    plan::{Address, Link, Observed, Plan, Route, Step, decide},
    request::{Binding, Forward, Masquerade, Protocol, Request, requests},
    ruleset::{Translation, ruleset},
    *,
};
use crate::safe_dir::SafeDir;

fn vmi(interfaces: &Value, networks: &Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "default"},
        "spec": {"domain": {"devices": {"interfaces": interfaces}}, "networks": networks},
    }))
    .unwrap()
}

fn masquerade() -> VirtualMachineInstance {
    vmi(&json!([{"name": "default", "masquerade": {}}]), &json!([{"name": "default", "pod": {}}]))
}

fn wanted(vmi: &VirtualMachineInstance) -> Request {
    requests(vmi).unwrap().remove(0)
}

fn nat(request: &mut Request) -> &mut Masquerade {
    match &mut request.binding {
        Binding::Masquerade(asked) => asked,
        Binding::Bridge { .. } => panic!("not masquerade"),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn eth0(addresses: &[&str]) -> Observed {
    let link = |index, name: &str| Link {
        index,
        name: name.to_owned(),
        kind: "veth".to_owned(),
        mac: Some([0x0a, 0x58, 0, 0, 0, 7]),
        mtu: 1450,
        controller: None,
        up: true,
        alias: None,
    };
    Observed {
        links: vec![link(1, "lo"), link(2, "eth0")],
        addresses: addresses.iter().map(|text| Address { link: 2, ip: ip(text), prefix: 24 }).collect(),
        routes: vec![],
    }
}

/// What a kernel shows after the steps.
fn after(mut observed: Observed, plan: &Plan) -> Observed {
    let at = |observed: &Observed, name: &str| observed.links.iter().position(|link| link.name == name).unwrap();
    for step in &plan.steps {
        let index = 10 + u32::try_from(observed.links.len()).unwrap();
        let made = |name: &str, kind: &str, mac: Option<[u8; 6]>, mtu| Link {
            index,
            name: name.to_owned(),
            kind: kind.to_owned(),
            mac,
            mtu,
            controller: None,
            up: false,
            alias: None,
        };
        match step {
            Step::CreateBridge { name, mac, mtu, up } => {
                observed.links.push(Link { up: *up, ..made(name, "bridge", Some(*mac), *mtu) });
            }
            Step::CreateTap { name, .. } => observed.links.push(made(name, "tun", None, 1500)),
            Step::Rename { from, to } => {
                let link = at(&observed, from);
                let index = observed.links[link].index;
                observed.links[link].name = to.clone();
                if std::mem::take(&mut observed.links[link].up) {
                    observed.addresses.retain(|address| address.link != index || address.ip.is_ipv4());
                }
                observed.routes.retain(|route| route.link != index);
            }
            Step::SetMac { link, mac } => {
                let link = at(&observed, link);
                observed.links[link].mac = Some(*mac);
            }
            Step::TakeAddresses { link } => {
                let link = observed.links[at(&observed, link)].index;
                observed.addresses.retain(|address| address.link != link);
            }
            Step::SetLink { name, mtu, controller, up } => {
                let controller = controller.as_ref().map(|name| observed.links[at(&observed, name)].index);
                let link = at(&observed, name);
                let link = &mut observed.links[link];
                link.mtu = mtu.unwrap_or(link.mtu);
                link.controller = controller.or(link.controller);
                link.up |= up;
            }
            Step::AddAddress { link, ip, prefix } => {
                let link = observed.links[at(&observed, link)].index;
                observed.addresses.push(Address { link, ip: *ip, prefix: *prefix });
            }
            Step::Mark { link, mark } => {
                let link = at(&observed, link);
                observed.links[link].alias = Some(mark.clone());
            }
            Step::SetKernel { .. } | Step::Rules(_) | Step::StopLearning { .. } => {}
        }
    }
    observed
}

/// What kinds of steps a plan has.
fn kinds(plan: &Plan) -> Vec<&'static str> {
    plan.steps
        .iter()
        .map(|step| match step {
            Step::CreateBridge { .. } => "bridge",
            Step::CreateTap { .. } => "tap",
            Step::SetLink { .. } => "set",
            Step::AddAddress { .. } => "address",
            Step::Rename { .. } => "rename",
            Step::SetMac { .. } => "mac",
            Step::TakeAddresses { .. } => "take",
            Step::StopLearning { .. } => "port",
            Step::SetKernel { .. } => "kernel",
            Step::Rules(_) => "rules",
            Step::Mark { .. } => "mark",
        })
        .collect()
}

#[test]
fn a_machine_without_interfaces_has_no_network() {
    assert!(requests(&vmi(&json!([]), &json!([]))).unwrap().is_empty());
    let unplugged = vmi(&json!([{"name": "default", "masquerade": {}, "state": "absent"}]), &json!([]));
    assert!(requests(&unplugged).unwrap().is_empty());
}

#[test]
fn addresses_come_from_the_range_asked_for() {
    let mut request = wanted(&masquerade());
    let asked = nat(&mut request);
    assert_eq!((asked.v4.gateway, asked.v4.guest, asked.v4.prefix), (ip("10.0.2.1"), ip("10.0.2.2"), 24));
    assert_eq!((asked.v6.gateway, asked.v6.guest, asked.v6.prefix), (ip("fd10:0:2::1"), ip("fd10:0:2::2"), 120));
    let ranged = |v4: &str, v6: &str| {
        vmi(
            &json!([{"name": "default", "masquerade": {}}]),
            &json!([{"name": "default", "pod": {"vmNetworkCIDR": v4, "vmIPv6NetworkCIDR": v6}}]),
        )
    };
    let mut request = wanted(&ranged("192.168.7.77/28", "fd00::ff/64"));
    let asked = nat(&mut request);
    assert_eq!((asked.v4.gateway, asked.v4.guest), (ip("192.168.7.65"), ip("192.168.7.66")));
    assert_eq!((asked.v6.gateway, asked.v6.guest), (ip("fd00::1"), ip("fd00::2")));
    assert_eq!(nat(&mut wanted(&ranged("0.0.0.0/0", "::/0"))).v4.gateway, ip("0.0.0.1"));
    for (v4, v6) in [("10.0.0.0/31", "::/120"), ("10.0.0.0/32", "::/120"), ("10.0.0.0/24", "::/127")] {
        let error = requests(&ranged(v4, v6)).unwrap_err();
        assert!(error.to_string().starts_with("VM CIDR subnet is too small, at least 2 host addresses"), "{error}");
        assert!(error.is_permanent());
    }
    assert_eq!(nat(&mut wanted(&ranged("", ""))).v4.gateway, ip("10.0.2.1"), "an empty range is none");
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
fn what_is_not_supported_is_refused_for_good() {
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
        wanted(&vmi).queues
    };
    let virtio = json!({"name": "default", "masquerade": {}});
    let e1000 = json!({"name": "default", "masquerade": {}, "model": "e1000"});
    assert_eq!(queues(virtio.clone(), false, 4), 1);
    assert_eq!(queues(virtio.clone(), true, 4), 4);
    assert_eq!(queues(virtio, true, 1000), 256);
    assert_eq!(queues(e1000, true, 4), 1);
}

#[test]
fn a_fresh_pod_gets_bridge_rules_and_tap_in_an_order_that_can_be_interrupted() {
    let plan = decide(&wanted(&masquerade()), &eth0(&["10.244.0.7"])).unwrap();
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
fn a_set_up_interrupted_anywhere_is_finished_and_a_finished_one_is_left_alone() {
    let request = wanted(&masquerade());
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
fn other_rules_replace_those_in_force() {
    let start = eth0(&["10.244.0.7"]);
    let mut request = wanted(&masquerade());
    let done = after(start.clone(), &decide(&request, &start).unwrap());
    nat(&mut request).forwards = vec![Forward { protocol: Protocol::Tcp, ports: 80..=80 }];
    let steps = decide(&request, &done).unwrap().steps;
    assert!(matches!(&steps[..], [Step::SetKernel { .. }, Step::SetKernel { .. }, Step::Rules(_), Step::Mark { .. }]));
}

#[test]
fn families_follow_the_addresses_of_the_pod() {
    let request = wanted(&masquerade());
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
fn a_pod_that_is_not_ready_is_tried_again() {
    let request = wanted(&masquerade());
    let missing = decide(&request, &Observed::default()).unwrap_err();
    assert_eq!(missing.to_string(), "pod link (eth0) is missing");
    assert!(!missing.is_permanent());
    for addresses in [&[][..], &["fe80::1", "169.254.0.1", "224.0.0.1"][..]] {
        assert!(matches!(decide(&request, &eth0(addresses)), Err(Error::PodAddressMissing(_))));
    }
}

#[test]
fn links_of_others_are_not_taken_over() {
    let mut observed = eth0(&["10.244.0.7"]);
    observed.links.push(Link { name: "tap0".into(), kind: "dummy".into(), index: 9, ..observed.links[0].clone() });
    assert!(matches!(decide(&wanted(&masquerade()), &observed), Err(Error::ForeignLink(_))));
}

#[test]
fn links_of_a_primary_network_by_another_name_are_named_after_it() {
    let mut vmi = masquerade();
    let status = json!({"interfaces": [{"name": "default", "podInterfaceName": "ovn-udn1"}]});
    vmi.status = Some(serde_json::from_value(status).unwrap());
    let mut observed = eth0(&["10.244.0.7"]);
    observed.links[1].name = "ovn-udn1".into();
    let nic = decide(&wanted(&vmi), &observed).unwrap().network.nics.remove(0);
    assert_eq!((nic.tap.as_str(), nic.bridge.as_str()), ("tap-udn1", "k6t-ovn-udn1"));
    // Text that could be more than a name is not used.
    let status = json!({"interfaces": [{"name": "default", "podInterfaceName": "x\" drop; #"}]});
    vmi.status = Some(serde_json::from_value(status).unwrap());
    assert_eq!(wanted(&vmi).pod_link, "eth0");
}

#[test]
fn rules_without_ports_forward_everything() {
    let request = wanted(&masquerade());
    let text = rules_of(&request, &["10.244.0.7"]);
    assert_eq!(
        text,
        "table ip ferrovirt\n\
         delete table ip ferrovirt\n\
         table ip ferrovirt {\n\
         \tchain guest_loopback {\n\t\ttype filter hook prerouting priority -300; policy accept;\n\
         \t\tiifname \"k6t-eth0\" ip daddr 127.0.0.0/8 counter drop\n\
         \t\tiifname \"k6t-eth0\" ip saddr 127.0.0.0/8 counter drop\n\t}\n\
         \tchain KUBEVIRT_PREINBOUND {\n\t\tcounter dnat to 10.0.2.2\n\t}\n\
         \tchain KUBEVIRT_POSTINBOUND {\n\t\tip saddr { 127.0.0.1 } counter snat to 10.0.2.1\n\t}\n\
         \tchain prerouting {\n\t\ttype nat hook prerouting priority -99; policy accept;\n\t\tiifname \"eth0\" counter jump KUBEVIRT_PREINBOUND\n\t}\n\
         \tchain input {\n\t\ttype nat hook input priority 101; policy accept;\n\t}\n\
         \tchain output {\n\t\ttype nat hook output priority -99; policy accept;\n\t\tip daddr { 127.0.0.1 } counter dnat to 10.0.2.2\n\t}\n\
         \tchain postrouting {\n\t\ttype nat hook postrouting priority 101; policy accept;\n\t\tip saddr 10.0.2.2 counter masquerade\n\t\toifname \"k6t-eth0\" counter jump KUBEVIRT_POSTINBOUND\n\t}\n\
         }\n"
    );
}

#[test]
fn rules_with_ports_forward_those() {
    let mut request = wanted(&masquerade());
    nat(&mut request).forwards = vec![
        Forward { protocol: Protocol::Udp, ports: 53..=53 },
        Forward { protocol: Protocol::Tcp, ports: 1000..=2000 },
    ];
    let text = rules_of(&request, &["fd00:1::7"]);
    for rule in [
        "table ip6 ferrovirt {",
        "\t\tudp dport { 53 } counter dnat to fd10:0:2::2\n",
        "\t\ttcp dport { 1000-2000 } counter dnat to fd10:0:2::2\n",
        "\t\tudp dport { 53 } ip6 saddr { ::1 } counter snat to fd10:0:2::1\n",
        "\t\tip6 daddr { ::1 } tcp dport { 1000-2000 } counter dnat to fd10:0:2::2\n",
        "\t\tip6 saddr fd10:0:2::2 counter masquerade\n",
        "\t\tiifname \"k6t-eth0\" ip6 daddr ::1 counter drop\n",
    ] {
        assert!(text.contains(rule), "{rule}\n{text}");
    }
    assert!(!text.contains("\t\tcounter dnat"));
}

#[test]
fn behind_a_sidecar_only_ssh_reaches_the_guest_from_outside() {
    let mut vmi = masquerade();
    vmi.metadata.labels = Some([("sidecar.istio.io/inject".to_owned(), "true".to_owned())].into());
    let mut request = wanted(&vmi);
    let text = rules_of(&request, &["10.244.0.7"]);
    for rule in [
        "\t\ttcp dport { 22 } counter dnat to 10.0.2.2\n",
        "15090 } ip saddr 127.0.0.1 counter return\n",
        "\t\tip saddr { 127.0.0.1, 127.0.0.6 } counter snat to 10.0.2.1\n",
        "\t\tip daddr { 127.0.0.1, 10.244.0.7 } counter dnat to 10.0.2.2\n",
    ] {
        assert!(text.contains(rule), "{rule}\n{text}");
    }
    assert!(!text.contains("\t\tcounter dnat"));
    nat(&mut request).forwards = vec![Forward { protocol: Protocol::Tcp, ports: 80..=80 }];
    let text = rules_of(&request, &["10.244.0.7"]);
    assert!(!text.contains("\t\ttcp dport { 80 } counter dnat"), "{text}");
    assert!(text.contains("\t\tip daddr { 127.0.0.1, 10.244.0.7 } tcp dport { 80 } counter dnat to 10.0.2.2\n"));
}

fn rules_of(request: &Request, pod: &[&str]) -> String {
    let asked = nat(&mut request.clone()).clone();
    let translations: Vec<Translation<'_>> = pod
        .iter()
        .map(|address| Translation {
            pod_link: "eth0",
            bridge: "k6t-eth0",
            pod_address: ip(address),
            pair: if ip(address).is_ipv4() { asked.v4 } else { asked.v6 },
            forwards: &asked.forwards,
            sidecar: asked.sidecar,
        })
        .collect();
    ruleset(&translations)
}

#[tokio::test]
async fn the_network_of_the_node_is_never_touched() {
    let own = Peer::open(i32::try_from(std::process::id()).unwrap(), 0, 0).unwrap();
    let error = setup(&own, &masquerade()).await.unwrap_err();
    assert!(matches!(error, Error::HostNetwork), "{error}");
    assert!(error.is_permanent());
}

// What follows needs root: it makes network namespaces without names, which go when the test ends.

/// Whether namespaces can be made; says so loudly if not.
fn can_make_namespaces() -> bool {
    if std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join().unwrap().is_ok() {
        return true;
    }
    eprintln!("SKIPPED: network namespaces cannot be made here; run the test as root");
    false
}

fn new_namespace() -> OwnedFd {
    std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        OwnedFd::from(File::open("/proc/thread-self/ns/net").unwrap())
    })
    .join()
    .unwrap()
}

fn inside(namespace: &OwnedFd) -> NetworkNamespace {
    NetworkNamespace::descriptor(namespace.try_clone().unwrap())
}

/// Runs `ip` in a namespace.
async fn ip_in(namespace: &OwnedFd, commands: &[&str]) -> String {
    let commands: Vec<String> = commands.iter().map(|&command| command.to_owned()).collect();
    inside(namespace)
        .run(move || async move {
            let mut output = String::new();
            for command in commands {
                let mut words = command.split_whitespace();
                let run = std::process::Command::new(words.next().unwrap()).args(words).output().unwrap();
                assert!(run.status.success(), "{command}: {}", String::from_utf8_lossy(&run.stderr));
                output.push_str(&String::from_utf8_lossy(&run.stdout));
            }
            Ok(output)
        })
        .await
        .unwrap()
}

/// A pod's namespace with eth0 (10.244.0.7, fd00:1::7) and one outside of it (10.244.0.1, fd00:1::1).
async fn pod_and_outside() -> (OwnedFd, OwnedFd) {
    let (pod, outside) = (new_namespace(), new_namespace());
    let target = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&outside));
    ip_in(
        &pod,
        &[
            "ip link set lo up",
            &format!("ip link add eth0 mtu 1450 type veth peer name out0 mtu 1450 netns {target}"),
            "ip address add 10.244.0.7/24 dev eth0",
            "ip address add fd00:1::7/64 dev eth0 nodad",
            "ip link set eth0 up",
            "ip route add default via 10.244.0.1",
            "ip -6 route add default via fd00:1::1",
        ],
    )
    .await;
    ip_in(
        &outside,
        &[
            "ip link set lo up",
            "ip address add 10.244.0.1/24 dev out0",
            "ip address add 192.0.2.1/32 dev lo",
            "ip address add fd00:1::1/64 dev out0 nodad",
            "ip link set out0 up",
        ],
    )
    .await;
    (pod, outside)
}

/// A guest: a namespace of its own with the address that DHCP would give it, wired to the pod's tap device.
async fn guest(pod: &OwnedFd) -> OwnedFd {
    let guest = new_namespace();
    let (to_guest, from_pod) = mpsc::channel(256);
    let (to_pod, from_guest) = mpsc::channel(256);
    wire(pod, "tap0", to_guest, from_guest);
    wire(&guest, "eth0", to_pod, from_pod);
    let give = [
        "ip link set eth0 mtu 1450 up",
        "ip link set lo up",
        "ip address add 10.0.2.2/24 dev eth0",
        "ip address add fd10:0:2::2/120 dev eth0 nodad",
        "ip route add default via 10.0.2.1",
        "ip -6 route add default via fd10:0:2::1",
    ];
    // The tap device of the guest comes up on another thread.
    for _ in 0..100 {
        if ip_in(&guest, &["ip -br link"]).await.contains("eth0") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ip_in(&guest, &give).await;
    guest
}

/// Passes packets between a tap device in a namespace and two channels until the test ends.
fn wire(namespace: &OwnedFd, name: &'static str, out: mpsc::Sender<Vec<u8>>, mut into: mpsc::Receiver<Vec<u8>>) {
    let namespace = inside(namespace);
    tokio::spawn(namespace.run(move || async move {
        let tap = tokio_tun::Tun::builder().name(name).tap().build().unwrap().remove(0);
        let mut packet = vec![0; 4096];
        loop {
            tokio::select! {
                read = tap.recv(&mut packet) => {
                    if let Ok(length) = read {
                        let _ = out.try_send(packet[..length].to_vec());
                    }
                }
                received = into.recv() => match received {
                    Some(packet) => {
                        let _ = tap.send(&packet).await;
                    }
                    None => return Ok(()),
                },
            }
        }
    }));
}

async fn answer_once(namespace: &OwnedFd, address: &'static str) -> tokio::task::JoinHandle<Result<String, Error>> {
    let (ready, listening) = tokio::sync::oneshot::channel();
    let namespace = inside(namespace);
    let task = tokio::spawn(namespace.run(move || async move {
        let listener = TcpListener::bind(address).await.unwrap();
        ready.send(()).unwrap();
        let (mut stream, from) = listener.accept().await.unwrap();
        stream.write_all(b"hello").await.unwrap();
        Ok(from.ip().to_string())
    }));
    listening.await.unwrap();
    task
}

async fn call(namespace: &OwnedFd, address: &'static str) -> String {
    inside(namespace)
        .run(move || async move {
            let connecting = tokio::time::timeout(Duration::from_secs(5), TcpStream::connect(address));
            let mut stream = connecting.await.expect("no answer").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            Ok(text)
        })
        .await
        .unwrap()
}

#[tokio::test]
async fn a_guest_reaches_the_outside_and_is_reached_at_the_address_of_its_pod() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, outside) = pod_and_outside().await;
    let network = setup_in(inside(&pod), vec![wanted(&masquerade())]).await.unwrap();
    assert_eq!(network.interfaces[0].ips, [ip("10.244.0.7"), ip("fd00:1::7")]);
    assert_eq!(network.nics[0].mtu, 1450);
    let guest = guest(&pod).await;

    // From outside to the pod's addresses: the guest answers, and sees who calls.
    for (address, listen, caller) in [
        ("10.244.0.7:8080", "10.0.2.2:8080", "10.244.0.1"),
        ("[fd00:1::7]:8081", "[fd10:0:2::2]:8081", "fd00:1::1"),
        // Across the guest's own ports: nothing is kept back without a list of ports.
        ("10.244.0.7:22", "10.0.2.2:22", "10.244.0.1"),
    ] {
        let server = answer_once(&guest, listen).await;
        assert_eq!(call(&outside, address).await, "hello", "{address}");
        assert_eq!(server.await.unwrap().unwrap(), caller);
    }
    // From the pod's own loopback address.
    let server = answer_once(&guest, "10.0.2.2:9000").await;
    assert_eq!(call(&pod, "127.0.0.1:9000").await, "hello");
    assert_eq!(server.await.unwrap().unwrap(), "10.0.2.1");
    // From the guest to the outside: it comes from the pod's address.
    for (address, caller) in
        [("10.244.0.1:7000", "10.244.0.7"), ("192.0.2.1:7001", "10.244.0.7"), ("[fd00:1::1]:7002", "fd00:1::7")]
    {
        if address.starts_with("192") {
            ip_in(&outside, &["ip route replace default via 10.244.0.7"]).await;
        }
        let server = answer_once(&outside, address).await;
        assert_eq!(call(&guest, address).await, "hello", "{address}");
        assert_eq!(server.await.unwrap().unwrap(), caller);
    }
    // The launcher's DHCP server answers on the bridge.
    let (ready, listening) = tokio::sync::oneshot::channel();
    let server = tokio::spawn(inside(&pod).run(move || async move {
        let socket = UdpSocket::bind("0.0.0.0:67").await.unwrap();
        ready.send(()).unwrap();
        let mut buffer = [0; 16];
        let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..length], b"discover");
        Ok(from)
    }));
    listening.await.unwrap();
    inside(&guest)
        .run(|| async {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 68)).await.unwrap();
            socket.set_broadcast(true).unwrap();
            socket.send_to(b"discover", "255.255.255.255:67").await.unwrap();
            Ok(())
        })
        .await
        .unwrap();
    let from = tokio::time::timeout(Duration::from_secs(5), server).await.expect("no DHCP packet").unwrap().unwrap();
    assert_eq!(from.port(), 68);
}

#[tokio::test]
async fn a_guest_does_not_reach_the_loopback_of_its_pod() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, _outside) = pod_and_outside().await;
    setup_in(inside(&pod), vec![wanted(&masquerade())]).await.unwrap();
    let guest = guest(&pod).await;
    // A guest whose kernel sends packets for 127.0.0.1 to its gateway, and takes the answers.
    inside(&guest)
        .run(|| async {
            let settings = SafeDir::trusted(Path::new("/proc/sys/net/ipv4/conf"))?;
            for link in ["all", "eth0"] {
                settings.write_existing(format!("{link}/route_localnet"), b"1")?;
                settings.write_existing(format!("{link}/rp_filter"), b"0")?;
            }
            Ok(())
        })
        .await
        .unwrap();
    ip_in(
        &guest,
        &["ip address del 127.0.0.1/8 dev lo", "ip route add 127.0.0.1/32 via 10.0.2.1 dev eth0 src 10.0.2.2"],
    )
    .await;
    let reached = async || {
        inside(&guest)
            .run(|| async {
                let connecting = TcpStream::connect("127.0.0.1:5555");
                Ok(tokio::time::timeout(Duration::from_secs(2), connecting).await.is_ok_and(|made| made.is_ok()))
            })
            .await
            .unwrap()
    };
    let _listener = answer_once(&pod, "127.0.0.1:5555").await;
    assert!(!reached().await);
    let rules = ip_in(&pod, &["nft list chain ip ferrovirt guest_loopback"]).await;
    let dropped = rules.lines().find(|rule| rule.contains("daddr")).unwrap();
    assert!(!dropped.contains("packets 0 "), "{rules}");
    // It is the rule that stands in the way.
    ip_in(&pod, &["nft flush chain ip ferrovirt guest_loopback"]).await;
    assert!(reached().await);
}

#[tokio::test]
async fn only_listed_ports_reach_the_guest_and_a_second_set_up_changes_nothing() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, outside) = pod_and_outside().await;
    let vmi = vmi(
        &json!([{"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:07", "ports": [{"port": 80}]}]),
        &json!([{"name": "default", "pod": {}}]),
    );
    let state = [
        "ip address",
        "ip -o -d link show tap0",
        "ip link show k6t-eth0",
        "nft list ruleset",
        "cat /proc/sys/net/ipv4/ip_forward",
    ];
    let first = setup_in(inside(&pod), vec![wanted(&vmi)]).await.unwrap();
    assert_eq!(first.nics[0].mac, "02:00:00:00:00:07");
    let before = ip_in(&pod, &state).await;
    assert!(before.contains("user 107 group 107"), "{before}");
    assert!(before.contains("link/ether 02:00:00:00:00:00"), "{before}");
    let second = setup_in(inside(&pod), vec![wanted(&vmi)]).await.unwrap();
    assert_eq!(first, second);
    assert_eq!(ip_in(&pod, &state).await, before);

    let guest = guest(&pod).await;
    let server = answer_once(&guest, "0.0.0.0:80").await;
    assert_eq!(call(&outside, "10.244.0.7:80").await, "hello");
    server.await.unwrap().unwrap();
    // Another port is the pod's own.
    let _guests = answer_once(&guest, "0.0.0.0:81").await;
    let pods = answer_once(&pod, "0.0.0.0:81").await;
    assert_eq!(call(&outside, "10.244.0.7:81").await, "hello");
    pods.await.unwrap().unwrap();

    // Other ports: the rules are replaced while the guest runs, its connections are not.
    ip_in(&pod, &["nft add table ip others"]).await;
    let changed = setup_in(inside(&pod), vec![wanted(&masquerade())]).await.unwrap();
    assert_eq!(changed.nics[0].tap, "tap0");
    let rules = ip_in(&pod, &["nft list ruleset"]).await;
    assert!(!rules.contains("dport 80") && rules.contains("dnat to 10.0.2.2"), "{rules}");
    assert!(rules.contains("table ip others"), "what is not ours stays");
}

#[tokio::test]
async fn a_half_made_network_is_finished() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, _outside) = pod_and_outside().await;
    // As after an agent that died while it worked, with an older MTU.
    ip_in(
        &pod,
        &[
            "ip link add k6t-eth0 address 02:00:00:00:00:00 mtu 1400 type bridge",
            "ip tuntap add tap0 mode tap user 107 group 107",
        ],
    )
    .await;
    setup_in(inside(&pod), vec![wanted(&masquerade())]).await.unwrap();
    let links = ip_in(&pod, &["ip -o link"]).await;
    let tap = links.lines().find(|line| line.contains("tap0")).unwrap();
    assert!(tap.contains("master k6t-eth0") && tap.contains("mtu 1450") && tap.contains("UP"), "{tap}");
    assert!(links.lines().any(|line| line.contains("k6t-eth0:") && line.contains("mtu 1450")), "{links}");
    // A pod whose bridge is something else is left alone.
    let other = new_namespace();
    ip_in(&other, &["ip link add eth0 type veth peer name k6t-eth0", "ip address add 10.244.0.9/24 dev eth0"]).await;
    assert!(matches!(setup_in(inside(&other), vec![wanted(&masquerade())]).await, Err(Error::ForeignLink(_))));
}

#[tokio::test]
async fn several_queues_are_made_where_asked_for() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, _outside) = pod_and_outside().await;
    let request = Request { queues: 2, ..wanted(&masquerade()) };
    setup_in(inside(&pod), vec![request]).await.unwrap();
    let tap = ip_in(&pod, &["ip -d link show tap0"]).await;
    assert!(tap.contains("multi_queue numqueues"), "{tap}");
}
