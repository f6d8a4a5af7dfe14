//! Why a migration waits, for its condition `migrationWaiting`.

use api::{
    Condition, MigrationPhase, VirtualMachineInstance, VmiPhase,
    constants::{condition, event},
    migration::VirtualMachineInstanceMigrationStatus,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Observed,
    backoff::{self, entered},
    gate::Full,
    target,
};
use crate::{launcher_pod::with_unoffered, resources::pods::CachedPod, runtime::Decision, vmi::leaving_volume};

/// Time after which a wait shows. Most are shorter.
const SHOWN_AFTER: SignedDuration = SignedDuration::from_secs(5);
/// Shortest time between two texts with the same reason.
const SAME_REASON: SignedDuration = SignedDuration::from_secs(10);

/// A cause for which a migration waits.
#[derive(Debug, PartialEq, Eq)]
struct Wait {
    reason: &'static str,
    message: String,
    /// It shows at once: it does not pass soon.
    at_once: bool,
}

impl Wait {
    fn new(reason: &'static str, message: String) -> Self {
        Self { reason, message, at_once: false }
    }

    fn at_once(self) -> Self {
        Self { at_once: true, ..self }
    }
}

/// Updates the condition.
pub(super) fn update(
    observed: &Observed,
    phase: &MigrationPhase,
    status: &mut VirtualMachineInstanceMigrationStatus,
    decision: &mut Decision,
) {
    let type_ = condition::MIGRATION_WAITING;
    let known = status.conditions.iter().position(|known| known.type_ == type_);
    let Some(wait) = wait(observed, phase) else {
        known.map(|known| status.conditions.remove(known));
        return;
    };
    let since = entered(&observed.migration, phase).unwrap_or(observed.now);
    let former = known.map(|known| &status.conditions[known]);
    let left = match former {
        Some(former) if former.reason.as_deref() != Some(wait.reason) => SignedDuration::ZERO,
        Some(former) if former.message.as_ref() == Some(&wait.message) => return,
        Some(former) => left(observed.now, former.last_probe_time.as_ref().map(|at| at.0), SAME_REASON),
        None if wait.at_once => SignedDuration::ZERO,
        None => left(observed.now, Some(since), SHOWN_AFTER),
    };
    if left > SignedDuration::ZERO {
        decision.wake(left.unsigned_abs());
        return;
    }
    let now = Time(observed.now);
    let shown = Condition::new(type_, true, wait.reason, &wait.message, &now);
    let shown = Condition { last_probe_time: Some(now), ..shown };
    match known {
        Some(known) => status.conditions[known] = shown,
        None => status.conditions.push(shown),
    }
}

/// Returns the rest of a time that began at `since`.
fn left(now: Timestamp, since: Option<Timestamp>, time: SignedDuration) -> SignedDuration {
    since.map_or(SignedDuration::ZERO, |since| time - now.duration_since(since))
}

/// Returns what the migration waits for. Waits with a condition of their own have no other.
fn wait(observed: &Observed, phase: &MigrationPhase) -> Option<Wait> {
    let vmi = observed.vmi.as_deref()?;
    let is_early = matches!(phase, MigrationPhase::Pending | MigrationPhase::Scheduling);
    if !is_early || observed.state().is_some() || observed.migration.metadata.deletion_timestamp.is_some() {
        return None;
    }
    match observed.target() {
        Some(target) => for_target(observed, vmi, target),
        None if *phase != MigrationPhase::Pending || !vmi.spec.utility_volumes.is_empty() => None,
        None => for_place(observed, vmi),
    }
}

/// Returns what the target pod waits for.
fn for_target(observed: &Observed, vmi: &VirtualMachineInstance, pod: &CachedPod) -> Option<Wait> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    if let Some(scheduled) = pod.scheduled.as_ref().filter(|_| pod.is_unschedulable()) {
        let message = scheduled.message.as_deref().unwrap_or_default();
        let message = with_unoffered(message, "no other node", &observed.unoffered);
        return Some(
            Wait::new("TargetPodUnschedulable", format!("target pod {name} has no node: {message}")).at_once(),
        );
    }
    let known = observed.warnings.iter().find(|known| known.metadata.uid == pod.metadata.uid);
    let warning = known.and_then(|known| known.warning.as_ref());
    let warning = warning.map(|warning| (warning.reason, warning.message.as_str()));
    let waiting = pod.waiting.as_ref().map(|(reason, message)| (reason.as_str(), message.as_str()));
    if let Some((reason, message)) = waiting.or(warning).filter(|_| pod.is_starting()) {
        let message = format!("target pod {name} does not start: {reason}: {message}");
        return Some(Wait::new("TargetPodNotStarted", message));
    }
    if let Some(volume) = leaving_volume(vmi).filter(|_| target::runs(observed)) {
        let message = format!("the guest has not released volume {volume}, which was removed");
        return Some(Wait::new("VolumeNotReleased", message));
    }
    if target::runs(observed) && !target::has_attachments(observed, vmi) {
        let message = format!("the attachment pod of target pod {name} is not ready");
        return Some(Wait::new("AttachmentPodNotReady", message));
    }
    for_operation(observed).filter(|_| target::runs(observed))
}

/// Returns the operation on the data of the VM that goes first.
fn for_operation(observed: &Observed) -> Option<Wait> {
    let message = format!("the data of the VM must hold still: {}", observed.held.as_ref()?);
    Some(Wait::new("OperationInProgress", message).at_once())
}

/// Returns why there is no target pod.
fn for_place(observed: &Observed, vmi: &VirtualMachineInstance) -> Option<Wait> {
    if let Some(refusal) = observed.refusal(event::FAILED_CREATE) {
        let message = format!("cannot create the target pod: {}", refusal.message);
        return Some(Wait::new(event::FAILED_CREATE, message).at_once());
    }
    if let Some(until) = backoff::until(&observed.migration, &observed.all).filter(|until| *until > observed.now) {
        let message = format!("the last migrations of the VMI failed; the next attempt is at {until}");
        return Some(Wait::new("Backoff", message));
    }
    if let Some(wait) = for_operation(observed) {
        return Some(wait);
    }
    let limits = &observed.config.migrations;
    match observed.full.as_ref() {
        Some(Full::Cluster) => {
            let limit = limits.parallel_per_cluster;
            let message = format!(
                "as many migrations are under way as the cluster allows: {limit} (parallelMigrationsPerCluster)"
            );
            Some(Wait::new("ParallelMigrationsPerCluster", message))
        }
        Some(Full::Node(node)) => {
            let limit = limits.parallel_outbound_per_node;
            let message = format!(
                "as many migrations leave node {node} as a node allows: {limit} (parallelOutboundMigrationsPerNode)"
            );
            Some(Wait::new("ParallelOutboundMigrationsPerNode", message))
        }
        None if *vmi.phase() != VmiPhase::Running => {
            Some(Wait::new("VmiNotRunning", format!("the VMI is not running: its phase is {}", vmi.phase())))
        }
        None if vmi.is_handed_off() || observed.pods.iter().filter(|pod| !pod.is_down()).count() > 1 => {
            Some(Wait::new("FormerMigration", "a former migration of the VMI or its pod has not ended".to_owned()))
        }
        None => None,
    }
}
