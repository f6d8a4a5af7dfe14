//! Condition MigrationRequired: the pod of a running VMI has other networks than the VMI, and nothing changes the pod.
//!
//! ```text
//!   none ── networks differ ──> False, AutoMigrationPending ── for 15 s ──> True, AutoMigrationDueToLiveUpdate
//!     ^                                   │                                     │
//!     └───────────────────────────────────┴──── the networks are the same ──────┘
//! ```
//! The 15 s are for a program that plugs networks into pods (Multus' dynamic networks controller).

use api::{
    Condition, VirtualMachineInstance, VmiPhase,
    condition::{remove, set},
    constants::{condition::MIGRATION_REQUIRED, reason},
    nics,
    vmi::network::Interface,
};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Observed;
use crate::runtime::Decision;

/// Time in which another program can change the networks of the pod.
const GRACE: SignedDuration = SignedDuration::from_secs(15);

/// Updates the condition.
pub(super) fn update(observed: &Observed<'_>, wanted: &mut VirtualMachineInstance, decision: &mut Decision) {
    let runs = *wanted.phase() == VmiPhase::Running && !wanted.is_deleting();
    let differs = runs && nics::secondary(wanted).any(|(interface, _)| differs(wanted, interface));
    let known = observed.instance.condition(MIGRATION_REQUIRED);
    let since = known.and_then(|known| known.last_transition_time.as_ref()).map_or(observed.now, |time| time.0);
    let is_over = known.is_some_and(Condition::is_true) || observed.now.duration_since(since) > GRACE;
    let Some(status) = &mut wanted.status else { return };
    if !differs {
        remove(&mut status.conditions, MIGRATION_REQUIRED);
        return;
    }
    let reason = if is_over { reason::AUTO_MIGRATION_DUE_TO_LIVE_UPDATE } else { reason::AUTO_MIGRATION_PENDING };
    let condition = Condition::new(MIGRATION_REQUIRED, is_over, reason, "", &Time(observed.now));
    set(&mut status.conditions, condition);
    if !is_over {
        let left = GRACE.saturating_sub(observed.now.duration_since(since));
        decision.wake(left.unsigned_abs() + std::time::Duration::from_millis(1));
    }
}

/// Returns true if the pod lacks a network of the VMI, or has one that the VMI no longer has.
fn differs(vmi: &VirtualMachineInstance, interface: &Interface) -> bool {
    let has = |source| nics::has_source(vmi, &interface.name, source);
    if interface.is_absent() {
        has(nics::MULTUS) && !has(nics::DOMAIN)
    } else {
        nics::shown(vmi, &interface.name).is_none()
    }
}
