//! VirtualMachineInstances, and the names of other objects in their specs.

use std::collections::BTreeSet;

use api::{
    VirtualMachineInstance, VmiPhase,
    constants::{condition, label},
    names, owner, persistent_state, resize,
    tsc::{self, Need},
    vsock,
};

use super::claims::mounted_claim;
use crate::cache::{Cached, Key};

/// Indices of VMIs. Ranges over an index depend on the order of the first two.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VmiIndex {
    /// Node of a VMI that has not ended.
    Node(String),
    /// Claim that a VMI names and that has not ended.
    Claim(Key),
    /// Label of the claim with the state of a VMI that has not ended, with its namespace.
    State(Key),
    /// Definition of a network that a VMI names and that has not started.
    Network(Key),
    /// UID of the controller.
    Controller(String),
    /// Label of a VMI without a controller.
    OrphanLabel {
        /// Namespace of the VMI.
        namespace: String,
        /// Key of the label.
        key: String,
        /// Value of the label.
        value: String,
    },
    /// Namespace of a VMI without a controller.
    Orphan(String),
    /// Context ID of a VMI that has not ended.
    Cid(u32),
    /// TSC frequency of a VMI that has not ended.
    TscFrequency(i64),
    /// VMIs that have no TSC frequency yet and need one.
    NeedsTscFrequency,
    /// VMIs that have not started.
    Unstarted,
    /// VMIs whose launcher has another version.
    Outdated,
    /// VMIs with a change that only a migration can carry out.
    NeedsMigration,
    /// VMIs that the KubeVirt object counts as outdated.
    CountedAsOutdated,
}

impl Cached for VirtualMachineInstance {
    type Index = VmiIndex;
    whole!();

    fn indices(&self) -> Vec<VmiIndex> {
        let namespace = self.metadata.namespace.clone().unwrap_or_default();
        let mut indices = Vec::new();
        match owner::controller(&self.metadata) {
            Some(controller) => indices.push(VmiIndex::Controller(controller.uid.clone())),
            None => {
                let labels = self.metadata.labels.iter().flatten();
                indices.extend(labels.map(|(key, value)| VmiIndex::OrphanLabel {
                    namespace: namespace.clone(),
                    key: key.clone(),
                    value: value.clone(),
                }));
                indices.push(VmiIndex::Orphan(namespace.clone()));
            }
        }
        if is_outdated(self) {
            indices.push(VmiIndex::Outdated);
        }
        if counts_as_outdated(self) {
            indices.push(VmiIndex::CountedAsOutdated);
        }
        if self.is_final() {
            return indices;
        }
        if needs_migration(self) {
            indices.push(VmiIndex::NeedsMigration);
        }
        indices.extend(node_name(self).map(|name| VmiIndex::Node(name.to_owned())));
        indices.extend(claim_names(self).into_iter().map(|name| VmiIndex::Claim(Key::new(namespace.clone(), name))));
        if persistent_state::is_kept(&self.spec) {
            let name = names::label_value(self.metadata.name.as_deref().unwrap_or_default());
            indices.push(VmiIndex::State(Key::new(namespace.clone(), name)));
        }
        indices.extend(vsock::cid(self).map(VmiIndex::Cid));
        indices.extend(tsc::frequency(self).map(VmiIndex::TscFrequency));
        if needs_tsc_frequency(self) {
            indices.push(VmiIndex::NeedsTscFrequency);
        }
        if is_unstarted(self) {
            let networks = network_names(self).map(|(namespace, name)| VmiIndex::Network(Key::new(namespace, name)));
            indices.extend(networks);
            indices.push(VmiIndex::Unstarted);
        }
        indices
    }
}

kept!(whole VirtualMachineInstance written as Instance);

/// Returns true for a VMI whose launcher has another version.
pub(crate) fn is_outdated(vmi: &VirtualMachineInstance) -> bool {
    vmi.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label::OUTDATED_LAUNCHER_IMAGE))
}

/// Returns true for a VMI with a change that only a migration can carry out.
pub(crate) fn needs_migration(vmi: &VirtualMachineInstance) -> bool {
    let is_too_large = |type_: &str| vmi.condition(type_).is_some_and(resize::needs_another_pod);
    [condition::MIGRATION_REQUIRED, condition::VOLUMES_CHANGE].into_iter().any(|type_| vmi.has_true(type_))
        || [condition::HOT_VCPU_CHANGE, condition::HOT_MEMORY_CHANGE].into_iter().any(is_too_large)
}

/// Returns true for a VMI that the KubeVirt object counts as outdated. As in KubeVirt, one that waits for a migration counts, too,
/// until the migration begins.
pub(crate) fn counts_as_outdated(vmi: &VirtualMachineInstance) -> bool {
    let waits = || *vmi.phase() == VmiPhase::Running && !vmi.is_deleting() && !vmi.is_migrating();
    is_outdated(vmi) || (needs_migration(vmi) && waits())
}

/// Returns true for a VMI without a launcher pod that a scheduler has seen.
pub(crate) fn is_unstarted(vmi: &VirtualMachineInstance) -> bool {
    matches!(vmi.phase(), VmiPhase::Unset | VmiPhase::Pending)
}

/// Returns true until the guest of the VMI runs.
pub(crate) fn is_starting(vmi: &VirtualMachineInstance) -> bool {
    let before =
        matches!(vmi.phase(), VmiPhase::Unset | VmiPhase::Pending | VmiPhase::Scheduling | VmiPhase::Scheduled);
    before && vmi.metadata.deletion_timestamp.is_none()
}

/// Returns true when a TSC frequency must be selected for the VMI.
pub(crate) fn needs_tsc_frequency(vmi: &VirtualMachineInstance) -> bool {
    is_unstarted(vmi) && tsc::need(vmi) != Need::Nothing && tsc::frequency(vmi).is_none()
}

/// Returns the node of a VMI.
pub(crate) fn node_name(vmi: &VirtualMachineInstance) -> Option<&str> {
    vmi.status.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

/// Returns the names of the claims that the launcher pod mounts, or gets while it runs.
pub(crate) fn claim_names(vmi: &VirtualMachineInstance) -> BTreeSet<String> {
    let mounted = vmi.spec.volumes.iter().filter_map(mounted_claim).map(|(name, _)| name);
    mounted.chain(vmi.spec.utility_volumes.iter().map(|volume| volume.claim_name.as_str())).map(str::to_owned).collect()
}

/// Returns the names of the claims behind the volumes of a VMI that are none for the memory of its guest.
pub(crate) fn disk_claims(vmi: &VirtualMachineInstance) -> impl Iterator<Item = &str> {
    let volumes = vmi.spec.volumes.iter().filter(|volume| volume.memory_dump.is_none());
    volumes.filter_map(mounted_claim).map(|(name, _)| name)
}

/// Returns the definitions of the networks that a VMI is connected to, as namespace and name.
pub(crate) fn network_names(vmi: &VirtualMachineInstance) -> impl Iterator<Item = (&str, &str)> {
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    connected_networks(vmi).map(move |(_, multus)| multus.definition(namespace))
}

/// Returns the Multus networks that a VMI is connected to.
pub(crate) fn connected_networks(
    vmi: &VirtualMachineInstance,
) -> impl Iterator<Item = (&api::vmi::network::Network, &api::vmi::network::MultusNetwork)> {
    let spec = &vmi.spec;
    let is_absent = move |name: &str| {
        let mut interfaces = spec.domain.devices.interfaces.iter();
        interfaces.any(|interface| interface.name == name && interface.is_absent())
    };
    spec.networks
        .iter()
        .filter(move |network| !is_absent(&network.name))
        .filter_map(|network| Some((network, network.multus.as_ref()?)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn vmi_counts_as_outdated_by_its_launcher_or_until_its_migration_begins() {
        let old = json!({"metadata": {"labels": {"kubevirt.io/outdatedLauncherImage": ""}}});
        let changed = |type_: &str| json!({"status": {"conditions": [{"type": type_, "status": "True"}]}});
        let required = changed("MigrationRequired");
        let with = |first: &Value, second: Value| {
            let mut both = first.clone();
            json_patch::merge(&mut both, &second);
            both
        };
        let begun = json!({"status": {"migrationState": {"startTimestamp": "2030-01-01T00:00:00Z"}}});
        for (change, counts) in [
            (json!({}), false),
            (old.clone(), true),
            (required.clone(), true),
            (with(&old, required.clone()), true),
            (changed("VolumesChange"), true),
            (changed("AgentConnected"), false),
            (with(&required, begun.clone()), false),
            (with(&old, begun), true),
            (with(&required, json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}})), false),
            (with(&required, json!({"status": {"phase": "Scheduled"}})), false),
        ] {
            let mut vmi = json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "m", "namespace": "n", "uid": "u"},
                "spec": {"domain": {"devices": {}}}, "status": {"phase": "Running"},
            });
            json_patch::merge(&mut vmi, &change);
            let vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
            let indices = vmi.indices().into_iter();
            let count = indices.filter(|index| *index == VmiIndex::CountedAsOutdated).count();
            assert_eq!(count, usize::from(counts), "{change}");
        }
    }
}
