//! Restores: a VM gets the spec and the disks that it had at a snapshot, or a new VM is made from it.
//!
//! Start with [`decide`]; `controller.rs` holds the watches, `readiness.rs` the wait for the guest's end, `volumes.rs` the claims,
//! `claim.rs` their content, `target.rs` the VM, `finish.rs` what follows its change, `status.rs` the conditions.
//!
//! ```text
//!          guest ended,       lease       claims named   claims bound, or      VM changed
//!          snapshot ready     taken       in the status  wait for a consumer   or created
//!  (new) ──────────────> ready ──> locked ──────> named ───────────────> made ──────────> done ──> complete
//!    │                     │          │             │                     │               owners, state, old disks, lease
//!    └─────────────────────┴──────────┴─────────────┴─────────────────────┴──> failed
//!                                                        new claims deleted, lease released
//! ```
//! One write makes the restore irrevocable: that of the VM, which has the annotation with the UID of the restore from then on. Until
//! then a failed or deleted restore leaves the VM as it was. With policy `InPlace` the first deleted claim is that point: its content is
//! in the snapshot only, so that such a restore never gives up, and a deleted one first replaces its claims. Each step is read from
//! objects, so that virt-controller can be killed between any two writes.

mod claim;
mod controller;
mod finish;
mod readiness;
mod status;
mod target;
#[cfg(test)]
mod tests;
mod volumes;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    VirtualMachine, VirtualMachineInstance, VmOperation,
    cdi::DataVolume,
    constants::{annotation, finalizer},
    snapshot::{
        VirtualMachineSnapshot,
        content::{SourceVirtualMachine, VirtualMachineSnapshotContent},
        phase,
        restore::{VirtualMachineRestore, VirtualMachineRestoreStatus},
    },
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};

pub(crate) use self::{controller::Restores, target::DROPPED};
use self::{status::Shown, volumes::Progress};
use crate::{
    resources::{
        claims::CachedClaim, instancetype_revisions::InstancetypeRevision, snapshots::CachedSnapshot,
        storage_classes::CachedStorageClass, vmis::is_unstarted,
    },
    runtime::{Decision, Effect, Failure, Kind, has_finalizer},
    vm_lease,
};

/// Refusals in a row after which a restore fails: about three minutes.
const ATTEMPTS: u32 = 8;
/// Reason under which refused writes are remembered.
const REFUSED: &str = "RestoreRefused";
/// Time for which a restore that holds the lease, or makes claims for a new VM, waits for what is missing.
const PATIENCE: SignedDuration = SignedDuration::from_mins(5);
/// Time between two looks at claims that are made or deleted.
const RETRY: Duration = Duration::from_secs(10);

/// Everything that a decision about a restore depends on.
pub(crate) struct Observed {
    /// The restore.
    pub restore: Arc<VirtualMachineRestore>,
    /// Its target.
    pub vm: Option<Arc<VirtualMachine>>,
    /// The VMI of the target's name.
    pub vmi: Option<Arc<VirtualMachineInstance>>,
    /// The snapshot.
    pub snapshot: Option<Arc<VirtualMachineSnapshot>>,
    /// Its content.
    pub content: Option<Arc<VirtualMachineSnapshotContent>>,
    /// The volume snapshots of the content.
    pub volume_snapshots: BTreeMap<String, Arc<CachedSnapshot>>,
    /// Claims of the content and of the restore.
    pub claims: BTreeMap<String, Arc<CachedClaim>>,
    /// Claims of the content that are disks of other VMs, with the name of one.
    pub others: BTreeMap<String, String>,
    /// Claims with the state of the target.
    pub states: Vec<Arc<CachedClaim>>,
    /// DataVolumes of these claims, and those that the restore replaces.
    pub data_volumes: BTreeMap<String, Arc<DataVolume>>,
    /// Storage classes of the claims.
    pub classes: BTreeMap<String, Arc<CachedStorageClass>>,
    /// Copies of instance type and preference that the snapshot keeps, and those of the target.
    pub revisions: BTreeMap<String, Arc<InstancetypeRevision>>,
    /// The last write that was refused.
    pub failure: Option<Failure>,
    /// The current time.
    pub now: Timestamp,
}

type Step = crate::runtime::Step<Shown>;

/// The snapshot of a restore, ready to be restored.
#[derive(Clone, Copy)]
struct Source<'a> {
    snapshot: &'a VirtualMachineSnapshot,
    content: &'a VirtualMachineSnapshotContent,
    vm: &'a SourceVirtualMachine,
}

impl Observed {
    /// Returns the text by which objects name the restore.
    fn id(&self) -> String {
        self.restore.id()
    }

    fn namespace(&self) -> &str {
        self.restore.metadata.namespace.as_deref().unwrap_or_default()
    }

    fn target(&self) -> &str {
        &self.restore.spec.target.name
    }

    fn status(&self) -> VirtualMachineRestoreStatus {
        self.restore.status.clone().unwrap_or_default()
    }

    fn is_in_place(&self) -> bool {
        self.restore.is_in_place()
    }

    fn holds_lease(&self) -> bool {
        self.vm.as_deref().is_some_and(|vm| vm_lease::is_held_by(vm, &self.restore.metadata))
    }

    /// Returns true if this restore has changed or created the VM.
    fn is_done(&self) -> bool {
        let annotations = self.vm.as_ref().and_then(|vm| vm.metadata.annotations.as_ref());
        annotations.and_then(|all| all.get(annotation::LAST_RESTORE)).is_some_and(|id| *id == self.id())
    }

    /// Returns the release of the lease, if the restore holds it. A memory dump is no state that a snapshot restores. A hibernation whose
    /// claim is still to be deleted stays.
    fn release(&self, forgets_dump: bool) -> Result<Option<Effect>, serde_json::Error> {
        let Some(vm) = self.vm.as_deref() else { return Ok(None) };
        let mut wanted = vm.clone();
        let status = wanted.status.get_or_insert_default();
        if !status.is_held_by(&self.restore.metadata) {
            return Ok(None);
        }
        status.release(self.restore.metadata.uid.as_deref().unwrap_or_default());
        if forgets_dump {
            status.memory_dump_request = None;
            status.hibernation.take_if(|known| known.claim_name.is_empty());
        }
        Effect::change(Kind::VirtualMachine, vm, &wanted, Some("status"))
    }

    /// Returns the write that adds or removes the finalizer.
    fn finalizer(&self, present: bool) -> Option<Effect> {
        Effect::finalizer(Kind::VmRestore, &self.restore.metadata, finalizer::RESTORE, present)
    }

    fn refusal(&self) -> Option<&Failure> {
        self.failure.as_ref().filter(|failure| failure.reason == REFUSED)
    }

    /// Returns true once nothing is deleted any more that another party does not let go.
    fn gives_up(&self) -> bool {
        self.refusal().is_some_and(|failure| failure.attempts > ATTEMPTS)
    }

    fn is_held_back(&self) -> bool {
        has_finalizer(&self.restore.metadata, finalizer::RESTORE)
    }
}

/// Decides about a restore.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let is_final = observed.restore.is_final();
    let holds = volumes::let_go(observed, |is_made| is_made || is_final);
    let mut step = next(observed)?;
    // A refused deletion is not remembered, and would keep the volume snapshot from being deleted.
    if !holds.is_empty() {
        step.wake = Some(step.wake.map_or(RETRY, |wake| wake.min(RETRY)));
    }
    step.before(holds).decided(|shown, decision| status::show(observed, &shown, decision))
}

fn next(observed: &Observed) -> Result<Step, serde_json::Error> {
    if observed.restore.metadata.deletion_timestamp.is_some() {
        return ending(observed);
    }
    if observed.restore.is_final() {
        return Ok(Step::default().before(observed.release(false)?));
    }
    if observed.restore.status.is_none() || !observed.is_held_back() {
        return Ok(Step::show(Shown::works(
            "Initializing VirtualMachineRestore",
            "Initializing VirtualMachineRestore",
        ))
        .before(observed.finalizer(true)));
    }
    if has_lost_target(observed) {
        // The VM, which waits for this, can be gone before its lease could be released.
        return Ok(Step::show(Shown::failed("restore target was deleted")).before(volumes::clean_up(observed)));
    }
    if let Some(failure) = observed.refusal() {
        // The answers to all writes are known by now: a claim that is marked and stays was not deleted.
        if failure.attempts >= ATTEMPTS && !(observed.is_done() || volumes::has_deleted(observed)) {
            return leave(observed, Shown::failed(&failure.message));
        }
        if failure.blocks(observed.now) {
            let wait = failure.remaining(observed.now);
            return Ok(Step::show(Shown::error(&failure.message)).wake(wait));
        }
    }
    if let Some(vmi) = observed.vmi.as_deref()
        && observed.holds_lease()
        && is_unstarted(vmi)
    {
        return Ok(readiness::too_early(vmi));
    }
    if observed.is_done() {
        return finish::step(observed);
    }
    prepare(observed)
}

/// Returns true if the VM is as it was before the restore.
fn may_fail(observed: &Observed) -> bool {
    !(observed.is_done() || volumes::is_begun(observed))
}

/// Returns true if the target is deleted before it was changed. A restore that was created later makes the VM again, as does one that has
/// deleted its claims. Times are in seconds, and a VM that is gone can be in the cache for a moment.
fn has_lost_target(observed: &Observed) -> bool {
    let deleted = observed.vm.as_ref().and_then(|vm| vm.metadata.deletion_timestamp.as_ref());
    let created = observed.restore.metadata.creation_timestamp.as_ref();
    let is_known = deleted.is_some_and(|deleted| created.is_none_or(|created| created.0 < deleted.0));
    is_known && may_fail(observed)
}

/// Waits for the guest's end and for the snapshot, and takes the lease.
fn prepare(observed: &Observed) -> Result<Step, serde_json::Error> {
    if is_foreign(observed) {
        let text = "restore source and restore target are different but restore target already exists";
        return fail(observed, text, Shown::refused(text));
    }
    if let Some(vmi) = observed.vmi.as_deref() {
        return readiness::step(observed, vmi);
    }
    let source = match source(observed) {
        Ok(source) => source,
        Err(Hindrance::Passing(text)) => return hindered(observed, &text),
        Err(Hindrance::Final(text)) => return failed(observed, &text),
    };
    if let Some(vm) = observed.vm.as_deref() {
        if vm.metadata.deletion_timestamp.is_some() {
            return Ok(Step::show(Shown::waits("restore target is being deleted")));
        }
        let mut wanted = vm.clone();
        let status = wanted.status.get_or_insert_default();
        if !status.is_held_by(&observed.restore.metadata) {
            if let Err(holder) = status.take(VmOperation::Restore, &observed.restore.metadata, &Time(observed.now)) {
                // The VM wakes the restore when the lease is free.
                return Ok(Step::show(Shown::waits(&holder.holder())));
            }
            let take = Effect::change(Kind::VirtualMachine, vm, &wanted, Some("status"))?;
            return Ok(Step::default().before(take.map(|take| take.refused_as(REFUSED))));
        }
    }
    restore(observed, source)
}

/// Returns true if the target exists and is not the VM of the snapshot. One that runs is not waited for.
fn is_foreign(observed: &Observed) -> bool {
    let status = observed.snapshot.as_ref().and_then(|snapshot| snapshot.status.as_ref());
    let Some((vm, status)) = observed.vm.as_ref().zip(status) else { return false };
    let is_known = status.source_uid.is_some() || status.ready_to_use == Some(true);
    is_known && vm.metadata.uid != status.source_uid
}

/// Names the claims, makes them, and then changes or creates the VM.
fn restore(observed: &Observed, source: Source<'_>) -> Result<Step, serde_json::Error> {
    let working = Shown::works("Creating new PVCs", "Waiting for new PVCs");
    let named = match volumes::named(observed, source) {
        Ok(named) => named,
        Err(text) => return failed(observed, &text),
    };
    let status = observed.status();
    // A VM without restored claims can have DataVolumes that go.
    if (&status.restores, &status.deleted_data_volumes) != (&named.restores, &named.deleted) {
        return Ok(Step::show(working.naming(named)));
    }
    match volumes::progress(observed, source)? {
        Progress::Failed(text) => failed(observed, &text),
        Progress::Hindered(text, effects) => Ok(hindered(observed, &text)?.after(effects)),
        Progress::Works(effects) => Ok(Step::show(working).after(effects).wake(RETRY)),
        Progress::Made => match target::effects(observed, source)? {
            Ok(effects) => {
                let updating = Shown::works("Updating target spec", "Waiting for target update");
                Ok(Step::show(updating).after(effects))
            }
            Err(text) => failed(observed, &text),
        },
    }
}

/// A reason why a snapshot cannot be restored.
enum Hindrance {
    /// It may go away.
    Passing(String),
    /// It stays.
    Final(String),
}

/// Returns the snapshot with its content. One that lacks a volume is not ready, but has the others that were deleted to be replaced.
fn source(observed: &Observed) -> Result<Source<'_>, Hindrance> {
    let path = |name: &str| format!("{}/{name}", observed.namespace());
    let name = path(&observed.restore.spec.virtual_machine_snapshot_name);
    let Some(snapshot) = observed.snapshot.as_deref() else {
        return Err(Hindrance::Passing(format!("VMSnapshot {name} does not exist")));
    };
    if snapshot.is_in(phase::FAILED) {
        return Err(Hindrance::Final(format!("VMSnapshot {name} failed and is invalid to use")));
    }
    let of_content = path(&snapshot.content_name());
    // From the record of the claims on they stay until the restore has ended. Their end may have begun before.
    let is_new = observed.is_in_place() && observed.status().restores.is_empty() && !observed.is_done();
    let goes = |meta: &ObjectMeta| is_new && meta.deletion_timestamp.is_some();
    let is_going = |what: &str, name: &str| Hindrance::Passing(format!("{what} {name} is being deleted"));
    if goes(&snapshot.metadata) {
        return Err(is_going("VMSnapshot", &name));
    }
    let not_ready = |what: &str, name: &str| Hindrance::Passing(format!("{what} {name} not ready"));
    let is_begun = volumes::is_begun(observed);
    if snapshot.status.as_ref().and_then(|status| status.ready_to_use) != Some(true) && !is_begun {
        return Err(not_ready("VMSnapshot", &name));
    }
    let Some(content) = observed.content.as_deref() else {
        return Err(Hindrance::Passing(format!("VMSnapshotContent {of_content} does not exist")));
    };
    if goes(&content.metadata) {
        return Err(is_going("VMSnapshotContent", &of_content));
    }
    if content.status.as_ref().and_then(|status| status.ready_to_use) != Some(true) && !is_begun {
        return Err(not_ready("VMSnapshotContent", &of_content));
    }
    match &content.spec.source.virtual_machine {
        Some(vm) if vm.spec.is_some() => Ok(Source { snapshot, content, vm }),
        _ => Err(Hindrance::Final("unexpected snapshot source".to_owned())),
    }
}

/// Shows what is missing. A restore that holds the lease keeps its VM from starting, and one of a new VM keeps its clone from ending. They
/// do not wait for ever, unless the VM has lost disks already.
fn hindered(observed: &Observed, text: &str) -> Result<Step, serde_json::Error> {
    let lease = observed.vm.as_ref().and_then(|vm| vm.status.as_ref()?.operation.as_ref());
    let held = match &observed.vm {
        Some(_) => lease.filter(|_| observed.holds_lease()).and_then(|lease| lease.since.as_ref()),
        None => {
            let created = observed.restore.metadata.creation_timestamp.as_ref();
            created.filter(|_| !observed.status().restores.is_empty())
        }
    };
    let Some(held) = held.filter(|_| may_fail(observed)) else { return Ok(Step::show(Shown::error(text)).wake(RETRY)) };
    let since = status::hindered_since(observed).map_or(observed.now, |since| since.max(held.0));
    match Duration::try_from(PATIENCE - observed.now.duration_since(since)).ok().filter(|left| !left.is_zero()) {
        Some(left) => Ok(Step::show(Shown::error(text)).wake(left.min(RETRY))),
        None => failed(observed, text),
    }
}

/// Ends a restore that leaves the VM as it was. Any other is tried again.
fn failed(observed: &Observed, text: &str) -> Result<Step, serde_json::Error> {
    fail(observed, text, Shown::failed(text))
}

fn fail(observed: &Observed, text: &str, shown: Shown) -> Result<Step, serde_json::Error> {
    if !may_fail(observed) {
        return Ok(Step::show(Shown::error(text)).wake(RETRY));
    }
    leave(observed, shown)
}

/// Ends a restore, and leaves the VM as it was.
fn leave(observed: &Observed, shown: Shown) -> Result<Step, serde_json::Error> {
    Ok(Step::show(shown).before(volumes::clean_up(observed)).before(observed.release(false)?))
}

/// Ends a restore that was deleted.
fn ending(observed: &Observed) -> Result<Step, serde_json::Error> {
    if !observed.is_held_back() {
        return Ok(Step::default());
    }
    if let Some(failure) = observed.refusal().filter(|failure| !observed.gives_up() && failure.blocks(observed.now)) {
        return Ok(Step::default().wake(failure.remaining(observed.now)));
    }
    let step = Step::show(Shown::idle("VM restore is deleting"));
    // It must not hold back its VM and its namespace.
    let step = if observed.restore.is_final() {
        step
    } else if observed.gives_up() {
        step.before(volumes::clean_up(observed))
    } else if observed.is_done() {
        step.before(finish::effects(observed))
    } else if let Some(effects) = replacing(observed)? {
        return Ok(step.after(effects).wake(RETRY));
    } else {
        step.before(volumes::clean_up(observed))
    };
    Ok(step.before(observed.release(observed.is_done())?).after(observed.finalizer(false)))
}

/// Returns the next writes of a deleted restore that has deleted claims of its VM, until each is made again: the VM would be left without
/// these disks. It waits for a limited time, since another party may keep a former claim, and not for a VM that goes as well.
fn replacing(observed: &Observed) -> Result<Option<Vec<Effect>>, serde_json::Error> {
    let deleted = observed.restore.metadata.deletion_timestamp.as_ref();
    let is_in_time = deleted.is_some_and(|deleted| observed.now.duration_since(deleted.0) < PATIENCE);
    let is_kept = observed.vm.as_ref().is_some_and(|vm| vm.metadata.deletion_timestamp.is_none());
    let is_begun = volumes::is_begun(observed) && !volumes::are_made(observed);
    if !(is_in_time && is_kept && is_begun && observed.holds_lease()) {
        return Ok(None);
    }
    let Ok(source) = source(observed) else { return Ok(None) };
    Ok(match volumes::progress(observed, source)? {
        Progress::Works(effects) | Progress::Hindered(_, effects) => Some(effects),
        Progress::Made | Progress::Failed(_) => None,
    })
}

/// Returns the mark of objects that this restore makes or replaces.
fn marks(observed: &Observed) -> [(&'static str, Value); 2] {
    let name = observed.restore.metadata.name.as_deref().unwrap_or_default();
    [(annotation::RESTORE, json!(name)), (annotation::LAST_RESTORE, json!(observed.id()))]
}
