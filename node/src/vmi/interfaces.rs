//! `status.interfaces`, merged from domain, pod and guest agent.
//!
//! Data of the guest agent is untrusted: it is bounded, shown, and never dialled. Addresses under which the cluster reaches the
//! guest come from the pod.

use std::net::IpAddr;

use api::{
    VirtualMachineInstance, VmiPhase,
    nics::{DOMAIN, DOWN, GUEST_AGENT, MULTUS, SEPARATOR, has_source, shown, sources},
    vmi::status::VirtualMachineInstanceNetworkInterface as Interface,
};
use protocol::GuestInterface;

use crate::network::{PodNetwork, observed::is_link_local, request::queues};

/// Most interfaces that only the guest reports.
const MAX_GUEST_ONLY: usize = 10;
/// Most addresses of one interface.
const MAX_ADDRESSES: usize = 32;
/// Longest interface name of the guest. Linux permits 15 characters, Windows more.
const MAX_NAME: usize = 64;

/// Returns the merged list. `in_domain` are the interfaces of the domain and `in_domain_queues` their queues, if its launcher reports
/// them; `guest` is empty while no guest agent is connected.
pub(super) fn merged(
    vmi: &VirtualMachineInstance,
    pod: Option<&PodNetwork>,
    in_domain: Option<&[String]>,
    in_domain_queues: &[u32],
    guest: &[GuestInterface],
) -> Vec<Interface> {
    let reported_queues = |name: &str| {
        let number = in_domain?.iter().position(|nic| nic == name)?;
        in_domain_queues.get(number).copied()
    };
    let before = vmi.status.as_ref().map_or(&[][..], |status| status.interfaces.as_slice());
    let mut list: Vec<Interface> = vmi
        .spec
        .domain
        .devices
        .interfaces
        .iter()
        .filter_map(|interface| match place(interface, vmi, pod, in_domain) {
            Place::Domain => {
                let queues = reported_queues(&interface.name).unwrap_or_else(|| queues(vmi, interface));
                Some(from_domain(interface, pod, queues, before))
            }
            Place::Pod => Some(from_pod(shown(vmi, &interface.name)?)),
            Place::Nowhere => None,
        })
        .collect();
    let mut guest_only = Vec::new();
    for reported in guest.iter().filter(|reported| !is_loopback(reported)) {
        let known = list
            .iter_mut()
            .find(|entry| entry.mac.as_deref().is_some_and(|mac| mac.eq_ignore_ascii_case(&reported.mac)));
        match known {
            Some(entry) => add_guest(entry, reported, is_masquerade(vmi, entry.name.as_deref())),
            None if guest_only.len() < MAX_GUEST_ONLY => guest_only.push(from_guest(reported)),
            None => {}
        }
    }
    list.append(&mut guest_only);
    for entry in &mut list {
        keep_multus(entry, before);
    }
    primary_first(&mut list, vmi);
    list
}

/// Place of an interface.
enum Place {
    Domain,
    Pod,
    Nowhere,
}

/// Returns the place of an interface. One that is unplugged counts as one of the domain until its link is given back: until then the
/// network plugins must not remove it.
fn place(
    interface: &api::vmi::network::Interface,
    vmi: &VirtualMachineInstance,
    pod: Option<&PodNetwork>,
    in_domain: Option<&[String]>,
) -> Place {
    let name = &interface.name;
    let was_in_domain = has_source(vmi, name, DOMAIN);
    let is_in_domain = match in_domain {
        Some(nics) => nics.contains(name),
        // A launcher of an older release keeps the interfaces of the start.
        None => was_in_domain || *vmi.phase() != VmiPhase::Running,
    };
    let is_kept = || interface.is_absent() && was_in_domain && !pod.is_some_and(|pod| pod.released.contains(name));
    if is_in_domain || is_kept() {
        Place::Domain
    } else if has_source(vmi, name, MULTUS) {
        Place::Pod
    } else {
        Place::Nowhere
    }
}

/// Returns the entry of an interface that only the pod has.
fn from_pod(former: &Interface) -> Interface {
    Interface {
        name: former.name.clone(),
        pod_interface_name: former.pod_interface_name.clone(),
        ..Interface::default()
    }
}

fn from_domain(
    interface: &api::vmi::network::Interface,
    pod: Option<&PodNetwork>,
    queues: u32,
    before: &[Interface],
) -> Interface {
    let nic = pod.and_then(|pod| pod.nics.iter().find(|nic| nic.name == interface.name));
    let in_pod = pod.and_then(|pod| pod.interfaces.iter().find(|entry| entry.name == interface.name));
    let former = before.iter().find(|entry| entry.name.as_deref() == Some(interface.name.as_str()));
    let mac = nic
        .map(|nic| nic.mac.clone())
        .filter(|mac| !mac.is_empty())
        .or_else(|| interface.mac())
        .or_else(|| former.and_then(|former| former.mac.clone()));
    let addresses: Vec<String> = match in_pod {
        Some(in_pod) => in_pod.ips.iter().map(ToString::to_string).collect(),
        None => former.map(|former| former.ip_addresses.clone()).unwrap_or_default(),
    };
    Interface {
        name: Some(interface.name.clone()),
        mac,
        ip_address: addresses.first().cloned(),
        ip_addresses: addresses,
        info_source: Some(DOMAIN.into()),
        queue_count: Some(i32::try_from(queues).unwrap_or(i32::MAX)),
        link_state: Some(if interface.state.as_deref() == Some(DOWN) { DOWN } else { "up" }.into()),
        // virt-controller corrects it to the name that the network plugins report, possibly after the start.
        pod_interface_name: former
            .and_then(|former| former.pod_interface_name.clone())
            .or_else(|| in_pod.map(|in_pod| in_pod.pod_interface_name.clone())),
        ..Interface::default()
    }
}

/// Adds the guest's data of an interface of the domain. For each address family the pod's addresses are kept if it has any;
/// otherwise the guest's are used.
fn add_guest(entry: &mut Interface, reported: &GuestInterface, masquerade: bool) {
    entry.interface_name = Some(bounded(&reported.name));
    entry.info_source = Some(format!("{DOMAIN}{SEPARATOR}{GUEST_AGENT}"));
    let in_guest: Vec<IpAddr> =
        addresses(reported).into_iter().filter(|address| !(masquerade && is_link_local(address))).collect();
    let in_pod: Vec<IpAddr> = entry.ip_addresses.iter().filter_map(|text| text.parse().ok()).collect();
    let family = |v4: bool| -> Vec<IpAddr> {
        let pick = |list: &[IpAddr]| list.iter().copied().filter(|address| address.is_ipv4() == v4).collect::<Vec<_>>();
        let (guest, pod) = (pick(&in_guest), pick(&in_pod));
        // A guest behind NAT does not know the address under which the cluster reaches it.
        if (masquerade && !pod.is_empty()) || (!guest.is_empty() && !pod.is_empty()) { pod } else { guest }
    };
    let all: Vec<String> = family(true).into_iter().chain(family(false)).map(|address| address.to_string()).collect();
    entry.ip_address = all.first().cloned();
    entry.ip_addresses = all;
}

fn from_guest(reported: &GuestInterface) -> Interface {
    let all: Vec<String> = addresses(reported).iter().map(ToString::to_string).collect();
    Interface {
        interface_name: Some(bounded(&reported.name)),
        mac: Some(bounded(&reported.mac)),
        ip_address: all.first().cloned(),
        ip_addresses: all,
        info_source: Some(GUEST_AGENT.into()),
        ..Interface::default()
    }
}

fn addresses(reported: &GuestInterface) -> Vec<IpAddr> {
    reported
        .addresses
        .iter()
        .take(MAX_ADDRESSES)
        .filter_map(|text| text.split('/').next().unwrap_or_default().parse().ok())
        .collect()
}

fn is_loopback(reported: &GuestInterface) -> bool {
    reported.name == "lo" || reported.mac == "00:00:00:00:00:00"
}

fn is_masquerade(vmi: &VirtualMachineInstance, name: Option<&str>) -> bool {
    vmi.spec
        .domain
        .devices
        .interfaces
        .iter()
        .any(|interface| Some(interface.name.as_str()) == name && interface.masquerade.is_some())
}

fn keep_multus(entry: &mut Interface, before: &[Interface]) {
    if entry.name.is_none() {
        return;
    }
    let formers = before.iter().filter(|former| former.name == entry.name);
    let had = formers.flat_map(sources).any(|source| source == MULTUS);
    if had {
        entry.info_source = Some(match entry.info_source.take() {
            Some(source) => format!("{source}{SEPARATOR}{MULTUS}"),
            None => MULTUS.into(),
        });
    }
}

fn primary_first(list: &mut [Interface], vmi: &VirtualMachineInstance) {
    let primary = vmi
        .spec
        .networks
        .iter()
        .find(|network| network.is_primary())
        .and_then(|network| list.iter().position(|entry| entry.name.as_deref() == Some(network.name.as_str())));
    if let Some(position) = primary {
        list[..=position].rotate_right(1);
    }
}

fn bounded(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect()
}

#[cfg(test)]
mod tests {
    use protocol::Nic;
    use serde_json::json;

    use super::*;
    use crate::network::PodInterface;

    fn vmi() -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {
                "domain": {"devices": {"interfaces": [
                    {"name": "second", "bridge": {}, "macAddress": "02:00:00:00:00:02"},
                    {"name": "default", "masquerade": {}}]}},
                "networks": [{"name": "second", "multus": {"networkName": "n"}}, {"name": "default", "pod": {}}],
            },
            "status": {"interfaces": [{"name": "second", "infoSource": "multus-status", "podInterfaceName": "net1"}]},
        }))
        .unwrap()
    }

    fn pod() -> PodNetwork {
        PodNetwork {
            nics: vec![Nic { name: "default".into(), mac: "02:00:00:00:00:01".into(), ..Nic::default() }],
            interfaces: vec![PodInterface {
                name: "default".into(),
                pod_interface_name: "eth0".into(),
                ips: vec!["10.244.0.7".parse().unwrap()],
            }],
            ..PodNetwork::default()
        }
    }

    fn guest(name: &str, mac: &str, addresses: &[&str]) -> GuestInterface {
        GuestInterface {
            name: name.into(),
            mac: mac.into(),
            addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
        }
    }

    #[test]
    fn without_a_guest_agent_addresses_are_those_of_the_pod_and_the_primary_interface_is_first() {
        let list = merged(&vmi(), Some(&pod()), None, &[], &[]);
        let names: Vec<_> = list.iter().map(|entry| entry.name.as_deref().unwrap()).collect();
        assert_eq!(names, ["default", "second"]);
        assert_eq!(list[0].ip_address.as_deref(), Some("10.244.0.7"));
        assert_eq!(list[0].mac.as_deref(), Some("02:00:00:00:00:01"));
        assert_eq!(list[0].pod_interface_name.as_deref(), Some("eth0"));
        assert_eq!(list[0].info_source.as_deref(), Some("domain"));
        assert_eq!(list[1].info_source.as_deref(), Some("domain, multus-status"));
        assert_eq!(list[1].pod_interface_name.as_deref(), Some("net1"));
    }

    #[test]
    fn link_of_the_primary_network_that_virt_controller_reports_is_kept() {
        let mut vmi = vmi();
        let shown = json!([{"name": "default", "infoSource": "domain", "podInterfaceName": "ovn-udn1"}]);
        vmi.status.as_mut().unwrap().interfaces = serde_json::from_value(shown).unwrap();
        let list = merged(&vmi, Some(&pod()), None, &[], &[]);
        assert_eq!(list[0].pod_interface_name.as_deref(), Some("ovn-udn1"));
    }

    #[test]
    fn entries_follow_the_domain_the_pod_and_the_state() {
        let in_domain = ["default".to_owned(), "second".to_owned()];
        for (state, before, nics, released, expected) in [
            ("", "multus-status", &in_domain[..1], false, Some("multus-status")),
            ("", "multus-status", &in_domain, false, Some("domain, multus-status")),
            ("", "", &in_domain[..1], false, None),
            ("", "domain", &in_domain[..1], false, None),
            // The network plugins may remove an unplugged interface once its link is given back.
            ("absent", "domain, multus-status", &in_domain, false, Some("domain, multus-status")),
            ("absent", "domain, multus-status", &in_domain[..1], false, Some("domain, multus-status")),
            ("absent", "domain, multus-status", &in_domain[..1], true, Some("multus-status")),
            ("absent", "domain", &in_domain[..1], true, None),
        ] {
            let (mut vmi, mut pod) = (vmi(), pod());
            vmi.spec.domain.devices.interfaces[0].state = Some(state.to_owned());
            vmi.status.as_mut().unwrap().interfaces[0].info_source = Some(before.to_owned());
            pod.released.extend(released.then(|| "second".to_owned()));
            let list = merged(&vmi, Some(&pod), Some(nics), &[], &[]);
            let second = list.iter().find(|entry| entry.name.as_deref() == Some("second"));
            let found = second.and_then(|entry| entry.info_source.as_deref());
            assert_eq!(found, expected, "{state} {before} {nics:?}");
        }
    }

    #[test]
    fn a_guest_behind_nat_keeps_the_address_of_its_pod() {
        let reported = [
            guest("lo", "00:00:00:00:00:00", &["127.0.0.1/8"]),
            guest("eth0", "02:00:00:00:00:01", &["10.0.2.2/24", "fe80::1/64"]),
            guest("eth1", "02:00:00:00:00:02", &["192.168.1.5"]),
        ];
        let list = merged(&vmi(), Some(&pod()), None, &[], &reported);
        assert_eq!(list.len(), 2);
        assert_eq!(list[0].ip_addresses, ["10.244.0.7"]);
        assert_eq!(list[0].interface_name.as_deref(), Some("eth0"));
        assert_eq!(list[0].info_source.as_deref(), Some("domain, guest-agent"));
        assert_eq!(list[1].ip_addresses, ["192.168.1.5"]);
    }

    #[test]
    fn a_guest_cannot_flood_the_status() {
        let many: Vec<String> = (0..1000).map(|n| format!("10.1.{}.{}", n / 250, n % 250)).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let reported: Vec<_> =
            (0..100).map(|n| guest(&"x".repeat(500), &format!("02:00:00:00:01:{n:02x}"), &many)).collect();
        let list = merged(&vmi(), None, None, &[], &reported);
        assert_eq!(list.len(), 2 + MAX_GUEST_ONLY);
        assert!(list.iter().all(|entry| entry.ip_addresses.len() <= MAX_ADDRESSES));
        assert!(list.iter().all(|entry| entry.interface_name.as_deref().unwrap_or_default().len() <= MAX_NAME));
    }

    #[test]
    fn only_adapters_with_multiqueue_show_several_queues() {
        let mut vmi = vmi();
        let domain = &mut vmi.spec.domain;
        domain.devices.network_interface_multiqueue = Some(true);
        domain.cpu = serde_json::from_value(json!({"cores": 4})).unwrap();
        domain.devices.interfaces[0].model = Some("e1000e".into());
        let list = merged(&vmi, Some(&pod()), None, &[], &[]);
        let queues: Vec<_> = list.iter().map(|entry| (entry.name.as_deref().unwrap(), entry.queue_count)).collect();
        assert_eq!(queues, [("default", Some(4)), ("second", Some(1))]);
    }

    #[test]
    fn queues_are_those_of_the_domain() {
        let in_domain = ["second".to_owned(), "default".to_owned()];
        for (source, known, reported, expected) in [
            ("", None, &[][..], 2),
            ("domain", Some(1), &[3, 1], 1),
            ("domain", Some(2), &[3, 1], 1),
            // A launcher of an older release.
            ("domain", Some(1), &[], 1),
            ("domain", None, &[], 2),
            // Another domain had it.
            ("multus-status", Some(1), &[], 2),
        ] {
            let mut vmi = vmi();
            vmi.spec.domain.devices.network_interface_multiqueue = Some(true);
            vmi.spec.domain.cpu = serde_json::from_value(json!({"sockets": 2})).unwrap();
            vmi.status.as_mut().unwrap().interfaces.push(Interface {
                name: Some("default".into()),
                info_source: Some(source.into()),
                queue_count: known,
                ..Interface::default()
            });
            let list = merged(&vmi, Some(&pod()), Some(&in_domain), reported, &[]);
            assert_eq!(list[0].queue_count, Some(expected), "{source} {known:?} {reported:?}");
        }
    }

    #[test]
    fn text_that_is_no_address_is_left_out() {
        let reported = [guest("eth1", "02:00:00:00:00:02", &["169.254.169.254.evil", "javascript:", "10.9.9.9/8"])];
        let list = merged(&vmi(), None, None, &[], &reported);
        assert_eq!(list[1].ip_addresses, ["10.9.9.9"]);
    }
}
