//! The restore controller: its watches and observations.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    constants::annotation,
    names,
    snapshot::{content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, target, volumes};
use crate::{
    cache::{Cache, Cached, Key},
    resources::{
        Caches, Resource,
        claims::{CachedClaim, ClaimIndex},
        needs,
        vm_snapshots::{ContentIndex, RestoreIndex},
        vms::VmIndex,
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
};

/// The controller of VirtualMachineRestores.
pub(crate) struct Restores;

/// Returns the key of the restore that made or replaces a claim.
fn restore_of(claim: &CachedClaim) -> Option<Key> {
    let name = claim.metadata.annotations.as_ref()?.get(annotation::RESTORE)?;
    Some(Key::beside(&claim.metadata, name.as_str()))
}

impl Controller for Restores {
    const NAME: &'static str = "restore";
    const SHARDED: bool = true;
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::VmRestores,
        Resource::VmSnapshots,
        Resource::VmSnapshotContents,
        Resource::Snapshots,
        Resource::Vms,
        Resource::Vmis,
        Resource::Claims,
        Resource::DataVolumes,
        Resource::StorageClasses,
        Resource::Revisions,
        Resource::Namespaces,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn vm(caches: &Caches, key: &Key) -> Key {
        let restore = caches.vm_restores.get(key);
        restore.map_or_else(|| key.clone(), |restore| Key::new(key.namespace.as_str(), &*restore.spec.target.name))
    }

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vm_restores);
        let restores = caches.vm_restores.clone();
        wake.on_object(&caches.vms, move |vm| open(&restores, RestoreIndex::Vm(Key::of(&vm.metadata))));
        let restores = caches.vm_restores.clone();
        // The end of a guest lets a restore go on, and a start that came too early ends.
        wake.on(&caches.vmis, move |former, present| {
            let vmi = present.xor(former);
            vmi.map(|vmi| open(&restores, RestoreIndex::Vm(Key::of(&vmi.metadata)))).into_iter().flatten()
        });
        let restores = caches.vm_restores.clone();
        wake.on_object(&caches.vm_snapshots, move |snapshot| {
            open(&restores, RestoreIndex::Snapshot(Key::of(&snapshot.metadata)))
        });
        let restores = caches.vm_restores.clone();
        wake.on_object(&caches.vm_snapshot_contents, move |content| {
            snapshot_of(content).map(|key| open(&restores, RestoreIndex::Snapshot(key))).into_iter().flatten()
        });
        let (restores, contents) = (caches.vm_restores.clone(), caches.vm_snapshot_contents.clone());
        wake.on_object(&caches.snapshots, move |snapshot| {
            let contents = contents.by(&ContentIndex::VolumeSnapshot(Key::of(&snapshot.metadata)));
            let snapshots: Vec<Key> = contents.iter().filter_map(|content| snapshot_of(content)).collect();
            snapshots.into_iter().flat_map(|key| open(&restores, RestoreIndex::Snapshot(key))).collect::<Vec<_>>()
        });
        wake.on_object(&caches.claims, restore_of);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let restore = caches.vm_restores.get(attempt.key)?;
        let own = attempt.key.namespace.clone();
        let key = |name: &str| Key::new(own.clone(), name);
        let target = key(&restore.spec.target.name);
        let snapshot = caches.vm_snapshots.get(&key(&restore.spec.virtual_machine_snapshot_name));
        let content = snapshot.as_ref().and_then(|known| caches.vm_snapshot_contents.get(&key(&known.content_name())));
        let content = content.filter(|content| {
            snapshot_of(content)
                .is_some_and(|key| snapshot.as_ref().is_some_and(|known| key == Key::of(&known.metadata)))
        });
        let claims = caches.claims_named(&own, claim_names(&restore, content.as_deref()));
        let volumes = restore.status.iter().flat_map(|status| &status.deleted_data_volumes).cloned();
        let volumes = volumes.chain(claims.values().filter_map(|claim| Some(claim.data_volume()?.0.to_owned())));
        let restored = restore.status.iter().flat_map(|status| &status.restores);
        let volumes = volumes.chain(restored.filter_map(|restored| restored.data_volume_name.clone()));
        let backups = content.as_deref().into_iter().flat_map(|content| &content.spec.volume_backups);
        let captured_classes =
            backups.filter_map(|backup| backup.persistent_volume_claim.spec.as_ref()?.storage_class_name.clone());
        let classes = claims.values().filter_map(|claim| claim.storage_class.clone()).chain(captured_classes);
        let captured = content.as_ref().and_then(|known| known.spec.source.virtual_machine.as_ref());
        let captured = captured.zip(snapshot.as_ref());
        let copies = captured.map(|(vm, snapshot)| target::copy_names(vm, &snapshot.metadata, &target.name));
        Some(Observed {
            vm: caches.vms.get(&target),
            // After the lease was read, so that a VMI is seen whose pod was created before.
            vmi: caches.vmis.get(&target),
            volume_snapshots: named(volume_snapshots(content.as_deref()), |name| caches.snapshots.get(&key(name))),
            states: caches.claims.by(&ClaimIndex::State(key(&names::label_value(&target.name)))),
            data_volumes: named(volumes, |name| caches.data_volumes.get(&key(name))),
            classes: named(classes, |name| caches.storage_classes.get(&Key::cluster_wide(name))),
            revisions: named(copies.into_iter().flatten(), |name| caches.revisions.get(&key(name))),
            others: claims
                .keys()
                .filter_map(|name| Some((name.clone(), other_vm(caches, &key(name), &target)?)))
                .collect(),
            claims,
            snapshot,
            content,
            failure: attempt.failures.newest().cloned(),
            now: attempt.now,
            restore,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.restore.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

/// Returns another VM that has a claim as disk.
fn other_vm(caches: &Caches, claim: &Key, vm: &Key) -> Option<String> {
    caches.vms.keys_by(&VmIndex::Claim(claim.clone())).into_iter().find(|other| other != vm).map(|other| other.name)
}

/// Returns the restores that have not ended.
fn open(restores: &Cache<VirtualMachineRestore>, index: RestoreIndex) -> Vec<Key> {
    let restores = restores.by(&index);
    restores.iter().filter(|restore| !restore.is_final()).map(|restore| Key::of(&restore.metadata)).collect()
}

/// Returns the key of the snapshot that a content belongs to.
fn snapshot_of(content: &VirtualMachineSnapshotContent) -> Option<Key> {
    let name = content.spec.virtual_machine_snapshot_name.as_deref()?;
    Some(Key::beside(&content.metadata, name))
}

/// Returns the names of the claims of a restore, and of those in the snapshot.
fn claim_names(restore: &VirtualMachineRestore, content: Option<&VirtualMachineSnapshotContent>) -> Vec<String> {
    let own = restore.status.iter().flat_map(|status| &status.restores);
    let holds = own.clone().filter(|_| restore.is_in_place()).map(|restored| volumes::hold_name(restore, restored));
    let own = own.map(|restored| restored.persistent_volume_claim.clone()).chain(holds);
    let backups = content.into_iter().flat_map(|content| &content.spec.volume_backups);
    own.chain(backups.filter_map(|backup| backup.persistent_volume_claim.metadata.name.clone())).collect()
}

fn volume_snapshots(content: Option<&VirtualMachineSnapshotContent>) -> impl Iterator<Item = String> {
    let backups = content.into_iter().flat_map(|content| &content.spec.volume_backups);
    backups.filter_map(|backup| backup.volume_snapshot_name.clone())
}

/// Returns the objects with these names that exist.
fn named<K: Cached>(
    names: impl IntoIterator<Item = String>,
    find: impl Fn(&str) -> Option<Arc<K>>,
) -> BTreeMap<String, Arc<K>> {
    names.into_iter().filter_map(|name| Some((name.clone(), find(&name)?))).collect()
}
