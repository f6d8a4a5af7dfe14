//! VMs that fail to start, which are replaced.

use std::time::Duration;

use api::{
    constants::condition,
    duration,
    enums::PrintableStatus,
    pool::{VirtualMachinePoolAutohealingStrategy, VirtualMachinePoolSpec},
    vm::status::VirtualMachineStartFailure,
};
use jiff::{SignedDuration, Timestamp};

use super::{Member, selection::select};
use crate::vm::failed_at;

/// Failed starts in a row after which a VM is replaced.
const THRESHOLD: u32 = 3;
/// Time for which a VM must be failing.
const FAILING_FOR: Duration = Duration::from_secs(5 * 60);
/// Time for which a VM stays after its last failed start, for clients that look once a second. Timestamps are cut to seconds, so that
/// it is one second less at worst.
const SHOWN: SignedDuration = SignedDuration::from_secs(3);
/// States that show a failure.
const FAILING: [PrintableStatus; 6] = [
    PrintableStatus::CrashLoopBackOff,
    PrintableStatus::ErrorUnschedulable,
    PrintableStatus::DataVolumeError,
    PrintableStatus::ErrorPvcNotFound,
    PrintableStatus::ErrImagePull,
    PrintableStatus::ImagePullBackOff,
];

/// Returns the VMs to replace, and the time after which another one may have to be.
pub(super) fn failing<'a>(
    pool: &VirtualMachinePoolSpec,
    active: &[&'a Member],
    now: Timestamp,
) -> (Vec<&'a Member>, Option<Duration>) {
    let Some(healing) = &pool.autohealing else { return (Vec::new(), None) };
    let proactive = pool.scale_in_strategy.as_ref().and_then(|strategy| strategy.proactive.as_ref());
    let candidates = select(proactive.and_then(|proactive| proactive.selection_policy.as_ref()), active.to_vec());
    let (mut victims, mut wake) = (Vec::new(), None);
    for member in candidates {
        match remaining(healing, member, now) {
            Some(Duration::ZERO) => victims.push(member),
            Some(wait) => wake = Some(wake.map_or(wait, |known: Duration| known.min(wait))),
            None => {}
        }
    }
    (victims, wake)
}

/// Returns the time after which a VM is to be replaced. `None`: it does not fail.
fn remaining(healing: &VirtualMachinePoolAutohealingStrategy, member: &Member, now: Timestamp) -> Option<Duration> {
    let status = member.vm.status.as_ref()?;
    let threshold = healing.start_up_failure_threshold.unwrap_or(THRESHOLD).max(1);
    let count = |failure: &&VirtualMachineStartFailure| u32::try_from(failure.consecutive_fail_count.unwrap_or(0));
    if let Some(failure) = status.start_failure.as_ref().filter(|failure| count(failure).unwrap_or(0) >= threshold) {
        return Some(shown_for(failure, now));
    }
    let is_failing = status.printable_status.as_ref().is_some_and(|status| FAILING.contains(status));
    if !is_failing || member.is_ready() {
        return None;
    }
    let ready = member.vm.condition(condition::READY).and_then(|ready| ready.last_transition_time.as_ref());
    let since = ready.or(member.vm.metadata.creation_timestamp.as_ref())?.0;
    let limit = healing.min_failing_to_start_duration.as_deref().and_then(|limit| duration::parse(limit).ok());
    let passed = Duration::try_from(now.duration_since(since)).unwrap_or(Duration::ZERO);
    Some(limit.unwrap_or(FAILING_FOR).saturating_sub(passed))
}

/// Returns how long a VM still stays whose start has failed. A failure far ahead, as by another formula of delays, does not keep it.
fn shown_for(failure: &VirtualMachineStartFailure, now: Timestamp) -> Duration {
    let left = failed_at(failure).and_then(|failed_at| SHOWN.checked_sub(now.duration_since(failed_at)));
    left.filter(|left| *left <= SHOWN * 2).and_then(|left| Duration::try_from(left).ok()).unwrap_or_default()
}
