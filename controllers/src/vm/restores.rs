//! Restores of a VM that is being deleted: their records outlive it.

use std::time::Duration;

use api::{constants::annotation, snapshot::restore::VirtualMachineRestore};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;

use super::Observed;
use crate::runtime::{Decision, Effect, Kind};

/// Reason under which refused writes are remembered.
const REFUSED: &str = "RestoreRefused";
/// Refusals in a row after which a record that cannot be changed goes with its VM: about half a minute.
const ATTEMPTS: u32 = 6;
/// Longest time for which a VM waits for the last steps of the restore that has changed it, and for the failure of others.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);
/// Time between two looks at that restore.
const RETRY: Duration = Duration::from_secs(1);

/// Removes a VM from the owners of its restores, which the garbage collector would delete with it. Returns true if the VM can go. It waits
/// for a restore that is about to be complete: the write that makes the VM its owner may be on its way. One that is not as far fails: if it
/// did not see the deletion, it would make the VM again.
pub(super) fn release(observed: &Observed, decision: &mut Decision) -> bool {
    let failure = observed.failures.of(REFUSED);
    let gives_up = failure.is_some_and(|failure| failure.attempts >= ATTEMPTS);
    let vm = &observed.vm.metadata;
    let kept = || observed.restores.iter().filter(|restore| restore.metadata.deletion_timestamp.is_none());
    if !gives_up {
        let last = vm.annotations.as_ref().and_then(|all| all.get(annotation::LAST_RESTORE));
        let deleted = vm.deletion_timestamp.as_ref();
        let is_awaited = |restore: &VirtualMachineRestore| {
            let dates = restore.metadata.creation_timestamp.as_ref().zip(deleted);
            let is_older = dates.is_some_and(|(created, deleted)| created.0 < deleted.0);
            !restore.is_final() && (is_older || last.is_some_and(|id| *id == restore.id()))
        };
        let is_in_time = deleted.is_some_and(|deleted| observed.now.duration_since(deleted.0) < PATIENCE);
        if is_in_time && kept().any(|restore| is_awaited(restore)) {
            decision.wake(RETRY);
            return false;
        }
        if decision.must_wait(&observed.failures, REFUSED, observed.now) {
            return false;
        }
    }
    let owned = kept().filter(|restore| is_owned(&restore.metadata, vm));
    decision.effects.extend(owned.map(|restore| {
        let patch = json!({"metadata": {"ownerReferences": null}});
        let release = Effect::merge(Kind::VmRestore, &restore.metadata, patch);
        // One that is refused for ever does not take the others with it.
        if gives_up { release.independent() } else { release.refused_as(REFUSED) }
    }));
    true
}

/// Returns true if the VM is the only owner. Another one keeps the restore, or goes with it on purpose, as a clone does.
fn is_owned(restore: &ObjectMeta, vm: &ObjectMeta) -> bool {
    let Some([owner]) = restore.owner_references.as_deref() else { return false };
    let wanted = Kind::VirtualMachine.owner_reference(vm);
    owner.api_version == wanted.api_version
        && owner.kind == wanted.kind
        && owner.name == wanted.name
        && owner.uid == wanted.uid
}
