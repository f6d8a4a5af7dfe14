//! VMs with the finalizer of pools that no pool controls: their pool was deleted with `--cascade=orphan`, or by force. Nobody else
//! removes the finalizer.

use std::sync::Arc;

use api::{VirtualMachine, VirtualMachinePool, constants::finalizer};

use crate::{
    cache::Key,
    resources::{
        Caches, Resource, needs,
        pools::{controlling_pool, controls},
        vms::{VmIndex, is_held_by_pool},
    },
    runtime::{Attempt, Controller, Decision, Effect, Kind, Needs, Wake},
};

/// The controller of these VMs.
pub(crate) struct HeldVms;

/// A VM with the finalizer.
pub(crate) struct HeldVm {
    vm: Arc<VirtualMachine>,
    /// The pool that it names as its controller, if that exists.
    pool: Option<Arc<VirtualMachinePool>>,
}

impl Controller for HeldVms {
    const NAME: &'static str = "pool-finalizer";
    const NEEDS: Needs = needs(&[Resource::Pools, Resource::Vms]);
    type Caches = Caches;
    type Observed = HeldVm;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        let woken = wake.clone();
        caches.vms.listen(move |(_, present)| {
            woken.keys(present.filter(|vm| is_held_by_pool(vm)).map(|vm| Key::of(&vm.metadata)));
        });
        let (woken, vms) = (wake.clone(), caches.vms.clone());
        caches.pools.listen(move |(former, present)| {
            let gone = former.filter(|_| present.is_none()).and_then(|pool| pool.metadata.uid.clone());
            woken.keys(gone.into_iter().flat_map(|uid| vms.keys_by(&VmIndex::Pool(uid))));
        });
        let vms = caches.vms.clone();
        wake.at_start(move || vms.keys_by(&VmIndex::HeldByPool));
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<HeldVm> {
        let vm = caches.vms.get(attempt.key).filter(|vm| is_held_by_pool(vm))?;
        let named = controlling_pool(&vm.metadata);
        let pool = named.and_then(|pool| caches.pools.get(&Key::new(attempt.key.namespace.clone(), &*pool.name)));
        Some(HeldVm { vm, pool })
    }

    fn decide(&self, observed: &HeldVm) -> Result<Decision, serde_json::Error> {
        Ok(decide(observed))
    }
}

fn decide(observed: &HeldVm) -> Decision {
    let mut decision = Decision::settled();
    if !observed.pool.as_ref().is_some_and(|pool| controls(pool, &observed.vm.metadata)) {
        let metadata = &observed.vm.metadata;
        decision.effects.extend(Effect::finalizer(Kind::VirtualMachine, metadata, finalizer::POOL, false));
    }
    decision
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn finalizer_is_removed_from_a_vm_without_its_pool() {
        let pool = |uid: &str| {
            let pool = json!({
                "metadata": {"name": "p", "namespace": "n", "uid": uid},
                "spec": {"selector": {}, "virtualMachineTemplate": {}},
            });
            Some(Arc::new(serde_json::from_value(pool).unwrap()))
        };
        let of_pool = json!([{
            "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool", "name": "p", "uid": "p", "controller": true,
        }]);
        for (owners, pool, expected) in [
            (of_pool.clone(), pool("p"), None),
            (of_pool.clone(), pool("of-the-same-name"), Some(json!(["example.com/other"]))),
            (of_pool, None, Some(json!(["example.com/other"]))),
            (json!([]), None, Some(json!(["example.com/other"]))),
        ] {
            let vm = json!({
                "metadata": {
                    "name": "p-0", "namespace": "n", "uid": "v", "resourceVersion": "1", "ownerReferences": owners,
                    "finalizers": ["example.com/other", "pool.kubevirt.io/finalizer"],
                },
                "spec": {"template": {"spec": {"domain": {"devices": {}}}}},
            });
            let decision = decide(&HeldVm { vm: Arc::new(serde_json::from_value(vm).unwrap()), pool });
            let written: Option<Value> = decision.effects.into_iter().next().map(|effect| match effect {
                Effect::Patch { patch, resource_version: Some(_), .. } => patch["metadata"]["finalizers"].clone(),
                other => panic!("{other:?}"),
            });
            assert_eq!(written, expected, "{owners}");
        }
    }
}
