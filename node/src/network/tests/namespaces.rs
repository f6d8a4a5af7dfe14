//! Setups in real network namespaces. They need root; the namespaces have no names and end with the test.

use std::{fs::File, os::fd::OwnedFd, path::Path, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
};

use super::*;
use crate::safe_dir::SafeDir;

/// Returns true if namespaces can be created.
pub(super) fn can_make_namespaces() -> bool {
    if std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join().unwrap().is_ok() {
        return true;
    }
    skips::skip("permission to make network namespaces: root");
    false
}

pub(super) fn new_namespace() -> OwnedFd {
    std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        OwnedFd::from(File::open("/proc/thread-self/ns/net").unwrap())
    })
    .join()
    .unwrap()
}

pub(super) fn inside(namespace: &OwnedFd) -> NetworkNamespace {
    NetworkNamespace::descriptor(namespace.try_clone().unwrap())
}

/// Runs commands in a namespace.
pub(super) async fn ip_in(namespace: &OwnedFd, commands: &[&str]) -> String {
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

/// Creates a pod's namespace with eth0 (10.244.0.7, fd00:1::7) and one outside of it (10.244.0.1, fd00:1::1).
pub(super) async fn pod_and_outside() -> (OwnedFd, OwnedFd) {
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

/// Creates a guest: a namespace with the guest's DHCP address, connected to the pod's tap device.
pub(super) async fn guest(pod: &OwnedFd) -> OwnedFd {
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
    // Another thread creates the tap device of the guest.
    for _ in 0..100 {
        if ip_in(&guest, &["ip -br link"]).await.contains("eth0") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ip_in(&guest, &give).await;
    guest
}

/// Forwards packets between a tap device in a namespace and two channels until the test ends.
pub(super) fn wire(
    namespace: &OwnedFd,
    name: &'static str,
    out: mpsc::Sender<Vec<u8>>,
    mut into: mpsc::Receiver<Vec<u8>>,
) {
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

pub(super) async fn answer_once(
    namespace: &OwnedFd,
    address: &'static str,
) -> tokio::task::JoinHandle<Result<String, Error>> {
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

pub(super) async fn call(namespace: &OwnedFd, address: &'static str) -> String {
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
async fn the_network_of_the_node_is_never_touched() {
    let own = Peer::open(i32::try_from(std::process::id()).unwrap(), 0).unwrap();
    let error = setup(&own, &masquerade(), &[]).await.unwrap_err();
    assert!(matches!(error, Error::HostNetwork), "{error}");
    assert!(error.is_permanent());
}

#[tokio::test]
async fn a_guest_reaches_the_outside_and_is_reached_at_the_address_of_its_pod() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, outside) = pod_and_outside().await;
    let network = setup_in(inside(&pod), vec![request_of(&masquerade())], vec![]).await.unwrap();
    assert_eq!(network.interfaces[0].ips, [ip("10.244.0.7"), ip("fd00:1::7")]);
    assert_eq!(network.nics[0].mtu, 1450);
    let guest = guest(&pod).await;

    // From outside to the pod's addresses: the guest answers and sees the client's address.
    for (address, listen, caller) in [
        ("10.244.0.7:8080", "10.0.2.2:8080", "10.244.0.1"),
        ("[fd00:1::7]:8081", "[fd10:0:2::2]:8081", "fd00:1::1"),
        // Without a list of ports all are forwarded.
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
    // From the guest to the outside, with the pod's address as source.
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
    setup_in(inside(&pod), vec![request_of(&masquerade())], vec![]).await.unwrap();
    let guest = guest(&pod).await;
    // A guest whose kernel sends packets for 127.0.0.1 to its gateway and accepts the answers.
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
    // Without the rule it succeeds.
    ip_in(&pod, &["nft flush chain ip ferrovirt guest_loopback"]).await;
    assert!(reached().await);
}

#[tokio::test]
async fn only_listed_ports_reach_the_guest_and_a_second_setup_changes_nothing() {
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
        "nft -s list ruleset",
        "cat /proc/sys/net/ipv4/ip_forward",
    ];
    let first = setup_in(inside(&pod), vec![request_of(&vmi)], vec![]).await.unwrap();
    assert_eq!(first.nics[0].mac, "02:00:00:00:00:07");
    let before = ip_in(&pod, &state).await;
    assert!(before.contains("user 107 group 107"), "{before}");
    assert!(before.contains("link/ether 02:00:00:00:00:00"), "{before}");
    let second = setup_in(inside(&pod), vec![request_of(&vmi)], vec![]).await.unwrap();
    assert_eq!(first, second);
    assert_eq!(ip_in(&pod, &state).await, before);

    let guest = guest(&pod).await;
    let server = answer_once(&guest, "0.0.0.0:80").await;
    assert_eq!(call(&outside, "10.244.0.7:80").await, "hello");
    server.await.unwrap().unwrap();
    // Other ports belong to the pod.
    let _guests = answer_once(&guest, "0.0.0.0:81").await;
    let pods = answer_once(&pod, "0.0.0.0:81").await;
    assert_eq!(call(&outside, "10.244.0.7:81").await, "hello");
    pods.await.unwrap().unwrap();

    // With other ports, the rules are replaced while the guest runs; its devices are not.
    ip_in(&pod, &["nft add table ip others"]).await;
    let changed = setup_in(inside(&pod), vec![request_of(&masquerade())], vec![]).await.unwrap();
    assert_eq!(changed.nics[0].tap, "tap0");
    let rules = ip_in(&pod, &["nft list ruleset"]).await;
    assert!(!rules.contains("dport 80") && rules.contains("dnat to 10.0.2.2"), "{rules}");
    assert!(rules.contains("table ip others"), "tables of other owners stay");
}

#[tokio::test]
async fn an_interrupted_setup_is_continued() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, _outside) = pod_and_outside().await;
    // As after an interrupted setup, with an older MTU.
    ip_in(
        &pod,
        &[
            "ip link add k6t-eth0 address 02:00:00:00:00:00 mtu 1400 type bridge",
            "ip tuntap add tap0 mode tap user 107 group 107",
        ],
    )
    .await;
    setup_in(inside(&pod), vec![request_of(&masquerade())], vec![]).await.unwrap();
    let links = ip_in(&pod, &["ip -o link"]).await;
    let tap = links.lines().find(|line| line.contains("tap0")).unwrap();
    assert!(tap.contains("master k6t-eth0") && tap.contains("mtu 1450") && tap.contains("UP"), "{tap}");
    assert!(links.lines().any(|line| line.contains("k6t-eth0:") && line.contains("mtu 1450")), "{links}");
    // A link of another kind with the bridge's name is an error.
    let other = new_namespace();
    ip_in(&other, &["ip link add eth0 type veth peer name k6t-eth0", "ip address add 10.244.0.9/24 dev eth0"]).await;
    let failed = setup_in(inside(&other), vec![request_of(&masquerade())], vec![]).await.unwrap();
    assert_eq!(failed.failures[0].message, Error::ForeignLink("k6t-eth0".into()).to_string());
}

#[tokio::test]
async fn an_interface_that_cannot_be_set_up_holds_up_no_other_one() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, _outside) = pod_and_outside().await;
    let lost = Request { name: "lost".into(), pod_link: "pod1".into(), ..request_of(&masquerade()) };
    let release = request::Release { name: "gone".into(), pod_link: "pod2".into() };
    let ready = setup_in(inside(&pod), vec![lost, request_of(&masquerade())], vec![release]).await.unwrap();
    assert_eq!(ready.nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(), ["default"]);
    assert_eq!(ready.interfaces.len(), 1);
    assert_eq!(ready.released, ["gone".to_owned()].into());
    let message = "pod link (pod1) is missing".to_owned();
    assert_eq!(ready.failures, [InterfaceFailure { name: "lost".into(), message, permanent: false }]);
}

#[tokio::test]
async fn several_queues_are_created_on_request() {
    if !can_make_namespaces() {
        return;
    }
    let (pod, _outside) = pod_and_outside().await;
    let request = Request { queues: 2, ..request_of(&masquerade()) };
    setup_in(inside(&pod), vec![request], vec![]).await.unwrap();
    let tap = ip_in(&pod, &["ip -d link show tap0"]).await;
    assert!(tap.contains("multi_queue numqueues"), "{tap}");
}
