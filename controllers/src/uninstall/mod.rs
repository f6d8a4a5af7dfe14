//! The end of the KubeVirt object: a finalizer while workloads need it, and the removal of workloads if it is deleted with the
//! strategy `RemoveWorkloads`.
//!
//! The finalizer is absent while no workload needs it, so that an installation without VMIs can be deleted in any order, also
//! after virt-controller.

mod controller;
#[cfg(test)]
mod tests;

use std::{collections::HashSet, sync::Arc, time::Duration};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    VirtualMachineInstanceReplicaSet, VirtualMachinePool,
    constants::finalizer,
    kubevirt::uninstall::{UninstallStrategy, Workload},
    owner,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub(crate) use self::controller::Uninstall;
use crate::runtime::{Decision, Effect, Event, Kind, has_finalizer};

/// Time after which refused deletions are repeated.
const RETRY: Duration = Duration::from_secs(5);
/// Time after the deletion of the KubeVirt object before workloads are deleted. The policy that permits it reads the object from a
/// cache of the API server, and the time of the deletion is in seconds.
const DELAY: Duration = Duration::from_secs(2);
/// Reason of the event of a refused deletion.
const DELETION_FAILED: &str = "DeletionFailed";

/// Numbers of existing workloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// VMIs.
    pub vmis: usize,
    /// VMs.
    pub vms: usize,
    /// Replica sets.
    pub replica_sets: usize,
}

impl Counts {
    fn of(self, workload: Workload) -> usize {
        match workload {
            Workload::Vmi => self.vmis,
            Workload::Vm => self.vms,
            Workload::ReplicaSet => self.replica_sets,
        }
    }

    fn exist(self, strategy: UninstallStrategy) -> bool {
        strategy.concerned().iter().any(|workload| self.of(*workload) > 0)
    }
}

/// All workloads, which are removed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Workloads {
    /// VMs.
    pub vms: Vec<Arc<VirtualMachine>>,
    /// VMIs.
    pub vmis: Vec<Arc<VirtualMachineInstance>>,
    /// Replica sets.
    pub replica_sets: Vec<Arc<VirtualMachineInstanceReplicaSet>>,
    /// Pools.
    pub pools: Vec<Arc<VirtualMachinePool>>,
    /// Migrations.
    pub migrations: Vec<Arc<VirtualMachineInstanceMigration>>,
}

/// Returns true if the KubeVirt object is deleted together with the workloads.
pub(crate) fn removes_workloads(kubevirt: &KubeVirt) -> bool {
    kubevirt.metadata.deletion_timestamp.is_some()
        && UninstallStrategy::of(&kubevirt.spec) == UninstallStrategy::RemoveWorkloads
}

/// Decides on the finalizer and on the workloads to delete. `workloads` is read only if they are removed.
pub(crate) fn decide(kubevirt: &KubeVirt, counts: Counts, workloads: &Workloads, now: Timestamp) -> Decision {
    let mut decision = Decision::settled();
    let is_held = has_finalizer(&kubevirt.metadata, finalizer::KUBEVIRT);
    let is_deleted = kubevirt.metadata.deletion_timestamp.is_some();
    // A deleted object takes no further finalizers.
    if is_deleted && !is_held {
        return decision;
    }
    let is_needed = if removes_workloads(kubevirt) {
        let deletions = deletions(kubevirt, workloads);
        let deleted_at = kubevirt.metadata.deletion_timestamp.as_ref().map_or(now, |time| time.0);
        let age = Duration::try_from(now.duration_since(deleted_at)).unwrap_or(Duration::ZERO);
        if !deletions.is_empty() {
            decision.wake(if age < DELAY { DELAY.saturating_sub(age) } else { RETRY });
        }
        if age >= DELAY {
            decision.effects = deletions;
        }
        is_left(workloads)
    } else if is_deleted {
        // Admission has decided on everything else.
        counts.vmis > 0
    } else {
        counts.exist(UninstallStrategy::of(&kubevirt.spec))
    };
    let change = Effect::finalizer(Kind::KubeVirt, &kubevirt.metadata, finalizer::KUBEVIRT, is_needed);
    decision.effects.extend(change);
    decision
}

/// Returns the deletions of workloads. VMIs of a VM are left to the VM's controller, which stops them when the VM is deleted, and
/// VMIs of a replica set and VMs of a pool to the garbage collector. A migration ends with its VMI.
fn deletions(kubevirt: &KubeVirt, workloads: &Workloads) -> Vec<Effect> {
    let pools = workloads.pools.iter().map(|pool| (Kind::Pool, &pool.metadata));
    let vms = workloads.vms.iter().map(|vm| (Kind::VirtualMachine, &vm.metadata));
    let sets = workloads.replica_sets.iter().map(|set| (Kind::ReplicaSet, &set.metadata));
    let uids: HashSet<&str> =
        pools.clone().chain(vms.clone()).chain(sets.clone()).filter_map(|(_, meta)| meta.uid.as_deref()).collect();
    let has_owner = |meta: &ObjectMeta| owner::controller(meta).is_some_and(|owner| uids.contains(owner.uid.as_str()));
    let vmis = workloads.vmis.iter().map(|vmi| &vmi.metadata).filter(|meta| !has_owner(meta));
    let vmis = vmis.map(|meta| (Kind::Instance, meta));
    let vms = vms.filter(|(_, meta)| !has_owner(meta));
    let ended = workloads.migrations.iter().filter(|migration| migration.is_final());
    let migrations = ended.map(|migration| (Kind::Migration, &migration.metadata));
    let all = pools.chain(vms).chain(sets).chain(vmis).chain(migrations);
    all.filter(|(_, meta)| meta.deletion_timestamp.is_none())
        .map(|(kind, meta)| {
            let what = format!(
                "An error occurred during deletion: {} {}/{}: {{error}}",
                kind.kind(),
                meta.namespace.as_deref().unwrap_or_default(),
                meta.name.as_deref().unwrap_or_default()
            );
            let failed = Event::warning(Kind::KubeVirt.reference(&kubevirt.metadata), DELETION_FAILED, what);
            Effect::delete(kind, meta).on_failure(failed).independent()
        })
        .collect()
}

/// Returns true if a component has work with a workload. An object that waits only for finalizers of others does not count.
fn is_left(workloads: &Workloads) -> bool {
    let metadata = workloads.vms.iter().map(|vm| &vm.metadata);
    let metadata = metadata.chain(workloads.vmis.iter().map(|vmi| &vmi.metadata));
    let metadata = metadata.chain(workloads.replica_sets.iter().map(|set| &set.metadata));
    let metadata = metadata.chain(workloads.pools.iter().map(|pool| &pool.metadata));
    let mut metadata = metadata.chain(workloads.migrations.iter().map(|migration| &migration.metadata));
    metadata.any(|meta| {
        let ours = |name: &String| finalizer::ALL.contains(&name.as_str());
        meta.deletion_timestamp.is_none() || meta.finalizers.iter().flatten().any(ours)
    })
}
