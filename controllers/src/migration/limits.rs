//! Time limits of the phases: no migration holds its place longer than its nodes may be silent.
//!
//! | phase | waits for | after the limit |
//! |---|---|---|
//! | Pending with a target pod, Scheduling | target pod, attachment pod, volumes that leave, a snapshot | Failed; the pods are deleted |
//! | Scheduled | the hand-off | Failed; the pods are deleted |
//! | PreparingTarget | virt-handler of the target | Failed, recorded on the VMI: the source cannot have begun |
//! | TargetReady, Running | virt-handler of the source | Failed; an abort is requested, and the pods stay until it is answered |
//! | Running, the guest has moved | virt-handler of the target | Succeeded |
//!
//! Times that virt-handler writes are those of another clock, so that signs of life count from their arrival.
//!
//! On purpose without a limit: Pending without a target pod. It holds no place. It waits for one, for room in a quota, for a pod that
//! the API server refuses, or for the outcome of a former migration, which only the nodes of that one know.

use api::{MigrationPhase, constants::annotation};
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

use super::{Observed, backoff::entered, seconds, target};
use crate::{resources::vmis::node_name, vmi::leaving_volume};

/// Time in which a virt-handler or virt-controller takes a step.
const STEP: SignedDuration = SignedDuration::from_mins(5);
/// Time beyond that of a pending target pod, which is deleted then.
const AFTER_PENDING: SignedDuration = SignedDuration::from_mins(1);
/// Time for which a snapshot that goes first is awaited: a bit longer than its default deadline.
const HELD: SignedDuration = SignedDuration::from_mins(6);
/// Name of what is awaited then.
const OPERATION: &str = "the operation on the data of the VM did not end";
/// Time without a sign of progress. virt-handler writes one each minute.
const PROGRESS: SignedDuration = SignedDuration::from_mins(10);
/// The same for virt-handlers of older releases, whose progress shows no time.
const UNDATED_PROGRESS: SignedDuration = SignedDuration::from_hours(24);
/// The sign of life of a guest that has moved.
const MOVED: &str = "moved";

/// A wait with a limit.
pub(super) struct Wait {
    /// Rest of the time.
    pub(super) left: SignedDuration,
    /// The guest runs at the target: the migration has succeeded whatever happens now.
    pub(super) has_moved: bool,
    /// Names what is waited for.
    pub(super) message: String,
}

/// The progress that virt-handler of the source writes.
#[derive(Deserialize)]
struct Progress {
    migration: String,
    time: Option<Timestamp>,
}

/// Returns the wait of a phase whose condition for the next one is not met.
pub(super) fn wait(observed: &Observed, phase: &MigrationPhase) -> Option<Wait> {
    let state = observed.state();
    let known = observed.migration.metadata.creation_timestamp.as_ref().map_or(observed.now, |at| at.0);
    let since = entered(&observed.migration, phase).unwrap_or(known);
    let node = |node: Option<&String>| node.map(String::as_str).unwrap_or_default().to_owned();
    let source = || node(state.and_then(|state| state.source_node.as_ref()));
    let (since, limit, what) = match phase {
        MigrationPhase::Pending | MigrationPhase::Scheduling => starting(observed, since)?,
        MigrationPhase::Scheduled if observed.held.is_some() => {
            (observed.held_since.map_or(since, |held| held.max(since)), HELD, OPERATION.to_owned())
        }
        MigrationPhase::Scheduled => (since, STEP, "the hand-off to virt-handler was not possible".to_owned()),
        MigrationPhase::PreparingTarget => {
            let node = node(state.and_then(|state| state.target_node.as_ref()));
            (since, STEP, format!("virt-handler of node {node} did not prepare the target"))
        }
        MigrationPhase::TargetReady => {
            (since, STEP, format!("virt-handler of node {} did not begin the migration", source()))
        }
        MigrationPhase::Running if observed.has_moved() => {
            let node = observed.vmi.as_deref().and_then(node_name).unwrap_or_default();
            (last_sign(observed, since), STEP, format!("virt-handler of node {node} did not complete the migration"))
        }
        MigrationPhase::Running => {
            let is_undated = progress(observed).is_some_and(|(_, is_dated)| !is_dated);
            let limit = if is_undated { UNDATED_PROGRESS } else { PROGRESS };
            (last_sign(observed, since), limit, format!("virt-handler of node {} showed no progress", source()))
        }
        _ => return None,
    };
    let left = limit.saturating_sub(observed.now.duration_since(since));
    let message = format!("Migration failed because {what} within {} seconds.", limit.as_secs());
    Some(Wait { left, has_moved: observed.has_moved(), message })
}

/// Returns begin and limit of the wait for the target pod and the pod that attaches volumes to it.
fn starting(observed: &Observed, since: Timestamp) -> Option<(Timestamp, SignedDuration, String)> {
    let pod = observed.target()?;
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let is_complete = |vmi| target::runs(observed) && target::has_attachments(observed, vmi);
    let is_held = observed.held.is_some() && observed.vmi.as_deref().is_some_and(is_complete);
    let what = match observed.vmi.as_deref().and_then(leaving_volume) {
        _ if !target::runs(observed) => format!("target pod {name} did not run"),
        Some(volume) => format!("the guest did not release volume {volume}, which was removed,"),
        None if is_held => OPERATION.to_owned(),
        None => format!("the attachment pod of target pod {name} was not ready"),
    };
    let attachment = target::attachment(observed).map(|pod| &pod.metadata);
    let created = [Some(&pod.metadata), attachment].into_iter().flatten();
    let created = created.filter_map(|metadata| metadata.creation_timestamp.as_ref()).map(|at| at.0).max();
    let pending = seconds(observed, annotation::MIGRATION_PENDING_TIMEOUT).unwrap_or(target::PENDING_TIMEOUT);
    let limit = SignedDuration::from_secs(pending).saturating_add(AFTER_PENDING);
    let begin = created.map_or(since, |created| created.max(since));
    // However old the pod is: the migration goes on at the end of the operation.
    let held = observed.held_since.filter(|_| is_held);
    let (begin, limit) = held.map_or((begin, limit), |held| (begin.max(held), limit.max(HELD)));
    Some((begin, limit, what))
}

/// Returns the sign of life of virt-handler in phase Running. Its silence is counted from the last change.
pub(super) fn sign(observed: &Observed) -> Option<&str> {
    if *observed.migration.phase() != MigrationPhase::Running {
        return None;
    }
    if observed.has_moved() { Some(MOVED) } else { progress(observed).map(|(text, _)| text) }
}

/// Returns the time of the last sign of life in a phase that began at `since`.
fn last_sign(observed: &Observed, since: Timestamp) -> Timestamp {
    let seen = observed.silence.and_then(|silence| observed.now.checked_sub(silence).ok());
    seen.map_or(since, |seen| seen.max(since))
}

/// Returns the progress that virt-handler has written, and true if it contains the time.
fn progress(observed: &Observed) -> Option<(&str, bool)> {
    let text = observed.vmi.as_deref()?.metadata.annotations.as_ref()?.get(annotation::MIGRATION_PROGRESS)?;
    let progress = serde_json::from_str::<Progress>(text).ok()?;
    let is_of_this = Some(&progress.migration) == observed.migration.metadata.uid.as_ref();
    is_of_this.then_some((text.as_str(), progress.time.is_some()))
}
