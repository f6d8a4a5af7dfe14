//! The status of a migration: phase, times, conditions.

use api::{
    Condition, MigrationPhase,
    constants::{condition, event},
    migration::{VirtualMachineInstanceMigrationPhaseTransitionTimestamp, VirtualMachineInstanceMigrationStatus},
    vmi::migration::VirtualMachineInstanceMigrationState,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Observed, SHORTEST_RETRY, admission, creates_pod, names,
    phases::{Step, utility_volumes_time},
    state_claim, waits,
};
use crate::runtime::{Decision, Effect, Event, Kind};

/// Text of a refusal by a quota.
const QUOTA: &str = "exceeded quota";

/// Writes the status after a step.
pub(super) fn write(observed: &Observed, step: Step, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let mut wanted = (*observed.migration).clone();
    let status = wanted.status.get_or_insert_default();
    for phase in &step.passed {
        status.phase_transition_timestamps.push(VirtualMachineInstanceMigrationPhaseTransitionTimestamp {
            phase: Some(phase.clone()),
            phase_transition_timestamp: Some(Time(observed.now)),
        });
    }
    if !step.passed.is_empty() {
        status.phase = Some(step.phase().clone());
    }
    let begins = update_conditions(observed, step.phase(), status);
    waits::update(observed, step.phase(), status, decision);
    if observed.by_status && observed.is_admitted && !creates_pod(decision) {
        let retry = decision.wake_after.unwrap_or_default().max(SHORTEST_RETRY);
        admission::give_back(status, observed.now, retry);
    }
    if *step.phase() == MigrationPhase::Pending && status.migration_state.is_none() {
        status.migration_state = observed.source().map(|pod| VirtualMachineInstanceMigrationState {
            source_pod: pod.metadata.name.clone(),
            ..VirtualMachineInstanceMigrationState::default()
        });
    }
    // Before there is a claim of the target.
    if let Some(state) = status.migration_state.as_mut().filter(|_| *step.phase() == MigrationPhase::Pending)
        && state.source_persistent_state_pvc_name.is_none()
        && let Some((source, target)) = state_claim::planned(observed)
    {
        state.source_persistent_state_pvc_name = Some(source);
        state.target_persistent_state_pvc_name = Some(target);
    }
    // Clients that wait for the end read the nodes of the migration there.
    if let Some(state) = observed.state().filter(|_| step.phase().is_final()) {
        status.migration_state = Some(state.clone());
    }
    if let Some(change) = Effect::change(Kind::Migration, &*observed.migration, &wanted, Some("status"))? {
        decision.push(match step.event {
            Some(event) => change.on_success(event),
            None => change,
        });
        decision.effects.extend(begins.map(Effect::Event));
    }
    Ok(())
}

/// Updates the conditions. Returns the event of a wait that begins.
fn update_conditions(
    observed: &Observed,
    phase: &MigrationPhase,
    status: &mut VirtualMachineInstanceMigrationStatus,
) -> Option<Event> {
    if observed.migration.metadata.deletion_timestamp.is_some() && *phase != MigrationPhase::Succeeded {
        set(observed, status, condition::MIGRATION_ABORT_REQUESTED, "", "");
    }
    let is_rejected = observed.refusal(event::FAILED_CREATE).is_some_and(|refusal| refusal.message.contains(QUOTA));
    if *phase == MigrationPhase::Pending && is_rejected {
        set(observed, status, condition::MIGRATION_REJECTED_BY_QUOTA, "", "");
    } else if *phase != MigrationPhase::Pending {
        remove(status, condition::MIGRATION_REJECTED_BY_QUOTA);
    }
    let vmi = observed.vmi.as_deref()?;
    if *phase != MigrationPhase::Pending || vmi.spec.utility_volumes.is_empty() || observed.target().is_some() {
        remove(status, condition::MIGRATION_BLOCKED_BY_UTILITY_VOLUMES);
        return None;
    }
    let left = utility_volumes_time(observed).0.as_secs().max(0);
    let text = format!("Migration is waiting for utility volumes to detach. Will timeout in {left} seconds.");
    let type_ = condition::MIGRATION_BLOCKED_BY_UTILITY_VOLUMES;
    set(observed, status, type_, "UtilityVolumesPresent", &text).then(|| {
        let (namespace, name) = names(vmi);
        let message = format!(
            "Migration waiting for utility volumes to detach from VMI [{namespace}/{name}]. Will timeout in {left} seconds."
        );
        Event::warning(observed.regarding(), event::UTILITY_VOLUME_MIGRATION_PENDING, message)
    })
}

/// Adds a condition. A known one stays as it is. Returns true if it is new.
fn set(
    observed: &Observed,
    status: &mut VirtualMachineInstanceMigrationStatus,
    type_: &str,
    reason: &str,
    message: &str,
) -> bool {
    if status.conditions.iter().any(|known| known.type_ == type_) {
        return false;
    }
    let now = Time(observed.now);
    let condition = Condition::new(type_, true, reason, message, &now);
    status.conditions.push(Condition { last_probe_time: Some(now), last_transition_time: None, ..condition });
    true
}

fn remove(status: &mut VirtualMachineInstanceMigrationStatus, type_: &str) {
    status.conditions.retain(|known| known.type_ != type_);
}
