//! Rules for nft.

use super::*;
use crate::network::ruleset::{Translation, ruleset};

#[test]
fn rules_without_ports_forward_everything() {
    let request = request_of(&masquerade());
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
    let mut request = request_of(&masquerade());
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
    let mut request = request_of(&vmi);
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
    let requested = nat(&mut request.clone()).clone();
    let translations: Vec<Translation<'_>> = pod
        .iter()
        .map(|address| Translation {
            pod_link: "eth0",
            bridge: "k6t-eth0",
            pod_address: ip(address),
            pair: if ip(address).is_ipv4() { requested.v4 } else { requested.v6 },
            forwards: &requested.forwards,
            sidecar: requested.sidecar,
        })
        .collect();
    ruleset(&translations)
}
