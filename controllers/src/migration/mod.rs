//! Live migrations of VMIs: from the request to the hand-off to virt-handler, and their ends. Start with [`decide`];
//! `controller.rs` holds the watches, `gate.rs` the limits and the queue,
//! `admission.rs` how the leader admits migrations that other replicas decide about, `admission_controller.rs` when.
//!
//! ```text
//!             gate: target pod     pod runs       hand-off           target virt-handler       source virt-handler
//!  Pending ──────────────> Scheduling ──> Scheduled ──> PreparingTarget ──────────> TargetReady ────────────> Running
//!     │                        │              │                │                         │                      │
//!     └──── deleted, VMI gone, pod down ──> Failed <───────────┴──── migrationState.failed ──────────────> Succeeded
//! ```
//! `phases.rs` decides the phase, `limits.rs` how long it may last, `target.rs` the target pod, `state.rs` what the status of the VMI says about the migration,
//! `state_claim.rs` the claims of a VMI that keeps state, `end.rs` what is left of one that has ended, `waits.rs` why one waits.

mod admission;
mod admission_controller;
mod backoff;
mod controller;
mod end;
mod gate;
mod limits;
mod object;
mod options;
mod phases;
mod state;
mod state_claim;
mod status;
mod target;
#[cfg(test)]
mod tests;
mod waits;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    MigrationPhase, VirtualMachineInstance, VirtualMachineInstanceMigration, config::ClusterConfig, constants::event,
    vmi::migration::VirtualMachineInstanceMigrationState,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Toleration};

use self::gate::Full;
pub(crate) use self::object::{Origin, migration_of};
pub(crate) use self::{admission_controller::Admissions, controller::Migrations};
use crate::{
    launcher_pod::{LauncherImages, NamespaceLimits, is_target_of},
    persistent_state::State,
    resources::{
        attachments::CachedAttachment, claims::CachedClaim, networks::CachedNetwork, nodes::CachedNode,
        pod_warnings::PodWarning, pods::CachedPod, policies::CachedPolicy, recoveries::CachedRecovery, vmis::node_name,
    },
    runtime::{Decision, Effect, Event, Failure, Failures, Kind},
    vmi::present_pod,
};

/// Shortest time between two attempts to create a target pod.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// Wait before a pod is rendered again that could not be rendered.
const RENDER_AGAIN: Duration = Duration::from_secs(30);

/// Everything that a decision about a migration depends on.
pub(crate) struct Observed {
    /// The migration.
    pub migration: Arc<VirtualMachineInstanceMigration>,
    /// Its VMI.
    pub vmi: Option<Arc<VirtualMachineInstance>>,
    /// All migrations of the VMI.
    pub all: Vec<Arc<VirtualMachineInstanceMigration>>,
    /// Launcher pods of the VMI.
    pub pods: Vec<Arc<CachedPod>>,
    /// Warnings about pods that do not start.
    pub warnings: Vec<Arc<PodWarning>>,
    /// Labels that the target pod requires and no node but the source has, if it cannot be scheduled.
    pub unoffered: Vec<String>,
    /// Pods that attach claims to them.
    pub attachments: Vec<Arc<CachedAttachment>>,
    /// It is the migration's turn to have a target pod.
    pub is_admitted: bool,
    /// The leader admits migrations by their status, from which an attempt without a pod has to be removed.
    pub by_status: bool,
    /// The limit for which it waits.
    pub full: Option<Full>,
    /// The operation on the VM's data for which it waits: any before it has a target pod, and a snapshot until it is handed over.
    pub held: Option<String>,
    /// Time since which it has the VM.
    pub held_since: Option<Timestamp>,
    /// The event about an unschedulable target pod was emitted.
    pub is_reported: bool,
    /// Node of the VMI.
    pub source_node: Option<Arc<CachedNode>>,
    /// The target pod is on a node that is being drained.
    pub is_target_drained: bool,
    /// Migration policies, if the migration is about to be handed over.
    pub policies: Vec<Arc<CachedPolicy>>,
    /// Labels of the namespace.
    pub namespace: BTreeMap<String, String>,
    /// Claims that the VMI names.
    pub claims: BTreeMap<String, Arc<CachedClaim>>,
    /// Claims with the state of the VMI.
    pub claims_of_state: State,
    /// The pod that reads which of them has it.
    pub recovery: Option<Arc<CachedRecovery>>,
    /// Tolerations of that pod: those of the VMI.
    pub tolerations: Vec<Toleration>,
    /// Limits that the namespace makes necessary.
    pub limits: NamespaceLimits,
    /// Definitions of the VMI's networks, if the pod requests the resources that they need.
    pub definitions: Option<BTreeMap<String, Arc<CachedNetwork>>>,
    /// Configuration in force.
    pub config: Arc<ClusterConfig>,
    /// Launcher images of this installation.
    pub launcher_images: LauncherImages,
    /// The writes for the migration that were refused.
    pub failures: Failures,
    /// Time since the last sign of life of virt-handler in phase Running, if there was one.
    pub silence: Option<Duration>,
    /// The current time.
    pub now: Timestamp,
}

impl Observed {
    /// Returns what the VMI says about this migration. There is none before the hand-off.
    fn state(&self) -> Option<&VirtualMachineInstanceMigrationState> {
        let state = self.vmi.as_ref()?.status.as_ref()?.migration_state.as_deref()?;
        (state.migration_uid.is_some() && state.migration_uid == self.migration.metadata.uid).then_some(state)
    }

    /// Returns true once the guest belongs to the target node.
    fn has_moved(&self) -> bool {
        let node = self.vmi.as_deref().and_then(node_name);
        node.is_some() && self.state().is_some_and(|state| state.target_node.as_deref() == node)
    }

    /// Returns the target pods: more than one after a creation whose answer was lost.
    fn targets(&self) -> Vec<&CachedPod> {
        let Some(vmi) = self.vmi.as_deref() else { return Vec::new() };
        let is_target = |pod: &&CachedPod| is_target_of(pod, &self.migration, vmi);
        let mut targets: Vec<&CachedPod> = self.pods.iter().map(Arc::as_ref).filter(is_target).collect();
        targets.sort_by_key(|pod| (pod.metadata.creation_timestamp.as_ref().map(|at| at.0), pod.metadata.name.clone()));
        targets
    }

    /// Returns the target pod.
    fn target(&self) -> Option<&CachedPod> {
        self.targets().into_iter().next()
    }

    /// Returns the present pod of the VMI.
    fn source(&self) -> Option<&CachedPod> {
        let vmi = self.vmi.as_deref()?;
        node_name(vmi)?;
        let active = &vmi.status.as_ref()?.active_pods;
        let is_active = |pod: &&CachedPod| pod.metadata.uid.as_ref().is_some_and(|uid| active.contains_key(uid));
        let pods: Vec<&CachedPod> = self.pods.iter().map(Arc::as_ref).filter(is_active).collect();
        present_pod(vmi, &pods).filter(|pod| !pod.is_down())
    }

    fn regarding(&self) -> ObjectReference {
        Kind::Migration.reference(&self.migration.metadata)
    }

    /// Returns the refusal of a write with this reason.
    fn refusal(&self, reason: &str) -> Option<&Failure> {
        self.failures.of(reason)
    }

    /// Returns true if a refused write must wait, and sets the wake-up.
    fn must_wait(&self, reason: &str, decision: &mut Decision) -> bool {
        decision.must_wait(&self.failures, reason, self.now)
    }
}

/// Decides what to do about a migration.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    if observed.migration.is_final() {
        end::decide(observed, &mut decision)?;
        return Ok(decision);
    }
    let step = phases::next(observed);
    if let Some(after) = step.wake {
        decision.wake(after);
    }
    if !step.phase().is_final() {
        act(observed, step.phase(), &mut decision)?;
    }
    let is_new = |phase: &MigrationPhase| step.passed.contains(phase);
    let backs_off = is_new(&MigrationPhase::Pending)
        && backoff::until(&observed.migration, &observed.all).is_some_and(|until| until > observed.now);
    // Without an address of the target the source cannot begin, so that the failure is certain.
    if let Some((reason, vmi)) = step.timed_out.as_ref().zip(observed.vmi.as_deref())
        && observed.state().is_some_and(|state| !state::may_have_begun(state))
    {
        state::mark_failed(observed, vmi, reason, &mut decision)?;
    }
    status::write(observed, step, &mut decision)?;
    if let Some(vmi) = observed.vmi.as_deref().filter(|_| backs_off) {
        let (namespace, name) = names(vmi);
        let message = format!("backoff migrating vmi {namespace}/{name}");
        let regarding = Kind::Instance.reference(&vmi.metadata);
        decision.push(Effect::Event(Event::warning(regarding, event::MIGRATION_BACKOFF, message)));
    }
    if observed.vmi.is_none() {
        end::delete_migration(observed, &mut decision);
    }
    Ok(decision)
}

/// Returns true if a decision creates a pod.
fn creates_pod(decision: &Decision) -> bool {
    decision.effects.iter().any(|effect| matches!(effect, Effect::Create { kind: Kind::Pod, .. }))
}

/// Does what the phase requires.
fn act(observed: &Observed, phase: &MigrationPhase, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let Some(vmi) = observed.vmi.as_deref().filter(|vmi| !vmi.is_deleting() && !vmi.is_final()) else { return Ok(()) };
    match phase {
        MigrationPhase::Pending => {
            if let Some(until) =
                backoff::until(&observed.migration, &observed.all).filter(|until| *until > observed.now)
            {
                decision.wake(until.duration_since(observed.now).unsigned_abs());
            }
            state::end_forgotten(observed, vmi, decision)?;
            target::provide(observed, vmi, decision)
        }
        MigrationPhase::Scheduling => target::provide(observed, vmi, decision),
        MigrationPhase::Scheduled if observed.state().is_none() => state::hand_over(observed, vmi, decision),
        MigrationPhase::Scheduled
        | MigrationPhase::PreparingTarget
        | MigrationPhase::TargetReady
        | MigrationPhase::Running => {
            state::abort(observed, vmi, decision)?;
            state_claim::hand_over(observed, decision);
            target::mark_ready(observed, decision);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns a number of seconds in an annotation of the migration.
fn seconds(observed: &Observed, key: &str) -> Option<i64> {
    observed.migration.metadata.annotations.as_ref()?.get(key)?.trim().parse().ok().filter(|seconds| *seconds >= 0)
}

/// Returns namespace and name.
fn names(vmi: &VirtualMachineInstance) -> (&str, &str) {
    let metadata = &vmi.metadata;
    (metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref().unwrap_or_default())
}
