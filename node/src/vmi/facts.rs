//! The parts of a VMI that decisions need, computed once per version of the object.

use std::{
    collections::{BTreeMap, BTreeSet, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
};

use api::{
    VirtualMachineInstance, VmiPhase as Phase,
    constants::{annotation::MIGRATION_PROGRESS, label::MIGRATION_TARGET_NODE_NAME},
    hotplug, resize,
};
use kube::ResourceExt;
use serde::Serialize;

use super::migration_facts::Migration;
use crate::launcher::{Candidates, candidates};

/// Facts of one version of a VMI.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Facts {
    /// UID of the object.
    pub(super) uid: String,
    pub(super) phase: Phase,
    /// Deletion was requested.
    pub(super) deleting: bool,
    /// Grace period of the guest in seconds.
    pub(super) grace: u64,
    /// The pods of this node that may contain the launcher.
    pub(super) pods: Candidates,
    /// Hash of everything that the launcher acts on.
    pub(super) fingerprint: u64,
    /// Hash of the spec.
    pub(super) spec: u64,
    /// The last migration, if it concerns this node.
    pub(super) migration: Option<Migration>,
}

impl Facts {
    /// Computes the facts that hold on `node`.
    pub(super) fn of(vmi: &VirtualMachineInstance, node: &str) -> Self {
        Self {
            uid: vmi.uid().unwrap_or_default(),
            phase: vmi.phase().clone(),
            deleting: vmi.is_deleting(),
            grace: u64::try_from(vmi.grace_seconds()).unwrap_or_default(),
            pods: vmi.status.as_ref().map_or(Candidates::None, |status| candidates(&status.active_pods, node)),
            fingerprint: fingerprint(vmi),
            spec: hash(&resize::admitted(vmi).spec),
            migration: Migration::of(vmi, node),
        }
    }

    /// Returns true if the VMI has ended.
    pub(super) fn is_final(&self) -> bool {
        self.phase.is_final()
    }
}

/// Hashes the parts of the object that a launcher acts on: of the spec, with the size that the domain may have now; of the
/// status, only the controller's data about claims, and which hot-plugged volumes the launcher pod has. virt-handler's other
/// writes must not change the hash.
fn fingerprint(vmi: &VirtualMachineInstance) -> u64 {
    let claims: Vec<_> = vmi
        .status
        .iter()
        .flat_map(|status| &status.volume_status)
        .filter_map(|volume| volume.persistent_volume_claim_info.as_ref().map(|claim| (&volume.name, claim)))
        .collect();
    // A migration in progress is no change of the VMI.
    let annotations = without(&vmi.metadata.annotations, MIGRATION_PROGRESS);
    let labels = without(&vmi.metadata.labels, MIGRATION_TARGET_NODE_NAME);
    hash(&(&resize::admitted(vmi).spec, annotations, labels, claims, handed_over(vmi)))
}

/// Returns the entries of a map but one.
fn without<'a>(map: &'a Option<BTreeMap<String, String>>, left_out: &str) -> Vec<(&'a String, &'a String)> {
    map.iter().flatten().filter(|(key, _)| *key != left_out).collect()
}

/// Returns the hot-plugged volumes that the launcher pod has, as the status shows it.
fn handed_over(vmi: &VirtualMachineInstance) -> BTreeSet<&str> {
    let entries = vmi.status.iter().flat_map(|status| &status.volume_status);
    let entries = entries.filter(|entry| entry.hotplug_volume.is_some() && hotplug::is_handed_over(entry));
    entries.map(|entry| entry.name.as_str()).collect()
}

/// Hashes a value. Hashes are compared within one process only.
fn hash(value: &impl Serialize) -> u64 {
    struct Sink(DefaultHasher);
    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            bytes.hash(&mut self.0);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut sink = Sink(DefaultHasher::new());
    // Cannot fail: the sink takes everything, and the types have no keys that JSON lacks.
    let _ = serde_json::to_writer(&mut sink, value);
    sink.0.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fingerprint_of(labels: Value, volumes: Value) -> u64 {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "uid": "u", "labels": labels},
            "spec": {"domain": {"devices": {}}},
            "status": {"phase": "Running", "volumeStatus": volumes},
        });
        Facts::of(&serde_json::from_value(vmi).unwrap(), "node-1").fingerprint
    }

    #[test]
    fn the_fingerprint_covers_what_launchers_act_on_and_nothing_else() {
        let claim = |size: &str| json!({"claimName": "c", "requests": {"storage": size}});
        let volume = |target: &str, size: &str| json!([{"name": "d", "target": target, "persistentVolumeClaimInfo": claim(size)}]);
        let before = fingerprint_of(json!({}), volume("", "1Gi"));
        assert_eq!(fingerprint_of(json!({}), volume("vda", "1Gi")), before, "written by virt-handler");
        assert_ne!(fingerprint_of(json!({}), volume("", "2Gi")), before, "the claim has grown");
        assert_ne!(fingerprint_of(json!({"team": "blue"}), volume("", "1Gi")), before, "a volume contains labels");
        let target = json!({"kubevirt.io/migrationTargetNodeName": "node-2"});
        assert_eq!(fingerprint_of(target, volume("", "1Gi")), before, "a migration");
        let plugged = |phase: &str| {
            fingerprint_of(json!({}), json!([{"name": "d", "target": "", "phase": phase, "hotplugVolume": {}}]))
        };
        assert_ne!(plugged("Bound"), plugged("MountedToPod"), "the launcher has the volume");
        assert_eq!(plugged("MountedToPod"), plugged("Ready"));
    }
}
