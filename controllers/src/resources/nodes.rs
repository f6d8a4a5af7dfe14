//! Nodes, as far as controllers read them: heartbeat, taints and time stamp counter (TSC).

use std::{collections::HashMap, sync::Mutex};

use api::constants::{annotation, label};
use daemon::lock;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    declaration::Declaration,
    metadata::{keep, slim},
    pods::digest,
};
use crate::{
    cache::{Cached, Seen},
    runtime::Kind,
};

/// Label of a node with the frequency of its TSC in Hz.
pub(crate) const TSC_FREQUENCY: &str = "cpu-timer.node.kubevirt.io/tsc-frequency";
/// Label of a node whose guests can have a lower TSC frequency.
pub(crate) const TSC_SCALABLE: &str = "cpu-timer.node.kubevirt.io/tsc-scalable";

/// Effect of a taint that keeps new pods away.
const NO_SCHEDULE: &str = "NoSchedule";

/// Prefixes of labels about the CPU of a node, which targets of migrations depend on.
const CPU_LABELS: [&str; 3] =
    [label::HOST_MODEL_CPU_PREFIX, label::HOST_MODEL_REQUIRED_FEATURES_PREFIX, label::CPU_VENDOR_PREFIX];

/// Indices of nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NodeIndex {
    /// TSC frequency of nodes that accept VMIs.
    SchedulableTsc(u64),
    /// TSC frequency of nodes that accept no VMIs.
    UnschedulableTsc(u64),
    /// Nodes with labels about a TSC.
    HasTscLabels,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedNode {
    /// Metadata, reduced to names, the heartbeat annotation, the label of its outcome, and those about its counter and its CPU.
    pub metadata: ObjectMeta,
    /// Keys of its taints that keep new pods away.
    pub no_schedule: Vec<String>,
    /// Digests of the labels by which it offers something to VMIs. There are hundreds.
    pub offers: Vec<u64>,
}

impl Cached for CachedNode {
    type Index = NodeIndex;
    reduced!();

    fn indices(&self) -> Vec<NodeIndex> {
        let by_frequency = self.tsc().map(|tsc| {
            let index = if self.is_schedulable() { NodeIndex::SchedulableTsc } else { NodeIndex::UnschedulableTsc };
            index(tsc.frequency)
        });
        by_frequency.into_iter().chain(self.has_tsc_labels().then_some(NodeIndex::HasTscLabels)).collect()
    }
}

impl Declaration for CachedNode {
    type Wire = Node;
    type Kept = Self;
    const WRITTEN: Option<Kind> = Some(Kind::Node);
}

/// The TSC of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tsc {
    /// Frequency in Hz.
    pub frequency: u64,
    /// Guests can have a lower frequency.
    pub is_scalable: bool,
}

impl CachedNode {
    fn label(&self, key: &str) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns the TSC, if the node reports one.
    #[must_use]
    pub(crate) fn tsc(&self) -> Option<Tsc> {
        let frequency = self.label(TSC_FREQUENCY)?.parse::<u64>().ok().filter(|frequency| *frequency > 0)?;
        Some(Tsc { frequency, is_scalable: self.label(TSC_SCALABLE) == Some("true") })
    }

    /// Returns true if the node has this taint, which keeps new pods away.
    #[must_use]
    pub(crate) fn is_tainted(&self, key: &str) -> bool {
        self.no_schedule.iter().any(|known| known == key)
    }

    /// Returns the labels with this prefix, each as the rest of its key and its value.
    pub(crate) fn labels_with<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let labels = self.metadata.labels.iter().flatten();
        labels.filter_map(move |(key, value)| Some((key.strip_prefix(prefix)?, value.as_str())))
    }

    /// Returns true if the node accepts VMIs.
    #[must_use]
    pub(crate) fn is_schedulable(&self) -> bool {
        self.label(label::SCHEDULABLE) == Some("true")
    }

    /// Returns true if the node reports a TSC or is labelled with frequencies.
    #[must_use]
    pub(crate) fn has_tsc_labels(&self) -> bool {
        let mut labels = self.metadata.labels.iter().flatten().map(|(key, _)| key.as_str());
        labels.any(|key| key == TSC_FREQUENCY || key.starts_with(label::TSC_FREQUENCY_PREFIX))
    }
}

impl From<Node> for CachedNode {
    fn from(mut node: Node) -> Self {
        let annotations = keep(node.metadata.annotations.as_ref(), &[annotation::HEARTBEAT]);
        let wanted = |key: &str| {
            [label::SCHEDULABLE, TSC_FREQUENCY, TSC_SCALABLE].contains(&key)
                || key.starts_with(label::TSC_FREQUENCY_PREFIX)
                || CPU_LABELS.iter().any(|prefix| key.starts_with(prefix))
        };
        let offers = node.metadata.labels.iter().flatten();
        let offers = offers.filter(|(key, value)| *value == "true" && label::is_on_nodes(key));
        let offers = offers.map(|(key, _)| digest(key)).collect();
        let labels =
            node.metadata.labels.take().map(|labels| labels.into_iter().filter(|(key, _)| wanted(key)).collect());
        let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
        let no_schedule =
            taints.into_iter().filter(|taint| taint.effect == NO_SCHEDULE).map(|taint| taint.key).collect();
        Self { metadata: ObjectMeta { annotations, labels, ..slim(node.metadata) }, no_schedule, offers }
    }
}

/// Numbers of nodes by the labels that they offer to VMIs.
#[derive(Debug, Default)]
pub(crate) struct Offers(Mutex<HashMap<u64, usize>>);

impl Offers {
    /// Follows a change of a node.
    pub(crate) fn follow(&self, (former, present): Seen<'_, CachedNode>) {
        let [former, present] = [former, present].map(|node| node.map_or(&[][..], |node| &node.offers));
        if former == present {
            return;
        }
        let mut counts = lock(&self.0);
        for key in present {
            *counts.entry(*key).or_default() += 1;
        }
        for key in former {
            if let Some(count) = counts.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(key);
                }
            }
        }
    }

    /// Returns true if a node has this label with the value `true`.
    #[must_use]
    pub(crate) fn has(&self, key: &str) -> bool {
        lock(&self.0).contains_key(&digest(key))
    }

    /// Returns true if a node other than this one has this label with the value `true`.
    #[must_use]
    pub(crate) fn has_apart_from(&self, key: &str, node: Option<&CachedNode>) -> bool {
        let key = digest(key);
        let own = usize::from(node.is_some_and(|node| node.offers.contains(&key)));
        lock(&self.0).get(&key).is_some_and(|count| *count > own)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn label_is_offered_as_long_as_a_node_has_it() {
        let node = |machine: &str, value: &str| {
            let labels = json!({format!("machine-type.node.kubevirt.io/{machine}"): value, "zone": "true"});
            let node = json!({"metadata": {"name": "n", "labels": labels}});
            CachedNode::from(serde_json::from_value::<Node>(node).unwrap())
        };
        let offers = Offers::default();
        let has = |machine: &str| offers.has(&format!("machine-type.node.kubevirt.io/{machine}"));
        let (first, second, other) = (node("q35", "true"), node("q35", "true"), node("pc", "true"));
        offers.follow((None, Some(&first)));
        offers.follow((None, Some(&second)));
        offers.follow((Some(&first), Some(&other)));
        assert!(has("q35") && has("pc"));
        let apart =
            |machine: &str, node| offers.has_apart_from(&format!("machine-type.node.kubevirt.io/{machine}"), node);
        assert!(apart("q35", Some(&other)) && apart("q35", None));
        assert!(!apart("q35", Some(&second)) && !apart("pc", Some(&other)) && !apart("isa", None));
        offers.follow((Some(&second), None));
        assert!(!has("q35") && has("pc") && !offers.has("zone"));
        offers.follow((Some(&other), Some(&node("pc", "false"))));
        assert!(!has("pc"));
    }
}
