//! The phase of a migration. Rules and messages are those of the reference.

use std::time::Duration;

use api::{
    MigrationPhase, VirtualMachineInstance, VmiPhase,
    constants::{annotation, event},
};
use jiff::SignedDuration;

use super::{Observed, limits, names, seconds, target};
use crate::{runtime::Event, vmi::plugged_volumes};

/// The phases that a migration enters, and the event about the last one.
#[derive(Debug, Default)]
pub(super) struct Step {
    phase: MigrationPhase,
    /// Phases entered by this step, in order.
    pub(super) passed: Vec<MigrationPhase>,
    /// The event.
    pub(super) event: Option<Event>,
    /// Time after which a time limit ends.
    pub(super) wake: Option<Duration>,
    /// Reason of a migration that fails because a time limit has ended.
    pub(super) timed_out: Option<String>,
}

impl Step {
    /// Returns the phase after the step.
    pub(super) fn phase(&self) -> &MigrationPhase {
        &self.phase
    }

    fn succeed(&mut self, observed: &Observed, message: &str) {
        self.event = Some(Event::normal(observed.regarding(), event::SUCCESSFUL_MIGRATION, message));
        self.enter(MigrationPhase::Succeeded);
    }

    fn fail(&mut self, observed: &Observed, message: String) {
        self.event = Some(Event::warning(observed.regarding(), event::FAILED_MIGRATION, message));
        self.enter(MigrationPhase::Failed);
    }

    fn enter(&mut self, phase: MigrationPhase) {
        self.phase = phase.clone();
        self.passed.push(phase);
    }
}

/// Returns the next phase.
pub(super) fn next(observed: &Observed) -> Step {
    let phase = observed.migration.phase().clone();
    let mut step = Step { phase: phase.clone(), ..Step::default() };
    match end(observed, &phase) {
        Some(End::Succeeded) => step.succeed(observed, "Source node reported migration succeeded"),
        Some(End::Failed(message)) => step.fail(observed, message),
        None => {
            while let Some(next) = advance(observed, &step.phase, &mut step.wake) {
                step.enter(next);
            }
            if step.passed.is_empty() {
                limit(observed, &mut step);
            }
        }
    }
    step
}

/// Ends a migration that has waited too long, or sets the wake-up for that.
fn limit(observed: &Observed, step: &mut Step) {
    let Some(wait) = limits::wait(observed, &step.phase) else { return };
    if wait.left > SignedDuration::ZERO {
        let left = wait.left.unsigned_abs();
        step.wake = Some(step.wake.map_or(left, |wake| wake.min(left)));
    } else if wait.has_moved {
        step.succeed(observed, "the guest runs at the target, whose virt-handler has not completed the migration");
    } else {
        step.timed_out = Some(wait.message.clone());
        step.fail(observed, wait.message);
    }
}

enum End {
    Succeeded,
    Failed(String),
}

fn failed(message: &str) -> Option<End> {
    Some(End::Failed(message.to_owned()))
}

/// Returns the end of the migration. The first rule that applies decides.
fn end(observed: &Observed, phase: &MigrationPhase) -> Option<End> {
    let spec = &observed.migration.spec;
    if spec.send_to.is_some() || spec.receive.is_some() {
        return failed("migrations between clusters or namespaces (sendTo, receive) are not supported");
    }
    let state = observed.state();
    // Whatever happens to the VMI or its pod from now on, the migration has succeeded.
    if state.is_some_and(|state| state.completed && !state.failed) {
        return Some(End::Succeeded);
    }
    let Some(vmi) = observed.vmi.as_deref() else { return failed("Migration failed because vmi does not exist.") };
    if vmi.is_final() {
        return failed("Migration failed vmi shutdown during migration.");
    }
    let is_deleted = observed.migration.metadata.deletion_timestamp.is_some();
    let was_handed_over =
        matches!(phase, MigrationPhase::PreparingTarget | MigrationPhase::TargetReady | MigrationPhase::Running);
    if is_deleted && state.is_none() && !was_handed_over {
        return failed("Migration failed due to being canceled");
    }
    let target = observed.target();
    if state.is_some_and(|state| state.failed) {
        return failed("source node reported migration failed");
    }
    if let Some(pod) = target.filter(|pod| pod.is_going_down()) {
        let cause = pod.reason.iter().chain(&pod.message).map(|part| format!(": {part}")).collect::<String>();
        return Some(End::Failed(format!("Migration failed because target pod shutdown during migration{cause}")));
    }
    let had_target = was_handed_over || matches!(phase, MigrationPhase::Scheduling | MigrationPhase::Scheduled);
    if had_target && target.is_none() {
        return failed("Migration target pod was removed during active migration.");
    }
    if was_handed_over && state.is_none() {
        let present = vmi.status.as_ref().and_then(|status| status.migration_state.as_ref());
        return failed(match present {
            None => "VMI's migration state was cleared during the active migration.",
            Some(_) => "VMI's migration state was taken over by another migration job during active migration.",
        });
    }
    // Once the migration has begun, the guest of a running target has its volumes.
    let has_begun = state.is_some_and(|state| state.start_timestamp.is_some());
    if !has_begun
        && target.is_some_and(|pod| target::attachments_of(observed, pod).any(|attachment| attachment.is_down()))
    {
        return failed("Migration failed because target attachment pod shutdown during migration");
    }
    match phase {
        MigrationPhase::Unset if is_preceded(observed) => {
            failed("VMI is not eligible for migration because another migration job is in progress.")
        }
        MigrationPhase::Pending => utility_volumes_timed_out(observed, vmi),
        _ => None,
    }
}

/// Returns true if another migration of the VMI has not ended and comes first.
fn is_preceded(observed: &Observed) -> bool {
    let own = &observed.migration.metadata;
    let created = observed.migration.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let others = observed.all.iter().filter(|other| other.metadata.uid != own.uid && !other.is_final());
    others.into_iter().any(|other| {
        let before = (other.metadata.creation_timestamp.as_ref().map(|at| at.0), &other.metadata.name);
        *other.phase() != MigrationPhase::Unset || before < (created, &own.name)
    })
}

/// Returns the rest of the time in which utility volumes can be detached, and the whole time in seconds.
pub(super) fn utility_volumes_time(observed: &Observed) -> (SignedDuration, i64) {
    let limit = seconds(observed, annotation::MIGRATION_UTILITY_VOLUMES_TIMEOUT)
        .unwrap_or(observed.config.migrations.utility_volumes_timeout);
    let created = observed.migration.metadata.creation_timestamp.as_ref().map_or(observed.now, |at| at.0);
    let age = observed.now.duration_since(created);
    (SignedDuration::from_secs(limit).saturating_sub(age), limit)
}

fn utility_volumes_timed_out(observed: &Observed, vmi: &VirtualMachineInstance) -> Option<End> {
    if vmi.spec.utility_volumes.is_empty() {
        return None;
    }
    let (left, limit) = utility_volumes_time(observed);
    let (namespace, name) = names(vmi);
    (left <= SignedDuration::ZERO).then(|| {
        End::Failed(format!(
            "Migration timeout waiting for utility volumes to detach from VMI [{namespace}/{name}]. Utility volumes still \
             present after {limit} seconds."
        ))
    })
}

/// Returns the phase that follows, if its condition is met.
fn advance(observed: &Observed, phase: &MigrationPhase, wake: &mut Option<Duration>) -> Option<MigrationPhase> {
    let vmi = observed.vmi.as_deref()?;
    let state = observed.state();
    let runs = target::runs(observed);
    match phase {
        MigrationPhase::Unset => Some(MigrationPhase::Pending),
        MigrationPhase::Pending if !vmi.spec.utility_volumes.is_empty() && observed.target().is_none() => {
            *wake = Some(utility_volumes_time(observed).0.unsigned_abs());
            None
        }
        MigrationPhase::Pending if state.is_some() => Some(MigrationPhase::Scheduling),
        MigrationPhase::Pending => {
            let is_provided = observed.target().is_some()
                && (plugs_nothing(observed, vmi) || (runs && target::has_attachments(observed, vmi)));
            is_provided.then_some(MigrationPhase::Scheduling)
        }
        MigrationPhase::Scheduling if state.is_some() => Some(MigrationPhase::Scheduled),
        MigrationPhase::Scheduling => {
            let is_ready = runs && target::has_attachments(observed, vmi);
            (is_ready && observed.held.is_none()).then_some(MigrationPhase::Scheduled)
        }
        MigrationPhase::Scheduled => state?.target_node.is_some().then_some(MigrationPhase::PreparingTarget),
        MigrationPhase::PreparingTarget => state?.target_node_address.is_some().then_some(MigrationPhase::TargetReady),
        MigrationPhase::TargetReady => state?.start_timestamp.is_some().then_some(MigrationPhase::Running),
        _ => None,
    }
}

fn plugs_nothing(observed: &Observed, vmi: &VirtualMachineInstance) -> bool {
    *vmi.phase() != VmiPhase::Running || plugged_volumes(vmi, &observed.attachments).is_empty()
}
