//! VirtualMachines and replica sets with their indices.

use api::{
    VirtualMachine, VirtualMachineInstanceReplicaSet,
    constants::condition,
    instancetype::{
        MatchedKind,
        matcher::{Role, Source, source},
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::claims::claim_name;
use crate::cache::{Cached, Key, trim_meta};

/// Indices of VMs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VmIndex {
    /// Claim that the template names.
    Claim(Key),
    /// Instance type or preference that the VM names.
    Instancetype(MatchedKind, Key),
    /// Copy of an instance type or preference that the VM names.
    Revision(Key),
    /// VMs with an instance type or a preference.
    HasInstancetype,
    /// VMs with condition Failure.
    Failing,
}

impl Cached for VirtualMachine {
    type Index = VmIndex;

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }

    fn indices(&self) -> Vec<VmIndex> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let claims = claim_names(self).into_iter().map(|name| VmIndex::Claim(Key::new(namespace, name)));
        let sources = Role::ALL.into_iter().filter_map(|role| source(self, role)?.ok());
        let sources = sources.map(|source| match source {
            Source::Revision(name) => VmIndex::Revision(Key::new(namespace, name)),
            Source::Object(kind, name) => VmIndex::Instancetype(kind, instancetype_key(kind, namespace, name)),
        });
        let mut indices: Vec<VmIndex> = claims.chain(sources).collect();
        if self.spec.instancetype.is_some() || self.spec.preference.is_some() {
            indices.push(VmIndex::HasInstancetype);
        }
        if self.condition(condition::FAILURE).is_some() {
            indices.push(VmIndex::Failing);
        }
        indices
    }
}

/// Returns the key of an instance type or preference that an object in `namespace` names.
pub(crate) fn instancetype_key(kind: MatchedKind, namespace: &str, name: impl Into<String>) -> Key {
    if kind.is_cluster_wide() { Key::cluster_wide(name) } else { Key::new(namespace, name) }
}

/// Returns the names of the claims behind the template's volumes.
pub(crate) fn claim_names(vm: &VirtualMachine) -> Vec<String> {
    let volumes = vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    volumes.filter_map(claim_name).map(str::to_owned).collect()
}

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

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }

    fn indices(&self) -> Vec<ReplicaSetIndex> {
        let namespace = self.metadata.namespace.clone().unwrap_or_default();
        vec![match required_label(self) {
            Some((key, value)) => ReplicaSetIndex::Selects { namespace, key: key.clone(), value: value.clone() },
            None => ReplicaSetIndex::SelectsByExpressions(namespace),
        }]
    }
}
