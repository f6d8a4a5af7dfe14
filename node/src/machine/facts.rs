//! What the decisions about a machine need from its VirtualMachineInstance, read once per version of it.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
};

use api::{VirtualMachineInstance, VmiPhase as Phase};
use kube::ResourceExt;

use crate::launcher::{Candidates, candidates};

/// Grace period where the object says nothing: the cluster default, in seconds.
const DEFAULT_GRACE: u64 = 30;

/// Facts of one version of a VirtualMachineInstance.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// UID of the object.
    pub uid: String,
    /// Its phase.
    pub phase: Phase,
    /// Somebody asked for its deletion.
    pub deleting: bool,
    /// Seconds the guest has for its shutdown.
    pub grace: u64,
    /// The pods of this node that may hold its launcher.
    pub pods: Candidates,
    /// Stands for everything that the launcher is told about the machine; changes when that changes.
    pub fingerprint: u64,
}

impl Facts {
    /// Reads the facts that hold on `node`.
    pub fn of(vmi: &VirtualMachineInstance, node: &str) -> Self {
        Self {
            uid: vmi.uid().unwrap_or_default(),
            phase: vmi.phase().clone(),
            deleting: vmi.is_deleting(),
            grace: grace(vmi),
            pods: vmi.status.as_ref().map_or(Candidates::None, |status| candidates(&status.active_pods, node)),
            fingerprint: fingerprint(vmi),
        }
    }

    /// The machine has ended for good.
    pub fn is_final(&self) -> bool {
        self.phase.is_final()
    }
}

fn grace(vmi: &VirtualMachineInstance) -> u64 {
    match vmi.spec.termination_grace_period_seconds {
        Some(seconds) => u64::try_from(seconds).unwrap_or(0),
        None => DEFAULT_GRACE,
    }
}

/// Hash of the parts of the object that a launcher acts on. Only compared within one process.
fn fingerprint(vmi: &VirtualMachineInstance) -> u64 {
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
    // Of the status only what the controller says of claims: what the agent itself writes there must not count.
    let claims: Vec<_> = vmi
        .status
        .iter()
        .flat_map(|status| &status.volume_status)
        .filter_map(|volume| volume.persistent_volume_claim_info.as_ref().map(|claim| (&volume.name, claim)))
        .collect();
    // Writing into a hash cannot fail, and the types have no keys that JSON lacks; a failure would only cause
    // one synchronization more or less.
    let _ = serde_json::to_writer(&mut sink, &(&vmi.spec, &vmi.metadata.annotations, &vmi.metadata.labels, claims));
    sink.0.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn stands_for(labels: Value, volumes: Value) -> u64 {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "uid": "u", "labels": labels},
            "spec": {"domain": {"devices": {}}},
            "status": {"phase": "Running", "volumeStatus": volumes},
        });
        Facts::of(&serde_json::from_value(vmi).unwrap(), "node-1").fingerprint
    }

    #[test]
    fn launchers_are_told_what_they_act_on_and_nothing_else() {
        let claim = |size: &str| json!({"claimName": "c", "requests": {"storage": size}});
        let volume = |target: &str, size: &str| json!([{"name": "d", "target": target, "persistentVolumeClaimInfo": claim(size)}]);
        let before = stands_for(json!({}), volume("", "1Gi"));
        assert_eq!(stands_for(json!({}), volume("vda", "1Gi")), before, "what the agent writes itself");
        assert_ne!(stands_for(json!({}), volume("", "2Gi")), before, "a claim has grown");
        assert_ne!(stands_for(json!({"team": "blue"}), volume("", "1Gi")), before, "a label is shown in a volume");
    }
}
