//! The DataVolumes that a VMI waits for, and the temporary pod.
//!
//! ```text
//!   claim of a DataVolume ...                                     temporary pod    launcher pod
//!     has no DataVolume, or that is Succeeded, PendingPopulation                   created once all claims are
//!     is unbound, the DataVolume is WaitForFirstConsumer          created, kept
//!     is filled, in any other phase                               deleted          waits
//!     has a DataVolume that Failed                                deleted          VMI Failed
//! ```
//! The temporary pod is created while every other claim is ready, so that the scheduler takes all of them into account.

use std::{cmp::Reverse, sync::Arc, time::Duration};

use api::{
    Condition, DataVolumePhase, VirtualMachineInstance, VmiPhase,
    cdi::DataVolume,
    condition::{remove, set, set_or_remove},
    constants::{condition, event, reason},
    hotplug::is_hotplugged,
};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Observed;
use crate::{
    data_volumes::{Readiness, described},
    resources::{
        claims::{claim_name, mounted_claim},
        pods::CachedPod,
        vmis::is_unstarted,
    },
    runtime::{Decision, Effect, Event, Kind},
};

/// Least age of a temporary pod that has ended when it is replaced.
const REPLACEMENT_AGE: SignedDuration = SignedDuration::from_secs(30);

/// The state of the claims that the launcher pod mounts: that of the least ready one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gate<'a> {
    /// All of them are ready.
    Open,
    /// A claim waits for a pod, and the others are ready.
    AwaitsConsumer(&'a DataVolume),
    /// A claim is being filled.
    Waits(&'a DataVolume),
    /// The DataVolume of a claim does not exist.
    Orphaned(&'a str),
    /// A claim does not exist.
    Missing(&'a str),
    /// A DataVolume has failed for good.
    Failed(&'a DataVolume),
}

impl Gate<'_> {
    fn rank(self) -> u8 {
        match self {
            Self::Open => 0,
            Self::AwaitsConsumer(_) => 1,
            Self::Waits(_) => 2,
            Self::Orphaned(_) => 3,
            Self::Missing(_) => 4,
            Self::Failed(_) => 5,
        }
    }
}

/// Returns the state of each claim that the launcher pod mounts.
fn gates(observed: &Observed) -> impl Iterator<Item = Gate<'_>> {
    let instance = &*observed.instance;
    let mounted =
        instance.spec.volumes.iter().filter(|volume| !is_hotplugged(instance, volume)).filter_map(mounted_claim);
    mounted.map(|(name, _)| {
        let Some(claim) = observed.claims.get(name) else {
            let failed =
                observed.data_volumes.known.get(name).filter(|volume| volume.phase() == DataVolumePhase::Failed);
            return failed.map_or(Gate::Missing(name), |volume| Gate::Failed(volume));
        };
        match observed.data_volumes.readiness(claim) {
            Readiness::Ready => Gate::Open,
            Readiness::AwaitsConsumer(volume) => Gate::AwaitsConsumer(volume),
            Readiness::Waits(volume) => Gate::Waits(volume),
            Readiness::Orphaned(volume) => Gate::Orphaned(volume),
            Readiness::Failed(volume) => Gate::Failed(volume),
        }
    })
}

/// Returns the state of the claims that the launcher pod mounts.
pub(super) fn gate(observed: &Observed) -> Gate<'_> {
    // The first of several.
    gates(observed).min_by_key(|gate| Reverse(gate.rank())).unwrap_or(Gate::Open)
}

/// Returns true if the VMI needs a temporary pod: one of its claims waits for a first consumer.
fn needs_pod(observed: &Observed) -> bool {
    let is_waiting = is_unstarted(&observed.instance) && !observed.instance.is_deleting();
    is_waiting && gates(observed).any(|gate| matches!(gate, Gate::AwaitsConsumer(_)))
}

/// Returns the temporary pod that failed although a claim still waits for it.
pub(super) fn failed_pod(observed: &Observed) -> Option<&CachedPod> {
    let failed = observed.temporary.iter().find(|pod| pod.phase == "Failed");
    failed.filter(|_| needs_pod(observed)).map(Arc::as_ref)
}

/// Deletes the temporary pods that the VMI does not need. Nothing runs in them and nothing is mounted.
pub(super) fn delete_pods(observed: &Observed, decision: &mut Decision) {
    if observed.temporary.is_empty() {
        return;
    }
    let is_needed = needs_pod(observed);
    for pod in observed.temporary.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        // One that has ended does not bind a claim that was made again.
        if is_needed && pod.phase != "Succeeded" {
            continue;
        }
        if let Some(left) = replacement_wait(observed, pod).filter(|_| is_needed) {
            decision.wake(left);
            continue;
        }
        if decision.must_wait(&observed.failures, event::FAILED_DELETE, observed.now) {
            return;
        }
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        decision.push(Effect::delete(Kind::Pod, &pod.metadata).at_once().reported(
            Kind::Instance.reference(&observed.instance.metadata),
            (event::SUCCESSFUL_DELETE, format!("Deleted WaitForFirstConsumer temporary pod {name}")),
            (event::FAILED_DELETE, format!("Failed to delete WaitForFirstConsumer temporary pod {name}")),
        ));
    }
}

/// Returns the time until a temporary pod that has ended is old enough to be replaced.
fn replacement_wait(observed: &Observed, pod: &CachedPod) -> Option<Duration> {
    let created = pod.metadata.creation_timestamp.as_ref()?.0;
    let left = REPLACEMENT_AGE.checked_sub(observed.now.duration_since(created))?;
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

/// Returns the event of a VMI that fails because a DataVolume has.
pub(super) fn event(observed: &Observed, wanted: &VirtualMachineInstance) -> Option<Effect> {
    let Gate::Failed(volume) = gate(observed) else { return None };
    let fails = is_unstarted(&observed.instance) && observed.pods.is_empty() && *wanted.phase() == VmiPhase::Failed;
    let regarding = Kind::Instance.reference(&observed.instance.metadata);
    fails.then(|| Effect::Event(Event::warning(regarding, event::FAILED_DATA_VOLUME_IMPORT, described(volume))))
}

/// Returns the DataVolumes of the volumes, hot-plugged ones included.
fn of_volumes(observed: &Observed) -> impl Iterator<Item = &DataVolume> {
    let names = observed.instance.spec.volumes.iter().filter_map(claim_name);
    names.filter_map(|name| match observed.claims.get(name) {
        Some(claim) => observed.data_volumes.of_claim(claim),
        None => observed.data_volumes.known.get(name).map(Arc::as_ref),
    })
}

/// Updates the conditions about DataVolumes.
pub(super) fn update_conditions(observed: &Observed, phase: &VmiPhase, conditions: &mut Vec<Condition>) {
    let now = Time(observed.now);
    let is_unstarted = matches!(phase, VmiPhase::Unset | VmiPhase::Pending) && observed.pods.is_empty();
    let waits = match gate(observed) {
        Gate::AwaitsConsumer(volume) | Gate::Waits(volume) if is_unstarted => Some(described(volume)),
        _ => None,
    };
    let waits = waits.map(|message| Condition::new(condition::PROVISIONING, true, "", &message, &now));
    set_or_remove(conditions, condition::PROVISIONING, waits);
    let ready = of_volumes(observed).map(|volume| volume.condition(condition::READY));
    let ready: Vec<Option<&str>> = ready.map(|ready| ready.map(|ready| ready.status.as_str())).collect();
    if ready.is_empty() {
        remove(conditions, condition::DATA_VOLUMES_READY);
    } else if ready.iter().all(|status| *status == Some("True")) {
        let message = "All of the VMI's DVs are bound and ready";
        set(
            conditions,
            Condition::new(condition::DATA_VOLUMES_READY, true, reason::ALL_DATA_VOLUMES_READY, message, &now),
        );
    } else {
        let (reason, message) = (reason::NOT_ALL_DATA_VOLUMES_READY, "Not all of the VMI's DVs are ready");
        let status = if ready.contains(&Some("False")) { "False" } else { "Unknown" }.to_owned();
        let not = Condition::new(condition::DATA_VOLUMES_READY, false, reason, message, &now);
        set(conditions, Condition { status, ..not });
    }
}
