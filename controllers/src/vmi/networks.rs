//! Secondary networks of a VMI: the request of its pod, and what the network plugins report of it.

use api::{
    VirtualMachineInstance, nics,
    vmi::{
        network::{Interface, Network},
        status::VirtualMachineInstanceNetworkInterface as Shown,
    },
};

use crate::{
    launcher_pod,
    resources::pods::{AttachedNetwork, CachedPod, NO_NETWORKS, digest},
};

/// The default link of the pod network.
const USUAL: &str = "eth0";

/// Updates the networks to which the pod is connected. virt-handler reports everything else about an interface.
pub(super) fn update(
    networks: &[Network],
    interfaces: &[Interface],
    attached: &[AttachedNetwork],
    shown: &mut Vec<Shown>,
) {
    for network in networks {
        let Some(interface) = interfaces.iter().find(|interface| interface.name == network.name) else { continue };
        if network.is_primary() {
            primary(network, attached, shown);
        } else if network.multus.is_some() {
            secondary(network, interface.is_absent(), attached, shown);
        }
    }
}

/// Returns the request for networks that a running pod must get, as the value of its annotation. A program that watches pods plugs
/// and unplugs the difference.
pub(super) fn request(instance: &VirtualMachineInstance, pod: &CachedPod) -> Option<String> {
    let is_changing = |(interface, _): (&Interface, &Network)| {
        interface.is_absent() || nics::shown(instance, &interface.name).is_none()
    };
    if !nics::secondary(instance).any(is_changing) {
        return None;
    }
    // The guest and its bridge use the link of an unplugged interface until virt-handler gives it back.
    let request = launcher_pod::network_request(instance, |interface| {
        !interface.is_absent() || nics::has_source(instance, &interface.name, nics::DOMAIN)
    });
    let request = request.unwrap_or_else(|| NO_NETWORKS.to_owned());
    (pod.requested_networks != Some(digest(&request))).then_some(request)
}

/// Records the link of the primary network, which virt-handler needs unless it is the default one.
fn primary(network: &Network, attached: &[AttachedNetwork], shown: &mut Vec<Shown>) {
    let Some(link) = attached.iter().find(|attached| attached.default).map(|attached| &attached.interface) else {
        return;
    };
    match position(network, shown).and_then(|at| shown.get_mut(at)) {
        Some(entry) => entry.pod_interface_name = Some(link.clone()),
        None if link == USUAL => {}
        None => shown.push(Shown {
            name: Some(network.name.clone()),
            pod_interface_name: Some(link.clone()),
            ..Shown::default()
        }),
    }
}

fn secondary(network: &Network, is_absent: bool, attached: &[AttachedNetwork], shown: &mut Vec<Shown>) {
    let link = network.pod_link();
    let is_attached = attached.iter().any(|attached| attached.interface == link);
    let Some((at, entry)) = position(network, shown).and_then(|at| Some((at, shown.get_mut(at)?))) else {
        if is_attached && !is_absent {
            shown.push(Shown {
                name: Some(network.name.clone()),
                info_source: Some(nics::MULTUS.to_owned()),
                pod_interface_name: Some(link),
                ..Shown::default()
            });
        }
        return;
    };
    let mut sources: Vec<&str> = nics::sources(entry).filter(|source| *source != nics::MULTUS).collect();
    if is_attached {
        sources.push(nics::MULTUS);
    }
    if sources.is_empty() {
        // Neither the pod nor the guest has it.
        shown.remove(at);
        return;
    }
    entry.info_source = Some(sources.join(nics::SEPARATOR));
    if is_attached {
        entry.pod_interface_name.get_or_insert(link);
    }
}

fn position(network: &Network, shown: &[Shown]) -> Option<usize> {
    shown.iter().position(|entry| entry.name.as_deref() == Some(network.name.as_str()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn updated(attached: &[(&str, bool)], shown: Value) -> Value {
        let networks: Vec<Network> = serde_json::from_value(json!([
            {"name": "default", "pod": {}},
            {"name": "lan", "multus": {"networkName": "n"}},
            {"name": "gone", "multus": {"networkName": "n"}},
        ]))
        .unwrap();
        let interfaces: Vec<Interface> = serde_json::from_value(json!([
            {"name": "default", "masquerade": {}},
            {"name": "lan", "bridge": {}},
            {"name": "gone", "bridge": {}, "state": "absent"},
        ]))
        .unwrap();
        let attached: Vec<AttachedNetwork> = attached
            .iter()
            .map(|(interface, default)| AttachedNetwork {
                interface: (*interface).to_owned(),
                default: *default,
                ..AttachedNetwork::default()
            })
            .collect();
        let mut shown: Vec<Shown> = serde_json::from_value(shown).unwrap();
        update(&networks, &interfaces, &attached, &mut shown);
        serde_json::to_value(shown).unwrap()
    }

    #[test]
    fn networks_that_plugins_connected_are_shown() {
        let lan = json!({"name": "lan", "infoSource": "multus-status", "podInterfaceName": "pod094a367b026"});
        assert_eq!(updated(&[("eth0", true), ("pod094a367b026", false)], json!([])), json!([lan]));
        assert_eq!(updated(&[("eth0", true), ("net1", false)], json!([])), json!([]));
        let running = json!([{"name": "lan", "infoSource": "domain, guest-agent", "mac": "m"}]);
        let with = json!([{"name": "lan", "infoSource": "domain, guest-agent, multus-status", "mac": "m",
            "podInterfaceName": "pod094a367b026"}]);
        assert_eq!(updated(&[("pod094a367b026", false)], running), with);
        assert_eq!(updated(&[("pod094a367b026", false)], with.clone()), with);
        let without = json!([{"name": "lan", "infoSource": "domain, guest-agent", "mac": "m",
            "podInterfaceName": "pod094a367b026"}]);
        assert_eq!(updated(&[], with), without);
    }

    #[test]
    fn entry_of_an_unplugged_interface_leaves_with_the_link() {
        let gone = |sources: &str| json!([{"name": "gone", "infoSource": sources}]);
        let link = Network { name: "gone".to_owned(), ..Network::default() }.pod_link();
        let attached = [(link.as_str(), false)];
        assert_eq!(updated(&attached, json!([])), json!([]));
        let shown = json!([{"name": "gone", "infoSource": "domain, multus-status", "podInterfaceName": link}]);
        assert_eq!(updated(&attached, gone("domain")), shown);
        assert_eq!(updated(&[], gone("domain, multus-status")), gone("domain"));
        assert_eq!(updated(&[], gone("multus-status")), json!([]));
    }

    #[test]
    fn primary_network_is_shown_when_its_link_has_another_name() {
        assert_eq!(updated(&[("ovn1", true)], json!([])), json!([{"name": "default", "podInterfaceName": "ovn1"}]));
        let known = json!([{"name": "default", "podInterfaceName": "eth0"}]);
        assert_eq!(updated(&[("eth0", true)], known.clone()), known);
        assert_eq!(updated(&[], known.clone()), known);
    }
}
