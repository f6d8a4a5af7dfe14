//! Delays before a VMI is started again that failed before it ran.

use std::time::Duration;

use api::{RunStrategy, VirtualMachineInstance, VmiPhase, vm::status::VirtualMachineStartFailure};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use sha2::{Digest, Sha256};

/// Longest delay.
const LONGEST: u64 = 300;
/// Unit of the quadratic growth.
const INTERVAL: u64 = 10;

/// Returns true for strategies that restart VMIs.
pub(super) fn applies(strategy: &RunStrategy) -> bool {
    matches!(strategy, RunStrategy::Always | RunStrategy::RerunOnFailure | RunStrategy::Once)
}

/// Returns the delay after the n-th failure in a row: 10·n² seconds and up to half of that more, at most 300.
///
/// The jitter is derived from the UID, so that the same observation yields the same decision.
fn delay(count: i32, uid: &str) -> Duration {
    let count = u64::try_from(count).unwrap_or(1).max(1);
    let base = INTERVAL.saturating_mul(count.saturating_mul(count));
    let spread = Sha256::digest(uid.as_bytes()).first().copied().unwrap_or(0);
    let extra = (base / 2).saturating_mul(u64::from(spread)) / 255;
    Duration::from_secs(base.saturating_add(extra).min(LONGEST))
}

/// Returns the time of the last failure, cut to a second as the time of the next attempt is.
pub(crate) fn failed_at(failure: &VirtualMachineStartFailure) -> Option<Timestamp> {
    let delay = delay(failure.consecutive_fail_count?, failure.last_failed_vmi_uid.as_deref()?);
    failure.retry_after_timestamp.as_ref()?.0.checked_sub(delay).ok()
}

/// Returns the record of failures after an observation of the VMI.
pub(super) fn update(
    former: Option<&VirtualMachineStartFailure>,
    strategy: &RunStrategy,
    instance: Option<&VirtualMachineInstance>,
    now: Timestamp,
) -> Option<VirtualMachineStartFailure> {
    if !applies(strategy) {
        return None;
    }
    let Some(instance) = instance else { return former.cloned() };
    let timestamps = instance.status.as_ref().map(|status| status.phase_transition_timestamps.as_slice());
    let ran = *instance.phase() == VmiPhase::Running
        || timestamps.unwrap_or_default().iter().any(|stamp| stamp.phase == Some(VmiPhase::Running));
    if ran {
        return None;
    }
    let uid = instance.metadata.uid.clone().unwrap_or_default();
    let counted = former.is_some_and(|former| former.last_failed_vmi_uid.as_deref() == Some(uid.as_str()));
    // A failure is counted before the VMI is deleted. A VMI that is being deleted was stopped before it ran.
    if *instance.phase() != VmiPhase::Failed || instance.is_deleting() || counted {
        return former.cloned();
    }
    let count = former.and_then(|former| former.consecutive_fail_count).unwrap_or(0).saturating_add(1);
    let retry_at = now.checked_add(delay(count, &uid)).ok();
    Some(VirtualMachineStartFailure {
        consecutive_fail_count: Some(count),
        last_failed_vmi_uid: Some(uid),
        retry_after_timestamp: retry_at.map(Time),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_grows_with_the_square_within_its_bounds() {
        for (count, low, high) in [(1, 10, 15), (2, 40, 60), (3, 90, 135), (4, 160, 240), (5, 250, 300), (9, 300, 300)]
        {
            for uid in ["a", "b", "c"] {
                let seconds = delay(count, uid).as_secs();
                assert!((low..=high).contains(&seconds), "{count}: {seconds}");
            }
        }
    }

    #[test]
    fn time_of_a_failure_follows_from_the_next_attempt() {
        let instance = serde_json::json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m", "uid": "u"},
            "spec": {"domain": {"devices": {}}}, "status": {"phase": "Failed"},
        });
        let instance = serde_json::from_value(instance).unwrap();
        let now: Timestamp = "2030-01-01T00:00:00Z".parse().unwrap();
        let failure = update(None, &RunStrategy::Always, Some(&instance), now).unwrap();
        assert_eq!(failed_at(&failure), Some(now));
        assert_eq!(failed_at(&VirtualMachineStartFailure { last_failed_vmi_uid: None, ..failure }), None);
    }
}
