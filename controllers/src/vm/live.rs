//! Live updates of a running VMI: the observed generation, annotations for backups and deschedulers, hot-plugged volumes, and,
//! depending on the cluster's rollout strategy, the placement for its next migration.

use api::{VirtualMachineInstance, config::RolloutStrategy, constants::annotation};

use super::{
    Observed, SyncError, blocked, hotplug,
    restart::{self, Template},
    start,
};
use crate::runtime::{Decision, Effect, Event, Kind};

/// Reason of a refused update.
const FAILED_UPDATE: &str = "FailedUpdateError";
/// Reason of a refused change of volumes.
const FAILED_HOTPLUG: &str = "HotPlugVolumeError";
/// Message of a refused change of volumes.
const HOTPLUG_CONTEXT: &str = "Error encountered while handling declarative hotplug volumes";

/// Returns true if changes are applied to running VMIs.
pub(super) fn is_on(observed: &Observed<'_>) -> bool {
    observed.config.vm_rollout_strategy == RolloutStrategy::LiveUpdate
}

/// Updates the VMI. Returns an error for condition Failure.
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
    if let Some(generation) = restart::observed_generation(observed, instance, template) {
        let annotations = wanted.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation::VM_GENERATION.to_owned(), generation.to_string());
    }
    // These annotations are not part of the guest, so that they do not depend on the strategy.
    let template_annotations = observed.vm.spec.template.metadata.annotations.as_ref();
    let evictions = [annotation::DESCHEDULER_EVICT, annotation::DESCHEDULER_PREFER_NO_EVICTION]
        .map(|key| (key, template_annotations.and_then(|all| all.get(key))));
    for (key, value) in
        evictions.into_iter().chain([(annotation::SKIP_BACKUP_HOOKS, start::skip_backup_hooks(observed.vm))])
    {
        match value {
            Some(value) => {
                wanted.metadata.annotations.get_or_insert_default().insert(key.to_owned(), value.clone());
            }
            None => {
                if let Some(annotations) = &mut wanted.metadata.annotations {
                    annotations.remove(key);
                }
            }
        }
    }
    // A VMI that waits for a restart gets everything then.
    if let Some(template) =
        template.filter(|template| is_on(observed) && template.is_current(restart::started(observed, instance)))
    {
        template.placement.put(&mut wanted.spec);
    }
    let refused = plug(observed, instance, template, decision)?;
    let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? else { return Ok(refused) };
    let failure = observed.failure.filter(|failure| failure.reason == FAILED_UPDATE);
    if let Some(failure) = failure.filter(|failure| failure.blocks(observed.now)) {
        decision.wake(failure.remaining(observed.now));
    } else {
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        let message = "Error updating the virtual machine instance: {error}";
        decision.push(change.on_failure(Event::warning(regarding, FAILED_UPDATE, message)));
    }
    Ok(refused.or(blocked(observed, FAILED_UPDATE, "Failure while updating VMI")))
}

/// Plugs and unplugs volumes. This does not depend on the rollout strategy: the flag of each volume permits it. Returns an error
/// for condition Failure.
fn plug(
    observed: &Observed<'_>,
    instance: &VirtualMachineInstance,
    template: Option<&Template>,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    let Some(template) = template.filter(|_| hotplug::is_on(observed.config)) else { return Ok(None) };
    let Some(storage) = hotplug::reconcile(&template.storage, instance) else { return Ok(None) };
    let mut wanted = instance.clone();
    storage.put(&mut wanted.spec);
    let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? else { return Ok(None) };
    let failure = observed.failure.filter(|failure| failure.reason == FAILED_HOTPLUG);
    if let Some(failure) = failure.filter(|failure| failure.blocks(observed.now)) {
        decision.wake(failure.remaining(observed.now));
    } else {
        let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
        let message = format!("{HOTPLUG_CONTEXT}: {{error}}");
        decision.push(change.on_failure(Event::warning(regarding, FAILED_HOTPLUG, message)));
    }
    Ok(blocked(observed, FAILED_HOTPLUG, HOTPLUG_CONTEXT))
}
