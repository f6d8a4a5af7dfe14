//! The claim with the state of a VMI: made before the launcher pod, waited for, and deleted when the VMI keeps no state any more.

use api::{
    VirtualMachineInstance,
    constants::{event, reason},
    persistent_state::is_kept,
};

use super::{Observed, SyncError, shows};
use crate::{
    launcher_pod::StateMount,
    persistent_state::{Owner, mount, name_for_vmi},
    resources::claims::CachedClaim,
    runtime::{Decision, Effect, Event, Kind},
};

/// The claim for the launcher pod.
pub(super) enum Gate {
    /// The pod can be made, with this claim if the VMI keeps state.
    Open(Option<StateMount>),
    /// It has to wait.
    Closed(SyncError),
}

fn closed(reason: &str, message: String) -> Gate {
    Gate::Closed(SyncError { reason: reason.to_owned(), message })
}

/// Provides the claim for the launcher pod.
pub(super) fn provide(observed: &Observed, decision: &mut Decision) -> Result<Gate, serde_json::Error> {
    let vmi = &*observed.instance;
    if !is_kept(&vmi.spec) {
        return Ok(remove(observed, decision));
    }
    if let Some(migration) = &observed.state.undecided {
        let message =
            format!("it is not known yet to which claim migration {migration} has brought the state of the VMI");
        return Ok(closed(reason::BACKEND_STORAGE_NOT_READY, message));
    }
    match observed.state.present(vmi) {
        Some(claim) => Ok(match observed.state.obstacle(claim) {
            Some((reason, message)) => closed(reason, message),
            None => Gate::Open(Some(mount(claim))),
        }),
        None => create(observed, vmi, decision),
    }
}

/// Creates the claim. The pod is created at once if its scheduling is what makes the volume.
fn create(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<Gate, serde_json::Error> {
    let name = name_for_vmi(vmi);
    // The change of a claim without the label does not wake the VMI.
    if let Some(taken) = observed.state.known.get(&name) {
        decision.wake(super::AFTER_CLAIM);
        return Ok(refused(observed, taken_message(taken), decision));
    }
    let choice = match &observed.state.choice {
        Some(Ok(choice)) => choice,
        Some(Err(message)) => return Ok(refused(observed, message.clone(), decision)),
        None => return Ok(closed(reason::BACKEND_STORAGE_NOT_READY, "PVC pending".to_owned())),
    };
    let failure = observed.failures.of(reason::FAILED_BACKEND_STORAGE_CREATE);
    if decision.must_wait(&observed.failures, reason::FAILED_BACKEND_STORAGE_CREATE, observed.now) {
        return Ok(closed(
            reason::FAILED_BACKEND_STORAGE_CREATE,
            failure.map(|failure| failure.message.clone()).unwrap_or_default(),
        ));
    }
    let claim = Owner::of(vmi).claim_of_vmi(vmi, choice);
    decision.push(Effect::create(Kind::Claim, vmi.metadata.namespace.as_deref(), &claim)?.reported(
        Kind::Instance.reference(&vmi.metadata),
        (event::SUCCESSFUL_CREATE, "Created PVC {name} for the state of the VMI"),
        (reason::FAILED_BACKEND_STORAGE_CREATE, "Error creating the PVC for the state of the VMI: {error}"),
    ));
    Ok(if choice.class.is_late {
        Gate::Open(Some(StateMount { claim: name, shared: choice.shared }))
    } else {
        closed(reason::BACKEND_STORAGE_NOT_READY, "PVC pending".to_owned())
    })
}

fn taken_message(claim: &CachedClaim) -> String {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    match claim.metadata.deletion_timestamp {
        Some(_) => format!("PVC {name} is being deleted, and another one of this name is created when it is gone"),
        None => format!("PVC {name} exists and does not have the label of the state of this VMI"),
    }
}

/// Shows why there is no claim, with an event for each change.
fn refused(observed: &Observed, message: String, decision: &mut Decision) -> Gate {
    let reason = reason::FAILED_BACKEND_STORAGE_CREATE;
    if !shows(&observed.instance, reason, &message) {
        let regarding = Kind::Instance.reference(&observed.instance.metadata);
        decision.push(Effect::Event(Event::warning(regarding, reason, message.clone())));
    }
    closed(reason, message)
}

/// Deletes the claim of a VMI that keeps no state any more. A claim that was made by somebody else stays.
fn remove(observed: &Observed, decision: &mut Decision) -> Gate {
    let vmi = &*observed.instance;
    let owner = Owner::of(vmi);
    let Some(claim) = observed.state.present(vmi).filter(|claim| owner.owns(claim)) else { return Gate::Open(None) };
    let failure = observed.failures.of(reason::FAILED_BACKEND_STORAGE_DELETE);
    if decision.must_wait(&observed.failures, reason::FAILED_BACKEND_STORAGE_DELETE, observed.now) {
        return closed(
            reason::FAILED_BACKEND_STORAGE_DELETE,
            failure.map(|failure| failure.message.clone()).unwrap_or_default(),
        );
    }
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    decision.push(Effect::delete(Kind::Claim, &claim.metadata).reported(
        Kind::Instance.reference(&vmi.metadata),
        (event::SUCCESSFUL_DELETE, format!("Deleted PVC {name}: the VMI keeps no state")),
        (reason::FAILED_BACKEND_STORAGE_DELETE, format!("Error deleting PVC {name}: {{error}}")),
    ));
    Gate::Open(None)
}

/// Returns the claim that a launcher pod of the VMI mounts.
pub(super) fn mounted<'a>(observed: &'a Observed, claim: Option<&String>) -> Option<&'a CachedClaim> {
    observed.state.known.get(claim?).map(AsRef::as_ref)
}
