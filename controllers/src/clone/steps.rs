//! The work of each phase.

use std::time::Duration;

use api::{
    Condition,
    constants::GROUP,
    owner,
    snapshot::{
        self, VirtualMachineSnapshot, VirtualMachineSnapshotSpec,
        content::SourceVirtualMachine,
        restore::{VirtualMachineRestore, VirtualMachineRestoreSpec},
    },
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;

use super::{
    ATTEMPTS, Observed, PATIENCE, REFUSED, Shown, Step, VM, checks, clones_vm, patches, restore_name, snapshot_name,
    status::Phase, target_name,
};
use crate::runtime::{Effect, Event, Kind};

/// Ends a clone that cannot be made. Its snapshot and its restore are of no use.
pub(super) fn failed(observed: &Observed, reason: &'static str, text: String) -> Step {
    let event = Effect::Event(observed.event(reason, text.clone()));
    Step::show(Shown::failed(text)).before(leftovers(observed)).before([event])
}

/// Returns the deletion of the restore, and of the snapshot if it was made for the clone.
fn leftovers(observed: &Observed) -> Vec<Effect> {
    // They are deleted with the clone if another party does not let them go now.
    if observed.failure.as_ref().is_some_and(|failure| failure.reason == REFUSED && failure.attempts > ATTEMPTS) {
        return Vec::new();
    }
    let restore = observed.restore.as_ref().map(|known| (Kind::VmRestore, &known.metadata, is_own(observed, &**known)));
    let snapshot = observed.snapshot.as_ref();
    let snapshot = snapshot.map(|known| (Kind::VmSnapshot, &known.metadata, is_own(observed, &**known)));
    let all = restore.into_iter().chain(snapshot);
    let left = all.filter(|(_, metadata, is_own)| *is_own && metadata.deletion_timestamp.is_none());
    left.map(|(kind, metadata, _)| Effect::delete(kind, metadata).refused_as(REFUSED)).collect()
}

/// Returns true if the clone controls an object.
fn is_own<K: kube::Resource>(observed: &Observed, object: &K) -> bool {
    owner::is_controlled_by(object.meta(), &*observed.clone)
}

/// Ends a clone whose snapshot was deleted before its content was restored.
fn lost_snapshot(observed: &Observed, name: &str) -> Step {
    failed(observed, "SnapshotDeleted", format!("snapshot {name} does not exist anymore"))
}

/// Makes a snapshot of a VM, waits for it, shows that it is ready, and then makes the restore.
pub(super) fn snapshot(observed: &Observed, phase: Phase) -> Result<Step, serde_json::Error> {
    let (name, is_temporary) = (snapshot_name(&observed.clone), clones_vm(&observed.clone));
    let Some(snapshot) = observed.snapshot.as_deref() else {
        if phase == Phase::Restore || (phase == Phase::Snapshot && is_temporary) {
            return Ok(lost_snapshot(observed, &name));
        }
        return begin(observed, &name);
    };
    if is_temporary && !is_own(observed, snapshot) {
        return Ok(failed(observed, "SnapshotCreationFailed", format!("snapshot {name} belongs to another object")));
    }
    let status = snapshot.status.as_ref();
    if snapshot.is_in(snapshot::phase::FAILED) {
        let error = status.and_then(|status| status.error.as_ref()?.message.clone());
        let cause = error.or_else(|| failure(status.iter().flat_map(|status| &status.conditions)));
        let text = format!("snapshot {name} failed: {}", cause.unwrap_or_default());
        return Ok(failed(observed, "SnapshotFailed", text));
    }
    let is_ready = status.and_then(|status| status.ready_to_use) == Some(true);
    let Some(content) = observed.content.as_deref().filter(|_| is_ready) else {
        let shown = if phase == Phase::New { Phase::Snapshot } else { phase };
        let waits = Step::show(Shown::works(shown).snapshot(name.clone()));
        let Some((text, since)) = loss(observed, snapshot) else { return Ok(waits) };
        let left = Duration::try_from(PATIENCE - observed.now.duration_since(since)).ok();
        return Ok(match left.filter(|left| !left.is_zero()) {
            Some(left) => waits.wake(left),
            None => failed(observed, "SnapshotFailed", format!("snapshot {name} failed: {text}")),
        });
    };
    let Some(source) = &content.spec.source.virtual_machine else {
        return Ok(failed(observed, "SnapshotContentInvalid", format!("snapshot {name} is not one of a VM")));
    };
    if let Err((reason, text)) = checks::content(&format!("{}/{name}", observed.namespace()), content, source) {
        return Ok(failed(observed, reason, text));
    }
    // The clone shows that it restores also if the restore is refused.
    if phase != Phase::Restore {
        let text = format!("snapshot {name} for clone {} is ready to use", observed.name());
        let ready = Effect::Event(observed.event("SnapshotReady", text));
        return Ok(Step::show(Shown::works(Phase::Restore).snapshot(name)).before([ready]));
    }
    let restore = restore_name(&observed.clone);
    let made = observed.event("RestoreCreated", format!("created restore {restore} for clone {}", observed.name()));
    let create = create_restore(observed, &name, &restore, source)?;
    Ok(Step::show(Shown::works(Phase::Restore).snapshot(name).restore(restore)).before([create, Effect::Event(made)]))
}

/// Returns why a snapshot that was taken will not be ready, and since when: its content, or a part of it, is gone.
fn loss(observed: &Observed, snapshot: &VirtualMachineSnapshot) -> Option<(String, Timestamp)> {
    let is_whole = observed.content.as_ref().is_some_and(|content| !content.lacks_volumes());
    let is_lost = snapshot.is_in(snapshot::phase::SUCCEEDED) && !is_whole;
    let error = snapshot.status.as_ref()?.error.as_ref().filter(|_| is_lost)?;
    Some((error.message.clone().unwrap_or_default(), error.time.as_ref()?.0))
}

/// Returns the text of condition Failure.
fn failure<'a>(mut conditions: impl Iterator<Item = &'a Condition>) -> Option<String> {
    let failure = conditions.find(|known| known.type_ == snapshot::condition::FAILURE && known.is_true())?;
    failure.message.clone().or_else(|| failure.reason.clone())
}

/// Makes the snapshot of a VM whose volumes have snapshots.
fn begin(observed: &Observed, name: &str) -> Result<Step, serde_json::Error> {
    let source = observed.clone.spec.source.clone().unwrap_or_default();
    let Some(vm) = observed.source.as_deref() else {
        let text = format!("Source doesnt exist: {} {}/{}", source.kind, observed.namespace(), source.name);
        return Ok(Step::show(Shown::pending("SourceDoesNotExist", text)));
    };
    if let Some(text) = checks::state(&format!("{}/{}", observed.namespace(), source.name), vm) {
        return Ok(failed(observed, "SourceVMWithBackendStorageInvalid", text));
    }
    if let Some(text) = checks::unsupported_volumes(vm) {
        return Ok(Step::show(Shown::pending("VMVolumeSnapshotsInvalid", text)));
    }
    let snapshot = VirtualMachineSnapshot {
        metadata: observed.owned(name),
        spec: VirtualMachineSnapshotSpec { source: vm_reference(source.name), ..VirtualMachineSnapshotSpec::default() },
        status: None,
    };
    let create = Effect::create(Kind::VmSnapshot, Some(observed.namespace()), &snapshot)?.or_existing().reported(
        Kind::VmClone.reference(&observed.clone.metadata),
        ("SnapshotCreated", format!("created snapshot {name} for clone {}", observed.name())),
        ("SnapshotCreationFailed", format!("failed creating snapshot {name} for clone {}: {{error}}", observed.name())),
    );
    let create = create.refused_as(REFUSED);
    Ok(Step::show(Shown::works(Phase::Snapshot).snapshot(name.to_owned())).before([create]))
}

fn vm_reference(name: String) -> TypedLocalObjectReference {
    TypedLocalObjectReference { api_group: Some(GROUP.to_owned()), kind: VM.to_owned(), name }
}

fn create_restore(
    observed: &Observed,
    snapshot: &str,
    name: &str,
    source: &SourceVirtualMachine,
) -> Result<Effect, serde_json::Error> {
    let policy = observed.clone.spec.volume_name_policy.clone();
    let restore = VirtualMachineRestore {
        metadata: observed.owned(name),
        spec: VirtualMachineRestoreSpec {
            patches: patches::of(&observed.clone.spec, source),
            target: vm_reference(target_name(&observed.clone)),
            virtual_machine_snapshot_name: snapshot.to_owned(),
            volume_restore_policy: policy.filter(|policy| policy == "PrefixTargetName"),
            ..VirtualMachineRestoreSpec::default()
        },
        status: None,
    };
    let text = format!("failed creating restore {name} for clone {}: {{error}}", observed.name());
    let refused = Event::warning(Kind::VmClone.reference(&observed.clone.metadata), "RestoreCreationFailed", text);
    let create = Effect::create(Kind::VmRestore, Some(observed.namespace()), &restore)?;
    Ok(create.or_existing().on_failure(refused).refused_as(REFUSED))
}

/// Waits for the restore.
pub(super) fn restoring(observed: &Observed) -> Step {
    let (name, snapshot) = (restore_name(&observed.clone), snapshot_name(&observed.clone));
    let Some(restore) = observed.restore.as_deref() else {
        return failed(observed, "RestoreDeleted", format!("restore {name} does not exist anymore"));
    };
    let status = restore.status.as_ref();
    if status.and_then(|status| status.complete) == Some(true) {
        let text = format!("restore {name} for clone {} is ready to use", observed.name());
        let ready = Effect::Event(observed.event("RestoreReady", text));
        return Step::show(Shown::works(Phase::Target).snapshot(snapshot).restore(name)).before([ready]);
    }
    match failure(status.iter().flat_map(|status| &status.conditions)) {
        Some(text) => failed(observed, "RestoreFailed", format!("restore {name} failed: {text}")),
        // The restore would wait for it.
        None if observed.snapshot.is_none() => lost_snapshot(observed, &snapshot),
        None => Step::show(Shown::works(Phase::Restore).snapshot(snapshot).restore(name)),
    }
}

/// Names the new VM.
pub(super) fn created(observed: &Observed) -> Step {
    let target = target_name(&observed.clone);
    if observed.target.is_none() {
        return failed(observed, "TargetVMDeleted", format!("target VM {target} does not exist anymore"));
    }
    let text = format!("created target VM {target} for clone {}", observed.name());
    let created = Effect::Event(observed.event("TargetVMCreated", text));
    let shown = Shown::done(target).snapshot(snapshot_name(&observed.clone)).restore(restore_name(&observed.clone));
    Step::show(shown).before([created])
}

/// Deletes restore and snapshot when no claim needs them any more, and the clone when its VM is gone.
pub(super) fn succeeded(observed: &Observed) -> Step {
    if observed.target.is_none() {
        return Step::default().before([Effect::delete(Kind::VmClone, &observed.clone.metadata).refused_as(REFUSED)]);
    }
    // A claim that waits for its first consumer is still to be filled from the snapshot.
    let is_filled = || observed.claims.values().all(|claim| claim.phase == "Bound");
    if observed.status().restore_name.is_none() || !is_filled() {
        return Step::default();
    }
    let bound = Effect::Event(observed.event("PVCBound", format!("all PVC for clone {} are bound", observed.name())));
    Step::show(Shown::done(target_name(&observed.clone))).before(leftovers(observed)).before([bound])
}
