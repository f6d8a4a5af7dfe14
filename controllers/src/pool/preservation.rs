//! Disks that outlive their VM, and the finalizer that keeps the VM until they are detached. VMs of a pool that preserves nothing
//! have no finalizer.

use std::time::Duration;

use api::{constants::finalizer, owner, pool::VirtualMachinePoolSpec};
use jiff::Timestamp;
use serde_json::json;

use super::{Member, Observed};
use crate::{
    resources::vms::is_held_by_pool,
    runtime::{Decision, Effect, Event, Kind},
};

/// Shortest and longest time after which disks are expected to be detached, and refused writes are repeated.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The same for VMs that nobody deletes.
const RETRY_OF_OTHERS: Duration = Duration::from_secs(5);
const FAILED_UPDATE: &str = api::constants::event::FAILED_UPDATE;

/// Returns true if the disks of deleted VMs stay.
pub(super) fn preserves(pool: &VirtualMachinePoolSpec) -> bool {
    let Some(strategy) = &pool.scale_in_strategy else { return false };
    let proactive = strategy.proactive.as_ref().and_then(|proactive| proactive.state_preservation.as_deref());
    let opportunistic = strategy.opportunistic.as_ref().and_then(|waiting| waiting.state_preservation.as_deref());
    proactive.or(opportunistic).is_some_and(|state| state != "Disabled")
}

/// Sets and removes the finalizer, and detaches the disks of deleted VMs. A refusal holds up nothing else, so that no finalizer
/// stays behind.
pub(super) fn keep(observed: &Observed, owned: &[&Member], decision: &mut Decision) {
    let pool = &*observed.pool;
    let mut writes = Vec::new();
    // KubeVirt sets it. The owner references of VMs suffice.
    if let Some(release) = Effect::finalizer(Kind::Pool, &pool.metadata, finalizer::POOL, false) {
        writes.push(release.independent());
        decision.wake(RETRY_OF_OTHERS);
    }
    let preserves = preserves(&pool.spec) && pool.metadata.deletion_timestamp.is_none();
    for member in owned {
        let count = writes.len();
        match (preserves, is_held_by_pool(&member.vm), member.is_deleting()) {
            (true, false, false) => writes.extend(finalize(observed, member, true)),
            (true, true, true) => {
                let detachments = detachments(observed, member);
                if detachments.is_empty() {
                    writes.extend(finalize(observed, member, false));
                }
                writes.extend(detachments);
            }
            (false, true, _) => writes.extend(finalize(observed, member, false)),
            _ => {}
        }
        if writes.len() > count {
            decision.wake(pause(member, observed.now));
        }
    }
    decision.effects.extend(writes);
}

/// Returns the time until the writes for a VM are repeated: the longer, the longer it is being deleted.
fn pause(member: &Member, now: Timestamp) -> Duration {
    let Some(deleted) = &member.vm.metadata.deletion_timestamp else { return RETRY_OF_OTHERS };
    Duration::try_from(now.duration_since(deleted.0)).unwrap_or_default().clamp(RETRY.0, RETRY.1)
}

fn finalize(observed: &Observed, member: &Member, set: bool) -> Option<Effect> {
    let write = Effect::finalizer(Kind::VirtualMachine, &member.vm.metadata, finalizer::POOL, set)?;
    let what = if set { "adding finalizer to" } else { "removing finalizer for" };
    Some(independent(write, observed, what, member))
}

/// Returns the writes by which the disks of a VM outlive it.
fn detachments(observed: &Observed, member: &Member) -> Vec<Effect> {
    let vm = &*member.vm;
    let volumes = observed.data_volumes.iter().map(|volume| (Kind::DataVolume, "DataVolume", &volume.metadata));
    let claims = observed.claims.iter().map(|claim| (Kind::Claim, "PVC", &claim.metadata));
    let owned = volumes.chain(claims).filter(|(_, _, metadata)| owner::is_controlled_by(metadata, vm));
    owned
        .map(|(kind, name, metadata)| {
            let owners = metadata.owner_references.iter().flatten();
            let others: Vec<_> = owners.filter(|owner| Some(&owner.uid) != vm.metadata.uid.as_ref()).collect();
            let patch = json!({"metadata": {"uid": metadata.uid, "ownerReferences": others}});
            let what = format!("removing {name} owner references for");
            independent(Effect::merge(kind, metadata, patch), observed, &what, member)
        })
        .collect()
}

fn independent(effect: Effect, observed: &Observed, what: &str, member: &Member) -> Effect {
    let message = format!("Error {what} VM {}: {{error}}", member.path());
    let regarding = Kind::Pool.reference(&observed.pool.metadata);
    effect.on_failure(Event::warning(regarding, FAILED_UPDATE, message)).independent()
}
