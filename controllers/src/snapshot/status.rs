//! The status of a snapshot. Clients read the texts in the reasons of its conditions.

use api::{
    Condition, QuiesceState,
    condition::set,
    constants::{condition as of_vmi, event},
    snapshot::{
        SnapshotError, SnapshotVolumesLists, SourceIndication, VirtualMachineSnapshotStatus, condition,
        content::VirtualMachineSnapshotContent, phase,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Observed, Stage};
use crate::{
    resources::claims::claim_name,
    runtime::{Decision, Effect, Event, Kind},
};

const LOCKED: &str = "Source locked and operation in progress";
const NOT_LOCKED: &str = "Source not locked";
const NO_SOURCE: &str = "Source does not exist";
const COMPLETE: &str = "Operation complete";
const FAILED: &str = "Operation failed";
const DEADLINE: &str = "snapshot deadline exceeded";
const DELETING: &str = "VM snapshot is deleting";
const IN_ERROR: &str = "In error state";
/// Error of a snapshot whose content was deleted.
const NO_CONTENT: &str = "the content of the snapshot was deleted";
/// Errors of snapshots whose deadline has passed without any other one.
const NOT_FROZEN: &str = "the guest agent has not answered the request to freeze the file systems";
const NOT_TAKEN: &str = "the storage has not taken the VolumeSnapshots: does a snapshot-controller run?";

/// Writes the status, and the events about what is new in it.
pub(super) fn report(observed: &Observed, stage: &Stage, decision: &mut Decision) -> Result<(), serde_json::Error> {
    if *stage == Stage::Leaving {
        return Ok(());
    }
    let snapshot = &*observed.snapshot;
    let mut wanted = snapshot.clone();
    let status = wanted.status.get_or_insert_default();
    update(observed, stage, status);
    let events = events(observed, stage, status);
    if let Some(change) = Effect::change(Kind::VmSnapshot, snapshot, &wanted, Some("status"))? {
        decision.push(change);
        decision.effects.extend(events.into_iter().map(Effect::Event));
    }
    Ok(())
}

fn update(observed: &Observed, stage: &Stage, status: &mut VirtualMachineSnapshotStatus) {
    let now = Time(observed.now);
    let content = observed.content.as_deref();
    let found = content.and_then(|content| content.status.as_ref());
    status.source_uid =
        status.source_uid.take().or_else(|| observed.vm.as_ref().and_then(|vm| vm.metadata.uid.clone()));
    let is_ready = *stage == Stage::Succeeded && found.and_then(|found| found.ready_to_use) == Some(true);
    status.ready_to_use = Some(is_ready);
    let phase = match stage {
        Stage::Succeeded => phase::SUCCEEDED,
        Stage::Failed => phase::FAILED,
        Stage::Deleting => phase::DELETING,
        _ => phase::IN_PROGRESS,
    };
    status.phase = Some(phase.to_owned());
    if let Some(content) = content {
        status.virtual_machine_snapshot_content_name = content.metadata.name.clone();
        status.creation_time = found.and_then(|found| found.creation_time.clone());
        if *stage == Stage::Succeeded {
            let recorded = status.snapshot_volumes.take().filter(|_| observed.snapshot.is_in(phase::SUCCEEDED));
            status.snapshot_volumes = Some(recorded.unwrap_or_else(|| volumes(content, observed.state.as_deref())));
        }
        indicate(content, *stage == Stage::Succeeded, status);
    }
    status.error = error(observed, stage, status.error.take(), &now);
    conditions(stage, is_ready, status, &now);
}

/// Returns the error that is shown: that of the content, or of its creation. One with the same message keeps its time.
fn error(observed: &Observed, stage: &Stage, shown: Option<SnapshotError>, now: &Time) -> Option<SnapshotError> {
    let of_content = || observed.content.as_ref()?.status.as_ref()?.error.clone();
    let message = match stage {
        Stage::Failed => match shown.clone().or_else(of_content) {
            None => delay(observed)?,
            known => return known,
        },
        Stage::Succeeded if observed.content.is_none() => NO_CONTENT.to_owned(),
        Stage::Locked if observed.content.is_none() => {
            observed.failures.of(event::FAILED_SNAPSHOT_CONTENT_CREATE)?.message.clone()
        }
        _ => return of_content(),
    };
    let is_shown = |shown: &SnapshotError| shown.message.as_deref() == Some(message.as_str());
    let fresh = || SnapshotError { message: Some(message.clone()), time: Some(now.clone()) };
    Some(shown.filter(is_shown).unwrap_or_else(fresh))
}

/// Returns what an incomplete snapshot waits for. Its content has no state of the guest before the guest agent has answered.
fn delay(observed: &Observed) -> Option<String> {
    let Some(content) = observed.content.as_deref() else { return obstacle(observed) };
    let is_asked = content.status.as_ref().is_none_or(|status| status.quiesce.is_none());
    let has_agent = observed.live().is_some_and(|vmi| vmi.has_true(of_vmi::AGENT_CONNECTED));
    Some(if is_asked && has_agent { NOT_FROZEN } else { NOT_TAKEN }.to_owned())
}

/// Returns the text of the status about a VM that was not locked.
fn obstacle(observed: &Observed) -> Option<String> {
    let mut conditions = observed.snapshot.status.as_ref()?.conditions.iter();
    let reason = conditions.find(|shown| shown.type_ == condition::PROGRESSING)?.reason.clone()?;
    let names_cause = reason == NO_SOURCE || (reason != NOT_LOCKED && reason.starts_with(NOT_LOCKED));
    names_cause.then_some(reason)
}

fn conditions(stage: &Stage, is_ready: bool, status: &mut VirtualMachineSnapshotStatus, now: &Time) {
    let progressing = match stage {
        Stage::New => (false, NOT_LOCKED.to_owned()),
        Stage::NoSource => (false, NO_SOURCE.to_owned()),
        Stage::NotLocked(refusal) => (false, format!("{NOT_LOCKED}{refusal}")),
        Stage::Locked | Stage::Succeeded if status.error.is_some() => (false, IN_ERROR.to_owned()),
        Stage::Locked => (true, LOCKED.to_owned()),
        Stage::Succeeded => (false, COMPLETE.to_owned()),
        Stage::Failed => (false, FAILED.to_owned()),
        Stage::Deleting | Stage::Leaving => (false, DELETING.to_owned()),
    };
    let message = match stage {
        Stage::NotLocked(_) => progressing.1.as_str(),
        Stage::Locked | Stage::Succeeded => {
            status.error.as_ref().and_then(|error| error.message.as_deref()).unwrap_or_default()
        }
        _ => "",
    };
    let shown = &mut status.conditions;
    set(shown, Condition::new(condition::PROGRESSING, progressing.0, &progressing.1, message, now));
    let ready = if is_ready { "Ready" } else { "Not ready" };
    set(shown, Condition::new(condition::READY, is_ready, ready, "", now));
    if *stage == Stage::Failed {
        set(shown, Condition::new(condition::FAILURE, true, DEADLINE, "", now));
    }
}

/// Sets what is known about the guest while the snapshot was taken.
fn indicate(content: &VirtualMachineSnapshotContent, is_complete: bool, status: &mut VirtualMachineSnapshotStatus) {
    let state = content.status.as_ref().and_then(|found| found.quiesce.as_ref()).map(|quiesce| &quiesce.state);
    let mut indications = match state {
        None | Some(QuiesceState::Offline | QuiesceState::Other(_)) => vec![],
        Some(QuiesceState::Paused) => vec![ONLINE, PAUSED],
        Some(QuiesceState::NoAgent) => vec![NO_AGENT, ONLINE],
        Some(QuiesceState::Frozen | QuiesceState::Thawed) => vec![AGENT, ONLINE],
        Some(QuiesceState::TimedOut) => vec![AGENT, ONLINE, TIMED_OUT],
        Some(QuiesceState::Failed) => vec![AGENT, ONLINE, QUIESCE_FAILED],
    };
    let lists = status.snapshot_volumes.as_ref().filter(|_| is_complete);
    if lists.is_some_and(|lists| is_partial(content, lists)) {
        indications.push(PARTIAL);
    }
    indications.sort_by_key(|indication| indication.0);
    status.indications = indications.iter().map(|indication| indication.0.to_owned()).collect();
    status.source_indications = indications
        .into_iter()
        .map(|(name, message)| SourceIndication { indication: name.to_owned(), message: message.to_owned() })
        .collect();
}

type Indication = (&'static str, &'static str);
const ONLINE: Indication =
    ("Online", "Snapshot taken while the VM was running. Consistency depends on guest-agent quiescing.");
const AGENT: Indication =
    ("GuestAgent", "Guest agent was active and attempted to quiesce the filesystem for application consistency.");
const NO_AGENT: Indication = (
    "NoGuestAgent",
    "Guest agent was not available. Snapshot is crash-consistent and may not be application-consistent.",
);
const TIMED_OUT: Indication = (
    "QuiesceTimeout",
    "Guest agent quiesced the filesystem, but the freeze window timed out before completion. Snapshot is crash-consistent and may not \
     be application-consistent.",
);
const QUIESCE_FAILED: Indication = (
    "QuiesceFailed",
    "Guest agent failed to quiesce the filesystem. Snapshot is crash-consistent and may not be application-consistent.",
);
const PAUSED: Indication = (
    "Paused",
    "Snapshot taken while the VM was paused. Snapshot is crash-consistent and may not be application-consistent.",
);
const PARTIAL: Indication = (
    "PartialSnapshot",
    "Not all snapshotable volumes were included in the snapshot. Check status.snapshotVolumes for excluded volumes and VM \
     VolumeSnapshotStatus for details.",
);

fn is_included(content: &VirtualMachineSnapshotContent, volume: &str) -> bool {
    content.spec.volume_backups.iter().any(|backup| backup.volume_name == volume)
}

/// Returns true if a volume with a claim is left out. One that the template does not name is the state of the VM.
fn is_partial(content: &VirtualMachineSnapshotContent, lists: &SnapshotVolumesLists) -> bool {
    let spec = content.spec.source.virtual_machine.as_ref().and_then(|vm| vm.spec.as_ref());
    let volumes = spec.and_then(|spec| spec.template.spec.as_ref()).map(|spec| spec.volumes.as_slice());
    lists.excluded_volumes.iter().any(|name| {
        let volume = volumes.unwrap_or_default().iter().find(|volume| volume.name == *name);
        volume.is_none_or(|volume| claim_name(volume).is_some())
    })
}

/// Returns the volumes of the captured VM, and that with its state. `state`: its name, if the VM has it.
fn volumes(content: &VirtualMachineSnapshotContent, state: Option<&str>) -> SnapshotVolumesLists {
    let vm = content.spec.source.virtual_machine.as_ref();
    let spec = vm.and_then(|vm| vm.spec.as_ref()).and_then(|spec| spec.template.spec.as_ref());
    let named = spec.into_iter().flat_map(|spec| &spec.volumes).map(|volume| volume.name.clone());
    let backups = content.spec.volume_backups.iter().map(|backup| backup.volume_name.clone());
    let (included, excluded) = named.partition(|name| is_included(content, name));
    let mut lists = SnapshotVolumesLists { included_volumes: included, excluded_volumes: excluded };
    let others = backups.filter(|name| !lists.included_volumes.contains(name)).collect::<Vec<_>>();
    lists.included_volumes.extend(others);
    let is_listed = |name: &&str| {
        let mut listed = lists.included_volumes.iter().chain(&lists.excluded_volumes);
        listed.any(|known| known == name)
    };
    let left_out = state.filter(|name| !is_listed(name)).map(str::to_owned);
    lists.excluded_volumes.extend(left_out);
    lists
}

fn events(observed: &Observed, stage: &Stage, status: &VirtualMachineSnapshotStatus) -> Vec<Event> {
    let former = observed.snapshot.status.as_ref();
    let regarding = || Kind::VmSnapshot.reference(&observed.snapshot.metadata);
    let warning = |reason, text: &str| vec![Event::warning(regarding(), reason, text.to_owned())];
    match stage {
        Stage::NotLocked(refusal) => {
            let text = format!("{NOT_LOCKED}{refusal}");
            let shown = former.into_iter().flat_map(|former| &former.conditions);
            let is_shown = shown.into_iter().any(|shown| shown.reason.as_deref() == Some(text.as_str()));
            if is_shown { vec![] } else { warning(event::SNAPSHOT_SOURCE_NOT_LOCKED, &text) }
        }
        Stage::Failed if !observed.snapshot.is_in(phase::FAILED) => {
            let cause = status.error.as_ref().and_then(|error| error.message.as_deref());
            let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
            warning(event::SNAPSHOT_FAILED, &format!("{DEADLINE}{cause}"))
        }
        Stage::Succeeded if status.indications.iter().any(|name| name == PARTIAL.0) => {
            let excluded = status.snapshot_volumes.as_ref().map(|lists| lists.excluded_volumes.join(", "));
            let is_known = observed.snapshot.is_in(phase::SUCCEEDED);
            let text = format!("volumes were not included in the snapshot: {}", excluded.unwrap_or_default());
            if is_known { vec![] } else { warning(event::PARTIAL_SNAPSHOT, &text) }
        }
        _ => vec![],
    }
}
