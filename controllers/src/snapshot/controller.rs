//! The snapshot controller: its watches and observations.

use std::sync::Arc;

use api::{VirtualMachine, owner, snapshot::VirtualMachineSnapshot};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, source};
use crate::{
    cache::Key,
    data_volumes::DataVolumes,
    resources::{
        Caches, Resource, needs,
        vm_snapshots::{RestoreIndex, SnapshotIndex, vm_key},
        vms::VmIndex,
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
};

/// The controller of VirtualMachineSnapshots.
pub(crate) struct Snapshots;

/// Resources of snapshots and of their contents.
pub(super) const RESOURCES: Needs = needs(&[
    Resource::Vms,
    Resource::Vmis,
    Resource::Claims,
    Resource::DataVolumes,
    Resource::Namespaces,
    Resource::Snapshots,
    Resource::SnapshotClasses,
    Resource::StorageClasses,
    Resource::StorageProfiles,
    Resource::VmSnapshots,
    Resource::VmSnapshotContents,
    Resource::VmRestores,
]);

impl Controller for Snapshots {
    const NAME: &'static str = "vm-snapshot";
    const SHARDED: bool = true;
    const WORKERS: usize = 3;
    const NEEDS: Needs = RESOURCES;
    type Caches = Caches;
    type Observed = Observed;

    fn vm(caches: &Caches, key: &Key) -> Key {
        let snapshot = caches.vm_snapshots.get(key);
        let vm = snapshot.and_then(|snapshot| vm_key(Some(&key.namespace), &snapshot.spec.source));
        vm.unwrap_or_else(|| key.clone())
    }

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vm_snapshots);
        wake.on_object(&caches.vm_snapshot_contents, |content| {
            let snapshot = content.spec.virtual_machine_snapshot_name.clone();
            snapshot.map(|name| Key::beside(&content.metadata, name))
        });
        wake.on_object(&caches.vm_restores, |restore| {
            let key = Key::beside(&restore.metadata, restore.spec.virtual_machine_snapshot_name.as_str());
            restore.is_in_place().then_some(key)
        });
        let of_vm = |caches: &Arc<Caches>| {
            let caches = caches.clone();
            move |meta: &ObjectMeta| open(&caches, &Key::of(meta))
        };
        let keys = of_vm(caches);
        wake.on_object(&caches.vms, move |vm| keys(&vm.metadata));
        let keys = of_vm(caches);
        wake.on_object(&caches.vmis, move |vmi| keys(&vmi.metadata));
        let of_claim = |caches: &Arc<Caches>| {
            let caches = caches.clone();
            move |meta: &ObjectMeta| {
                let mut vms = caches.vms.keys_by(&VmIndex::Claim(Key::of(meta)));
                vms.extend(vm_of_state(&caches, &Key::of(meta)));
                vms.iter().flat_map(|vm| open(&caches, vm)).collect::<Vec<_>>()
            }
        };
        let keys = of_claim(caches);
        wake.on_object(&caches.claims, move |claim| keys(&claim.metadata));
        let keys = of_claim(caches);
        wake.on_object(&caches.claim_users, move |users| keys(&users.metadata));
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let snapshot = caches.vm_snapshots.get(key)?;
        let uid = snapshot.status.as_ref().and_then(|status| status.source_uid.as_ref());
        let vm_key = vm_key(Some(&key.namespace), &snapshot.spec.source);
        let vm = vm_key.as_ref().and_then(|key| caches.vms.get(key));
        let vm = vm.filter(|vm| uid.is_none_or(|uid| vm.metadata.uid.as_ref() == Some(uid)));
        let vmi = vm_key.as_ref().and_then(|key| caches.vmis.get(key));
        let content = caches.vm_snapshot_contents.get(&Key::new(key.namespace.as_str(), snapshot.content_name()));
        // Only a snapshot without content depends on them.
        let is_open = !snapshot.is_final() && content.is_none();
        let volumes = vm.as_deref().filter(|_| is_open).map(|vm| source::volumes(caches, vm, vmi.as_deref()));
        let mut volumes = volumes.unwrap_or_default();
        volumes.retain(|volume| snapshot.excluded_volumes().all(|name| name != volume.name));
        let has_state = |vm: &&VirtualMachine| source::state_claim(caches, vm, vmi.as_deref()).is_some();
        // It is recorded when the snapshot is complete: the VM can get or lose it afterwards.
        let state = vm.as_deref().filter(|_| !snapshot.is_final()).filter(has_state).map(source::state_volume);
        let names: Vec<String> = volumes.iter().map(|volume| volume.claim.clone()).collect();
        let claims = caches.claims_named(&key.namespace, names.iter().cloned());
        let restores = caches.vm_restores.by(&RestoreIndex::Snapshot(key.clone()));
        Some(Observed {
            is_in_use: restores.iter().any(|restore| restore.is_begun_in_place()),
            data_volumes: DataVolumes::of(caches, &key.namespace, &claims, names),
            snapshot,
            vm,
            vmi,
            content,
            volumes,
            state,
            failures: attempt.failures.clone(),
            now: attempt.now,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.snapshot.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

/// Returns the VM whose state a claim has. The name in its label may be shortened, but such a claim is owned by its VM.
fn vm_of_state(caches: &Caches, claim: &Key) -> Option<Key> {
    let claim = caches.claims.get(claim)?;
    let label = claim.state_of.as_deref()?;
    let owner = owner::controller_of_kind::<VirtualMachine>(&claim.metadata).map(|owner| owner.name.as_str());
    Some(Key::beside(&claim.metadata, owner.unwrap_or(label)))
}

/// Returns the snapshots of a VM that have not ended.
fn open(caches: &Caches, vm: &Key) -> Vec<Key> {
    let snapshots = caches.vm_snapshots.by(&SnapshotIndex::Vm(vm.clone()));
    let is_open = |snapshot: &&Arc<VirtualMachineSnapshot>| {
        !snapshot.is_final() || snapshot.metadata.deletion_timestamp.is_some()
    };
    snapshots.iter().filter(is_open).map(|snapshot| Key::of(&snapshot.metadata)).collect()
}
