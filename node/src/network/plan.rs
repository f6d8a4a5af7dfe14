//! Compares requests with the observed links, and plans the missing steps.
//!
//! The order of steps makes an interrupted setup safe to continue: the tap device, which lets the guest's packets in, comes
//! after the rules, and the mark of a complete setup comes last.

use std::net::IpAddr;

use sha2::{Digest, Sha256};

use super::{
    Error, PodInterface, PodNetwork, bridge,
    observed::Observed,
    request::{Binding, Masquerade, Pair, Request},
    ruleset::{Translation, ruleset},
    step::{BRIDGE_MAC, GENERATION, MIN_MTU, Plan, Step, bridge_name, change, tap_name, tap_steps},
};

/// Plans the steps for one interface.
pub(crate) fn decide(request: &Request, observed: &Observed) -> Result<Plan, Error> {
    match &request.binding {
        Binding::Masquerade(binding) => masquerade(request, binding, observed),
        Binding::Bridge { server } => bridge::decide(request, *server, observed),
    }
}

fn masquerade(request: &Request, binding: &Masquerade, observed: &Observed) -> Result<Plan, Error> {
    let pod_link = observed.link(&request.pod_link).ok_or_else(|| Error::PodLinkMissing(request.pod_link.clone()))?;
    let ips = observed.unicast(pod_link.index);
    if ips.is_empty() {
        return Err(Error::PodAddressMissing(request.pod_link.clone()));
    }
    let bridge = bridge_name(&request.pod_link);
    let tap = tap_name(&request.pod_link);
    let mtu = pod_link.mtu.max(MIN_MTU);
    let pairs: Vec<(IpAddr, Pair)> =
        ips.iter().map(|ip| (*ip, if ip.is_ipv4() { binding.v4 } else { binding.v6 })).collect();
    let translations: Vec<Translation<'_>> = pairs
        .iter()
        .map(|(pod_address, pair)| Translation {
            pod_link: &request.pod_link,
            bridge: &bridge,
            pod_address: *pod_address,
            pair: *pair,
            forwards: &binding.forwards,
            sidecar: binding.sidecar,
        })
        .collect();
    let rules = ruleset(&translations);
    let mark = mark(&rules);

    let bridge_link = observed.own(&bridge, "bridge")?;
    let tap_link = observed.own(&tap, "tun")?;
    let marked = bridge_link.is_some_and(|link| link.alias.as_deref() == Some(mark.as_str()));

    let mut steps = Vec::new();
    match bridge_link {
        None => steps.push(Step::CreateBridge { name: bridge.clone(), mac: BRIDGE_MAC, mtu, up: true }),
        Some(link) => steps.extend(change(link, mtu, None)),
    }
    for (_, pair) in &pairs {
        let there = bridge_link.is_some_and(|link| observed.has(link.index, pair.gateway, pair.prefix));
        if !there {
            steps.push(Step::AddAddress { link: bridge.clone(), ip: pair.gateway, prefix: pair.prefix });
        }
    }
    if !marked {
        steps.extend(pairs.iter().flat_map(|(_, pair)| settings(&bridge, pair.guest)));
        steps.push(Step::Rules(rules));
    }
    steps.extend(tap_steps(request, tap_link, bridge_link, &bridge, mtu));
    if !marked {
        steps.push(Step::Mark { link: bridge.clone(), mark });
    }

    let guest = |v4: bool| pairs.iter().map(|(_, pair)| pair).find(|pair| pair.guest.is_ipv4() == v4);
    let (v4, v6) = (guest(true), guest(false));
    let nic = protocol::Nic {
        name: request.name.clone(),
        tap,
        bridge,
        mtu,
        mac: request.mac.clone().unwrap_or_default(),
        dhcp: v4.map(|pair| protocol::DhcpLease {
            address: format!("{}/{}", pair.guest, pair.prefix),
            gateway: pair.gateway.to_string(),
            server: pair.gateway.to_string(),
            routes: Vec::new(),
        }),
        dhcp6: v6.map(|pair| protocol::DhcpLease6 {
            address: pair.guest.to_string(),
            server_mac: BRIDGE_MAC.map(|byte| format!("{byte:02x}")).join(":"),
        }),
    };
    let interface = PodInterface { name: request.name.clone(), pod_interface_name: request.pod_link.clone(), ips };
    Ok(Plan { steps, network: PodNetwork { nics: vec![nic], interfaces: vec![interface], ..PodNetwork::default() } })
}

/// Returns the kernel settings for forwarding between the pod's link and the bridge.
fn settings(bridge: &str, guest: IpAddr) -> Vec<Step> {
    if guest.is_ipv4() {
        vec![
            Step::SetKernel { path: "net/ipv4/ip_forward".to_owned(), value: "1" },
            // Packets from the pod's loopback address reach the guest.
            Step::SetKernel { path: format!("net/ipv4/conf/{bridge}/route_localnet"), value: "1" },
        ]
    } else {
        vec![Step::SetKernel { path: "net/ipv6/conf/all/forwarding".to_owned(), value: "1" }]
    }
}

/// Returns the mark of a setup with these rules.
fn mark(rules: &str) -> String {
    let digest = Sha256::digest(rules.as_bytes());
    let hex: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("ferrovirt-{GENERATION}-{hex}")
}
