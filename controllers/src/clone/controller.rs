//! The clone controller: its watches and observations.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use api::{VirtualMachine, clone::VirtualMachineClone, constants::annotation, owner};
use daemon::lock;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, clones_vm, restore_name, snapshot_name, target_name};
use crate::{
    cache::Key,
    resources::{Caches, Resource, clones::CloneIndex, needs},
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    silence::Signs,
};

/// The controller of VirtualMachineClones.
#[derive(Default)]
pub(crate) struct Clones {
    /// Objects that clones miss, by the UIDs of the clones.
    missing: Arc<Mutex<Signs>>,
}

/// Returns the key of the clone that controls an object.
fn clone_of(metadata: &ObjectMeta) -> Option<Key> {
    let clone = owner::controller_of_kind::<VirtualMachineClone>(metadata)?;
    Some(Key::beside(metadata, clone.name.clone()))
}

impl Controller for Clones {
    const NAME: &'static str = "clone";
    const SHARDED: bool = true;
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::VmClones,
        Resource::VmRestores,
        Resource::VmSnapshots,
        Resource::VmSnapshotContents,
        Resource::Vms,
        Resource::Claims,
        Resource::Namespaces,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn vm(caches: &Caches, key: &Key) -> Key {
        // Its restore makes the target, and is complete only after that.
        let clone = caches.vm_clones.get(key);
        clone.map_or_else(|| key.clone(), |clone| Key::new(key.namespace.as_str(), target_name(&clone)))
    }

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vm_clones);
        let missing = self.missing.clone();
        caches.vm_clones.listen(move |(former, present)| {
            lock(&missing).forget_gone(former.map(|clone| &clone.metadata), present.map(|clone| &clone.metadata));
        });
        let clones = caches.vm_clones.clone();
        wake.on(&caches.vms, move |former, present| {
            // A VM changes often. Its clones wait for this alone.
            let snapshots = |vm: Option<&VirtualMachine>| {
                vm.map(|vm| vm.status.as_ref().map(|status| status.volume_snapshot_statuses.clone()))
            };
            let key = present.or(former).map(|vm| Key::of(&vm.metadata));
            let source = key.clone().filter(|_| snapshots(former) != snapshots(present)).map(CloneIndex::Source);
            let target = key.filter(|_| former.is_none() || present.is_none()).map(CloneIndex::Target);
            let indices = source.into_iter().chain(target);
            indices.flat_map(|index| clones.keys_by(&index)).collect::<Vec<_>>()
        });
        let clones = caches.vm_clones.clone();
        wake.on_object(&caches.vm_snapshots, move |snapshot| {
            let named = clones.keys_by(&CloneIndex::Snapshot(Key::of(&snapshot.metadata)));
            clone_of(&snapshot.metadata).into_iter().chain(named)
        });
        let (clones, snapshots) = (caches.vm_clones.clone(), caches.vm_snapshots.clone());
        wake.on_object(&caches.vm_snapshot_contents, move |content| {
            let name = content.spec.virtual_machine_snapshot_name.as_deref();
            let key = name.map(|name| Key::beside(&content.metadata, name));
            let own = key.as_ref().and_then(|key| clone_of(&snapshots.get(key)?.metadata));
            let named = key.map(|key| clones.keys_by(&CloneIndex::Snapshot(key)));
            own.into_iter().chain(named.into_iter().flatten()).collect::<Vec<_>>()
        });
        wake.on_object(&caches.vm_restores, |restore| clone_of(&restore.metadata));
        let clones = caches.vm_clones.clone();
        wake.on_object(&caches.claims, move |claim| {
            let name = claim.metadata.annotations.as_ref().and_then(|all| all.get(annotation::RESTORE));
            let restore = name.map(|name| CloneIndex::Restore(Key::beside(&claim.metadata, name.as_str())));
            restore.map(|restore| clones.keys_by(&restore)).into_iter().flatten()
        });
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let clone = caches.vm_clones.get(attempt.key)?;
        let own = attempt.key.namespace.clone();
        let key = |name: &str| Key::new(own.clone(), name);
        let source = clone.spec.source.as_ref().filter(|_| clones_vm(&clone));
        let snapshot = caches.vm_snapshots.get(&key(&snapshot_name(&clone)));
        let content = snapshot.as_ref().and_then(|known| caches.vm_snapshot_contents.get(&key(&known.content_name())));
        let restore = caches.vm_restores.get(&key(&restore_name(&clone)));
        let restore = restore.filter(|restore| owner::is_controlled_by(&restore.metadata, &*clone));
        let restored = restore.iter().filter_map(|restore| restore.status.as_ref()).flat_map(|status| &status.restores);
        let claims: Vec<String> = restored.map(|restored| restored.persistent_volume_claim.clone()).collect();
        let mut observed = Observed {
            source: source.and_then(|source| caches.vms.get(&key(&source.name))),
            target: caches.vms.get(&key(&target_name(&clone))),
            claims: caches.claims_named(&own, claims),
            snapshot,
            content,
            restore,
            missing_for: None,
            failure: attempt.failures.newest().cloned(),
            now: attempt.now,
            clone,
        };
        let uid = observed.clone.metadata.uid.as_deref().unwrap_or_default();
        observed.missing_for = lock(&self.missing).note(uid, observed.missing(), Instant::now());
        Some(observed)
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.clone.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}
