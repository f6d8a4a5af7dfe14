//! VMs: run strategies, the VMI of each, status. Start with [`decide`]; `controller.rs` holds the watches.
//!
//! ```text
//!             start                         deleted by us, or stopped        no pod, no finalizer
//!  no VMI ───────────────> VMI lives ─────────────────────────────> VMI final ─────────> no VMI
//!    ^                                                                                      │
//!    └──────────── run strategy and requests say whether to start again (run_strategy.rs) ──┘
//! ```
//! A hibernated VM has no VMI, whatever its run strategy, until a user starts it (hibernation.rs).

mod backoff;
mod chosen;
mod controller;
mod data_volumes;
mod hibernation;
mod hotplug;
mod instancetype;
mod live;
mod lookup;
mod memory_dump;
mod nics;
mod printable;
mod resize;
mod restart;
mod restores;
mod revision;
mod run_strategy;
mod start;
mod status;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    RunStrategy, VirtualMachine, VirtualMachineInstance, VmiPhase,
    cdi::DataVolume,
    config::ClusterConfig,
    constants::{condition, event, finalizer, reason},
    owner,
    snapshot::restore::VirtualMachineRestore,
    traceparent::TraceParent,
    vm::{lease::Attempt, status::VirtualMachineStateChangeRequest},
};
use jiff::Timestamp;

pub(crate) use self::{backoff::failed_at, controller::Vms};
use self::{
    chosen::Chosen,
    data_volumes::DataVolumes,
    instancetype::{References, Settled},
    lookup::Lookup,
    run_strategy::Action,
};
use crate::{
    owned_vmis::{adopt, create_vmi, delete_vmi},
    resources::{claims::CachedClaim, pod_warnings, start_revisions::StartRevision},
    runtime::{Decision, Effect, Event, Failures, Kind, has_finalizer},
    vm_lease, volume_migration,
};

/// Finalizer that lets the VMI outlive its VM.
const ORPHAN: &str = "orphan";

/// Everything that a decision about a VM depends on.
pub(crate) struct Observed {
    /// The VM.
    pub vm: Arc<VirtualMachine>,
    /// The VMI of the VM's name, also if another object controls it.
    pub instance: Option<Arc<VirtualMachineInstance>>,
    /// Claims of the namespace that the template, the VMI or the saved guest names.
    pub claims: BTreeMap<String, Arc<CachedClaim>>,
    /// DataVolumes that its templates and volumes name.
    pub data_volumes: BTreeMap<String, Arc<DataVolume>>,
    /// The cluster has DataVolumes.
    pub serves_data_volumes: bool,
    /// Sources of the DataVolumes of its templates.
    pub sources: BTreeMap<String, data_volumes::Source>,
    /// The instance type it names.
    pub instancetype: Lookup,
    /// The preference it names.
    pub preference: Lookup,
    /// Records of its starts.
    pub starts: Vec<Arc<StartRevision>>,
    /// The record that the VMI names. That of an adopted VMI is none of this VM's starts.
    pub named_start: Option<Arc<StartRevision>>,
    /// Classes of the volume snapshots by storage class of its claims, or why none can be chosen.
    pub snapshot_classes: BTreeMap<String, Result<Option<String>, String>>,
    /// The claim with its state.
    pub state_claim: Option<Arc<CachedClaim>>,
    /// The claim with the memory of the hibernated guest.
    pub hibernation_claim: Option<Arc<CachedClaim>>,
    /// A migration of the VMI has not ended.
    pub is_migrated: bool,
    /// Its restores, if it is being deleted.
    pub restores: Vec<Arc<VirtualMachineRestore>>,
    /// DataVolumes of the claims that volumes may move to.
    pub destinations: crate::data_volumes::DataVolumes,
    /// The cluster's configuration.
    pub config: Arc<ClusterConfig>,
    /// The writes for this VM that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

/// An error that shows in condition Failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SyncError {
    reason: String,
    message: String,
}

impl SyncError {
    fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), message: message.into() }
    }
}

/// Decides what to do about a VM.
fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let vm = &*observed.vm;
    let mut decision = Decision::settled();
    let owned = observed.instance.as_deref().filter(|instance| is_ours(vm, instance));
    let mut error = None;

    if vm.metadata.deletion_timestamp.is_some() {
        if deleting(observed, owned, &mut decision) {
            // The object is deleted with this write, so its status does not matter.
            return Ok(decision);
        }
    } else {
        decision.effects.extend(Effect::finalizer(Kind::VirtualMachine, &vm.metadata, finalizer::VM, true));
    }
    let chosen = chosen::chosen(observed);
    let data_volumes = DataVolumes::of(observed);
    let (mut failed_instance_restarts, mut references) = (false, None);
    if vm.metadata.deletion_timestamp.is_none() {
        match observed.instance.as_deref() {
            Some(instance) if owned.is_none() && owner::controller(&instance.metadata).is_some() => {
                let name = instance.metadata.name.as_deref().unwrap_or_default();
                let message = format!("VirtualMachineInstance {name} exists and belongs to another object");
                error = Some(SyncError::new(event::FAILED_CREATE, message));
            }
            Some(instance) if owned.is_none() => {
                decision.push(adopt(instance, &Kind::VirtualMachine.owner_reference(&vm.metadata)));
                // The next reconcile writes the status.
                return Ok(decision);
            }
            _ => {
                let settled = match &chosen {
                    Ok(chosen) => instancetype::settle(observed, owned, chosen, &mut decision)?,
                    Err(error) => Err(error.clone()),
                };
                let settled = match settled {
                    // The next reconcile continues with the changed VM.
                    Ok(Settled::Expanding) => return Ok(decision),
                    Ok(Settled::Kept(kept)) => {
                        references = Some(*kept);
                        Ok(())
                    }
                    Err(error) => Err(error),
                };
                let start = settled.and(chosen.as_ref().map_err(Clone::clone));
                data_volumes::synchronize(observed, owned, &data_volumes, &mut decision);
                let (failure, restarts) = synchronize(observed, owned, start.as_ref(), &data_volumes, &mut decision)?;
                if let Err(error) = &start {
                    report(vm, error, lookup::event_message(error), &mut decision);
                }
                error = failure.or(start.err()).or_else(|| data_volumes.error(observed));
                failed_instance_restarts = restarts;
            }
        }
    }

    // The effects change the status soon: one write then instead of two.
    let changes_instance = decision.effects.iter().any(|effect| match effect {
        Effect::Create { kind, .. } | Effect::Delete { kind, .. } => *kind == Kind::Instance,
        _ => false,
    });
    // The creation of a DataVolume for an existing claim may be refused, and then changes nothing.
    let creates =
        |effect: &Effect| matches!(effect, Effect::CreateDataVolume { creation, .. } if !creation.adopts_claim);
    let changes_soon = changes_instance || decision.effects.iter().any(creates);
    // A failed start is counted, and an interrupted move of volumes shown, before the VMI is deleted: a VMI without a pod disappears
    // at once.
    let has_failed = |instance: &VirtualMachineInstance| *instance.phase() == VmiPhase::Failed;
    let counts = owned.is_some_and(|instance| has_failed(instance) || volume_migration::ended_while_moving(instance));
    if changes_soon && error.is_none() && !counts {
        return Ok(decision);
    }
    let template = owned.and_then(|_| start::template(observed, chosen.as_ref().ok()?));
    // The saved spec is that of the guest.
    let can_change = vm.metadata.deletion_timestamp.is_none() && !hibernation::is_in_progress(vm);
    let kept = owned.filter(|_| !changes_instance && can_change);
    if let Some(instance) = kept {
        let refused = live::update(observed, instance, template.as_ref(), &mut decision)?;
        error = error.or(refused).or_else(|| revision::refused(observed, instance));
    }
    let mut wanted = vm.clone();
    status::update(observed, owned, error.as_ref(), template.as_ref(), &data_volumes, &mut wanted);
    if let (Some(references), Some(status)) = (&references, &mut wanted.status) {
        references.put(status);
    }
    if vm.metadata.deletion_timestamp.is_none() {
        memory_dump::update(observed, owned, &mut wanted, &mut decision)?;
        hibernation::update(observed, owned, &mut wanted, &mut decision)?;
    }
    if failed_instance_restarts {
        let requests = &mut wanted.status.get_or_insert_default().state_change_requests;
        if requests.is_empty() {
            requests.push(VirtualMachineStateChangeRequest {
                action: api::StateChangeAction::Start,
                ..VirtualMachineStateChangeRequest::default()
            });
        }
    }
    let follows = status::time_to_wait(vm, &wanted, owned, observed.now).filter(|_| error.is_none());
    write_status((vm, &wanted), follows, references, counts, &mut decision)?;
    if let Some(instance) = kept {
        // Last: if it is refused, nothing else is held back.
        revision::make_up(observed, instance, chosen.as_ref().ok(), &mut decision)?;
    }
    Ok(decision)
}

/// Writes the status of a VM, or waits for a change of its VMI that is about to follow. `counts`: the status tells
/// something about a VMI that has ended, which is known from that VMI alone.
fn write_status(
    (vm, wanted): (&VirtualMachine, &VirtualMachine),
    follows: Option<Duration>,
    references: Option<References>,
    counts: bool,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    // Most decisions change nothing, which costs less to see here than in JSON.
    if vm == wanted {
        return Ok(());
    }
    let Some(change) = Effect::change(Kind::VirtualMachine, vm, wanted, Some("status"))? else { return Ok(()) };
    let warning = warning(vm, wanted);
    if let Some(wait) = follows.filter(|_| warning.is_none()) {
        decision.wake(wait);
        return Ok(());
    }
    let change = match warning {
        Some(event) => change.on_success(event),
        None => change,
    };
    // Before the VMI is deleted: otherwise that would be lost if this process ended now.
    let deletes = |effect: &Effect| counts && matches!(effect, Effect::Delete { kind: Kind::Instance, .. });
    let at = decision.effects.iter().position(deletes).unwrap_or(decision.effects.len());
    decision.effects.insert(at, change);
    decision.effects.extend(references.into_iter().flat_map(References::into_deletions));
    Ok(())
}

/// Reasons of the condition Synchronized that are causes, and no mere wait, beside warnings about the pod.
const WARNINGS: [&str; 8] = [
    event::CONTAINER_PATH_VOLUMES_DISABLED,
    event::FAILED_CREATE,
    event::FAILED_DATA_VOLUME_IMPORT,
    event::POD_REJECTED,
    event::SYNC_FAILED,
    reason::FAILED_BACKEND_STORAGE_CREATE,
    reason::FAILED_BACKEND_STORAGE_PROBE,
    reason::FAILED_PVC_NOT_FOUND,
];

/// Returns the event of a cause that keeps the VMI from running, where it is new or has another text. The VMI has one as well, but
/// users look at the VM.
fn warning(former: &VirtualMachine, wanted: &VirtualMachine) -> Option<Event> {
    let shown = wanted.condition(condition::SYNCHRONIZED).filter(|shown| shown.status == "False")?;
    if former.condition(condition::SYNCHRONIZED).is_some_and(|former| former.says_same(shown)) {
        return None;
    }
    let name = shown.reason.as_deref()?;
    let reason = pod_warnings::known(name).or_else(|| WARNINGS.into_iter().find(|known| *known == name))?;
    Some(Event::warning(Kind::VirtualMachine.reference(&former.metadata), reason, shown.message.clone()?))
}

/// Emits an event about an error, unless condition Failure shows it already.
fn report(vm: &VirtualMachine, error: &SyncError, message: String, decision: &mut Decision) {
    let shown = vm.condition(condition::FAILURE).and_then(|failure| failure.message.as_deref());
    if shown != Some(error.message.as_str()) {
        decision.push(Effect::Event(Event::warning(
            Kind::VirtualMachine.reference(&vm.metadata),
            event::FAILED_CREATE,
            message,
        )));
    }
}

fn is_ours(vm: &VirtualMachine, instance: &VirtualMachineInstance) -> bool {
    owner::is_controlled_by(&instance.metadata, vm)
}

/// Deletes the VMI, releases the restores and removes the finalizer. Returns true when nothing is left to do.
fn deleting(observed: &Observed, owned: Option<&VirtualMachineInstance>, decision: &mut Decision) -> bool {
    let vm = &observed.vm.metadata;
    if let Some(instance) = owned.filter(|_| !has_finalizer(vm, ORPHAN)) {
        delete_instance(observed, instance, decision);
        return false;
    }
    if !restores::release(observed, decision) {
        return false;
    }
    decision.effects.extend(Effect::finalizer(Kind::VirtualMachine, vm, finalizer::VM, false));
    true
}

/// Carries out the run strategy. Returns an error for condition Failure, and true if a failed VMI must be started again.
fn synchronize(
    observed: &Observed,
    owned: Option<&VirtualMachineInstance>,
    chosen: Result<&&Chosen, &SyncError>,
    data_volumes: &DataVolumes,
    decision: &mut Decision,
) -> Result<(Option<SyncError>, bool), serde_json::Error> {
    let vm = &*observed.vm;
    if vm.spec.running.is_some() && vm.spec.run_strategy.is_some() {
        let message = "running and runstrategy are mutually exclusive";
        return Ok((Some(SyncError::new(event::FAILED_CREATE, message)), false));
    }
    match hibernation::action(observed, owned).unwrap_or_else(|| run_strategy::next(vm, owned, observed.now)) {
        Action::Nothing => Ok((None, false)),
        Action::Wait(time) => {
            decision.wake(time);
            Ok((None, false))
        }
        Action::Unknown(strategy) => {
            let message = format!("unknown runstrategy: {strategy}");
            Ok((Some(SyncError::new("UnsupportedSyncError", message)), false))
        }
        Action::Delete { restart } => {
            if let Some(instance) = owned {
                delete_instance(observed, instance, decision);
            }
            Ok((blocked(observed, event::FAILED_DELETE, "Failure attempting to delete VMI"), restart))
        }
        Action::SwitchToAlways => {
            let mut wanted = vm.clone();
            if wanted.spec.run_strategy.is_some() {
                wanted.spec.run_strategy = Some(RunStrategy::Always);
            } else {
                wanted.spec.running = Some(true);
            }
            decision.effects.extend(Effect::change(Kind::VirtualMachine, vm, &wanted, None)?);
            Ok((None, false))
        }
        Action::Start { .. } if !data_volumes.permit_start() => Ok((None, false)),
        Action::Start { paused } => match chosen {
            Ok(chosen) => Ok((start_instance(observed, chosen, paused, decision)?, false)),
            Err(error) => Ok((Some(error.clone()), false)),
        },
    }
}

fn start_instance(
    observed: &Observed,
    chosen: &Chosen,
    paused: bool,
    decision: &mut Decision,
) -> Result<Option<SyncError>, serde_json::Error> {
    let vm = &*observed.vm;
    if volume_migration::needs_recovery(vm, None) {
        return Ok(None);
    }
    if let Some(lease) = vm_lease::forbids(vm, Attempt::Start).filter(|_| !hibernation::resumes(vm)) {
        return Ok(Some(SyncError::new(vm_lease::OPERATION, vm_lease::awaited(lease))));
    }
    let instance = match start::instance(vm, chosen, &observed.config, paused, trace(observed)) {
        Ok(instance) => instance,
        Err(cause) => {
            let error = SyncError::new(event::FAILED_CREATE, format!("Failure while starting VMI: {cause}"));
            report(vm, &error, format!("Error creating virtual machine instance: {cause}"), decision);
            return Ok(Some(error));
        }
    };
    if !decision.must_wait(&observed.failures, event::FAILED_CREATE, observed.now) {
        let regarding = Kind::VirtualMachine.reference(&vm.metadata);
        let creation = create_vmi(vm.metadata.namespace.as_deref(), &instance, regarding)?;
        // The record names the DataVolumes that hold data of the VM, so that it comes first if there are any. Otherwise the VMI does not
        // wait for it, and a later reconcile makes up for one that is missing.
        let first = decision.effects.len();
        // The record of the start stays that of the saved guest.
        if !hibernation::resumes(vm) {
            revision::keep(observed, chosen, decision)?;
        }
        let at = if vm.spec.data_volume_templates.is_empty() { first } else { decision.effects.len() };
        decision.effects.insert(at, creation);
    }
    Ok(blocked(observed, event::FAILED_CREATE, "Failure while starting VMI"))
}

/// Returns the trace of the VM for its first VMI. Later starts are traces of their own.
fn trace(observed: &Observed) -> Option<TraceParent> {
    let is_first = observed.starts.is_empty() || !observed.failures.is_empty();
    TraceParent::of_new(&observed.vm.metadata, observed.now).filter(|_| is_first)
}

/// Returns the error of the last refused write with this reason.
fn blocked(observed: &Observed, reason: &str, context: &str) -> Option<SyncError> {
    let failure = observed.failures.of(reason)?;
    Some(SyncError::new(reason, format!("{context}: {}", failure.message)))
}

fn delete_instance(observed: &Observed, instance: &VirtualMachineInstance, decision: &mut Decision) {
    if instance.is_deleting() {
        return;
    }
    if decision.must_wait(&observed.failures, event::FAILED_DELETE, observed.now) {
        return;
    }
    decision.push(delete_vmi(instance, || Kind::VirtualMachine.reference(&observed.vm.metadata)));
}
