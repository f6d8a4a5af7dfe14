//! Condition MigrationRequired: the pod of a running VMI has other networks than the VMI, and nothing changes the pod.
//! No program exchanges the network behind a link, so that an interface with another network needs a migration at once.
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
    vmi::network::{Interface, Network},
};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Observed;
use crate::{resources::pods::CachedPod, runtime::Decision};

/// Time in which another program can change the networks of the pod.
const GRACE: SignedDuration = SignedDuration::from_secs(15);

/// Updates the condition.
pub(super) fn update(
    observed: &Observed,
    pod: Option<&CachedPod>,
    wanted: &mut VirtualMachineInstance,
    decision: &mut Decision,
) {
    // The pod changes with the migration.
    if wanted.is_migrating() {
        return;
    }
    let runs = *wanted.phase() == VmiPhase::Running && !wanted.is_deleting();
    let moved = runs && nics::secondary(wanted).any(|(_, network)| is_elsewhere(wanted, network, pod));
    let differs = moved || (runs && nics::secondary(wanted).any(|(interface, _)| differs(wanted, interface)));
    let known = observed.instance.condition(MIGRATION_REQUIRED);
    let since = known.and_then(|known| known.last_transition_time.as_ref()).map_or(observed.now, |time| time.0);
    let is_over = moved || known.is_some_and(Condition::is_true) || observed.now.duration_since(since) > GRACE;
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

/// Returns true if the pod is connected to another network than the VMI.
fn is_elsewhere(vmi: &VirtualMachineInstance, network: &Network, pod: Option<&CachedPod>) -> bool {
    let attached = pod.and_then(|pod| pod.networks.as_deref()).unwrap_or_default();
    let link = network.pod_link();
    let attached = attached.iter().find(|attached| attached.interface == link && !attached.name.is_empty());
    let (Some(attached), Some(multus)) = (attached, &network.multus) else { return false };
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let present = attached.name.split_once('/').unwrap_or((namespace, &attached.name));
    present != multus.definition(namespace)
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
