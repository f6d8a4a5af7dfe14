//! The content of a snapshot: freezes the guest, takes the volume snapshots, thaws the guest.
//!
//! ```text
//!           no guest, no agent, paused, or freeze fails often      all taken
//!  created ─────────────────────────────────────────────> taking ─────────────> taken ──> ready
//!     │ freeze                                               ^                    ^
//!     v limit of the freeze, refused volume, contents taken  │                    │ thaw
//!  frozen ───────────────────────────────────────────────────┘                    │
//!     └────────────────────────────── all taken ──────────────────────────────────┘
//! ```
//! The storage records first in the VolumeSnapshotContents that all volumes are taken. The guest is thawed then, and the VolumeSnapshots,
//! which external-snapshotter 8.7 updates up to a second later, decide about all else.
//!
//! The state of the guest is recorded in the status. The guest thaws itself after [`FROZEN`], also when nobody thaws it: the thaw here
//! shortens its pause. A content whose snapshot is gone, has failed or is deleted thaws the guest and is let go, after the answer to a
//! freeze that was asked for: the next snapshot would take that freeze for its own, and its limit for a later one.

mod controller;
mod quiesce;
mod status;
#[cfg(test)]
mod tests;
mod volume_snapshot;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    QuiesceState, VirtualMachine, VirtualMachineInstance,
    constants::finalizer,
    snapshot::{
        VirtualMachineSnapshot,
        content::{VirtualMachineSnapshotContent, VirtualMachineSnapshotContentStatus, VolumeBackup},
        phase,
    },
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(crate) use self::controller::SnapshotContents;
use self::quiesce::Step;
use crate::{
    resources::{claims::CachedClaim, snapshots::CachedSnapshot},
    runtime::{Decision, Effect, Failures, Kind},
};

/// Longest time for which a guest is frozen.
pub(crate) const FROZEN: Duration = Duration::from_secs(60);

/// Attempts to freeze a guest, and to create its volume snapshots while it is frozen.
const ATTEMPTS: u32 = 3;
/// Time after which a volume that cannot be snapshotted is looked at again.
const RETRY: Duration = Duration::from_secs(5);

/// Claims by name, with the class of their snapshots, or why none can be chosen.
type Claims = BTreeMap<String, (Arc<CachedClaim>, Result<Option<String>, String>)>;

/// Everything that a decision about a content depends on.
pub(crate) struct Observed {
    /// The content.
    pub content: Arc<VirtualMachineSnapshotContent>,
    /// Its snapshot, unless another one has the name.
    pub snapshot: Option<Arc<VirtualMachineSnapshot>>,
    /// The VM of the snapshot.
    pub vm: Option<Arc<VirtualMachine>>,
    /// Its VMI.
    pub vmi: Option<Arc<VirtualMachineInstance>>,
    /// Volume snapshots by name.
    pub taken: BTreeMap<String, Arc<CachedSnapshot>>,
    /// Claims of its volumes.
    pub claims: Claims,
    /// A restore in place has begun: the content of claims that it replaces is here only.
    pub is_in_use: bool,
    /// The writes for this content that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

impl Observed {
    /// Returns true if the content is not completed any more.
    fn is_leaving(&self) -> bool {
        let is_ending = |snapshot: &Arc<VirtualMachineSnapshot>| {
            snapshot.metadata.deletion_timestamp.is_some() || snapshot.is_in(phase::FAILED)
        };
        self.content.metadata.deletion_timestamp.is_some() || self.snapshot.as_ref().is_none_or(is_ending)
    }

    fn status(&self) -> VirtualMachineSnapshotContentStatus {
        self.content.status.clone().unwrap_or_default()
    }

    /// Returns the backups with names of volume snapshots.
    fn backups(&self) -> impl Iterator<Item = (&VolumeBackup, &str)> {
        let backups = self.content.spec.volume_backups.iter();
        backups.filter_map(|backup| Some((backup, backup.volume_snapshot_name.as_deref()?)))
    }

    /// Returns the backups without volume snapshots.
    fn missing(&self) -> Vec<(&VolumeBackup, &str)> {
        self.backups().filter(|(_, name)| !self.taken.contains_key(*name)).collect()
    }

    /// Returns the checks of the contents of the volume snapshots that do not show yet that they are taken. `None`: not all have contents.
    fn require_taken(&self) -> Option<Vec<Effect>> {
        let known: Option<Vec<_>> = self.backups().map(|(_, name)| self.taken.get(name)).collect();
        let open = known?.into_iter().filter(|known| known.created.is_none());
        let check = |known: &Arc<CachedSnapshot>| {
            Some(Effect::require_taken(&known.metadata, known.content.as_deref()?).refused_as(quiesce::READ))
        };
        open.map(check).collect()
    }

    /// Returns true if the content of all volumes is fixed.
    fn are_all_taken(&self) -> bool {
        self.backups().all(|(_, name)| self.taken.get(name).is_some_and(|taken| taken.created.is_some()))
    }
}

/// Decides what to do about a content.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    if observed.is_leaving() {
        // The end of the restore, or its deletion, wakes the content.
        if !observed.is_in_use {
            leave(observed, &mut decision);
        }
        return Ok(decision);
    }
    let mut status = observed.status();
    if status.creation_time.is_some() {
        if quiesce::is_frozen(&status) {
            let step = quiesce::thaw(observed, &mut status, &mut decision);
            put_step(observed, step, &mut decision);
        }
        status::update(observed, None, &mut status);
        status::put(observed, &status, &mut decision)?;
        status::warn_missing(observed, &mut decision);
        return Ok(decision);
    }
    if observed.are_all_taken() {
        let step = quiesce::thaw(observed, &mut status, &mut decision);
        put_step(observed, step, &mut decision);
        status.creation_time = Some(Time(observed.now));
        status::update(observed, None, &mut status);
        status::put(observed, &status, &mut decision)?;
        return Ok(decision);
    }
    take(observed, status, &mut decision)?;
    Ok(decision)
}

/// Freezes the guest and takes the volume snapshots.
fn take(
    observed: &Observed,
    mut status: VirtualMachineSnapshotContentStatus,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let is_hindered = volume_snapshot::obstacle(observed).is_some();
    if is_hindered {
        // No watch of contents shows its end.
        decision.wake(RETRY);
    }
    let is_early = is_hindered && status.quiesce.is_none();
    let step = if is_early { Step::Wait } else { quiesce::begin(observed, &mut status, decision) };
    let waits = matches!(step, Step::Wait | Step::Release);
    put_step(observed, step, decision);
    let error = quiesce::error(observed, &status).or_else(|| volume_snapshot::error(observed));
    // Nothing is known about a VM that does not run before its first volume snapshot is there. It cannot start meanwhile.
    let is_unknown = observed.content.status.is_none()
        && observed.taken.is_empty()
        && error.is_none()
        && is_state(&status, QuiesceState::Offline);
    if !is_unknown {
        status::update(observed, error, &mut status);
        status::put(observed, &status, decision)?;
    }
    if !waits {
        volume_snapshot::create(observed, decision);
    }
    thaw_early(observed, status, decision)
}

/// Thaws the guest if the contents of the volume snapshots are taken. Without the right to read them, the VolumeSnapshots decide.
fn thaw_early(
    observed: &Observed,
    mut status: VirtualMachineSnapshotContentStatus,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let Some(checks) = observed.require_taken().filter(|_| quiesce::is_frozen(&status)) else { return Ok(()) };
    if decision.must_wait(&observed.failures, quiesce::READ, observed.now) {
        return Ok(());
    }
    let pause = quiesce::pause(observed, &status);
    let step = quiesce::thaw(observed, &mut status, decision);
    if step == Step::Wait {
        return Ok(());
    }
    decision.wake(pause);
    decision.effects.extend(checks);
    put_step(observed, step, decision);
    status::put(observed, &status, decision)
}

fn put_step(observed: &Observed, step: Step, decision: &mut Decision) {
    let (freeze, reason) = match step {
        Step::Call(Some(limit)) => (Some(limit), quiesce::FREEZE),
        Step::Call(None) => (None, quiesce::THAW),
        Step::Release => (None, quiesce::FREEZE),
        Step::Nothing | Step::Wait => return,
    };
    let Some(vmi) = observed.vmi.as_ref().map(|vmi| &vmi.metadata) else { return };
    let (namespace, name) = (vmi.namespace.as_deref().unwrap_or_default(), vmi.name.as_deref().unwrap_or_default());
    decision.push(Effect::quiesce(namespace, name, freeze).refused_as(reason));
}

/// Thaws the guest if it may be frozen, and removes the finalizer. A content that nobody can use is deleted.
fn leave(observed: &Observed, decision: &mut Decision) {
    let content = &*observed.content;
    let release = Effect::finalizer(Kind::VmSnapshotContent, &content.metadata, finalizer::SNAPSHOT_CONTENT, false);
    if release.is_some() && !content.is_taken() && quiesce::may_be_frozen(observed) {
        let vmi = observed.vmi.as_ref().map(|vmi| vmi.metadata.clone()).unwrap_or_default();
        let thaw = Effect::quiesce(&vmi.namespace.unwrap_or_default(), &vmi.name.unwrap_or_default(), None);
        // The guest thaws itself if this fails.
        decision.push(thaw.independent());
    }
    decision.effects.extend(release);
    let is_useless = observed.snapshot.is_none() && observed.status().creation_time.is_none();
    if is_useless && content.metadata.deletion_timestamp.is_none() {
        decision.push(Effect::delete(Kind::VmSnapshotContent, &content.metadata));
    }
}

/// Returns true in this state of the guest.
fn is_state(status: &VirtualMachineSnapshotContentStatus, state: QuiesceState) -> bool {
    status.quiesce.as_ref().is_some_and(|quiesce| quiesce.state == state)
}
