//! Bridge binding: the guest replaces its pod on the network of the link, with the addresses of the link.
//!
//! ```text
//!            pod's network namespace
//!   0a1b2c3d4e5-nic (CNI's link, renamed) - k6t-0a1b2c3d4e5 (bridge, 169.254.75.11) - tap0a1b2c3d4e5 - guest
//!   pod0a1b2c3d4e5 (the keeper: a bridge without ports, with the link's old name and addresses)
//! ```
//!
//! The keeper preserves what the CNI plugins configured: the link's MAC address, its addresses, and its routes as a note. It is
//! complete before the link is changed, so that an interrupted setup can be continued. A dummy link would do as well, but not
//! every kernel has the driver.

use std::{
    fmt::Write,
    net::{IpAddr, Ipv4Addr},
};

use sha2::{Digest, Sha256};

use super::{
    Error, PodInterface, PodNetwork,
    mac::local_mac,
    observed::{Link, Observed, Route, is_link_local},
    request::Request,
    step::{GENERATION, MIN_MTU, Plan, Step, bridge_name, change, tap_name, tap_steps},
};

/// Prefix of the note on a keeper; the routes follow.
const NOTE: &str = "ferrovirt-keeps ";
/// Begin of routes in the dense form.
const DENSE: char = '=';
/// Longest note that the kernel accepts.
const NOTE_LIMIT: usize = 255;
/// Most addresses of a link.
const MAX_ADDRESSES: usize = 32;

/// The link as the pod's CNI plugins configured it.
#[derive(Debug, PartialEq, Eq)]
struct Origin {
    mac: [u8; 6],
    mtu: u32,
    addresses: Vec<(IpAddr, u8)>,
    routes: Vec<KeptRoute>,
}

/// A route without its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeptRoute {
    destination: Ipv4Addr,
    prefix: u8,
    gateway: Option<Ipv4Addr>,
}

/// Decides the steps for an interface whose guest is on the link's own network.
pub(super) fn decide(request: &Request, server: Ipv4Addr, observed: &Observed) -> Result<Plan, Error> {
    let pod = &request.pod_link;
    let stem = pod.strip_prefix("pod").unwrap_or(pod);
    let (nic_name, early_name) = (format!("{stem}-nic"), format!("{stem}-old"));
    let (bridge, tap) = (bridge_name(pod), tap_name(pod));

    let bridge_link = observed.own(&bridge, "bridge")?;
    let tap_link = observed.own(&tap, "tun")?;
    let early = observed.own(&early_name, "bridge")?;
    let named = observed.link(pod);
    let keeper = named.filter(|link| is_keeper(link)).or(early.filter(|link| is_keeper(link)));
    let missing = || Error::PodLinkMissing(pod.clone());
    let nic = observed.link(&nic_name).or(named.filter(|link| !is_keeper(link))).ok_or_else(missing)?;
    let renamed = nic.name == nic_name;
    let origin = match keeper {
        Some(keeper) => Origin { routes: kept_routes(keeper), ..origin(keeper, observed)? },
        // Without its keeper the original link is unknown.
        None if renamed => return Err(missing()),
        None => origin(nic, observed)?,
    };
    let mtu = origin.mtu.max(MIN_MTU);
    let bridge_mac = local_mac(&Sha256::digest(origin.mac));
    let mark = format!("ferrovirt-bridge-{GENERATION}");
    let marked = bridge_link.is_some_and(|link| link.alias.as_deref() == Some(mark.as_str()));
    let v4 = origin.addresses.iter().find_map(|(ip, prefix)| match ip {
        IpAddr::V4(ip) => Some((*ip, *prefix)),
        IpAddr::V6(_) => None,
    });

    let mut steps = Vec::new();
    match bridge_link {
        None => steps.push(Step::CreateBridge { name: bridge.clone(), mac: bridge_mac, mtu, up: true }),
        Some(link) => steps.extend(change(link, mtu, None)),
    }
    // The number of an interface changes when another one leaves; its server stays where its guest knows it.
    let server = bridge_link.and_then(|link| observed.server(link.index)).unwrap_or(server);
    if v4.is_some() && !bridge_link.is_some_and(|link| observed.has(link.index, server.into(), 32)) {
        steps.push(Step::AddAddress { link: bridge.clone(), ip: server.into(), prefix: 32 });
    }
    if keeper.is_none() {
        steps.extend(keep(request, &origin, early, &early_name, observed)?);
    }
    if !renamed {
        steps.push(Step::Rename { from: pod.clone(), to: nic_name.clone() });
    }
    if observed.addresses.iter().any(|address| address.link == nic.index && !is_link_local(&address.ip)) {
        steps.push(Step::TakeAddresses { link: nic_name.clone() });
    }
    if nic.mac != Some(bridge_mac) {
        steps.push(Step::SetMac { link: nic_name.clone(), mac: bridge_mac });
    }
    // It stays down, as the reference's dummy: nothing is sent over it.
    if named.is_none_or(|link| !is_keeper(link)) {
        steps.push(Step::Rename { from: early_name, to: pod.clone() });
    }
    let attached = nic.controller.is_some() && nic.controller == bridge_link.map(|link| link.index);
    if !renamed || !attached || !nic.up {
        let controller = (!attached).then(|| bridge.clone());
        steps.push(Step::SetLink { name: nic_name.clone(), mtu: None, controller, up: true });
    }
    if !marked {
        steps.push(Step::StopLearning { link: nic_name });
        // The guest also answers ARP for the addresses of the keeper.
        steps.push(Step::SetKernel { path: "net/ipv4/conf/all/arp_ignore".to_owned(), value: "1" });
    }
    steps.extend(tap_steps(request, tap_link, bridge_link, &bridge, mtu));
    if !marked {
        steps.push(Step::Mark { link: bridge.clone(), mark });
    }

    let nic = protocol::Nic {
        name: request.name.clone(),
        tap,
        // Without an address from the CNI plugins the guest gets none.
        bridge: if v4.is_some() { bridge } else { String::new() },
        mtu,
        mac: request.mac.clone().unwrap_or_else(|| origin.mac.map(|byte| format!("{byte:02x}")).join(":")),
        dhcp: v4.map(|(ip, prefix)| lease(ip, prefix, server, &origin)),
        // Guests on the pod's network get IPv6 addresses from the network itself.
        dhcp6: None,
    };
    let interface = PodInterface {
        name: request.name.clone(),
        pod_interface_name: pod.clone(),
        ips: v4.iter().map(|(ip, _)| IpAddr::V4(*ip)).collect(),
    };
    Ok(Plan { steps, network: PodNetwork { nics: vec![nic], interfaces: vec![interface], ..PodNetwork::default() } })
}

/// Decides the steps that give a link back to the CNI plugins, which find it by its name. The guest no longer uses it.
pub(super) fn release(pod: &str, observed: &Observed) -> Result<Vec<Step>, Error> {
    let stem = pod.strip_prefix("pod").unwrap_or(pod);
    let (nic_name, early_name, bridge) = (format!("{stem}-nic"), format!("{stem}-old"), bridge_name(pod));
    let own = [observed.own(&tap_name(pod), "tun")?, observed.own(&bridge, "bridge")?];
    let keepers = [observed.link(pod).filter(|link| is_keeper(link)), observed.own(&early_name, "bridge")?];
    let nic = observed.link(&nic_name);
    let mut steps = Vec::new();
    // Before the keeper is gone: it alone knows the address.
    if let Some((nic, mac)) = nic.zip(keepers.iter().flatten().find_map(|keeper| keeper.mac))
        && nic.mac != Some(mac)
    {
        steps.push(Step::SetMac { link: nic_name.clone(), mac });
    }
    let made = own.into_iter().chain(keepers).flatten();
    steps.extend(made.map(|link| Step::Delete { link: link.name.clone() }));
    if nic.is_some() {
        steps.push(Step::Rename { from: nic_name, to: pod.to_owned() });
    }
    Ok(steps)
}

/// Returns true if a link is a complete keeper.
fn is_keeper(link: &Link) -> bool {
    link.kind == "bridge" && link.alias.as_deref().is_some_and(|alias| alias.starts_with(NOTE))
}

/// Returns the configuration that a link shows.
fn origin(link: &Link, observed: &Observed) -> Result<Origin, Error> {
    let mac = link.mac.ok_or_else(|| Error::NoMac(link.name.clone()))?;
    let of_link = observed.addresses.iter().filter(|address| address.link == link.index && !is_link_local(&address.ip));
    let addresses: Vec<(IpAddr, u8)> =
        of_link.map(|address| (address.ip, address.prefix)).take(MAX_ADDRESSES).collect();
    let routes = observed.routes.iter().filter(|route| route.link == link.index && !is_subnet(route, &addresses));
    let routes = routes
        .map(|route| KeptRoute { destination: route.destination, prefix: route.prefix, gateway: route.gateway })
        .collect();
    Ok(Origin { mac, mtu: link.mtu, addresses, routes })
}

/// Returns true if a route is the subnet route of an address of its link. The kernel adds it with the address.
fn is_subnet(route: &Route, addresses: &[(IpAddr, u8)]) -> bool {
    let network = |ip: Ipv4Addr, prefix: u8| {
        let mask = u32::MAX.checked_shl(u32::from(32_u8.saturating_sub(prefix))).unwrap_or(0);
        ip.to_bits() & mask
    };
    route.gateway.is_none()
        && addresses.iter().any(|(ip, prefix)| match ip {
            IpAddr::V4(ip) => *prefix == route.prefix && network(*ip, *prefix) == network(route.destination, *prefix),
            IpAddr::V6(_) => false,
        })
}

/// Returns the missing steps to create the keeper. The note is last and marks it as complete.
fn keep(
    request: &Request,
    origin: &Origin,
    early: Option<&Link>,
    name: &str,
    observed: &Observed,
) -> Result<Vec<Step>, Error> {
    let mark = note(&origin.routes);
    if mark.len() > NOTE_LIMIT {
        return Err(Error::Unsupported {
            interface: request.name.clone(),
            reason: format!("its link has {} routes, more than can be kept for the guest", origin.routes.len()),
        });
    }
    let link = || name.to_owned();
    let mut steps = Vec::new();
    if early.is_none() {
        steps.push(Step::CreateBridge { name: link(), mac: origin.mac, mtu: origin.mtu, up: false });
    }
    let lacking = |ip: IpAddr, prefix| !early.is_some_and(|early| observed.has(early.index, ip, prefix));
    let addresses = origin.addresses.iter().filter(|(ip, prefix)| lacking(*ip, *prefix));
    steps.extend(addresses.map(|(ip, prefix)| Step::AddAddress { link: link(), ip: *ip, prefix: *prefix }));
    steps.push(Step::Mark { link: link(), mark });
    Ok(steps)
}

/// Encodes routes as the note of a keeper: `0.0.0.0/0>10.1.0.1,10.2.0.0/16>`, or in the dense form if that is too long.
fn note(routes: &[KeptRoute]) -> String {
    let mut text = NOTE.to_owned();
    for (number, KeptRoute { destination, prefix, gateway }) in routes.iter().enumerate() {
        let separator = if number == 0 { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{destination}/{prefix}>");
        if let Some(gateway) = gateway {
            let _ = write!(text, "{gateway}");
        }
    }
    if text.len() > NOTE_LIMIT { dense(routes) } else { text }
}

/// Encodes routes as in DHCP option 121 (RFC 3442), in hexadecimal: 10 to 18 characters each.
fn dense(routes: &[KeptRoute]) -> String {
    let mut text = format!("{NOTE}{DENSE}");
    for KeptRoute { destination, prefix, gateway } in routes {
        let significant = destination.octets().into_iter().take(usize::from(prefix.div_ceil(8)));
        let gateway = gateway.unwrap_or(Ipv4Addr::UNSPECIFIED).octets();
        for byte in std::iter::once(*prefix).chain(significant).chain(gateway) {
            let _ = write!(text, "{byte:02x}");
        }
    }
    text
}

/// Decodes routes in the dense form.
fn dense_routes(text: &str) -> Vec<KeptRoute> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let mut bytes = text.as_bytes().chunks_exact(2).map_while(byte);
    let mut routes = Vec::new();
    while let Some(prefix) = bytes.next().filter(|prefix| *prefix <= 32) {
        let mut address = |octets: u8| {
            let mut address = [0; 4];
            for octet in address.iter_mut().take(usize::from(octets)) {
                *octet = bytes.next()?;
            }
            Some(Ipv4Addr::from(address))
        };
        let (Some(destination), Some(gateway)) = (address(prefix.div_ceil(8)), address(4)) else { break };
        let gateway = Some(gateway).filter(|gateway| !gateway.is_unspecified());
        routes.push(KeptRoute { destination, prefix, gateway });
    }
    routes
}

/// Decodes the routes in the note of a keeper.
fn kept_routes(keeper: &Link) -> Vec<KeptRoute> {
    let text = keeper.alias.as_deref().and_then(|alias| alias.strip_prefix(NOTE)).unwrap_or_default();
    if let Some(text) = text.strip_prefix(DENSE) {
        return dense_routes(text);
    }
    let route = |text: &str| {
        let (destination, gateway) = text.split_once('>')?;
        let (destination, prefix) = destination.split_once('/')?;
        Some(KeptRoute {
            destination: destination.parse().ok()?,
            prefix: prefix.parse().ok().filter(|prefix| *prefix <= 32)?,
            gateway: if gateway.is_empty() { None } else { Some(gateway.parse().ok()?) },
        })
    };
    text.split(',').filter_map(route).collect()
}

/// Returns the DHCP lease: the pod's address, its gateway, and its other routes.
fn lease(ip: Ipv4Addr, prefix: u8, server: Ipv4Addr, origin: &Origin) -> protocol::DhcpLease {
    let (default, others): (Vec<&KeptRoute>, Vec<&KeptRoute>) =
        origin.routes.iter().partition(|route| route.prefix == 0 && route.gateway.is_some());
    let text = |gateway: Option<Ipv4Addr>| gateway.map(|gateway| gateway.to_string()).unwrap_or_default();
    protocol::DhcpLease {
        address: format!("{ip}/{prefix}"),
        gateway: text(default.first().and_then(|route| route.gateway)),
        server: server.to_string(),
        routes: others
            .into_iter()
            .map(|route| protocol::Route {
                destination: format!("{}/{}", route.destination, route.prefix),
                gateway: text(route.gateway),
            })
            .collect(),
    }
}
