//! Hibernation of a VM: the guest's memory goes to a claim, and the next start continues from it.
//!
//! ```text
//!             names and lease     domain ended, saved        started by a user       guest runs
//!  Requested ───────────────> Saving ───────────────> Hibernated ──────────> Resuming ──────────> Removing ──> (none)
//!      │                        │                      ^  │                     │                    ^
//!      └──────> Failed <────────┘                      │  └───── discarded ─────┼────────────────────┘
//!                                                      └──── not resumed ───────┘
//! ```
//! Each state is recorded before its consequence. `Hibernated` with the spec of the guest is written before its VMI is deleted, so that
//! nothing is lost; the VMI says that the guest continues (`Restored`, after the file was marked on the claim) before the file is
//! removed, so that nothing is resumed twice. A resume that fails keeps the file and waits for the user. From `Saving` to the end of
//! `Resuming` the VM holds the lease on its data: disks and memory belong together. The run strategy is not changed, and is not carried
//! out while the VM is hibernated.

use std::time::Duration;

use api::{
    Condition, HibernationPhase as Phase, RunStrategy, SavedMemoryPhase, StartStrategy, VirtualMachine,
    VirtualMachineInstance, VmOperation, VmiPhase,
    condition::set_or_remove,
    constants::{condition, label},
    hibernation::{CLAIM_PREFIX, SUFFIX, claim_size, guest_memory, obstacle},
    hotplug::status_of,
    names, quantity,
    vm::{
        lease::Attempt,
        status::{SavedInstance, VirtualMachineHibernation as Hibernation},
    },
    vmi::status::SavedMemory,
};
use jiff::SignedDuration;
use k8s_openapi::{
    api::core::v1::PersistentVolumeClaim,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};

use super::{
    Observed,
    memory_dump::{has, put},
    run_strategy::{Action, has_switched, is_paused_start, start_request},
};
use crate::{
    persistent_state::claim::{SINGLE, render},
    resources::vmis::disk_claims,
    runtime::{Decision, Effect, Event, Failure, Kind},
    vm_lease,
};

/// Reason of a refused write for a hibernation.
const FAILED: &str = "HibernationError";
/// Time within which a save must begin: it holds the lease.
const PATIENCE: SignedDuration = SignedDuration::from_mins(5);
/// End of the messages about a resume that something outside the VMI prevents.
const DISCARD: &str = "discard the saved memory to boot";
/// Longest part of the VM's name in the name of a file.
const VM_NAME: usize = 63;

fn hibernation(vm: &VirtualMachine) -> Option<&Hibernation> {
    vm.status.as_ref()?.hibernation.as_deref()
}

fn in_phase(vm: &VirtualMachine, phase: &Phase) -> bool {
    hibernation(vm).is_some_and(|known| known.phase == *phase)
}

/// Returns true if no guest runs and its memory is saved.
pub(super) fn is_hibernated(vm: &VirtualMachine) -> bool {
    in_phase(vm, &Phase::Hibernated)
}

/// Returns true if the next start continues from saved memory.
pub(super) fn resumes(vm: &VirtualMachine) -> bool {
    in_phase(vm, &Phase::Resuming)
}

/// Returns true while the memory of a guest is saved, or a guest starts from it.
pub(super) fn is_in_progress(vm: &VirtualMachine) -> bool {
    in_phase(vm, &Phase::Saving) || resumes(vm)
}

/// Returns the saved memory of a VMI, if it is that of this hibernation.
fn memory_of<'a>(known: &Hibernation, vmi: Option<&'a VirtualMachineInstance>) -> Option<&'a SavedMemory> {
    let memory = vmi?.status.as_ref()?.hibernation.as_ref()?;
    (memory.file_name == known.file_name && memory.claim_name == known.claim_name).then_some(memory)
}

/// Returns the action that takes the place of that of the run strategy. An ended VMI is kept until its end is recorded.
pub(super) fn action(observed: &Observed, vmi: Option<&VirtualMachineInstance>) -> Option<Action> {
    let vm = &*observed.vm;
    let is_final = vmi.is_some_and(VirtualMachineInstance::is_final);
    let is_halted = vm.spec.effective_run_strategy() == RunStrategy::Halted;
    let known = hibernation(vm)?;
    match known.phase {
        Phase::Saving | Phase::Resuming if is_final => Some(Action::Nothing),
        Phase::Resuming if vmi.is_none() && !is_halted => Some(match hindrance(observed, known) {
            Some(_) => Action::Nothing,
            None => Action::Start { paused: is_paused_start(vm) },
        }),
        Phase::Hibernated => match vmi {
            Some(vmi) if is_final && !vmi.is_deleting() => Some(Action::Delete { restart: false }),
            // A start that was requested changes the run strategy first.
            None if is_halted => None,
            _ => Some(Action::Nothing),
        },
        _ => None,
    }
}

/// Makes a new VMI the one whose memory is saved, if the VM resumes. The error says why that one is not readable.
pub(super) fn resume(vm: &VirtualMachine, vmi: &mut VirtualMachineInstance, paused: bool) -> Result<(), String> {
    let Some(known) = hibernation(vm).filter(|known| known.phase == Phase::Resuming) else { return Ok(()) };
    let saved = known.instance.as_ref().ok_or("it is missing")?;
    vmi.spec = serde_json::from_value(saved.spec.clone()).map_err(|error| error.to_string())?;
    vmi.spec.start_strategy = paused.then_some(StartStrategy::Paused);
    put(&mut vmi.spec, &known.claim_name, true);
    vmi.metadata.annotations.get_or_insert_default().extend(saved.annotations.clone());
    let status = vmi.status.get_or_insert_default();
    status.virtual_machine_revision_name.clone_from(&saved.revision_name);
    status.hibernation =
        Some(SavedMemory { preferred_node: saved.node_name.clone(), ..memory(known, SavedMemoryPhase::Restoring) });
    Ok(())
}

fn memory(known: &Hibernation, phase: SavedMemoryPhase) -> SavedMemory {
    SavedMemory {
        claim_name: known.claim_name.clone(),
        file_name: known.file_name.clone(),
        phase,
        ..SavedMemory::default()
    }
}

/// Returns what a resume needs of a VMI. Values that were chosen at its start are named, so that they are chosen again.
fn saved_instance(
    observed: &Observed,
    known: &Hibernation,
    vmi: &VirtualMachineInstance,
) -> Result<SavedInstance, serde_json::Error> {
    let status = vmi.status.clone().unwrap_or_default();
    let mut spec = vmi.spec.clone();
    put(&mut spec, &known.claim_name, false);
    if let Some(machine) = status.machine.filter(|machine| !machine.type_.is_empty()) {
        spec.domain.machine = Some(machine);
    }
    for interface in spec.domain.devices.interfaces.iter_mut().filter(|interface| interface.mac_address.is_none()) {
        let reported = status.interfaces.iter().find(|known| known.name.as_deref() == Some(interface.name.as_str()));
        interface.mac_address = reported.and_then(|known| known.mac.clone());
    }
    let with_uid = |name: &str| Some((name.to_owned(), observed.claims.get(name)?.metadata.uid.clone()?));
    let claims = disk_claims(vmi).filter_map(with_uid).collect();
    Ok(SavedInstance {
        annotations: vmi.metadata.annotations.clone().unwrap_or_default(),
        claims,
        node_name: status.node_name,
        revision_name: status.virtual_machine_revision_name,
        spec: serde_json::to_value(spec)?,
    })
}

/// Returns the next state of a hibernation; `None` if it stays. `vmi` is the VMI of the VM.
fn next(
    observed: &Observed,
    known: &Hibernation,
    vmi: Option<&VirtualMachineInstance>,
) -> Result<Option<Hibernation>, serde_json::Error> {
    let vm = &*observed.vm;
    let to = |phase: Phase, message: Option<String>| Some(Hibernation { phase, message, ..known.clone() });
    let failed = |message: &str| Ok(to(Phase::Failed, Some(message.to_owned())));
    let is_over = vmi.is_none_or(VirtualMachineInstance::is_final);
    let memory = memory_of(known, vmi);
    let phase = memory.map(|memory| &memory.phase);
    match known.phase {
        Phase::Requested => match vmi.filter(|vmi| *vmi.phase() == VmiPhase::Running && !vmi.is_deleting()) {
            None => failed("the VMI does not run"),
            Some(vmi) => match obstacle(vmi) {
                Some(obstacle) => failed(&unsaved(&obstacle)),
                None => Ok(begin(vm, known, observed)),
            },
        },
        Phase::Saving => match (phase, vmi) {
            (Some(SavedMemoryPhase::Saved), Some(vmi)) => Ok(Some(Hibernation {
                instance: Some(saved_instance(observed, known, vmi)?),
                phase: Phase::Hibernated,
                message: None,
                ..known.clone()
            })),
            (Some(SavedMemoryPhase::SaveFailed), _) => {
                failed(memory.and_then(|memory| memory.message.as_deref()).unwrap_or_default())
            }
            _ if is_over => failed("the guest has ended before its memory was saved"),
            // The VMI was changed by the decision that accepted the request.
            (None, Some(vmi)) if obstacle(vmi).is_some() => failed(&unsaved(&obstacle(vmi).unwrap_or_default())),
            _ if !known.owns_claim && observed.hibernation_claim.is_none() => {
                failed(&format!("PVC {} not found", known.claim_name))
            }
            _ => Ok(None),
        },
        // Its end was noticed before.
        Phase::Hibernated if phase == Some(&SavedMemoryPhase::Restored) => Ok(to(Phase::Removing, None)),
        Phase::Hibernated => Ok(match hindrance(observed, known) {
            Some(hindrance) => to(Phase::Hibernated, Some(hindrance)),
            None if vmi.is_none() && is_started(vm) => to(Phase::Resuming, None),
            // It is gone.
            None if known.message.as_ref().is_some_and(|message| message.ends_with(DISCARD)) => {
                to(Phase::Hibernated, None)
            }
            None => None,
        }),
        Phase::Resuming => Ok(match phase {
            Some(SavedMemoryPhase::Restored) => to(Phase::Removing, None),
            _ if vmi.is_some_and(VirtualMachineInstance::is_final) => to(Phase::Hibernated, Some(failure(vmi))),
            // It was stopped before the guest ran.
            _ if vmi.is_some_and(VirtualMachineInstance::is_deleting) => to(Phase::Hibernated, None),
            _ if vmi.is_none() && vm.spec.effective_run_strategy() == RunStrategy::Halted => {
                to(Phase::Hibernated, None)
            }
            // A claim was deleted while the start waited.
            _ if vmi.is_none() => hindrance(observed, known).and_then(|text| to(Phase::Hibernated, Some(text))),
            _ => None,
        }),
        _ => Ok(None),
    }
}

fn unsaved(obstacle: &str) -> String {
    format!("the guest cannot be saved with {obstacle}")
}

/// Returns why no VMI can continue from the saved memory.
fn hindrance(observed: &Observed, known: &Hibernation) -> Option<String> {
    // The VMI of a start would wait for it without end.
    if observed.hibernation_claim.is_none() {
        return Some(format!("PVC {} not found: restore it, or {DISCARD}", known.claim_name));
    }
    // The guest knows the content of its disks.
    let is_there = |name: &str, uid: &String| {
        observed.claims.get(name).is_some_and(|claim| claim.metadata.uid.as_ref() == Some(uid))
    };
    let mut claims = known.instance.iter().flat_map(|saved| &saved.claims);
    let (name, _) = claims.find(|(name, uid)| !is_there(name, uid))?;
    Some(format!("PVC {name} was deleted after the guest was saved, and a new one has other data: {DISCARD}"))
}

/// Returns the last write for a hibernation that was refused.
fn refused(observed: &Observed) -> Option<&Failure> {
    observed.failures.of(FAILED)
}

/// Returns the time that is left to begin a save, for which its claim is made, bound and attached. `None`: it has begun, or ended.
fn time_to_begin(observed: &Observed, memory: Option<&SavedMemory>) -> Option<Duration> {
    if memory.is_some_and(|memory| memory.phase != SavedMemoryPhase::Requested) {
        return None;
    }
    let since = observed.vm.status.as_ref()?.operation.as_ref()?.since.as_ref()?.0;
    Some(Duration::try_from(PATIENCE - observed.now.duration_since(since)).unwrap_or_default())
}

/// Returns true if a user has started a hibernated VM: by a request, or by another run strategy than `Halted`.
fn is_started(vm: &VirtualMachine) -> bool {
    let strategy = vm.spec.effective_run_strategy();
    let was_halted = vm.status.as_ref().and_then(|status| status.run_strategy.as_ref()) == Some(&RunStrategy::Halted);
    strategy != RunStrategy::Halted && (start_request(vm).is_some() || (was_halted && has_switched(vm, &strategy)))
}

/// Names file and claim, unless another operation holds the lease.
fn begin(vm: &VirtualMachine, known: &Hibernation, observed: &Observed) -> Option<Hibernation> {
    let mut next = known.clone();
    if let Some(lease) = vm_lease::forbids(vm, Attempt::Operation).filter(|lease| !is_own(vm, lease)) {
        next.message = Some(format!("the hibernation waits for the end of an operation: {}", lease.holder()));
        return Some(next);
    }
    let (name, uid) = (vm.metadata.name.as_deref().unwrap_or_default(), vm.metadata.uid.as_deref().unwrap_or_default());
    let since = known.since.as_ref().map_or(observed.now, |since| since.0);
    let at = since.strftime("%Y%m%d%H%M%S").to_string();
    next.file_name = format!("{}-{}-{at}{SUFFIX}", names::shortened(name, VM_NAME), names::hash(uid));
    if next.claim_name.is_empty() {
        // The name of the claim is that of a volume, too: a DNS label.
        let end = format!("-{}", names::hash(&format!("{uid}{at}")));
        let beginning = names::shortened(&format!("{CLAIM_PREFIX}{name}"), VM_NAME - end.len()).replace('.', "-");
        next.claim_name = format!("{beginning}{end}");
        next.owns_claim = true;
    }
    (next.phase, next.message) = (Phase::Saving, None);
    Some(next)
}

fn is_own(vm: &VirtualMachine, lease: &api::vm::status::OperationLease) -> bool {
    lease.operation == VmOperation::Hibernation && Some(&lease.uid) == vm.metadata.uid.as_ref()
}

/// Returns why a guest was not resumed.
fn failure(vmi: Option<&VirtualMachineInstance>) -> String {
    let shown = vmi.and_then(|vmi| vmi.condition(condition::SYNCHRONIZED)).filter(|shown| shown.is_false());
    let message = shown.and_then(|shown| shown.message.clone());
    message.unwrap_or_else(|| "the VMI has ended before the guest was resumed".to_owned())
}

/// Continues a hibernation: changes claim and VMI, and the status in `wanted`.
pub(super) fn update(
    observed: &Observed,
    vmi: Option<&VirtualMachineInstance>,
    wanted: &mut VirtualMachine,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let (vm, now) = (&*observed.vm, Time(observed.now));
    let mut result = hibernation(vm).cloned();
    if let Some(known) = hibernation(vm) {
        match next(observed, known, vmi)? {
            Some(next) => result = Some(next),
            None => result = carry_out(observed, known, vmi, decision)?,
        }
    }
    let status = wanted.status.get_or_insert_default();
    let holds =
        result.as_ref().is_some_and(|known| matches!(known.phase, Phase::Saving | Phase::Hibernated | Phase::Resuming));
    status.hold(VmOperation::Hibernation, holds.then_some(&vm.metadata), &now);
    let shown = result.as_ref().and_then(|known| shown(known, &now));
    set_or_remove(&mut status.conditions, condition::HIBERNATED, shown);
    status.hibernation = result.map(Box::new);
    Ok(())
}

/// Returns the condition of a hibernation.
fn shown(known: &Hibernation, now: &Time) -> Option<Condition> {
    let message = known.message.as_deref().unwrap_or_default();
    let (is_hibernated, reason, otherwise) = match known.phase {
        Phase::Requested | Phase::Saving => (false, "Saving", "the guest's memory is written to a claim"),
        Phase::Hibernated if message.is_empty() => (true, "Saved", "a start continues from the saved memory"),
        Phase::Hibernated => (true, "ResumeFailed", ""),
        Phase::Resuming => (true, "Resuming", "the guest starts from its saved memory"),
        Phase::Failed => (false, "SaveFailed", "the guest's memory was not saved"),
        Phase::Removing | Phase::Other(_) => return None,
    };
    let text = if message.is_empty() { otherwise } else { message };
    Some(Condition::new(condition::HIBERNATED, is_hibernated, reason, text, now))
}

/// Makes the changes of a phase. Returns the hibernation as it is recorded then.
fn carry_out(
    observed: &Observed,
    known: &Hibernation,
    vmi: Option<&VirtualMachineInstance>,
    decision: &mut Decision,
) -> Result<Option<Hibernation>, serde_json::Error> {
    let refused = refused(observed);
    let time = time_to_begin(observed, memory_of(known, vmi));
    let mut same = known.clone();
    if matches!(known.phase, Phase::Saving) {
        same.message = refused.map(|failure| failure.message.clone());
        if let Some(left) = time.filter(|left| !left.is_zero()) {
            decision.wake(left);
        }
    }
    if decision.must_wait(&observed.failures, FAILED, observed.now) {
        return Ok(Some(same));
    }
    match known.phase {
        Phase::Saving if time.is_some_and(|left| left.is_zero()) => {
            if let Some(vmi) = vmi.filter(|vmi| !vmi.is_deleting()) {
                give_up(observed, known, vmi, decision)?;
            }
        }
        Phase::Saving if observed.hibernation_claim.is_none() => {
            let vmi = vmi.and_then(guest_memory).unwrap_or_default();
            let claim = claim(observed, known, vmi);
            let effect = Effect::create(Kind::Claim, observed.vm.metadata.namespace.as_deref(), &claim)?;
            decision.push(effect.on_failure(failed(observed)));
        }
        Phase::Saving => {
            if let Some(vmi) = vmi.filter(|vmi| memory_of(known, Some(vmi)).is_none() && !vmi.is_deleting()) {
                change_vmi(observed, vmi, decision, |vmi| {
                    put(&mut vmi.spec, &known.claim_name, true);
                    vmi.status.get_or_insert_default().hibernation = Some(memory(known, SavedMemoryPhase::Requested));
                })?;
            }
        }
        Phase::Removing | Phase::Failed if !known.claim_name.is_empty() => {
            return remove(observed, known, vmi, decision);
        }
        Phase::Removing => return Ok(None),
        _ => {}
    }
    Ok(Some(same))
}

/// Ends a save that was not begun. This is decided in the VMI, which virt-handler changes before it begins: one of both writes is refused.
fn give_up(
    observed: &Observed,
    known: &Hibernation,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let claim = &known.claim_name;
    let is_bound = observed.hibernation_claim.as_ref().is_some_and(|claim| claim.phase == "Bound");
    let mut text = match is_bound {
        true => format!("the save to PVC {claim} did not begin within five minutes"),
        false => format!("PVC {claim} was not bound within five minutes"),
    };
    if let Some(shown) = status_of(vmi, claim).and_then(|shown| shown.message.as_ref()) {
        text = format!("{text}: {shown}");
    }
    let message = refused(observed).map_or(text, |failure| failure.message.clone());
    change_vmi(observed, vmi, decision, |vmi| {
        let failed = SavedMemory { message: Some(message), ..memory(known, SavedMemoryPhase::SaveFailed) };
        vmi.status.get_or_insert_default().hibernation = Some(failed);
    })
}

/// Takes the claim from the VMI, then removes it if it was made for this hibernation. What failed stays recorded, without the claim.
fn remove(
    observed: &Observed,
    known: &Hibernation,
    vmi: Option<&VirtualMachineInstance>,
    decision: &mut Decision,
) -> Result<Option<Hibernation>, serde_json::Error> {
    let live = vmi.filter(|vmi| !vmi.is_final() && !vmi.is_deleting());
    if let Some(vmi) = live.filter(|vmi| has(&vmi.spec, &known.claim_name) || memory_of(known, Some(vmi)).is_some()) {
        change_vmi(observed, vmi, decision, |vmi| {
            put(&mut vmi.spec, &known.claim_name, false);
            vmi.status.get_or_insert_default().hibernation = None;
        })?;
        return Ok(Some(known.clone()));
    }
    // It is unmounted and detached first.
    if vmi.is_some_and(|vmi| status_of(vmi, &known.claim_name).is_some()) && live.is_some() {
        return Ok(Some(known.clone()));
    }
    let owned =
        observed.hibernation_claim.as_ref().filter(|claim| known.owns_claim && is_of(observed, &claim.metadata));
    if let Some(claim) = owned.filter(|claim| claim.metadata.deletion_timestamp.is_none()) {
        decision.push(Effect::delete(Kind::Claim, &claim.metadata).on_failure(failed(observed)));
        return Ok(Some(known.clone()));
    }
    let failure = Hibernation {
        message: known.message.clone(),
        phase: Phase::Failed,
        since: known.since.clone(),
        ..Hibernation::default()
    };
    Ok((known.phase == Phase::Failed).then_some(failure))
}

fn change_vmi(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
    change: impl FnOnce(&mut VirtualMachineInstance),
) -> Result<(), serde_json::Error> {
    let mut changed = vmi.clone();
    change(&mut changed);
    let change = Effect::change(Kind::Instance, vmi, &changed, None)?;
    decision.effects.extend(change.map(|change| change.on_failure(failed(observed))));
    Ok(())
}

fn failed(observed: &Observed) -> Event {
    let regarding = Kind::VirtualMachine.reference(&observed.vm.metadata);
    Event::warning(regarding, FAILED, "Error encountered while hibernating the VM: {error}")
}

/// Returns true for a claim that the VM controls.
fn is_of(observed: &Observed, claim: &ObjectMeta) -> bool {
    api::owner::is_controlled_by(claim, &*observed.vm)
}

/// Returns the claim for the memory of a guest. It goes with the VM.
fn claim(observed: &Observed, known: &Hibernation, memory: i64) -> PersistentVolumeClaim {
    let vm = &observed.vm.metadata;
    let label = (label::HIBERNATION_OF, names::label_value(vm.name.as_deref().unwrap_or_default()));
    let (size, owner) = (quantity::bytes(claim_size(memory)), Kind::VirtualMachine.owner_reference(vm));
    let class = observed.config.vm_state_storage_class.clone();
    render(known.claim_name.clone(), [label], size, owner, SINGLE, class)
}
