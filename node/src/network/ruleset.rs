//! Rules for the translation between the pod's addresses and the guest's, as text for `nft -f -`.
//!
//! They are in a table of their own, so that the rules of service meshes and CNI plugins in the pod do not change, and the
//! text replaces the whole table in one transaction. The priorities of the chains are just after the standard NAT
//! priorities, so that the rules of a service mesh come first.
//!
//! The first chain drops packets of the guest to or from the pod's loopback addresses. Forwarding from within the pod needs
//! `route_localnet` on the bridge, which would let such packets reach listeners on 127.0.0.1 in the pod.

use std::{fmt::Write, net::IpAddr};

use super::request::{Forward, Pair, Protocol};

/// Name of the table in the families `ip` and `ip6`.
pub(crate) const TABLE: &str = "ferrovirt";
/// Ports of a service mesh's proxy, which are never forwarded to the guest.
const SIDECAR_PORTS: &str = "15000, 15001, 15004, 15006, 15008, 15009, 15020, 15021, 15053, 15090";
/// SSH: the port that a service mesh's proxy does not intercept.
const UNPROXIED_PORT: u16 = 22;
/// Source address of a service mesh's proxy towards its service.
const SIDECAR_SOURCE: &str = "127.0.0.6";

/// Input of the rules of one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translation<'a> {
    pub pod_link: &'a str,
    pub bridge: &'a str,
    pub pod_address: IpAddr,
    /// Addresses of bridge and guest, of the same family.
    pub pair: Pair,
    /// Ports forwarded to the guest; empty: all.
    pub forwards: &'a [Forward],
    /// A sidecar proxy shares the pod's network.
    pub sidecar: bool,
}

/// Returns the text for these families.
pub(crate) fn ruleset(families: &[Translation<'_>]) -> String {
    families.iter().map(table).collect()
}

fn table(translation: &Translation<'_>) -> String {
    let Translation { pod_link, bridge, pair, .. } = translation;
    let family = if pair.guest.is_ipv4() { "ip" } else { "ip6" };
    let guest = pair.guest;
    let Chains { preinbound, postinbound, output } = chains(translation, family);
    // Declared first, so that the delete succeeds without a table.
    let mut text = format!("table {family} {TABLE}\ndelete table {family} {TABLE}\ntable {family} {TABLE} {{\n");
    let mut chain = |name: &str, hook: &str, rules: &[String]| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\tchain {name} {{");
        if !hook.is_empty() {
            let _ = writeln!(text, "\t\ttype {hook}; policy accept;");
        }
        for rule in rules {
            let _ = writeln!(text, "\t\t{rule}");
        }
        let _ = writeln!(text, "\t}}");
    };
    let loopback = if guest.is_ipv4() { "127.0.0.0/8" } else { "::1" };
    // Before connection tracking: the guest's answers to connections from the pod's loopback address are addressed to the
    // gateway here, and to the loopback address only after their translation.
    chain(
        "guest_loopback",
        "filter hook prerouting priority -300",
        &["daddr", "saddr"].map(|end| format!("iifname \"{bridge}\" {family} {end} {loopback} counter drop")),
    );
    chain("KUBEVIRT_PREINBOUND", "", &preinbound);
    chain("KUBEVIRT_POSTINBOUND", "", &postinbound);
    chain(
        "prerouting",
        "nat hook prerouting priority -99",
        &[format!("iifname \"{pod_link}\" counter jump KUBEVIRT_PREINBOUND")],
    );
    chain("input", "nat hook input priority 101", &[]);
    chain("output", "nat hook output priority -99", &output);
    chain(
        "postrouting",
        "nat hook postrouting priority 101",
        &[
            format!("{family} saddr {guest} counter masquerade"),
            format!("oifname \"{bridge}\" counter jump KUBEVIRT_POSTINBOUND"),
        ],
    );
    text.push_str("}\n");
    text
}

/// Rules of the chains that depend on the forwarded ports.
#[derive(Default)]
struct Chains {
    /// To the guest, from outside.
    preinbound: Vec<String>,
    /// To the guest, from within the pod: the guest must see an address that it can answer.
    postinbound: Vec<String>,
    /// From within the pod to the pod itself.
    output: Vec<String>,
}

fn chains(translation: &Translation<'_>, family: &str) -> Chains {
    let Translation { pod_address, pair, forwards, sidecar, .. } = *translation;
    let Pair { gateway, guest, .. } = pair;
    let v4 = guest.is_ipv4();
    let loopback = if v4 { "127.0.0.1" } else { "::1" };
    // A service mesh uses its extra loopback address with IPv4 only.
    let sources = if sidecar && v4 { format!("{loopback}, {SIDECAR_SOURCE}") } else { loopback.to_owned() };
    let destinations = if sidecar && v4 { format!("{loopback}, {pod_address}") } else { loopback.to_owned() };
    let mut chains = Chains::default();
    for Forward { protocol, ports } in forwards {
        let (first, last) = (ports.start(), ports.end());
        let ports_text = if first == last { first.to_string() } else { format!("{first}-{last}") };
        if !sidecar {
            chains.preinbound.push(format!("{protocol} dport {{ {ports_text} }} counter dnat to {guest}"));
        } else if *protocol == Protocol::Tcp && ports.contains(&UNPROXIED_PORT) {
            // Other ports reach the guest through the proxy, from within the pod.
            chains.preinbound.push(format!("tcp dport {{ {UNPROXIED_PORT} }} counter dnat to {guest}"));
        }
        chains.postinbound.push(format!(
            "{protocol} dport {{ {ports_text} }} {family} saddr {{ {sources} }} counter snat to {gateway}"
        ));
        chains.output.push(format!(
            "{family} daddr {{ {destinations} }} {protocol} dport {{ {ports_text} }} counter dnat to {guest}"
        ));
    }
    if forwards.is_empty() {
        if sidecar {
            let reserved = format!("tcp dport {{ {SIDECAR_PORTS} }} {family} saddr {loopback} counter return");
            chains.output.push(reserved.clone());
            chains.postinbound.push(reserved);
            chains.preinbound.push(format!("tcp dport {{ {UNPROXIED_PORT} }} counter dnat to {guest}"));
        } else {
            chains.preinbound.push(format!("counter dnat to {guest}"));
        }
        chains.postinbound.push(format!("{family} saddr {{ {sources} }} counter snat to {gateway}"));
        chains.output.push(format!("{family} daddr {{ {destinations} }} counter dnat to {guest}"));
    }
    chains
}
