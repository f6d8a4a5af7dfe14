//! Nodes, as far as controllers read them: heartbeat, taints and time stamp counter (TSC).

use api::constants::{annotation, label};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::metadata::{keep, slim};
use crate::cache::Cached;

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
}

impl Cached for CachedNode {
    type Index = NodeIndex;

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn indices(&self) -> Vec<NodeIndex> {
        let by_frequency = self.tsc().map(|tsc| {
            let index = if self.is_schedulable() { NodeIndex::SchedulableTsc } else { NodeIndex::UnschedulableTsc };
            index(tsc.frequency)
        });
        by_frequency.into_iter().chain(self.has_tsc_labels().then_some(NodeIndex::HasTscLabels)).collect()
    }
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
        let labels =
            node.metadata.labels.take().map(|labels| labels.into_iter().filter(|(key, _)| wanted(key)).collect());
        let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
        let no_schedule =
            taints.into_iter().filter(|taint| taint.effect == NO_SCHEDULE).map(|taint| taint.key).collect();
        Self { metadata: ObjectMeta { annotations, labels, ..slim(node.metadata) }, no_schedule }
    }
}
