//! Status and conditions of a pool.

use api::{
    Condition, VirtualMachinePool,
    condition::{remove, set},
    constants::{condition, event},
    pool::VirtualMachinePoolStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::Selector;

use super::{Member, Observed, changes::FAILED_PRUNING, update::FAILED_ROLL};
use crate::runtime::{Decision, Effect, Event, Failure, Kind};

/// Reason of condition ReplicaPaused, and of its event.
const PAUSED: &str = "SuccessfulPaused";
/// Reason of the event at its end.
const RESUMED: &str = "SuccessfulResume";

/// Returns reason and beginning of the message of condition ReplicaFailure for a refused write.
fn failure_of(reason: &str) -> (&'static str, &'static str) {
    match reason {
        event::FAILED_CREATE => ("FailedScaleOut", "error during scale out"),
        event::FAILED_DELETE => ("FailedScaleIn", "error during scale in"),
        FAILED_PRUNING => (FAILED_PRUNING, "error while pruning vmpool revisions"),
        FAILED_ROLL => (event::FAILED_UPDATE, "error during VMI update"),
        _ => (event::FAILED_UPDATE, "error during VM update"),
    }
}

/// Writes the status, and emits the events of its conditions.
pub(super) fn report(
    observed: &Observed,
    selector: &Selector,
    owned: &[&Member],
    failure: Option<&Failure>,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let pool = &*observed.pool;
    let now = Time(observed.now);
    let mut conditions = pool.status.clone().unwrap_or_default().conditions;
    let regarding = || Kind::Pool.reference(&pool.metadata);
    if pool.spec.paused {
        let is_shown = conditions.iter().any(|known| known.type_ == condition::REPLICA_PAUSED);
        let paused = Condition::new(condition::REPLICA_PAUSED, true, PAUSED, "Pool controller is paused", &now);
        if !is_shown {
            decision.push(Effect::Event(Event::normal(regarding(), PAUSED, "Pool is paused")));
        }
        set(&mut conditions, paused);
    } else if remove(&mut conditions, condition::REPLICA_PAUSED) {
        decision.push(Effect::Event(Event::normal(regarding(), RESUMED, "Pool is unpaused")));
    }
    match failure {
        Some(failure) => {
            let (reason, context) = failure_of(failure.reason);
            let message = format!("{context}: {}", failure.message);
            let failed = Condition::new(condition::REPLICA_FAILURE, true, reason, &message, &now);
            if set(&mut conditions, failed) {
                decision.push(Effect::Event(Event::warning(regarding(), reason, message)));
            }
        }
        None => {
            remove(&mut conditions, condition::REPLICA_FAILURE);
        }
    }
    let count = |number: usize| Some(i32::try_from(number).unwrap_or(i32::MAX));
    let status = VirtualMachinePoolStatus {
        conditions,
        label_selector: Some(selector.to_string()),
        ready_replicas: count(owned.iter().filter(|member| member.is_ready()).count()),
        replicas: count(owned.len()),
    };
    let wanted = VirtualMachinePool { status: Some(status), ..pool.clone() };
    decision.effects.extend(Effect::change(Kind::Pool, pool, &wanted, Some("status"))?);
    Ok(())
}
