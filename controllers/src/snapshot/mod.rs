//! Snapshots of VMs: the lease, the content, its end. `content/` takes the volume snapshots.
//!
//! ```text
//!            VM can be locked        content created          content taken
//!  waiting ──────────────────> held ────────────────> taking ───────────────> Succeeded
//!     │                          │                       │ (lease released)      │
//!     └──────────────────────────┴───────────────────────┘                       │ deleted
//!                  │ deadline                     │ deleted                      v
//!                  v                              v              content deleted or kept, lease released,
//!        content deleted, lease released: Failed, Deleting ────> finalizer removed
//! ```
//! Everything follows from objects: the lease from the VM, the content from its name. Nothing depends on the guest: a content is
//! removed even if the guest cannot be thawed, because it thaws itself.

mod captured;
pub(crate) mod content;
mod controller;
mod source;
mod status;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use api::{
    VirtualMachine, VirtualMachineInstance, VmOperation,
    constants::{event, finalizer},
    snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, phase},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(crate) use self::{
    captured::restored_copy_name,
    content::SnapshotContents,
    controller::Snapshots,
    source::{SourceVolume, state_claim, state_volume},
};
use crate::{
    cache::Key,
    data_volumes::DataVolumes,
    runtime::{Decision, Effect, Event, Failures, Kind, has_finalizer},
    vm_lease,
};

/// Time after which a VM that cannot be locked is looked at again.
const RETRY: Duration = Duration::from_secs(5);
/// Reason of a refused lock.
const LOCK: &str = "LockFailed";

/// Everything that a decision about a snapshot depends on.
pub(crate) struct Observed {
    /// The snapshot.
    pub snapshot: Arc<VirtualMachineSnapshot>,
    /// The VM, unless another one has its name by now.
    pub vm: Option<Arc<VirtualMachine>>,
    /// The VMI of the VM's name.
    pub vmi: Option<Arc<VirtualMachineInstance>>,
    /// The content.
    pub content: Option<Arc<VirtualMachineSnapshotContent>>,
    /// Volumes of the VM with claims.
    pub volumes: Vec<SourceVolume>,
    /// Name of the volume with the state of the VM, if it has one. Unknown of a complete snapshot.
    pub state: Option<String>,
    /// DataVolumes of these claims.
    pub data_volumes: DataVolumes,
    /// A restore in place has begun: the content of claims that it replaces is in the snapshot only.
    pub is_in_use: bool,
    /// The writes for this snapshot that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

impl Observed {
    /// Returns the VMI while its guest runs or may run.
    fn live(&self) -> Option<&VirtualMachineInstance> {
        self.vmi.as_deref().filter(|vmi| !vmi.is_final())
    }

    fn is_deleting(&self) -> bool {
        self.snapshot.metadata.deletion_timestamp.is_some()
    }

    fn is_taken(&self) -> bool {
        self.content.as_ref().is_some_and(|content| content.is_taken())
    }

    /// Returns the time until the snapshot fails. `None`: it does not fail by time.
    fn time_left(&self) -> Option<Duration> {
        let limit = self.snapshot.time_limit()?;
        let created = self.snapshot.metadata.creation_timestamp.as_ref()?.0;
        let passed = Duration::try_from(self.now.duration_since(created)).unwrap_or_default();
        Some(limit.saturating_sub(passed))
    }

    fn has_failed(&self) -> bool {
        let is_open = !self.snapshot.is_final() && !self.is_taken();
        self.snapshot.is_in(phase::FAILED) || (is_open && self.time_left().is_some_and(|left| left.is_zero()))
    }
}

/// The stage of a snapshot.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// Nothing was written yet.
    New,
    /// The VM does not exist.
    NoSource,
    /// The VM cannot be locked, for this reason.
    NotLocked(String),
    /// The snapshot takes the lease or has it.
    Locked,
    /// All volume snapshots were taken.
    Succeeded,
    /// The deadline has passed.
    Failed,
    /// It is deleted before its content was taken.
    Deleting,
    /// It is deleted with its content.
    Leaving,
}

/// Decides what to do about a snapshot.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    let snapshot = &*observed.snapshot;
    if !observed.is_deleting() {
        decision.effects.extend(finalizer_of(snapshot, true));
    } else if observed.is_in_use {
        // The end of the restore, or its deletion, wakes the snapshot.
        return Ok(decision);
    }
    let stage = if observed.is_deleting() {
        let was_final = snapshot.is_final();
        if was_final { Stage::Leaving } else { Stage::Deleting }
    } else if observed.has_failed() {
        Stage::Failed
    } else if snapshot.is_in(phase::SUCCEEDED) || observed.is_taken() {
        Stage::Succeeded
    } else if snapshot.status.is_none() {
        Stage::New
    } else {
        advance(observed, &mut decision)
    };
    let is_over = match stage {
        Stage::Failed | Stage::Deleting | Stage::Leaving => drop_content(observed, &mut decision),
        Stage::Succeeded => true,
        _ => false,
    };
    if let Some(vm) = observed.vm.as_deref().filter(|_| is_over) {
        let uid = snapshot.metadata.uid.as_deref().unwrap_or_default();
        decision.effects.extend(release(vm, uid));
    }
    if observed.is_deleting() && is_over {
        // The object is gone with this write, so its status does not matter.
        decision.effects.extend(finalizer_of(snapshot, false));
        return Ok(decision);
    }
    status::report(observed, &stage, &mut decision)?;
    if !snapshot.is_final()
        && let Some(left) = observed.time_left().filter(|left| !left.is_zero())
    {
        decision.wake(left);
    }
    Ok(decision)
}

/// Returns the writes that release the lease, if the object with this UID has it.
fn release(vm: &VirtualMachine, uid: &str) -> Vec<Effect> {
    let lease = vm.status.as_ref().and_then(|status| status.operation.as_ref());
    if lease.is_some_and(|lease| lease.uid == uid) { vm_lease::release(vm, uid) } else { Vec::new() }
}

/// Takes the lease, then creates the content.
fn advance(observed: &Observed, decision: &mut Decision) -> Stage {
    let Some(vm) = observed.vm.as_deref() else { return Stage::NoSource };
    let snapshot = &*observed.snapshot;
    let uid = snapshot.metadata.uid.as_deref().unwrap_or_default();
    if vm_lease::is_held_by(vm, &snapshot.metadata) {
        if observed.content.is_some() {
            return Stage::Locked;
        }
        // A migration that was handed over in the instant of the lock goes first.
        let Some(text) = source::movement(observed, vm) else {
            create_content(observed, vm, decision);
            return Stage::Locked;
        };
        decision.wake(RETRY);
        decision.effects.extend(release(vm, uid));
        return Stage::NotLocked(text);
    }
    decision.wake(RETRY);
    if let Some(refusal) = source::refusal(observed, vm, decision) {
        if refusal.is_empty() {
            return Stage::New;
        }
        // The finalizer was refused after the lease was taken.
        decision.effects.extend(release(vm, uid));
        return Stage::NotLocked(refusal);
    }
    if decision.must_wait(&observed.failures, LOCK, observed.now) {
        // The VM can start until the next attempt.
        decision.effects.extend(release(vm, uid));
        let message = observed.failures.of(LOCK).map(|failure| failure.message.as_str()).unwrap_or_default();
        return Stage::NotLocked(format!(" source {} cannot be locked: {message}", Key::of(&vm.metadata)));
    }
    match vm_lease::take(vm, VmOperation::Snapshot, &snapshot.metadata, &Time(observed.now)) {
        Ok(effects) => {
            decision.effects.extend(effects.into_iter().map(|effect| effect.refused_as(LOCK)));
            Stage::Locked
        }
        Err(held) => Stage::NotLocked(format!(" {}", held.holder())),
    }
}

fn create_content(observed: &Observed, vm: &VirtualMachine, decision: &mut Decision) {
    if decision.must_wait(&observed.failures, event::FAILED_SNAPSHOT_CONTENT_CREATE, observed.now) {
        return;
    }
    let regarding = || Kind::VmSnapshot.reference(&observed.snapshot.metadata);
    let (copies, creation) = captured::content(observed, vm);
    let failed = || {
        let message = "Error creating VirtualMachineSnapshotContent: {error}";
        Event::warning(regarding(), event::FAILED_SNAPSHOT_CONTENT_CREATE, message)
    };
    decision.effects.extend(copies.into_iter().map(|copy| Effect::copy_revision(copy).on_failure(failed())));
    let created = Event::normal(
        regarding(),
        event::SUCCESSFUL_SNAPSHOT_CONTENT_CREATE,
        "Successfully created VirtualMachineSnapshotContent {name}",
    );
    decision.push(Effect::create_snapshot_content(creation).on_success(created).on_failure(failed()));
}

/// Deletes the content, unless it is kept. Returns true if nothing of it is left to wait for.
fn drop_content(observed: &Observed, decision: &mut Decision) -> bool {
    let Some(content) = observed.content.as_deref() else { return true };
    let is_kept = observed.is_deleting() && !observed.snapshot.deletes_content() && content.is_taken();
    if is_kept {
        return !has_finalizer(&content.metadata, finalizer::SNAPSHOT_CONTENT);
    }
    if content.metadata.deletion_timestamp.is_none() {
        decision.push(Effect::delete(Kind::VmSnapshotContent, &content.metadata));
    }
    false
}

/// Returns the write that adds or removes the finalizer.
fn finalizer_of(snapshot: &VirtualMachineSnapshot, present: bool) -> Option<Effect> {
    Effect::finalizer(Kind::VmSnapshot, &snapshot.metadata, finalizer::SNAPSHOT, present)
}
