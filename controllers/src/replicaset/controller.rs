//! The replica set controller: its watches and observations.

use std::{collections::BTreeMap, sync::Arc};

use api::{VirtualMachineInstance, VirtualMachineInstanceReplicaSet, owner};

use super::Observed;
use crate::{
    cache::{Cache, Key},
    resources::{
        Caches, Resource, needs,
        replica_sets::{ReplicaSetIndex, required_label},
        vmis::VmiIndex,
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
};

/// The controller of VirtualMachineInstanceReplicaSets.
pub(crate) struct ReplicaSets;

impl ReplicaSets {
    /// Creates the controller.
    pub(crate) fn new() -> Self {
        Self
    }
}

impl Controller for ReplicaSets {
    const NAME: &'static str = "replicaset";
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[Resource::ReplicaSets, Resource::Vmis, Resource::Namespaces]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.replica_sets);
        let (woken, sets) = (wake.clone(), caches.replica_sets.clone());
        caches.vmis.listen(move |(former, present)| {
            for vmi in [former, present].into_iter().flatten() {
                let namespace = vmi.metadata.namespace.clone().unwrap_or_default();
                match owner::controller(&vmi.metadata) {
                    Some(_) => {
                        let owner = owner::controller_of_kind::<VirtualMachineInstanceReplicaSet>(&vmi.metadata);
                        woken.keys(owner.map(|owner| Key::new(namespace, owner.name.clone())));
                    }
                    None => woken.keys(selecting(&sets, &namespace, vmi)),
                }
            }
        });
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let set = caches.replica_sets.get(key)?;
        let namespace = key.namespace.clone();
        let orphans = match required_label(&set) {
            Some((key, value)) => VmiIndex::OrphanLabel { namespace, key: key.clone(), value: value.clone() },
            None => VmiIndex::Orphan(namespace),
        };
        let owned = caches.vmis.by(&VmiIndex::Controller(set.metadata.uid.clone().unwrap_or_default()));
        let vmis = owned.into_iter().chain(caches.vmis.by(&orphans));
        let vmis = vmis.filter(|vmi| vmi.metadata.namespace.as_deref() == Some(key.namespace.as_str()));
        // In the order of their names, and each once.
        let instances: BTreeMap<Key, Arc<VirtualMachineInstance>> =
            vmis.map(|vmi| (Key::of(&vmi.metadata), vmi)).collect();
        Some(Observed {
            set,
            instances: instances.into_values().collect(),
            failures: attempt.failures.clone(),
            now: attempt.now,
        })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

/// Returns the replica sets that may select a VMI.
fn selecting(
    sets: &Cache<VirtualMachineInstanceReplicaSet>,
    namespace: &str,
    vmi: &VirtualMachineInstance,
) -> Vec<Key> {
    let labels = vmi.metadata.labels.iter().flatten();
    let by_label = labels.map(|(key, value)| ReplicaSetIndex::Selects {
        namespace: namespace.to_owned(),
        key: key.clone(),
        value: value.clone(),
    });
    let by_expression = ReplicaSetIndex::SelectsByExpressions(namespace.to_owned());
    by_label.chain([by_expression]).flat_map(|index| sets.keys_by(&index)).collect()
}
