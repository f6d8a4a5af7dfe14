//! The status of a content.

use api::{
    constants::event,
    snapshot::{
        SnapshotError,
        content::{VirtualMachineSnapshotContentStatus, VolumeSnapshotStatus},
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Observed;
use crate::runtime::{Decision, Effect, Event, Kind};

/// Sets the state of the volume snapshots. `error`: why they cannot be taken.
pub(super) fn update(observed: &Observed, error: Option<String>, status: &mut VirtualMachineSnapshotContentStatus) {
    let of = |error: &crate::resources::snapshots::SnapshotError| SnapshotError {
        message: error.message.clone(),
        time: error.time.clone(),
    };
    status.volume_snapshot_status = observed
        .backups()
        .filter_map(|(_, name)| Some((name, observed.taken.get(name)?)))
        .map(|(name, taken)| VolumeSnapshotStatus {
            creation_time: taken.created.clone(),
            error: taken.error.as_ref().map(of),
            ready_to_use: Some(taken.ready),
            volume_snapshot_name: name.to_owned(),
        })
        .collect();
    let missing: Vec<&str> = observed.missing().into_iter().map(|(_, name)| name).collect();
    let is_taken = status.creation_time.is_some();
    let is_ready = is_taken && missing.is_empty() && observed.taken.values().all(|taken| taken.ready);
    status.ready_to_use = Some(is_ready);
    let lost = (is_taken && !missing.is_empty()).then(|| format!("VolumeSnapshots ({}) missing", missing.join(",")));
    let message = lost.or(error).or_else(|| of_volumes(observed)).filter(|_| !is_ready);
    let shown = status.error.take();
    status.error = message.map(|message| {
        let is_shown = |shown: &SnapshotError| shown.message.as_deref() == Some(message.as_str());
        let fresh = || SnapshotError { message: Some(message.clone()), time: Some(Time(observed.now)) };
        shown.filter(is_shown).unwrap_or_else(fresh)
    });
}

/// Returns the first error of a volume snapshot.
fn of_volumes(observed: &Observed) -> Option<String> {
    observed.backups().find_map(|(_, name)| {
        let error = observed.taken.get(name)?.error.as_ref()?;
        Some(format!("VolumeSnapshot {name} error: {}", error.message.as_deref().unwrap_or_default()))
    })
}

/// Writes the status if it changes.
pub(super) fn put(
    observed: &Observed,
    status: &VirtualMachineSnapshotContentStatus,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let mut wanted = (*observed.content).clone();
    wanted.status = Some(status.clone());
    let change = Effect::change(Kind::VmSnapshotContent, &*observed.content, &wanted, Some("status"))?;
    decision.effects.extend(change);
    Ok(())
}

/// Emits an event for each volume snapshot that is gone since.
pub(super) fn warn_missing(observed: &Observed, decision: &mut Decision) {
    let status = observed.status();
    for (_, name) in observed.missing() {
        if status.volume_snapshot_status.iter().any(|known| known.volume_snapshot_name == name) {
            let regarding = Kind::VmSnapshotContent.reference(&observed.content.metadata);
            let text = format!("VolumeSnapshot {name} no longer exists");
            decision.push(Effect::Event(Event::warning(regarding, event::VOLUME_SNAPSHOT_MISSING, text)));
        }
    }
}
