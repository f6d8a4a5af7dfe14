//! Interfaces in the status, as reported by the pod's network plugins.

use api::vmi::{
    network::{Interface, Network},
    status::VirtualMachineInstanceNetworkInterface as Shown,
};

use crate::resources::pods::AttachedNetwork;

/// Value of `infoSource` for reports of the plugins.
const SOURCE: &str = "multus-status";
/// The default link of the pod network.
const USUAL: &str = "eth0";

/// Updates the networks to which the pod is connected. virt-handler reports everything else about an interface.
pub(super) fn update(
    networks: &[Network],
    interfaces: &[Interface],
    attached: &[AttachedNetwork],
    shown: &mut Vec<Shown>,
) {
    let plugged = |network: &&Network| {
        let mut of_network = interfaces.iter().filter(|interface| interface.name == network.name);
        of_network.any(|interface| interface.state.as_deref() != Some("absent"))
    };
    for network in networks.iter().filter(plugged) {
        if network.is_primary() {
            primary(network, attached, shown);
        } else if network.multus.is_some() {
            secondary(network, attached, shown);
        }
    }
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

fn secondary(network: &Network, attached: &[AttachedNetwork], shown: &mut Vec<Shown>) {
    let link = network.pod_link();
    let is_attached = attached.iter().any(|attached| attached.interface == link);
    let Some(entry) = position(network, shown).and_then(|at| shown.get_mut(at)) else {
        if is_attached {
            shown.push(Shown {
                name: Some(network.name.clone()),
                info_source: Some(SOURCE.to_owned()),
                pod_interface_name: Some(link),
                ..Shown::default()
            });
        }
        return;
    };
    let mut sources: Vec<&str> = entry.info_source.as_deref().unwrap_or_default().split(", ").collect();
    sources.retain(|source| !source.is_empty() && *source != SOURCE);
    if is_attached {
        sources.push(SOURCE);
        entry.pod_interface_name.get_or_insert(link);
    }
    entry.info_source = (!sources.is_empty()).then(|| sources.join(", "));
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
            .map(|(interface, default)| AttachedNetwork { interface: (*interface).to_owned(), default: *default })
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
    fn primary_network_is_shown_when_its_link_has_another_name() {
        assert_eq!(updated(&[("ovn1", true)], json!([])), json!([{"name": "default", "podInterfaceName": "ovn1"}]));
        let known = json!([{"name": "default", "podInterfaceName": "eth0"}]);
        assert_eq!(updated(&[("eth0", true)], known.clone()), known);
        assert_eq!(updated(&[], known.clone()), known);
    }
}
