//! The volume snapshots of a content.

use api::{
    constants::{event, label},
    names::label_value,
    snapshot::content::VolumeBackup,
};
use serde_json::{Value, json};

use super::{ATTEMPTS, Observed};
use crate::runtime::{Decision, Effect, Kind, WriteOptions};

/// Creates those that are missing.
pub(super) fn create(observed: &Observed, decision: &mut Decision) {
    if decision.must_wait(&observed.failures, event::FAILED_VOLUME_SNAPSHOT_CREATE, observed.now) {
        return;
    }
    let content = &observed.content.metadata;
    let regarding = || Kind::VmSnapshotContent.reference(content);
    for (backup, name) in observed.missing() {
        let Ok(class) = class(observed, backup) else { continue };
        let created = "Successfully created VolumeSnapshot {name}";
        let failed = format!("Error creating VolumeSnapshot {name}: {{error}}");
        decision.push(
            Effect::Create {
                kind: Kind::VolumeSnapshot,
                namespace: content.namespace.clone(),
                object: manifest(observed, backup, name, &class),
                options: WriteOptions::default(),
            }
            .reported(
                regarding(),
                (event::SUCCESSFUL_VOLUME_SNAPSHOT_CREATE, created),
                (event::FAILED_VOLUME_SNAPSHOT_CREATE, failed),
            ),
        );
    }
}

fn manifest(observed: &Observed, backup: &VolumeBackup, name: &str, class: &str) -> Value {
    let content = &observed.content;
    let vm = content.spec.source.virtual_machine.as_ref().map(|vm| &vm.metadata);
    let vm_name = vm.and_then(|vm| vm.name.as_deref()).unwrap_or_default();
    json!({
        "apiVersion": Kind::VolumeSnapshot.api_version(),
        "kind": Kind::VolumeSnapshot.kind(),
        "metadata": {
            "name": name,
            "namespace": content.metadata.namespace,
            "labels": {
                label::SNAPSHOT_SOURCE_NAME: label_value(vm_name),
                label::SNAPSHOT_SOURCE_NAMESPACE: content.metadata.namespace,
            },
            "ownerReferences": [Kind::VmSnapshotContent.owner_reference(&content.metadata)],
        },
        "spec": {
            "source": {"persistentVolumeClaimName": backup.persistent_volume_claim.metadata.name},
            "volumeSnapshotClassName": class,
        },
    })
}

/// Returns the class of the snapshot of a claim, or why there is none. Another claim under the name is not snapshotted.
fn class(observed: &Observed, backup: &VolumeBackup) -> Result<String, String> {
    let known = &backup.persistent_volume_claim.metadata;
    let name = known.name.as_deref().unwrap_or_default();
    let namespace = observed.content.metadata.namespace.as_deref().unwrap_or_default();
    let found = observed.claims.get(name).filter(|(claim, _)| claim.metadata.uid == known.uid);
    let (_, class) = found.ok_or_else(|| format!("PVC {namespace}/{name} no longer exists"))?;
    let class = class.clone()?;
    class.ok_or_else(|| format!("{namespace}/{name} VolumeSnapshot requested but no storage class"))
}

/// Returns why one that is missing cannot be created now. The guest does not stand still for it.
pub(super) fn obstacle(observed: &Observed) -> Option<String> {
    observed.missing().into_iter().find_map(|(backup, _)| class(observed, backup).err())
}

/// Returns why volume snapshots cannot be created. The first refusals can be of a moment, and have events.
pub(super) fn error(observed: &Observed) -> Option<String> {
    let refused = observed.failures.of(event::FAILED_VOLUME_SNAPSHOT_CREATE);
    let refused = refused.filter(|failure| failure.attempts >= ATTEMPTS);
    let refused = refused.map(|failure| format!("cannot create VolumeSnapshots: {}", failure.message));
    obstacle(observed).or(refused)
}
