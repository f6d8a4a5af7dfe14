//! The end of a migration at its target, which owns the VMI: the domain is brought in line with the spec, then the migration is
//! completed.

use std::time::Duration;

use api::{
    VirtualMachineInstanceStatus, condition,
    constants::{
        condition::{HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE, VOLUMES_CHANGE},
        label::MIGRATION_TARGET_NODE_NAME,
    },
    resize,
};

use super::target::has_arrived;
use crate::vmi::{
    desired::Metadata,
    observed::{Link, Now, Observed},
};

/// Longest wait for the changes that the spec has in store. Those that are not done then are shown by their conditions.
const LIMIT: Duration = Duration::from_secs(60);

/// Completes the migration once the domain is in line with the spec. Returns the time of the next attempt if the limit of the wait
/// decides.
pub(in crate::vmi) fn apply(
    next: &mut VirtualMachineInstanceStatus,
    metadata: &mut Metadata,
    observed: &Observed,
    now: Now,
) {
    if has_arrived(observed).is_none() {
        return;
    }
    if !is_in_line(next, observed) && !is_late(observed, now) {
        return;
    }
    condition::remove(&mut next.conditions, VOLUMES_CHANGE);
    next.migrated_volumes = Vec::new();
    if let Some(state) = &mut next.migration_state {
        state.completed = true;
    }
    metadata.remove_label(&observed.vmi, MIGRATION_TARGET_NODE_NAME);
}

/// Returns the time at which an incomplete migration is completed without further waiting.
pub(in crate::vmi) fn limit(observed: &Observed, now: Now) -> Option<Duration> {
    has_arrived(observed)?;
    let waited = waited(observed, now)?;
    Some(now.since_start + LIMIT.saturating_sub(waited))
}

fn is_late(observed: &Observed, now: Now) -> bool {
    waited(observed, now).is_none_or(|waited| waited >= LIMIT)
}

/// Returns the time since the guest runs here.
fn waited(observed: &Observed, now: Now) -> Option<Duration> {
    let state = observed.vmi.status.as_ref()?.migration_state.as_ref()?;
    let since = state.target_node_domain_ready_timestamp.as_ref()?;
    Some(Duration::try_from(now.wall.duration_since(since.0)).unwrap_or_default())
}

/// Returns true if the last Sync has carried out what the spec asks for. virt-controller permits growth of CPU and memory once the
/// pod has the resources.
fn is_in_line(next: &VirtualMachineInstanceStatus, observed: &Observed) -> bool {
    let Link::Up { synced, results_from, .. } = &observed.link else { return false };
    let is_synced = *synced == Some(observed.facts.fingerprint)
        && observed.report.as_ref().is_some_and(|report| report.sequence >= *results_from);
    let waits = |type_: &str| next.condition(type_).is_some_and(|shown| shown.is_true() && !resize::is_held(shown));
    is_synced && !waits(HOT_VCPU_CHANGE) && !waits(HOT_MEMORY_CHANGE)
}
