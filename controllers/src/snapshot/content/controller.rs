//! The controller of contents: its watches and observations.

use std::sync::Arc;

use api::owner;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Observed;
use crate::{
    cache::Key,
    resources::{
        Caches,
        vm_snapshots::{ContentIndex, RestoreIndex, vm_key},
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    snapshot::controller::RESOURCES,
    snapshot_class,
};

/// The controller of VirtualMachineSnapshotContents.
pub(crate) struct SnapshotContents;

impl Controller for SnapshotContents {
    const NAME: &'static str = "vm-snapshot-content";
    const SHARDED: bool = true;
    // Most of them wait for guest agents: a freeze takes up to a minute.
    const WORKERS: usize = 64;
    const NEEDS: Needs = RESOURCES;
    type Caches = Caches;
    type Observed = Observed;

    fn vm(caches: &Caches, key: &Key) -> Key {
        // Not that of its snapshot, which another watch may deliver later: a content without one is deleted.
        let content = caches.vm_snapshot_contents.get(key);
        let name = content.and_then(|content| content.spec.source.virtual_machine.as_ref()?.metadata.name.clone());
        name.map_or_else(|| key.clone(), |name| Key::new(key.namespace.as_str(), name))
    }

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vm_snapshot_contents);
        let contents = caches.vm_snapshot_contents.clone();
        wake.on_object(&caches.vm_snapshots, move |snapshot| {
            contents.keys_by(&ContentIndex::Snapshot(Key::of(&snapshot.metadata)))
        });
        let contents = caches.vm_snapshot_contents.clone();
        wake.on_object(&caches.vm_restores, move |restore| {
            let namespace = restore.metadata.namespace.clone().unwrap_or_default();
            let key = Key::new(namespace, restore.spec.virtual_machine_snapshot_name.as_str());
            let contents = restore.is_in_place().then(|| contents.keys_by(&ContentIndex::Snapshot(key)));
            contents.unwrap_or_default()
        });
        let contents = caches.vm_snapshot_contents.clone();
        wake.on_object(&caches.snapshots, move |snapshot| {
            contents.keys_by(&ContentIndex::VolumeSnapshot(Key::of(&snapshot.metadata)))
        });
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let content = caches.vm_snapshot_contents.get(key)?;
        let in_namespace = |name: &str| Key::new(key.namespace.as_str(), name);
        let snapshot = content.spec.virtual_machine_snapshot_name.as_deref();
        let restores = snapshot.map(|name| caches.vm_restores.by(&RestoreIndex::Snapshot(in_namespace(name))));
        let snapshot = snapshot.and_then(|name| caches.vm_snapshots.get(&in_namespace(name)));
        let snapshot = snapshot.filter(|snapshot| snapshot.content_name() == key.name);
        let vm_key = snapshot.as_ref().and_then(|snapshot| vm_key(Some(&key.namespace), &snapshot.spec.source));
        let backups = &content.spec.volume_backups;
        let is_open = content.status.as_ref().is_none_or(|status| status.creation_time.is_none());
        let names = backups.iter().filter_map(|backup| backup.volume_snapshot_name.as_ref());
        let taken = names.filter_map(|name| {
            let known = caches.snapshots.get(&in_namespace(name))?;
            // Those of a former content of the name are about to be deleted.
            let counts = !is_open || owner::is_controlled_by(&known.metadata, &*content);
            counts.then(|| (name.clone(), known))
        });
        // Only volume snapshots that are still to be created depend on them.
        let claims = backups.iter().filter(|_| is_open).filter_map(|backup| {
            let name = backup.persistent_volume_claim.metadata.name.clone()?;
            let claim = caches.claims.get(&in_namespace(&name))?;
            let class = claim.storage_class.as_deref().map_or(Ok(None), |class| snapshot_class::of(caches, class));
            Some((name, (claim, class)))
        });
        Some(Observed {
            vm: vm_key.as_ref().and_then(|key| caches.vms.get(key)),
            vmi: vm_key.as_ref().and_then(|key| caches.vmis.get(key)),
            taken: taken.collect(),
            claims: claims.collect(),
            is_in_use: restores.iter().flatten().any(|restore| restore.is_begun_in_place()),
            snapshot,
            content: content.clone(),
            failures: attempt.failures.clone(),
            now: attempt.now,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.content.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}
