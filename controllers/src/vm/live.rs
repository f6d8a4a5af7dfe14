//! What reaches a machine while it runs: the generation of its VM that it reflects, what it says to backups and
//! deschedulers, and, where the cluster's rollout strategy says so, where it may be placed when it moves.

use api::{VirtualMachineInstance, config::RolloutStrategy, constants::annotation};

use super::{
    Observed, SyncError, blocked,
    restart::{self, Template},
    start,
};
use crate::runtime::{Decision, Effect, Kind, Note};

/// Reason of a refused change.
const FAILED_UPDATE: &str = "FailedUpdateError";

/// True when changes reach running machines where they can.
pub(super) fn is_on(observed: &Observed<'_>) -> bool {
    observed.config.vm_rollout_strategy == RolloutStrategy::LiveUpdate
}

/// Brings the machine up to date. Returns an error to show.
pub(super) fn update(
    observed: &Observed<'_>,
    instance: &VirtualMachineInstance,
    template: Option<&Template>,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    if instance.is_final() || instance.is_deleting() {
        return Ok(None);
    }
    let mut wanted = instance.clone();
    if let Some(generation) = restart::observed_generation(observed.vm, instance) {
        let annotations = wanted.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation::VM_GENERATION.to_owned(), generation.to_string());
    }
    // What backups and evictions do is not part of the machine, so that no strategy holds it back.
    let said = observed.vm.spec.template.metadata.annotations.as_ref();
    let evictions = [annotation::DESCHEDULER_EVICT, annotation::DESCHEDULER_PREFER_NO_EVICTION]
        .map(|key| (key, said.and_then(|all| all.get(key))));
    for (key, said) in
        evictions.into_iter().chain([(annotation::SKIP_BACKUP_HOOKS, start::skip_backup_hooks(observed.vm))])
    {
        match said {
            Some(said) => {
                wanted.metadata.annotations.get_or_insert_default().insert(key.to_owned(), said.clone());
            }
            None => {
                if let Some(annotations) = &mut wanted.metadata.annotations {
                    annotations.remove(key);
                }
            }
        }
    }
    // A machine that waits for a restart gets the rest then, too.
    if let Some(template) = template.filter(|template| is_on(observed) && template.started(instance)) {
        template.placement.put(&mut wanted.spec);
    }
    let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? else { return Ok(None) };
    let failure = observed.failure.filter(|failure| failure.reason == FAILED_UPDATE);
    if let Some(failure) = failure.filter(|failure| failure.blocks(observed.now)) {
        decision.wake(failure.remaining(observed.now));
    } else {
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        let message = "Error updating the virtual machine instance: {error}";
        decision.push(change.on_failure(Note::warning(regarding, FAILED_UPDATE, message)));
    }
    Ok(blocked(observed, FAILED_UPDATE, "Failure while updating VMI"))
}
