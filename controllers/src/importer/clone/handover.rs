//! The hand-over of a volume from a temporary claim to the claim of a DataVolume in another namespace.
//!
//! ```text
//!   volume                         temporary claim   target claim     write
//!   ───────────────────────────────────────────────────────────────────────────────────────────────
//!   bound, not marked              bound, filled     -                label, and the receiver
//!   marked                         bound             -                policy recorded; Retain
//!   marked, Retain                 bound             -                target claim, names the volume
//!   marked, Retain                 bound             pending          temporary claim deleted
//!   marked, Retain, Released       gone              pending          claimRef: the target claim
//!   marked, Retain, Bound          gone              bound            recorded policy; label removed
//!   bound, not marked              gone              bound            (complete)
//! ```
//! The state is read from the three objects alone, so that the controller can be killed between any two writes. A volume is given
//! to another claim only while its phase is Released: the API server's volume controller has seen the end of the claim that had
//! it. If the DataVolume is deleted, the volume gets its recorded policy back in any state, and goes with the claim that has it.

use api::constants::{annotation, label};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::json;

use crate::{
    cache::Key,
    resources::{claims::CachedClaim, volumes::CachedVolume},
    runtime::{Effect, Kind, WriteOptions},
};

/// Reclaim policy of a volume that outlives its claim.
const RETAIN: &str = "Retain";

/// The objects of a hand-over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objects<'a> {
    /// UID of the DataVolume.
    pub uid: &'a str,
    /// The DataVolume and its claim.
    pub receiver: &'a Key,
    /// The temporary claim.
    pub temporary: Option<&'a CachedClaim>,
    /// The claim of the DataVolume, which owns it.
    pub target: Option<&'a CachedClaim>,
    /// The volume that is marked for the DataVolume.
    pub volume: Option<&'a CachedVolume>,
}

/// The next step of a hand-over.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// The temporary claim has to be made, filled and bound first.
    Fill,
    /// Marks the volume with this name.
    Mark(String),
    /// Records the reclaim policy of the volume, and keeps the volume.
    Keep,
    /// Creates the target claim with the volume of this name.
    Create(String),
    /// Deletes the temporary claim.
    Delete,
    /// Gives the volume to the target claim.
    Assign,
    /// Restores the recorded policy and removes the mark.
    Restore,
    /// Deletes the target claim, whose volume is gone.
    Discard,
    /// Another program makes the next change.
    Wait,
    /// The target claim has the volume.
    Complete,
    /// The state cannot be continued.
    Refuse(String),
}

/// Returns the next step.
pub(super) fn next(objects: &Objects<'_>) -> Step {
    let Some(volume) = objects.volume else { return without_volume(objects) };
    let name = volume.metadata.name.clone().unwrap_or_default();
    if volume.receiver().as_ref() != Some(objects.receiver) {
        return Step::Refuse(format!("PersistentVolume {name} is marked for another DataVolume"));
    }
    let holder = volume.claim.clone().unwrap_or_default();
    let has = |claim: Option<&CachedClaim>| claim.is_some_and(|claim| claim.metadata.uid == holder.uid);
    let is_of_target = holder.namespace.as_deref() == Some(&*objects.receiver.namespace)
        && holder.name.as_deref() == Some(&*objects.receiver.name);
    if !is_of_target && !is_temporary(&holder, objects.uid) {
        return Step::Refuse(format!("PersistentVolume {name} belongs to another claim"));
    }
    if volume.recorded_policy().is_none() || volume.reclaim_policy != RETAIN {
        return keep(objects, volume, has(objects.temporary));
    }
    match objects.target {
        None => Step::Create(name),
        Some(target) if is_deleting(target) => Step::Wait,
        Some(target) if target.volume.as_deref() != Some(&*name) => {
            Step::Refuse(format!("PersistentVolumeClaim {} has another volume", objects.receiver))
        }
        Some(target) if has(Some(target)) => {
            if target.phase == "Bound" {
                Step::Restore
            } else {
                Step::Wait
            }
        }
        Some(_) if has(objects.temporary) => delete(objects.temporary),
        Some(_) if volume.phase == "Released" => Step::Assign,
        Some(_) => Step::Wait,
    }
}

/// Returns the step that keeps the volume. It cannot be kept once its claim goes, unless it was to be kept anyway.
fn keep(objects: &Objects<'_>, volume: &CachedVolume, has_claim: bool) -> Step {
    let temporary = objects.temporary.filter(|_| has_claim);
    let is_provisioned = volume.provisioned
        && temporary.is_none_or(|claim| claim.metadata.creation_timestamp <= volume.metadata.creation_timestamp);
    if !is_provisioned {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        return Step::Refuse(format!("PersistentVolume {name} was not provisioned for the temporary claim"));
    }
    let is_kept = volume.reclaim_policy == RETAIN || volume.recorded_policy().is_some();
    if is_kept || temporary.is_some_and(|claim| !is_deleting(claim)) { Step::Keep } else { Step::Wait }
}

fn without_volume(objects: &Objects<'_>) -> Step {
    match (objects.temporary, objects.target) {
        (temporary, Some(target)) if target.phase == "Bound" => match temporary {
            Some(_) => delete(temporary),
            None => Step::Complete,
        },
        (_, Some(target)) if is_deleting(target) => Step::Wait,
        (_, Some(_)) => Step::Discard,
        (Some(temporary), None) if is_deleting(temporary) => Step::Wait,
        (Some(temporary), None) if temporary.phase == "Lost" => Step::Delete,
        (Some(temporary), None) if temporary.phase == "Bound" => match &temporary.volume {
            Some(volume) => Step::Mark(volume.clone()),
            None => Step::Wait,
        },
        _ => Step::Fill,
    }
}

/// Returns the next step after the deletion of the DataVolume. [`Step::Complete`]: nothing is left.
pub(super) fn next_of_end(objects: &Objects<'_>) -> Step {
    match (objects.volume, objects.temporary) {
        (Some(_), _) => Step::Restore,
        (None, None) => Step::Complete,
        (None, temporary) => delete(temporary),
    }
}

fn delete(claim: Option<&CachedClaim>) -> Step {
    if claim.is_some_and(is_deleting) { Step::Wait } else { Step::Delete }
}

fn is_deleting(claim: &CachedClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some()
}

fn is_temporary(holder: &ObjectReference, uid: &str) -> bool {
    holder.name.as_deref() == Some(&*super::temporary::name(uid))
}

/// Returns the write of a step on the volume or on claims that exist. The other steps are no such writes.
pub(super) fn write(objects: &Objects<'_>, step: &Step) -> Option<Effect> {
    let of_volume = |patch| objects.volume.map(|volume| Effect::merge(Kind::Volume, &volume.metadata, patch));
    match step {
        Step::Mark(volume) => Some(Effect::Patch {
            kind: Kind::Volume,
            namespace: None,
            name: volume.clone(),
            // Its version is not known. What the mark permits depends on the volume as it is then.
            resource_version: None,
            subresource: None,
            strategic: false,
            patch: json!({"metadata": {
                "labels": {label::HAND_OVER: objects.uid},
                "annotations": {annotation::HAND_OVER_TO: objects.receiver.to_string()},
            }}),
            options: WriteOptions::default(),
        }),
        Step::Keep => {
            let volume = objects.volume?;
            let policy = volume.recorded_policy().unwrap_or(&volume.reclaim_policy);
            of_volume(json!({
                "metadata": {"annotations": {annotation::HAND_OVER_RECLAIM_POLICY: policy}},
                "spec": {"persistentVolumeReclaimPolicy": RETAIN},
            }))
        }
        Step::Assign => {
            let target = &objects.target?.metadata;
            of_volume(json!({"spec": {"claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": target.namespace, "name": target.name,
                "uid": target.uid, "resourceVersion": null, "fieldPath": null,
            }}}))
        }
        Step::Restore => {
            let policy = objects.volume?.recorded_policy();
            let mut patch = json!({"metadata": {
                "labels": {label::HAND_OVER: null},
                "annotations": {annotation::HAND_OVER_TO: null, annotation::HAND_OVER_RECLAIM_POLICY: null},
            }});
            if let Some(policy) = policy {
                patch["spec"]["persistentVolumeReclaimPolicy"] = json!(policy);
            }
            of_volume(patch)
        }
        Step::Delete => Some(Effect::delete(Kind::Claim, &objects.temporary?.metadata)),
        Step::Discard => Some(Effect::delete(Kind::Claim, &objects.target?.metadata)),
        Step::Fill | Step::Create(_) | Step::Wait | Step::Complete | Step::Refuse(_) => None,
    }
}
