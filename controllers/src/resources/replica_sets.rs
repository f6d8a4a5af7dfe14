//! VirtualMachineInstanceReplicaSets.

use api::VirtualMachineInstanceReplicaSet;

use crate::cache::Cached;

/// Indices of replica sets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReplicaSetIndex {
    /// Label that a VMI must have to be selected. One of several is enough.
    Selects {
        /// Namespace of the replica set.
        namespace: String,
        /// Key of the label.
        key: String,
        /// Value of the label.
        value: String,
    },
    /// Namespace of a replica set that requires no certain label.
    SelectsByExpressions(String),
}

/// Returns the first label that a replica set requires.
pub(crate) fn required_label(set: &VirtualMachineInstanceReplicaSet) -> Option<(&String, &String)> {
    set.spec.selector.match_labels.as_ref()?.iter().next()
}

impl Cached for VirtualMachineInstanceReplicaSet {
    type Index = ReplicaSetIndex;
    whole!();

    fn indices(&self) -> Vec<ReplicaSetIndex> {
        let namespace = self.metadata.namespace.clone().unwrap_or_default();
        vec![match required_label(self) {
            Some((key, value)) => ReplicaSetIndex::Selects { namespace, key: key.clone(), value: value.clone() },
            None => ReplicaSetIndex::SelectsByExpressions(namespace),
        }]
    }
}

kept!(whole VirtualMachineInstanceReplicaSet written as ReplicaSet);
