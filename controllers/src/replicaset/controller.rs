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

/// Everything in the caches that a decision about a replica set depends on.
pub(crate) struct Snapshot {
    set: Arc<VirtualMachineInstanceReplicaSet>,
    /// VMIs of the set, and VMIs without a controller that it may select.
    vmis: BTreeMap<Key, Arc<VirtualMachineInstance>>,
}

impl Controller for ReplicaSets {
    const NAME: &'static str = "replicaset";
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[Resource::ReplicaSets, Resource::Vmis, Resource::Namespaces]);
    type Caches = Caches;
    type Snapshot = Snapshot;

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

    fn observe(&self, caches: &Caches, key: &Key) -> Option<Snapshot> {
        let set = caches.replica_sets.get(key)?;
        let namespace = key.namespace.clone();
        let orphans = match required_label(&set) {
            Some((key, value)) => VmiIndex::OrphanLabel { namespace, key: key.clone(), value: value.clone() },
            None => VmiIndex::Orphan(namespace),
        };
        let owned = caches.vmis.by(&VmiIndex::Controller(set.metadata.uid.clone().unwrap_or_default()));
        let vmis = owned.into_iter().chain(caches.vmis.by(&orphans));
        let vmis = vmis.filter(|vmi| vmi.metadata.namespace.as_deref() == Some(key.namespace.as_str()));
        Some(Snapshot { vmis: vmis.map(|vmi| (Key::of(&vmi.metadata), vmi)).collect(), set })
    }

    fn decide(&self, snapshot: &Snapshot, attempt: &Attempt<'_>) -> Result<Decision, serde_json::Error> {
        let instances: Vec<_> = snapshot.vmis.values().cloned().collect();
        super::decide(&Observed {
            set: &snapshot.set,
            instances: &instances,
            failure: attempt.failure,
            now: attempt.now,
        })
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
