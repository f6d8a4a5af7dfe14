//! Interfaces that come and go while the guest runs: the work on the pod's network, and what the launcher is sent. Pure.
//!
//! ```text
//!   plugged:    multus-status in the status -> network set up -> Sync attaches -> domain in the status
//!   unplugged:  state absent -> Sync detaches -> the guest releases it -> link given back -> no domain in the status
//! ```

use std::sync::Arc;

use api::{
    VirtualMachineInstance, VmiPhase,
    nics::{DOMAIN, has_source, secondary, shown},
    vmi::network::Interface,
};
use protocol::{LauncherState, Nic, features::Feature};

use super::{
    observed::{Failure, Link, Observed, SYNC},
    role::Role,
};
use crate::network::request::is_connected;

/// Returns the interfaces whose links the next setup of the network gives back; `None` if the network is as it should be.
pub(super) fn network_work(observed: &Observed) -> Option<Vec<String>> {
    let Link::Up { networked, .. } = observed.link else { return None };
    let vmi = &observed.vmi;
    let interfaces = &vmi.spec.domain.devices.interfaces;
    let released =
        interfaces.iter().filter(|interface| interface.is_absent() && may_release(observed, &interface.name));
    let released: Vec<String> = released.map(|interface| interface.name.clone()).collect();
    let network = observed.network.as_deref();
    let has = |name: &str| network.is_some_and(|network| network.nics.iter().any(|nic| nic.name == name));
    let is_new = |name: &String| !network.is_some_and(|network| network.released.contains(name));
    // A target is ready for the domain without the rest. Its setup is repeated once the guest is here.
    let is_awaited = |interface: &Interface| {
        is_connected(vmi, interface) && (observed.role != Role::MigrationTarget || is_needed(vmi, &interface.name))
    };
    let is_complete = networked
        && !released.iter().any(is_new)
        && interfaces.iter().all(|interface| has(&interface.name) || !is_awaited(interface));
    (!is_complete).then_some(released)
}

/// Returns true if the guest cannot do without an interface: its domain has it or starts with it. A running domain lacks
/// interfaces that were plugged into its pod only.
pub(super) fn is_needed(vmi: &VirtualMachineInstance, name: &str) -> bool {
    let is_secondary = || secondary(vmi).any(|(interface, _)| interface.name == name);
    *vmi.phase() != VmiPhase::Running || has_source(vmi, name, DOMAIN) || !is_secondary()
}

/// Returns the failure of the setup that plugged and unplugged interfaces still need.
pub(super) fn failure(observed: &Observed) -> Option<&Failure> {
    observed.network_failure.as_ref().filter(|_| network_work(observed).is_some())
}

/// Returns true if the domain does not use an absent interface, and does not start to.
fn may_release(observed: &Observed, name: &str) -> bool {
    let Link::Up { synced, results_from, .. } = &observed.link else { return false };
    let Some(report) = observed.report.as_ref().filter(|_| observed.domain().is_alive()) else { return false };
    !observed.is_busy(SYNC)
        && *synced == Some(observed.facts.fingerprint)
        && report.sequence >= *results_from
        && in_domain(&observed.link, report).is_some_and(|nics| !nics.iter().any(|nic| nic == name))
}

/// Returns the names of the domain's interfaces. `None`: a launcher of an older release does not report them.
pub(super) fn in_domain<'a>(link: &Link, report: &'a LauncherState) -> Option<&'a [String]> {
    let reports = matches!(link, Link::Up { features, .. } if features.contains(&Feature::NicHotplug));
    // A domain without interfaces, or a report from before the present connection.
    (reports || !report.nics.is_empty()).then_some(report.nics.as_slice())
}

/// Returns the VMI with the MAC addresses that its guest has. The link of another pod, to which the guest moves, has another
/// address.
pub(super) fn with_shown_macs(vmi: &Arc<VirtualMachineInstance>) -> Arc<VirtualMachineInstance> {
    let mac = |name: &str| shown(vmi, name).filter(|_| has_source(vmi, name, DOMAIN))?.mac.clone();
    let lacks = |interface: &&mut Interface| interface.mac().is_none();
    if *vmi.phase() != VmiPhase::Running {
        return vmi.clone();
    }
    let mut with_macs = (**vmi).clone();
    for interface in with_macs.spec.domain.devices.interfaces.iter_mut().filter(lacks) {
        interface.mac_address = mac(&interface.name).or(interface.mac_address.take());
    }
    Arc::new(with_macs)
}

/// Takes interfaces from the VMI for the launcher that the pod does not have yet. The domain keeps its own.
pub(super) fn leave_out_unconnected(vmi: &mut VirtualMachineInstance, nics: &[Nic], report: Option<&LauncherState>) {
    let is_ready = |name: &str| {
        let in_domain = report.is_some_and(|report| report.nics.iter().any(|nic| nic == name));
        in_domain || nics.iter().any(|nic| nic.name == name)
    };
    let spec = &mut vmi.spec;
    spec.domain.devices.interfaces.retain(|interface| is_ready(&interface.name));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use protocol::Lifecycle;
    use serde_json::{Value, json};

    use super::*;
    use crate::network::PodNetwork;

    /// Returns a running VMI with the interface `default` and this one, with these sources in the status.
    fn observed(state: &str, sources: Option<&str>, in_domain: &[&str], network: PodNetwork) -> Observed {
        let shown = |name: &str, sources: &str| json!({"name": name, "infoSource": sources});
        let shown: Vec<Value> = [Some(shown("default", "domain")), sources.map(|sources| shown("lan", sources))]
            .into_iter()
            .flatten()
            .collect();
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m", "uid": "u"},
            "spec": {
                "domain": {"devices": {"interfaces": [
                    {"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}, "state": state}]}},
                "networks": [{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "n"}}],
            },
            "status": {"phase": "Running", "nodeName": "n", "interfaces": shown},
        }))
        .unwrap();
        let mut observed = Observed::new(Arc::new(vmi), "n");
        observed.link = Link::Up {
            connection: 1,
            greeted: true,
            features: Feature::ALL.into_iter().collect(),
            networked: true,
            synced: Some(observed.facts.fingerprint),
            results_from: 0,
        };
        let nics = in_domain.iter().map(|name| (*name).to_owned()).collect();
        let mut report = LauncherState { nics, ..LauncherState::default() };
        report.set_lifecycle(Lifecycle::Running);
        observed.report = Some(report);
        observed.network = Some(Arc::new(network));
        observed
    }

    fn network(nics: &[&str], released: &[&str]) -> PodNetwork {
        PodNetwork {
            nics: nics.iter().map(|name| Nic { name: (*name).to_owned(), ..Nic::default() }).collect(),
            released: released.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(),
            ..PodNetwork::default()
        }
    }

    #[test]
    fn network_follows_the_interfaces_of_the_pod_and_of_the_domain() {
        let (one, both) = (["default"], ["default", "lan"]);
        for (state, sources, in_domain, network, expected) in [
            // Not in the pod yet.
            ("", None, &one[..], network(&one, &[]), None),
            ("", Some("multus-status"), &one, network(&one, &[]), Some(vec![])),
            ("", Some("multus-status"), &one, network(&both, &[]), None),
            ("", Some("domain, multus-status"), &both, network(&both, &[]), None),
            // Plugged in once more.
            ("", Some("multus-status"), &one, network(&one, &["lan"]), Some(vec![])),
            // The guest has not released it.
            ("absent", Some("domain, multus-status"), &both, network(&both, &[]), None),
            ("absent", Some("domain, multus-status"), &one, network(&both, &[]), Some(vec!["lan".to_owned()])),
            ("absent", Some("domain, multus-status"), &one, network(&one, &["lan"]), None),
        ] {
            let observed = observed(state, sources, in_domain, network);
            assert_eq!(network_work(&observed), expected, "{state} {sources:?} {in_domain:?}");
        }
        let mut changed = observed("absent", Some("domain"), &one, network(&both, &[]));
        changed.busy.insert(SYNC);
        assert_eq!(network_work(&changed), None, "a Sync may attach it");
        let mut target = observed("", Some("multus-status"), &one, network(&one, &[]));
        target.role = Role::MigrationTarget;
        assert_eq!(network_work(&target), None, "the domain that arrives lacks it");
        let mut target = observed("", Some("domain, multus-status"), &both, network(&one, &[]));
        target.role = Role::MigrationTarget;
        assert_eq!(network_work(&target), Some(vec![]));
        let mut new = observed("absent", Some("domain"), &both, network(&both, &[]));
        if let Link::Up { networked, .. } = &mut new.link {
            *networked = false;
        }
        assert_eq!(network_work(&new), Some(vec![]));
    }

    #[test]
    fn launcher_is_sent_interfaces_that_the_pod_or_the_domain_has() {
        for (nics, in_domain, sent) in [
            (&["default"][..], &["default"][..], vec!["default"]),
            (&["default", "lan"], &["default"], vec!["default", "lan"]),
            (&["default"], &["default", "lan"], vec!["default", "lan"]),
        ] {
            let observed = observed("", None, in_domain, network(nics, &[]));
            let mut vmi = (*observed.vmi).clone();
            leave_out_unconnected(&mut vmi, &network(nics, &[]).nics, observed.report.as_ref());
            let names: Vec<&str> = vmi.spec.domain.devices.interfaces.iter().map(|one| one.name.as_str()).collect();
            assert_eq!(names, sent);
        }
    }
}
