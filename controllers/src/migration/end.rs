//! What is left of a migration that has ended: its failure in the status of the VMI, its target pod, its finalizer, and in the
//! end the object itself.

use std::time::Duration;

use api::{
    MigrationPhase, VirtualMachineInstance, VirtualMachineInstanceMigration,
    constants::{event, finalizer, label},
};
use jiff::SignedDuration;

use super::{Observed, backoff::entered, object::has_finalizer, state, state_claim, target};
use crate::{
    runtime::{Decision, Effect, Event, Kind},
    vmi::TARGET_TIME,
};

/// Ended migrations of a VMI that are kept.
const KEPT: usize = 5;
/// Time in which virt-handler records the failure of a migration that has begun.
const HANDLER_TIME: SignedDuration = SignedDuration::from_secs(60);
/// Time in which virt-handler ends the launcher that the guest has left.
const SOURCE_TIME: SignedDuration = SignedDuration::from_secs(30);
/// Failure reason of a migration whose target is gone.
const TARGET_DOWN: &str = "Target pod is down";

/// Decides about a migration that has ended.
pub(super) fn decide(observed: &Observed, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let is_recorded = match observed.vmi.as_deref() {
        Some(vmi) => record_failure(observed, vmi, decision)?,
        None => true,
    };
    delete_target(observed, decision);
    let is_settled = state_claim::settle(observed, decision)?;
    if *observed.migration.phase() == MigrationPhase::Succeeded {
        target::mark_ready(observed, decision);
        delete_left_source(observed, decision);
    }
    mirror(observed, decision)?;
    if is_recorded && is_settled {
        let migration = &observed.migration.metadata;
        decision.effects.extend(Effect::finalizer(Kind::Migration, migration, finalizer::MIGRATION, false));
    }
    if observed.vmi.is_none() || is_superfluous(observed) {
        delete_ended_source(observed, decision);
        delete_migration(observed, decision);
    }
    Ok(())
}

/// Records a failure that virt-handler does not record, and removes the target from the labels of the VMI. Returns true when
/// nothing is left to record.
fn record_failure(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<bool, serde_json::Error> {
    let Some(state) = observed.state().filter(|_| *observed.migration.phase() == MigrationPhase::Failed) else {
        return Ok(true);
    };
    if observed.has_moved() || vmi.is_final() {
        return Ok(true);
    }
    if !state.failed && !state.completed {
        let since = entered(&observed.migration, &MigrationPhase::Failed).unwrap_or(observed.now);
        let left = HANDLER_TIME.saturating_sub(observed.now.duration_since(since));
        let may_run = observed.targets().iter().any(|pod| !pod.is_down());
        if state.start_timestamp.is_some() && left > SignedDuration::ZERO {
            // The source records the failure, with the reason of libvirt.
            decision.wake(left.unsigned_abs() + Duration::from_millis(1));
        } else if may_run && state::may_have_begun(state) {
            // The guest may have moved, or be about to: the source answers.
            state::stop(observed, vmi, state, decision)?;
        } else {
            state::mark_failed(observed, vmi, TARGET_DOWN, decision)?;
        }
        return Ok(false);
    }
    let labelled = vmi.metadata.labels.as_ref().and_then(|labels| labels.get(label::MIGRATION_TARGET_NODE_NAME));
    // virt-handler of the target cleans up as long as the label names its node.
    if labelled.is_some() && labelled == state.target_node.as_ref() && observed.target().is_none_or(|pod| pod.is_down())
    {
        let mut wanted = vmi.clone();
        if let Some(labels) = &mut wanted.metadata.labels {
            labels.remove(label::MIGRATION_TARGET_NODE_NAME);
        }
        decision.effects.extend(Effect::change(Kind::Instance, vmi, &wanted, None)?);
    }
    Ok(true)
}

/// Deletes the target pod of a failed migration if it does not end by itself. The pod on the node of the VMI runs the guest.
fn delete_target(observed: &Observed, decision: &mut Decision) {
    if *observed.migration.phase() != MigrationPhase::Failed || observed.has_moved() {
        return;
    }
    // The guest may have moved without a record of it.
    let is_over = observed.state().is_none_or(|state| state.failed || !state::may_have_begun(state));
    if !is_over && observed.vmi.as_deref().is_some_and(|vmi| !vmi.is_final()) {
        return;
    }
    let is_deleted = observed.migration.metadata.deletion_timestamp.is_some();
    let present = observed.source().and_then(|pod| pod.metadata.uid.as_ref());
    let stays = !is_deleted && !is_superfluous(observed);
    let left = time_to_end(observed);
    for pod in observed.targets() {
        // A pod that has ended stays as long as the migration, for its log.
        if (stays && pod.is_down()) || (present.is_some() && pod.metadata.uid.as_ref() == present) {
            continue;
        }
        if stays && left > SignedDuration::ZERO && pod.metadata.deletion_timestamp.is_none() {
            decision.wake(left.unsigned_abs() + Duration::from_millis(1));
            continue;
        }
        let text = if is_deleted {
            "migration canceled and pod {pod} is deleted"
        } else {
            "migration failed and pod {pod} is deleted"
        };
        target::delete(observed, pod, text, decision);
    }
}

/// Returns the time that is left to virt-handler for ending the launcher of the target. It removes the label of the VMI that names its
/// node first.
fn time_to_end(observed: &Observed) -> SignedDuration {
    let is_ending = observed.vmi.as_deref().is_some_and(|vmi| !vmi.is_final())
        && observed.state().is_some_and(|state| state.failed);
    let since = entered(&observed.migration, &MigrationPhase::Failed).filter(|_| is_ending);
    since.map_or(SignedDuration::ZERO, |since| TARGET_TIME.saturating_sub(observed.now.duration_since(since)))
}

/// Copies the state of the migration from the VMI.
fn mirror(observed: &Observed, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let Some(state) = observed.state() else { return Ok(()) };
    let mut wanted = (*observed.migration).clone();
    wanted.status.get_or_insert_default().migration_state = Some(state.clone());
    decision.effects.extend(Effect::change(Kind::Migration, &*observed.migration, &wanted, Some("status"))?);
    Ok(())
}

/// Returns true if enough newer migrations of the VMI have ended.
fn is_superfluous(observed: &Observed) -> bool {
    let order = |migration: &VirtualMachineInstanceMigration| {
        (migration.metadata.creation_timestamp.as_ref().map(|at| at.0), migration.metadata.name.clone())
    };
    let own = order(&observed.migration);
    let newer = observed.all.iter().filter(|other| other.is_final() && !has_finalizer(other) && order(other) > own);
    newer.count() >= KEPT
}

/// Deletes the pod that the guest has left if it has not ended in time. virt-handler of its node was restarted meanwhile and does
/// not know it.
fn delete_left_source(observed: &Observed, decision: &mut Decision) {
    let Some(state) = observed.state().filter(|_| observed.has_moved()) else { return };
    let is_left = |pod: &&std::sync::Arc<crate::resources::pods::CachedPod>| {
        pod.metadata.name == state.source_pod && !pod.is_down() && pod.metadata.deletion_timestamp.is_none()
    };
    let Some(pod) = observed.pods.iter().find(is_left) else { return };
    let since = entered(&observed.migration, &MigrationPhase::Succeeded).unwrap_or(observed.now);
    let left = SOURCE_TIME.saturating_sub(observed.now.duration_since(since));
    if left > SignedDuration::ZERO {
        decision.wake(left.unsigned_abs() + Duration::from_millis(1));
    } else {
        target::delete(observed, pod, "source pod {pod} has not ended after the migration and is deleted", decision);
    }
}

/// Deletes the pod that the guest has left, once it has ended.
fn delete_ended_source(observed: &Observed, decision: &mut Decision) {
    let Some(vmi) = observed.vmi.as_deref().filter(|_| *observed.migration.phase() == MigrationPhase::Succeeded) else {
        return;
    };
    let state = observed.migration.status.as_ref().and_then(|status| status.migration_state.as_ref());
    let Some(name) = state.and_then(|state| state.source_pod.as_ref()) else { return };
    let is_source = |pod: &&std::sync::Arc<crate::resources::pods::CachedPod>| {
        pod.metadata.name.as_ref() == Some(name) && pod.is_down()
    };
    if let Some(pod) = observed.pods.iter().find(is_source).filter(|_| !vmi.is_final()) {
        target::delete(observed, pod, "source pod {pod} of an old migration is deleted", decision);
    }
}

/// Deletes the migration.
pub(super) fn delete_migration(observed: &Observed, decision: &mut Decision) {
    if observed.migration.metadata.deletion_timestamp.is_some() || observed.must_wait(event::FAILED_DELETE, decision) {
        return;
    }
    let failed = "Error deleting a migration that is not needed any more: {error}";
    decision.push(Effect::delete(Kind::Migration, &observed.migration.metadata).on_failure(Event::warning(
        observed.regarding(),
        event::FAILED_DELETE,
        failed,
    )));
}
