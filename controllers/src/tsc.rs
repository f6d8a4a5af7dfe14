//! Frequencies of time stamp counters: which one a machine gets, and which nodes can offer it.
//!
//! The agent labels its node with the frequency of its counter, and whether guests may see a lower one. A machine that
//! depends on the counter gets the frequency that most nodes can offer: what the configuration says, else the lowest of
//! all nodes. Nodes are labelled with the frequencies that they can offer among those that somebody needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use api::constants::label;
use serde_json::json;

use crate::{
    runtime::{Effect, Kind},
    views::NodeView,
};

/// Label of a node with the frequency of its counter, in Hz.
pub const OWN_FREQUENCY: &str = "cpu-timer.node.kubevirt.io/tsc-frequency";
/// Label of a node whose guests may see a lower frequency.
pub const SCALABLE: &str = "cpu-timer.node.kubevirt.io/tsc-scalable";
/// Millionths by which a frequency may differ from what a guest was told.
const TOLERANCE: u64 = 250;
/// Most frequencies that are offered: a cluster has a few kinds of nodes.
const MAX_OFFERED: usize = 64;

/// The counter of a node: its frequency, and whether guests may see a lower one.
#[must_use]
pub fn counter(node: &NodeView) -> Option<(u64, bool)> {
    let labels = node.metadata.labels.as_ref()?;
    let frequency = labels.get(OWN_FREQUENCY)?.parse::<u64>().ok().filter(|frequency| *frequency > 0)?;
    Some((frequency, labels.get(SCALABLE).is_some_and(|value| value == "true")))
}

/// What machines that need a frequency look at: the counter of a node, and whether the node takes machines.
#[must_use]
pub fn standing(node: &NodeView) -> Option<((u64, bool), bool)> {
    Some((counter(node)?, takes_machines(node)))
}

fn takes_machines(node: &NodeView) -> bool {
    let labels = node.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(label::SCHEDULABLE)).is_some_and(|value| value == "true")
}

/// Whether a counter can show the guest this frequency.
fn offers((own, scalable): (u64, bool), wanted: u64) -> bool {
    let close = u128::from(own.abs_diff(wanted)) * 1_000_000 <= u128::from(own) * u128::from(TOLERANCE);
    close || (scalable && wanted < own)
}

/// The frequency for a machine that needs one. `occupied` tells whether machines are on a node.
#[must_use]
pub fn chosen(nodes: &[Arc<NodeView>], minimum: Option<i64>, occupied: impl Fn(&str) -> bool) -> Option<i64> {
    if let Some(minimum) = minimum.filter(|minimum| *minimum > 0) {
        return Some(minimum);
    }
    let takes = |node: &NodeView| takes_machines(node) || node.metadata.name.as_deref().is_some_and(&occupied);
    let counters = nodes.iter().map(Arc::as_ref).filter(|node| takes(node)).filter_map(counter);
    counters.map(|(frequency, _)| frequency).min().and_then(|lowest| i64::try_from(lowest).ok())
}

/// True when a node says something of its counter, or was said to offer a frequency.
#[must_use]
pub fn concerns(node: &NodeView) -> bool {
    let mut labels = node.metadata.labels.iter().flatten().map(|(key, _)| key.as_str());
    labels.any(|key| key == OWN_FREQUENCY || key.starts_with(label::TSC_FREQUENCY_PREFIX))
}

/// Puts the labels of a node right: those frequencies of `needed`, and its own, that it can offer.
#[must_use]
pub fn relabel(node: &NodeView, needed: &BTreeSet<u64>) -> Option<Effect> {
    let counter = counter(node);
    let own = counter.map(|(frequency, _)| frequency);
    let offered: BTreeSet<String> = own
        .into_iter()
        .chain(needed.iter().copied())
        .filter(|frequency| counter.is_some_and(|counter| offers(counter, *frequency)))
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
    use serde_json::Value;

    use super::*;

    fn node(name: &str, labels: &[(&str, &str)]) -> Arc<NodeView> {
        let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
        let metadata = json!({"name": name, "resourceVersion": "1", "labels": labels});
        Arc::new(NodeView { metadata: serde_json::from_value(metadata).unwrap() })
    }

    #[test]
    fn machines_get_the_lowest_frequency_of_nodes_that_take_them_or_have_some() {
        let nodes = [
            node("a", &[(OWN_FREQUENCY, "3000"), (label::SCHEDULABLE, "true")]),
            node("b", &[(OWN_FREQUENCY, "2000"), (label::SCHEDULABLE, "false")]),
            node("c", &[(OWN_FREQUENCY, "1000")]),
            node("d", &[(OWN_FREQUENCY, "none"), (label::SCHEDULABLE, "true")]),
        ];
        assert_eq!(chosen(&nodes, None, |_| false), Some(3000));
        assert_eq!(chosen(&nodes, None, |name| name == "b"), Some(2000));
        assert_eq!(chosen(&nodes, Some(7), |_| false), Some(7));
        assert_eq!(chosen(&nodes, Some(0), |_| false), Some(3000));
        assert_eq!(chosen(&nodes[3..], None, |_| true), None);
    }

    #[test]
    fn node_that_comes_to_take_machines_is_news_if_it_has_a_counter() {
        let of = |labels: &[(&str, &str)]| standing(&node("a", labels));
        let (counter, takes) = ((OWN_FREQUENCY, "3000"), (label::SCHEDULABLE, "true"));
        assert_ne!(of(&[counter]), of(&[counter, takes]));
        assert_ne!(of(&[counter, takes]), of(&[counter, takes, (SCALABLE, "true")]));
        assert_eq!(of(&[]), of(&[takes]));
    }

    #[test]
    fn nodes_are_labelled_with_what_they_can_offer_of_what_is_needed() {
        let key = |frequency: u64| format!("scheduling.node.kubevirt.io/tsc-frequency-{frequency}");
        let needed = BTreeSet::from([1_000_000, 2_000_400, 2_000_600, 3_000_000]);
        let (fixed, scalable) = ([(OWN_FREQUENCY, "2000000")], [(OWN_FREQUENCY, "2000000"), (SCALABLE, "true")]);
        let labelled = |node: &NodeView| match relabel(node, &needed) {
            Some(Effect::Patch { kind: Kind::Node, patch, .. }) => patch["metadata"]["labels"].clone(),
            None => Value::Null,
            other => panic!("{other:?}"),
        };
        let set = |frequencies: &[u64]| {
            Value::Object(frequencies.iter().map(|frequency| (key(*frequency), json!("true"))).collect())
        };
        assert_eq!(labelled(&node("a", &fixed)), set(&[2_000_000, 2_000_400]));
        assert_eq!(labelled(&node("a", &scalable)), set(&[1_000_000, 2_000_000, 2_000_400]));
        // What is nobody's need any more goes, and a node that has lost its counter offers nothing.
        let (own, close, stale) = (key(2_000_000), key(2_000_400), key(5));
        let settled = [fixed[0], (own.as_str(), "true"), (close.as_str(), "true")];
        assert_eq!(labelled(&node("a", &settled)), Value::Null);
        let more: Vec<_> = settled.into_iter().chain([(stale.as_str(), "true")]).collect();
        assert_eq!(labelled(&node("a", &more)), json!({&stale: null}));
        assert_eq!(labelled(&node("a", &[(own.as_str(), "true")])), json!({&own: null}));
        assert!(concerns(&node("a", &[(own.as_str(), "true")])) && !concerns(&node("a", &[(SCALABLE, "true")])));
    }
}
