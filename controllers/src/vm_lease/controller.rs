//! VMs with a lease whose holder has ended or is gone, or with the finalizer of snapshots without one.

use std::sync::Arc;

use api::{
    VirtualMachine, VmOperation,
    snapshot::{VirtualMachineSnapshot, restore::VirtualMachineRestore},
};

use super::{has_finalizer, is_of_snapshot, release};
use crate::{
    cache::{Cache, Cached, Key},
    resources::{
        Caches, Resource, needs,
        vm_snapshots::vm_key,
        vms::{VmIndex, is_leased},
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
};

/// The controller of these VMs.
pub(crate) struct VmLeases;

/// A VM with the lease or the finalizer.
pub(crate) struct Leased {
    vm: Arc<VirtualMachine>,
    /// The holder exists, is the one that the lease names, and has not ended.
    is_valid: bool,
}

impl Controller for VmLeases {
    const NAME: &'static str = "vm-lease";
    const SHARDED: bool = true;
    const NEEDS: Needs = needs(&[Resource::Vms, Resource::VmSnapshots, Resource::VmRestores]);
    type Caches = Caches;
    type Observed = Leased;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.on_object(&caches.vms, |vm| is_leased(vm).then(|| Key::of(&vm.metadata)));
        wake.on_object(&caches.vm_snapshots, |snapshot| {
            vm_key(snapshot.metadata.namespace.as_ref(), &snapshot.spec.source)
        });
        wake.on_object(&caches.vm_restores, |restore| {
            vm_key(restore.metadata.namespace.as_ref(), &restore.spec.target)
        });
        let vms = caches.vms.clone();
        wake.at_start(move || vms.keys_by(&VmIndex::Leased));
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Leased> {
        let vm = caches.vms.get(attempt.key).filter(|vm| is_leased(vm))?;
        Some(Leased { is_valid: is_valid(caches, &vm), vm })
    }

    fn decide(&self, observed: &Leased) -> Result<Decision, serde_json::Error> {
        Ok(decide(observed))
    }
}

/// Returns true if the holder of a lease exists and has not ended. Operations without an object of their own are the VM controller's.
fn is_valid(caches: &Caches, vm: &VirtualMachine) -> bool {
    let Some(lease) = vm.status.as_ref().and_then(|status| status.operation.as_ref()) else { return false };
    let key = Key::beside(&vm.metadata, lease.name.as_str());
    match lease.operation {
        VmOperation::Snapshot => holds(&caches.vm_snapshots, &key, &lease.uid, VirtualMachineSnapshot::is_final),
        VmOperation::Restore => holds(&caches.vm_restores, &key, &lease.uid, VirtualMachineRestore::is_final),
        _ => true,
    }
}

fn holds<K: Cached>(cache: &Cache<K>, key: &Key, uid: &str, is_final: impl Fn(&K) -> bool) -> bool {
    cache.get(key).is_some_and(|object| object.meta().uid.as_deref() == Some(uid) && !is_final(&object))
}

fn decide(observed: &Leased) -> Decision {
    let mut decision = Decision::settled();
    let (vm, status) = (&*observed.vm, observed.vm.status.as_ref());
    let lease = status.and_then(|status| status.operation.as_ref()).filter(|_| !observed.is_valid);
    if lease.is_some() || (has_finalizer(vm) && !is_of_snapshot(status)) {
        decision.effects.extend(release(vm, lease.map(|lease| lease.uid.as_str()).unwrap_or_default()));
    }
    decision
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::runtime::Effect;

    #[test]
    fn lease_ends_with_its_holder() {
        let snapshot =
            json!({"operation": {"operation": "Snapshot", "name": "s", "uid": "u"}, "snapshotInProgress": "s"});
        let restore = json!({"operation": {"operation": "Restore", "name": "r", "uid": "u"}, "restoreInProgress": "r"});
        let held = json!(["example.com/other", "snapshot.kubevirt.io/snapshot-source-protection"]);
        let other = json!(["example.com/other"]);
        // Lease and finalizers of the VM, validity of the holder, finalizers and lease that are written.
        for (status, finalizers, is_valid, written) in [
            (&snapshot, &held, true, vec![]),
            (&snapshot, &held, false, vec![other.clone(), Value::Null]),
            (&snapshot, &other, false, vec![Value::Null]),
            (&restore, &other, true, vec![]),
            (&restore, &held, true, vec![other.clone()]),
            (&restore, &other, false, vec![Value::Null]),
            (&Value::Null, &held, false, vec![other.clone()]),
        ] {
            let vm = json!({
                "metadata": {"name": "v", "namespace": "n", "uid": "v", "resourceVersion": "1", "finalizers": finalizers},
                "spec": {"template": {}}, "status": status,
            });
            let vm: Arc<VirtualMachine> = Arc::new(serde_json::from_value(vm).unwrap());
            let effects = decide(&Leased { vm, is_valid }).effects;
            let patches = effects.into_iter().map(|effect| match effect {
                Effect::Patch { patch, subresource: Some(_), .. } => patch["status"]["operation"].clone(),
                Effect::Patch { patch, .. } => patch["metadata"]["finalizers"].clone(),
                other => panic!("{other:?}"),
            });
            assert_eq!(patches.collect::<Vec<_>>(), written, "{status} {finalizers} {is_valid}");
        }
    }
}
