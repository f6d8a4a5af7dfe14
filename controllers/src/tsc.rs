//! Frequencies of time stamp counters (TSC): selection for VMIs, labels of nodes.
//!
//! virt-handler labels its node with the frequency of its TSC and whether guests can have a lower one. A VMI that depends on
//! the TSC gets the frequency that most nodes offer: the configured one, else the lowest of all nodes. Nodes are labelled
//! with those frequencies in use that they offer.

use std::collections::{BTreeMap, BTreeSet};

use api::{config::ClusterConfig, constants::label};
use serde_json::json;

use crate::{
    resources::{
        Caches,
        nodes::{CachedNode, NodeIndex, Tsc},
        vmis::VmiIndex,
    },
    runtime::{Effect, Kind},
};

/// Difference between a frequency and that of the host, in millionths, which guests tolerate.
const TOLERANCE: u64 = 250;
/// Frequencies that a node offers at most. A cluster has a few types of nodes.
const MAX_OFFERED: usize = 64;

/// Returns true if a TSC can show the guest this frequency.
fn offers(tsc: Tsc, wanted: u64) -> bool {
    let own = tsc.frequency;
    let is_close = u128::from(own.abs_diff(wanted)) * 1_000_000 <= u128::from(own) * u128::from(TOLERANCE);
    is_close || (tsc.is_scalable && wanted < own)
}

/// Returns the frequency for a VMI that needs one: the configured one, else the lowest of the nodes that accept VMIs or run
/// some.
#[must_use]
pub(crate) fn frequency(caches: &Caches, config: &ClusterConfig) -> Option<i64> {
    if let Some(minimum) = config.minimum_cluster_tsc_frequency.filter(|minimum| *minimum > 0) {
        return Some(minimum);
    }
    let schedulable = match caches.nodes.first_entry(NodeIndex::SchedulableTsc(0)..=NodeIndex::SchedulableTsc(u64::MAX))
    {
        Some(NodeIndex::SchedulableTsc(frequency)) => Some(frequency),
        _ => None,
    };
    let lower = NodeIndex::UnschedulableTsc(0)..=NodeIndex::UnschedulableTsc(schedulable.unwrap_or(u64::MAX));
    let runs_vmis = |name: &String| caches.vmis.count_by(&VmiIndex::Node(name.clone())) > 0;
    let occupied = caches.nodes.entries(lower).into_iter().find_map(|index| {
        let nodes = caches.nodes.by(&index);
        let runs = nodes.iter().any(|node| node.metadata.name.as_ref().is_some_and(runs_vmis));
        match index {
            NodeIndex::UnschedulableTsc(frequency) if runs => Some(frequency),
            _ => None,
        }
    });
    schedulable.into_iter().chain(occupied).min().and_then(|lowest| i64::try_from(lowest).ok())
}

/// Returns all frequencies with which nodes that offer them are labelled.
#[must_use]
pub(crate) fn needed(caches: &Caches, config: &ClusterConfig) -> BTreeSet<u64> {
    let used = caches.vmis.entries(VmiIndex::TscFrequency(i64::MIN)..=VmiIndex::TscFrequency(i64::MAX));
    let used = used.into_iter().filter_map(|index| match index {
        VmiIndex::TscFrequency(frequency) => Some(frequency),
        _ => None,
    });
    used.chain(frequency(caches, config)).filter_map(|frequency| u64::try_from(frequency).ok()).collect()
}

/// Returns the change of a node's labels: its own frequency and those of `needed` that it offers.
#[must_use]
pub(crate) fn relabel(node: &CachedNode, needed: &BTreeSet<u64>) -> Option<Effect> {
    let tsc = node.tsc();
    let offered: BTreeSet<String> = tsc
        .map(|tsc| tsc.frequency)
        .into_iter()
        .chain(needed.iter().copied())
        .filter(|frequency| tsc.is_some_and(|tsc| offers(tsc, *frequency)))
        .take(MAX_OFFERED)
        .map(|frequency| format!("{}{frequency}", label::TSC_FREQUENCY_PREFIX))
        .collect();
    let known: BTreeMap<&str, &str> = node
        .metadata
        .labels
        .iter()
        .flatten()
        .filter(|(key, _)| key.starts_with(label::TSC_FREQUENCY_PREFIX))
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let new = offered.iter().map(String::as_str).filter(|key| known.get(key) != Some(&"true"));
    let stale = known.keys().copied().filter(|key| !offered.contains(*key));
    let changes: BTreeMap<&str, Option<&str>> =
        new.map(|key| (key, Some("true"))).chain(stale.map(|key| (key, None))).collect();
    let patch = json!({"metadata": {"labels": changes}});
    (!changes.is_empty()).then(|| Effect::merge(Kind::Node, &node.metadata, patch))
}

#[cfg(test)]
mod tests {
    use api::VirtualMachineInstance;
    use serde_json::Value;

    use super::*;
    use crate::resources::nodes::{TSC_FREQUENCY, TSC_SCALABLE};

    fn node(name: &str, labels: &[(&str, &str)]) -> CachedNode {
        let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
        let metadata = json!({"name": name, "resourceVersion": "1", "labels": labels});
        CachedNode { metadata: serde_json::from_value(metadata).unwrap(), ..CachedNode::default() }
    }

    #[test]
    fn vmis_get_the_lowest_frequency_of_nodes_that_accept_vmis_or_run_some() {
        let vmi = |node: &str| {
            serde_json::from_value::<VirtualMachineInstance>(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "m", "namespace": "n", "uid": "u", "resourceVersion": "1"},
                "spec": {"domain": {"devices": {}}}, "status": {"phase": "Running", "nodeName": node},
            }))
            .unwrap()
        };
        let nodes = [
            node("a", &[(TSC_FREQUENCY, "3000"), (label::SCHEDULABLE, "true")]),
            node("b", &[(TSC_FREQUENCY, "2000"), (label::SCHEDULABLE, "false")]),
            node("c", &[(TSC_FREQUENCY, "1000")]),
            node("d", &[(TSC_FREQUENCY, "none"), (label::SCHEDULABLE, "true")]),
        ];
        for (minimum, occupied, expected) in [
            (None, None, Some(3000)),
            (None, Some("b"), Some(2000)),
            (None, Some("elsewhere"), Some(3000)),
            (Some(7), None, Some(7)),
            (Some(0), None, Some(3000)),
        ] {
            let caches = Caches::default();
            nodes.iter().for_each(|node| caches.nodes.observe(node.clone()));
            occupied.into_iter().for_each(|name| caches.vmis.observe(vmi(name)));
            let config = ClusterConfig { minimum_cluster_tsc_frequency: minimum, ..ClusterConfig::default() };
            assert_eq!(frequency(&caches, &config), expected, "{minimum:?} {occupied:?}");
        }
        assert_eq!(frequency(&Caches::default(), &ClusterConfig::default()), None);
    }

    #[test]
    fn nodes_are_labelled_with_the_needed_frequencies_that_they_offer() {
        let key = |frequency: u64| format!("scheduling.node.kubevirt.io/tsc-frequency-{frequency}");
        let needed = BTreeSet::from([1_000_000, 2_000_400, 2_000_600, 3_000_000]);
        let (fixed, scalable) = ([(TSC_FREQUENCY, "2000000")], [(TSC_FREQUENCY, "2000000"), (TSC_SCALABLE, "true")]);
        let labelled = |node: &CachedNode| match relabel(node, &needed) {
            Some(Effect::Patch { kind: Kind::Node, patch, .. }) => patch["metadata"]["labels"].clone(),
            None => Value::Null,
            other => panic!("{other:?}"),
        };
        let set = |frequencies: &[u64]| {
            Value::Object(frequencies.iter().map(|frequency| (key(*frequency), json!("true"))).collect())
        };
        assert_eq!(labelled(&node("a", &fixed)), set(&[2_000_000, 2_000_400]));
        assert_eq!(labelled(&node("a", &scalable)), set(&[1_000_000, 2_000_000, 2_000_400]));
        // Frequencies that are not needed any more are removed, and a node without a TSC offers none.
        let (own, close, stale) = (key(2_000_000), key(2_000_400), key(5));
        let settled = [fixed[0], (own.as_str(), "true"), (close.as_str(), "true")];
        assert_eq!(labelled(&node("a", &settled)), Value::Null);
        let more: Vec<_> = settled.into_iter().chain([(stale.as_str(), "true")]).collect();
        assert_eq!(labelled(&node("a", &more)), json!({&stale: null}));
        assert_eq!(labelled(&node("a", &[(own.as_str(), "true")])), json!({&own: null}));
        assert!(node("a", &[(own.as_str(), "true")]).has_tsc_labels());
        assert!(!node("a", &[(TSC_SCALABLE, "true")]).has_tsc_labels());
    }
}
