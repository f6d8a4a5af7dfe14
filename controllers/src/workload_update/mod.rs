//! VMIs whose launcher has another version, as after an upgrade. If the installation's strategy requires it, they are evicted
//! in batches; the VM of an evicted VMI starts it again with the present launcher.
//!
//! Method `LiveMigrate` is not carried out yet. Start with [`decide`]; `controller.rs` holds the watches.

mod controller;
#[cfg(test)]
mod tests;

use std::time::Duration;

use api::{KubeVirt, VirtualMachineInstance, VmiPhase, constants::event, duration};
use jiff::Timestamp;
use sha2::{Digest, Sha256};

pub(crate) use self::controller::WorkloadUpdates;
use crate::{
    kubevirt::Deployment,
    resources::{VmiWithPods, pods::CachedPod},
    runtime::{Decision, Effect, Event, Kind, WriteOptions},
};

/// The method that is carried out.
const EVICT: &str = "Evict";
/// Phase of an installation that is not being changed.
const DEPLOYED: &str = "Deployed";
/// VMIs evicted at once, unless the strategy sets another value.
const USUAL_SIZE: usize = 10;
/// Time between two batches, unless the strategy sets another value.
const USUAL_INTERVAL: Duration = Duration::from_secs(60);
/// Least time between two batches.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time until the next decision.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Everything that a decision depends on.
pub(crate) struct Observed<'a> {
    /// The configuration object.
    pub kubevirt: &'a KubeVirt,
    /// This installation.
    pub deployment: &'a Deployment,
    /// Number of VMIs whose launcher has another version.
    pub outdated_count: usize,
    /// These VMIs. Not needed before a batch is due.
    pub outdated: &'a [VmiWithPods],
    /// Time of the last batch.
    pub last_batch: Option<Timestamp>,
    /// The current time.
    pub now: Timestamp,
}

/// Returns the time between two batches.
fn interval(kubevirt: &KubeVirt) -> Duration {
    let text = kubevirt.spec.workload_update_strategy.batch_eviction_interval.as_deref();
    let interval = text.and_then(|text| duration::parse(text).ok());
    interval.unwrap_or(USUAL_INTERVAL).max(SHORTEST_INTERVAL)
}

/// Returns the time until the next batch, or `None` if it is due.
fn time_left(kubevirt: &KubeVirt, last_batch: Option<Timestamp>, now: Timestamp) -> Option<Duration> {
    let waited = Duration::try_from(now.duration_since(last_batch?)).unwrap_or_default();
    interval(kubevirt).checked_sub(waited).filter(|left| !left.is_zero())
}

/// Decides which VMIs are evicted.
fn decide(observed: &Observed<'_>) -> Decision {
    let mut decision = Decision::settled();
    let strategy = &observed.kubevirt.spec.workload_update_strategy;
    let evicts = strategy.workload_update_methods.iter().any(|method| method == EVICT);
    if !evicts || observed.outdated_count == 0 || !is_deployed(observed) {
        return decision;
    }
    let left = time_left(observed.kubevirt, observed.last_batch, observed.now);
    decision.wake(left.unwrap_or_else(|| interval(observed.kubevirt)).min(LONGEST_WAIT));
    if left.is_some() {
        return decision;
    }
    let size = strategy.batch_eviction_size.map_or(USUAL_SIZE, |size| usize::try_from(size).unwrap_or(0));
    let mut candidates: Vec<(&VirtualMachineInstance, &CachedPod)> =
        observed.outdated.iter().filter_map(candidate).collect();
    // In another order each time, so that VMIs that must not be evicted do not hold up others.
    candidates.sort_by_cached_key(|(vmi, _)| rank(vmi, observed.now));
    for (vmi, pod) in candidates.into_iter().take(size) {
        decision.push(evict(vmi, pod));
    }
    decision
}

/// Returns true when all processes have the version of this installation.
fn is_deployed(observed: &Observed<'_>) -> bool {
    observed.kubevirt.status.as_ref().is_some_and(|status| {
        let is_this = |id: &Option<String>| id.as_deref() == Some(observed.deployment.id());
        status.phase.as_deref() == Some(DEPLOYED)
            && is_this(&status.observed_deployment_id)
            && is_this(&status.target_deployment_id)
    })
}

/// Returns a running VMI with its pod, unless it is ending or already marked for eviction.
fn candidate(outdated: &VmiWithPods) -> Option<(&VirtualMachineInstance, &CachedPod)> {
    let vmi: &VirtualMachineInstance = &outdated.vmi;
    let evacuated = vmi.status.as_ref().and_then(|status| status.evacuation_node_name.as_deref());
    if *vmi.phase() != VmiPhase::Running || vmi.is_deleting() || evacuated.is_some_and(|node| !node.is_empty()) {
        return None;
    }
    let pod: &CachedPod = outdated.pods.iter().find(|pod| !pod.is_going_down())?;
    Some((vmi, pod))
}

fn rank(vmi: &VirtualMachineInstance, now: Timestamp) -> Vec<u8> {
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    Sha256::digest(format!("{uid} {}", now.as_second())).to_vec()
}

fn evict(vmi: &VirtualMachineInstance, pod: &CachedPod) -> Effect {
    let regarding = || Kind::Instance.reference(&vmi.metadata);
    // The reference prints its error value even if there is none.
    let evicted = "Initiated eviction of VMI as part of automated workload update: <nil>";
    let failed = "Error deleting VMI during automated workload update: {error}";
    let effect = Effect::Evict {
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone(),
        options: WriteOptions::default(),
    };
    effect.on_success(Event::normal(regarding(), event::SUCCESSFUL_EVICT, evicted)).on_failure(Event::warning(
        regarding(),
        event::FAILED_EVICT,
        failed,
    ))
}
