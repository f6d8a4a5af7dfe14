//! The claims of a VMI that keeps state: a claim that both nodes can mount stays, any other gives way to one of the target.
//!
//! ```text
//!   status names both claims -> claim of the target -> target pod -> guest moves with its state
//!     guest runs at the target   -> claim of the target gets the label of the VMI -> claim of the source is deleted
//!     guest stayed at the source -> claim of the target is deleted
//!     nobody recorded the end, both pods are down -> a pod reads the mark of the migration in the claim of the source
//! ```
//! Each step can be taken again. The migration keeps its finalizer until one claim is left, and the VM does not start before.

use std::time::Duration;

use api::{
    MigrationPhase, VirtualMachineInstance,
    constants::event,
    persistent_state::{LABEL, MIGRATION_LABEL, changes_claim, is_kept},
    vmi::migration::VirtualMachineInstanceMigrationState,
};
use jiff::SignedDuration;
use serde_json::{Value, json};

use super::{Observed, RENDER_AGAIN, backoff::entered, object::has_finalizer};
use crate::{
    launcher_pod::StateMount,
    persistent_state::{
        Owner, Verdict, belongs, is_moving_to, is_shared, label_of, mount, name_for_migration, render_recovery, verdict,
    },
    resources::{claims::CachedClaim, pods::CachedPod},
    runtime::{Decision, Effect, Event, Kind},
};

/// Wait for claims and for a pod that has failed to answer.
const AGAIN: Duration = Duration::from_secs(2);
/// Least age of a pod that has failed to answer when it is replaced.
const REPLACEMENT_AGE: SignedDuration = SignedDuration::from_secs(30);

/// The claim for the target pod.
pub(super) enum Gate {
    /// The pod can be made, with this claim if the VMI keeps state.
    Open(Option<StateMount>),
    /// It has to wait.
    Closed,
}

/// The end of a migration, as far as the state is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Moved,
    Stayed,
    Open,
}

fn recorded(observed: &Observed) -> Option<&VirtualMachineInstanceMigrationState> {
    observed.migration.status.as_ref()?.migration_state.as_ref()
}

/// Returns the claims of source and target as they are to be recorded, before there is anything to lose.
pub(super) fn planned(observed: &Observed) -> Option<(String, String)> {
    let vmi = observed.vmi.as_deref().filter(|vmi| is_kept(&vmi.spec))?;
    let source = observed.source()?.state_claim.clone()?;
    let is_shared = is_shared(observed.claims_of_state.known.get(&source)?);
    let target = if is_shared { source.clone() } else { name_for_migration(vmi, &observed.migration) };
    Some((source, target))
}

/// Provides the claim for the target pod.
pub(super) fn provide(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<Gate, serde_json::Error> {
    // Without a claim of the source the pod cannot be rendered, which says so.
    if !is_kept(&vmi.spec) || planned(observed).is_none() {
        return Ok(Gate::Open(None));
    }
    // The answer to the write of the status wakes the migration.
    let Some(state) = recorded(observed).filter(|state| state.target_persistent_state_pvc_name.is_some()) else {
        return Ok(Gate::Closed);
    };
    let name = state.target_persistent_state_pvc_name.clone().unwrap_or_default();
    if !changes_claim(state) {
        return Ok(Gate::Open(Some(StateMount { claim: name, shared: true })));
    }
    let known = observed.claims_of_state.known.get(&name);
    let is_free = observed.claims_of_state.undecided.is_none();
    match (known, &observed.claims_of_state.choice) {
        (Some(claim), _) if is_free && is_moving_to(claim, &observed.migration) => Ok(Gate::Open(Some(mount(claim)))),
        (None, Some(Ok(choice))) if is_free => {
            let claim = Owner::of(vmi).claim_of_migration(vmi, &observed.migration, choice);
            let failed = "Error creating the PVC for the state of the VMI at the migration target: {error}";
            decision.push(
                Effect::create(Kind::Claim, vmi.metadata.namespace.as_deref(), &claim)?.on_failure(Event::warning(
                    Kind::Instance.reference(&vmi.metadata),
                    event::FAILED_CREATE,
                    failed,
                )),
            );
            Ok(Gate::Open(Some(StateMount { claim: name, shared: choice.shared })))
        }
        (None, Some(Err(message))) if is_free => {
            let message =
                format!("failed to create the PVC for the state of the VMI at the migration target: {message}");
            let regarding = Kind::Instance.reference(&vmi.metadata);
            decision.push(Effect::Event(Event::warning(regarding, event::FAILED_CREATE, message)));
            decision.wake(RENDER_AGAIN);
            Ok(Gate::Closed)
        }
        _ => {
            decision.wake(AGAIN);
            Ok(Gate::Closed)
        }
    }
}

/// Hands the state over to the claim of the target while the migration has not ended, once the guest runs there.
pub(super) fn hand_over(observed: &Observed, decision: &mut Decision) {
    let has_moved = observed.state().is_some_and(|state| state.target_node_domain_ready_timestamp.is_some());
    if has_moved && recorded(observed).is_some_and(changes_claim) {
        label(observed, decision);
    }
}

/// Leaves one claim of a migration that has ended. Returns true when there is nothing left to do.
pub(super) fn settle(observed: &Observed, decision: &mut Decision) -> Result<bool, serde_json::Error> {
    // One without the finalizer is settled, and another claim can have the name of its source by now.
    if !recorded(observed).is_some_and(changes_claim) || !has_finalizer(&observed.migration) {
        return Ok(true);
    }
    let moving = target(observed).filter(|claim| is_moving_to(claim, &observed.migration));
    let is_settled = match outcome(observed) {
        Outcome::Moved => {
            label(observed, decision);
            moving.is_none() && left_source(observed).is_none()
        }
        Outcome::Stayed => {
            if let Some(claim) = moving.filter(|_| !observed.must_wait(event::FAILED_DELETE, decision)) {
                decision.push(delete(observed, claim));
            }
            moving.is_none()
        }
        Outcome::Open if moving.is_none() => true,
        Outcome::Open => {
            recover(observed, decision)?;
            false
        }
    };
    if !is_settled {
        decision.wake(AGAIN);
    } else if let Some(pod) = &observed.recovery {
        decision.push(Effect::delete(Kind::Pod, &pod.metadata).at_once().independent());
    }
    Ok(is_settled)
}

fn named<'a>(observed: &'a Observed, name: Option<&String>) -> Option<&'a CachedClaim> {
    observed.claims_of_state.known.get(name?).map(AsRef::as_ref)
}

fn target(observed: &Observed) -> Option<&CachedClaim> {
    named(observed, recorded(observed)?.target_persistent_state_pvc_name.as_ref())
}

fn source(observed: &Observed) -> Option<&CachedClaim> {
    let claim = named(observed, recorded(observed)?.source_persistent_state_pvc_name.as_ref());
    claim.filter(|claim| claim.metadata.deletion_timestamp.is_none())
}

/// Returns the claim of the source, as long as it has the state beside the claim of the target.
fn left_source(observed: &Observed) -> Option<&CachedClaim> {
    let created = |claim: &CachedClaim| claim.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let target = target(observed).filter(|claim| claim.metadata.deletion_timestamp.is_none())?;
    // A claim that is older than that of the target is the one that the migration knew.
    source(observed).filter(|claim| (belongs(claim) || claim.state_of.is_some()) && created(claim) <= created(target))
}

/// Decides which claim has the state. That a migration has failed says nothing once the source could begin, unless its pod goes on.
fn outcome(observed: &Observed) -> Outcome {
    let own = recorded(observed).filter(|state| state.migration_uid.is_some());
    let state = observed.state().or(own);
    let runs_at_target = |state: &VirtualMachineInstanceMigrationState| {
        state.target_node_domain_ready_timestamp.is_some() || (state.completed && !state.failed)
    };
    if observed.has_moved() || state.is_some_and(runs_at_target) {
        return Outcome::Moved;
    }
    // Without an address of the target the source cannot begin.
    let may_have_begun = match state {
        Some(state) => state.target_node_address.is_some(),
        None => entered(&observed.migration, &MigrationPhase::Scheduled).is_some(),
    };
    let is_over = state.is_none_or(|state| state.failed);
    let goes_on = source_pod(observed).is_some_and(|pod| !pod.is_going_down());
    if is_over && (!may_have_begun || goes_on) {
        return Outcome::Stayed;
    }
    if source(observed).is_none() {
        return Outcome::Moved;
    }
    match observed.recovery.as_deref().and_then(verdict) {
        Some(Verdict::Moved) => Outcome::Moved,
        Some(Verdict::Stayed) => Outcome::Stayed,
        Some(Verdict::Failed) | None => Outcome::Open,
    }
}

fn source_pod(observed: &Observed) -> Option<&CachedPod> {
    let name = recorded(observed)?.source_pod.as_ref();
    observed.pods.iter().map(AsRef::as_ref).find(|pod| name.is_some() && pod.metadata.name.as_ref() == name)
}

fn patch(claim: &CachedClaim, labels: Value) -> Effect {
    Effect::merge(Kind::Claim, &claim.metadata, json!({"metadata": {"labels": labels}}))
}

fn delete(observed: &Observed, claim: &CachedClaim) -> Effect {
    let failed = "Error deleting a PVC that no longer has the state of the VMI: {error}";
    let event = Event::warning(observed.regarding(), event::FAILED_DELETE, failed);
    Effect::delete(Kind::Claim, &claim.metadata).on_failure(event)
}

/// Gives the label of the VMI to the claim of the target, and removes that of the source after it: made for the VMI, it is deleted; any
/// other keeps its content.
fn label(observed: &Observed, decision: &mut Decision) {
    let vmi = label_of(observed.migration.spec.vmi_name.as_deref().unwrap_or_default());
    let refused =
        |message: String| Effect::Event(Event::warning(observed.regarding(), event::FAILED_HAND_OVER, message));
    let metadata = &observed.migration.metadata;
    let Some(target) = target(observed).filter(|claim| claim.metadata.deletion_timestamp.is_none()) else {
        let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
        let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
        decision.push(refused(format!("target PVC not found for migration {namespace}/{name}")));
        return;
    };
    if let Some(other) = target.state_of.as_ref().filter(|other| **other != vmi) {
        let name = metadata.name.as_deref().unwrap_or_default();
        decision.push(refused(format!("target PVC for {name} is already labelled for another VMI: {other}")));
        return;
    }
    if observed.must_wait(event::FAILED_HAND_OVER, decision) || observed.must_wait(event::FAILED_DELETE, decision) {
        return;
    }
    if target.moved_by.is_some() || target.state_of.is_none() {
        let failed = "Error handing the state of the VMI over to the PVC of the migration target: {error}";
        let event = Event::warning(observed.regarding(), event::FAILED_HAND_OVER, failed);
        decision.push(patch(target, json!({LABEL: vmi, MIGRATION_LABEL: null})).on_failure(event));
    }
    if let Some(claim) = left_source(observed) {
        decision.push(if belongs(claim) {
            delete(observed, claim)
        } else {
            patch(claim, json!({LABEL: null})).refused_as(event::FAILED_DELETE)
        });
    }
}

/// Asks the claim of the source, once no pod of the migration writes to it.
fn recover(observed: &Observed, decision: &mut Decision) -> Result<(), serde_json::Error> {
    if observed.pods.iter().any(|pod| !pod.is_down()) {
        return Ok(());
    }
    let metadata = &observed.migration.metadata;
    let Some(pod) = &observed.recovery else {
        let Some(source) = source(observed).filter(|_| !observed.must_wait(event::FAILED_CREATE, decision)) else {
            return Ok(());
        };
        let name = source.metadata.name.as_deref().unwrap_or_default();
        let image = (observed.launcher_images.plain(), observed.config.image_pull_policy.as_str());
        let pod = render_recovery(&observed.migration, name, observed.tolerations.clone(), image);
        let failed = "Error creating the pod that reads which PVC has the state of the VMI: {error}";
        let event = Event::warning(observed.regarding(), event::FAILED_CREATE, failed);
        decision.push(Effect::create(Kind::Pod, metadata.namespace.as_deref(), &pod)?.on_failure(event));
        return Ok(());
    };
    let created = pod.metadata.creation_timestamp.as_ref().map_or(observed.now, |at| at.0);
    let is_old = observed.now.duration_since(created) >= REPLACEMENT_AGE;
    if verdict(pod) == Some(Verdict::Failed) && is_old && pod.metadata.deletion_timestamp.is_none() {
        decision.push(Effect::delete(Kind::Pod, &pod.metadata).at_once().independent());
    }
    Ok(())
}
