//! Clones: a new VM from a snapshot of another one, by a restore.
//!
//! Start with [`decide`]; `controller.rs` holds the watches, `steps.rs` what is done in a phase, `checks.rs` what can be cloned,
//! `patches.rs` the differences of the new VM, `status.rs` the conditions.
//!
//! ```text
//!  source missing, volume without snapshots: pending
//!            │ snapshot made            snapshot ready           restore complete       VM exists
//!  (new) ────┴──> SnapshotInProgress ──────────────> RestoreInProgress ──> CreatingTargetVM ──> Succeeded
//!                     │                                  │                       │                 │ claims bound: restore and
//!                     └──── snapshot or restore failed, or gone ─────────────────┘                 │ snapshot deleted
//!                                      v                                                           v
//!                                   Failed                                       VM deleted: clone deleted
//! ```
//! Snapshot and restore are named after the UID of the clone, which controls them: they go with it, and no step is done twice.

mod checks;
mod controller;
mod patches;
mod status;
mod steps;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    VirtualMachine,
    clone::{VirtualMachineClone, VirtualMachineCloneStatus},
    snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub(crate) use self::controller::Clones;
use self::status::{Phase, Shown};
use crate::{
    resources::claims::CachedClaim,
    runtime::{Decision, Event, Failure, Kind},
};

/// Kind of VMs.
const VM: &str = "VirtualMachine";
/// Refusals in a row after which a clone fails: about three minutes.
const ATTEMPTS: u32 = 8;
/// Time for which a part of a snapshot can be missing.
const PATIENCE: SignedDuration = SignedDuration::from_mins(5);
/// Time for which an object that the clone needs can be missing: its watch can be behind that of the clone.
const MISSING: Duration = Duration::from_secs(10);
/// Reason under which refused writes are remembered.
const REFUSED: &str = "CloneRefused";
/// Characters of the UID at the end of a generated name.
const SUFFIX: usize = 5;

/// Everything that a decision about a clone depends on.
pub(crate) struct Observed {
    /// The clone.
    pub clone: Arc<VirtualMachineClone>,
    /// The VM that is cloned.
    pub source: Option<Arc<VirtualMachine>>,
    /// The snapshot that is restored.
    pub snapshot: Option<Arc<VirtualMachineSnapshot>>,
    /// Its content.
    pub content: Option<Arc<VirtualMachineSnapshotContent>>,
    /// The restore.
    pub restore: Option<Arc<VirtualMachineRestore>>,
    /// The VM that is made.
    pub target: Option<Arc<VirtualMachine>>,
    /// Claims of the restore that exist.
    pub claims: BTreeMap<String, Arc<CachedClaim>>,
    /// Time since this process has seen that an object is missing without which the clone cannot go on.
    pub missing_for: Option<Duration>,
    /// The last write that was refused.
    pub failure: Option<Failure>,
    /// The current time.
    pub now: Timestamp,
}

type Step = crate::runtime::Step<Shown>;

impl Observed {
    fn name(&self) -> &str {
        self.clone.metadata.name.as_deref().unwrap_or_default()
    }

    fn namespace(&self) -> &str {
        self.clone.metadata.namespace.as_deref().unwrap_or_default()
    }

    fn status(&self) -> VirtualMachineCloneStatus {
        self.clone.status.clone().unwrap_or_default()
    }

    /// Returns true if the restore was not made yet. Its name is recorded when it is made: if it is missing then, it was deleted.
    fn is_to_restore(&self) -> bool {
        let status = self.status();
        Phase::of(&status) == Phase::Restore && self.restore.is_none() && status.restore_name.is_none()
    }

    /// Returns the object that the phase requires if it is missing.
    fn missing(&self) -> Option<&'static str> {
        match Phase::of(&self.status()) {
            Phase::Snapshot if clones_vm(&self.clone) && self.snapshot.is_none() => Some("snapshot"),
            Phase::Restore if self.restore.is_none() && !self.is_to_restore() => Some("restore"),
            Phase::Restore => {
                let is_open = self.restore.as_ref().is_none_or(|restore| !restore.is_final());
                (is_open && self.snapshot.is_none()).then_some("snapshot")
            }
            Phase::Target | Phase::Succeeded if self.target.is_none() => Some("target"),
            _ => None,
        }
    }

    /// Returns the rest of the time for which a missing object is awaited.
    fn patience(&self) -> Option<Duration> {
        self.missing()?;
        let left = MISSING.saturating_sub(self.missing_for.unwrap_or_default());
        (!left.is_zero()).then_some(left)
    }

    /// Returns the metadata of an object that goes with the clone.
    fn owned(&self, name: &str) -> ObjectMeta {
        ObjectMeta {
            name: Some(name.to_owned()),
            namespace: self.clone.metadata.namespace.clone(),
            owner_references: Some(vec![Kind::VmClone.owner_reference(&self.clone.metadata)]),
            ..ObjectMeta::default()
        }
    }

    /// Returns an event. All are normal ones in KubeVirt.
    fn event(&self, reason: &'static str, message: String) -> Event {
        Event::normal(Kind::VmClone.reference(&self.clone.metadata), reason, message)
    }
}

/// Returns true if a VM is cloned, as opposed to a snapshot.
fn clones_vm(clone: &VirtualMachineClone) -> bool {
    clone.spec.source.as_ref().is_some_and(|source| source.kind == VM)
}

/// Returns the name of the snapshot that is restored.
fn snapshot_name(clone: &VirtualMachineClone) -> String {
    match clone.spec.source.as_ref().filter(|_| !clones_vm(clone)) {
        Some(source) => source.name.clone(),
        None => format!("tmp-snapshot-{}", clone.metadata.uid.as_deref().unwrap_or_default()),
    }
}

/// Returns the name of the restore.
fn restore_name(clone: &VirtualMachineClone) -> String {
    format!("tmp-restore-{}", clone.metadata.uid.as_deref().unwrap_or_default())
}

/// Returns the name of the new VM. Admission gives one to clones without.
fn target_name(clone: &VirtualMachineClone) -> String {
    let named = clone.spec.target.as_ref().map(|target| target.name.clone()).filter(|name| !name.is_empty());
    named.unwrap_or_else(|| {
        let source = clone.spec.source.as_ref().map(|source| source.name.as_str()).unwrap_or_default();
        let uid = clone.metadata.uid.as_deref().unwrap_or_default();
        let suffix = uid.get(uid.len().saturating_sub(SUFFIX)..).unwrap_or_default();
        api::names::object_name(source, &format!("-clone-{suffix}"))
    })
}

/// Decides about a clone.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    if observed.clone.metadata.deletion_timestamp.is_some() {
        return Ok(Decision::settled());
    }
    next(observed)?.decided(|shown, decision| status::show(observed, shown, decision))
}

fn next(observed: &Observed) -> Result<Step, serde_json::Error> {
    let phase = Phase::of(&observed.status());
    if phase == Phase::Failed {
        return Ok(Step::default());
    }
    if let Some(failure) = observed.failure.as_ref().filter(|failure| failure.reason == REFUSED) {
        if failure.attempts >= ATTEMPTS && phase != Phase::Succeeded {
            return Ok(steps::failed(observed, "CloneFailed", failure.message.clone()));
        }
        if failure.blocks(observed.now) {
            return Ok(Step::default().wake(failure.remaining(observed.now)));
        }
    }
    // The answer to its creation was lost, or another replica has made it.
    if let Some(left) = observed.patience() {
        return Ok(Step::default().wake(left));
    }
    match phase {
        Phase::New | Phase::Snapshot => steps::snapshot(observed, phase),
        Phase::Restore if observed.is_to_restore() => steps::snapshot(observed, phase),
        Phase::Restore => Ok(steps::restoring(observed)),
        Phase::Target => Ok(steps::created(observed)),
        Phase::Succeeded => Ok(steps::succeeded(observed)),
        Phase::Failed => Ok(Step::default()),
    }
}
