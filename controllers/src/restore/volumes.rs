//! The claims of a restore: their names, their creation from volume snapshots, and the replacement of former ones.
//!
//! ```text
//!                                        missing ──create──> pending ──> bound, or waits for a consumer
//!  InPlace: former claim of the name ──hold, mark, delete──> missing
//! ```
//! External-snapshotter deletes no VolumeSnapshot that is the source of a pending claim. While a claim is replaced, its content is in the
//! snapshot only, so that a claim that is never bound holds the VolumeSnapshot until the new claim is there.

use std::sync::Arc;

use api::{
    VirtualMachine, VirtualMachineSpec,
    cdi::{DataVolume, annotation as cdi},
    constants::annotation,
    hotplug::dump_claim,
    names, owner,
    snapshot::{
        content::VolumeBackup,
        restore::{VirtualMachineRestore, VolumeRestore},
    },
    vmi::volumes::PersistentVolumeClaimVolumeSource,
};
use serde_json::json;

use super::{Observed, REFUSED, Source, claim, marks};
use crate::{
    resources::{
        claims::{CachedClaim, claim_name},
        vms::{claim_names, templated},
    },
    runtime::{Effect, Kind},
};

/// Longest name of a claim with the name of its target.
const PREFIXED: usize = 63;

/// The claims that a restore makes, and the DataVolumes that it deletes. Recorded before the first write.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Named {
    pub restores: Vec<VolumeRestore>,
    pub deleted: Vec<String>,
}

/// The state of the claims.
pub(super) enum Progress {
    /// All are bound, or wait for their first consumer.
    Made,
    /// Writes, or nothing but time, bring it further.
    Works(Vec<Effect>),
    /// Something is missing that may come back. The writes do not need it.
    Hindered(String, Vec<Effect>),
    /// It cannot be continued.
    Failed(String),
}

/// Returns the backups of a snapshot that are restored. Memory dumps are none of the VM's disks.
fn backups<'a>(source: Source<'a>) -> impl Iterator<Item = (&'a VolumeBackup, &'a str)> {
    let volumes = source.vm.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()).map(|spec| &spec.volumes);
    let is_dump = move |name: &str| {
        volumes.into_iter().flatten().any(|volume| volume.name == name && dump_claim(volume).is_some())
    };
    let backups = source.content.spec.volume_backups.iter().filter(move |backup| !is_dump(&backup.volume_name));
    backups.filter_map(|backup| Some((backup, backup.volume_snapshot_name.as_deref()?)))
}

/// Returns the record of the claims, or why there is none. What was recorded stays.
pub(super) fn named(observed: &Observed, source: Source<'_>) -> Result<Named, String> {
    let status = observed.status();
    if !status.restores.is_empty() {
        return Ok(Named { restores: status.restores, deleted: status.deleted_data_volumes });
    }
    let mut restores: Vec<VolumeRestore> = Vec::new();
    for (backup, snapshot) in backups(source) {
        let claim = restored_name(observed, source, backup);
        if let Some(text) = irreplaceable(observed, source, &claim) {
            return Err(text);
        }
        // Two volumes with one claim would be restored over each other.
        if restores.iter().any(|other| other.persistent_volume_claim == claim) {
            return Err(format!("two volumes of the snapshot would be restored as PVC {claim}"));
        }
        restores.push(VolumeRestore {
            data_volume_name: data_volume(observed, source, backup, &claim),
            persistent_volume_claim: claim,
            volume_name: backup.volume_name.clone(),
            volume_snapshot_name: snapshot.to_owned(),
        });
    }
    let mut spec = source.vm.spec.clone().unwrap_or_default();
    rename(&mut spec, &restores);
    let templates = spec.data_volume_templates.iter().filter_map(|known| known.metadata.name.as_deref());
    // Also that of a disk that the snapshot does not have.
    let volumes = spec.template.spec.iter().flat_map(|spec| &spec.volumes).filter_map(claim_name);
    let kept: Vec<&str> = templates.chain(volumes).collect();
    let former = observed.vm.iter().flat_map(|vm| templated(vm));
    let deleted = former.filter(|name| !kept.contains(name)).map(str::to_owned).collect();
    Ok(Named { restores, deleted })
}

/// Returns the name of the claim of a volume.
fn restored_name(observed: &Observed, source: Source<'_>, backup: &VolumeBackup) -> String {
    let volume = &backup.volume_name;
    let spec = &observed.restore.spec;
    let overridden = spec.volume_restore_overrides.iter().find(|change| change.volume_name.as_ref() == Some(volume));
    let named = overridden.and_then(|change| change.restore_name.clone()).filter(|name| !name.is_empty());
    if let Some(name) = named {
        return name;
    }
    let original = backup.persistent_volume_claim.metadata.name.clone().unwrap_or_default();
    match spec.volume_restore_policy.as_deref() {
        // Its state stays until the VM is restored.
        Some("InPlace") if *volume != claim::state_volume(source.vm) => original,
        Some("PrefixTargetName") => names::shortened(&format!("{}-{volume}", observed.target()), PREFIXED),
        _ => names::object_name(
            &format!("restore-{}-{volume}", observed.restore.metadata.uid.as_deref().unwrap_or_default()),
            "",
        ),
    }
}

/// Returns the DataVolume of a restored claim: one of the VM's templates, or the one that controls the claim that is replaced.
fn data_volume(observed: &Observed, source: Source<'_>, backup: &VolumeBackup, claim: &str) -> Option<String> {
    let spec = source.vm.spec.as_ref()?;
    let volumes = spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    // Its volume can name the claim as well.
    let named = volumes.filter(|volume| volume.name == backup.volume_name).find_map(claim_name);
    let mut templates = spec.data_volume_templates.iter();
    let is_templated = named.is_some_and(|named| templates.any(|known| known.metadata.name.as_deref() == Some(named)));
    let replaced = || observed.claims.get(claim)?.data_volume().filter(|_| observed.is_in_place());
    if is_templated { Some(claim.to_owned()) } else { replaced().map(|(name, _)| name.to_owned()) }
}

/// Replaces the claims in a captured spec by the restored ones. Volumes without one stay, and memory dumps go.
pub(super) fn rename(spec: &mut VirtualMachineSpec, restores: &[VolumeRestore]) {
    let Some(template) = &mut spec.template.spec else { return };
    template.volumes.retain(|volume| dump_claim(volume).is_none());
    for volume in &mut template.volumes {
        let Some(restored) = restores.iter().find(|restored| restored.volume_name == volume.name) else { continue };
        let Some(former) = claim_name(volume).map(str::to_owned) else { continue };
        let mut templates = spec.data_volume_templates.iter_mut();
        let template = templates.find(|known| known.metadata.name.as_ref() == Some(&former));
        let templated = template.zip(restored.data_volume_name.as_ref()).map(|(template, name)| {
            template.metadata.name = Some(name.clone());
            name
        });
        if let Some(claim) = &mut volume.persistent_volume_claim {
            claim.claim_name.clone_from(&restored.persistent_volume_claim);
        }
        let Some(source) = &mut volume.data_volume else { continue };
        match templated {
            Some(name) => source.name.clone_from(name),
            // One without a template as well, even if its claim is made again in place: the claim is what was restored.
            None => {
                let claim = PersistentVolumeClaimVolumeSource {
                    claim_name: restored.persistent_volume_claim.clone(),
                    hotpluggable: source.hotpluggable,
                    read_only: false,
                };
                (volume.data_volume, volume.persistent_volume_claim) = (None, Some(claim));
            }
        }
    }
}

/// Returns true if this restore made the claim.
pub(super) fn is_own(observed: &Observed, claim: &CachedClaim) -> bool {
    annotated(claim, annotation::LAST_RESTORE).is_some_and(|id| *id == observed.id())
}

fn annotated<'a>(claim: &'a CachedClaim, key: &str) -> Option<&'a String> {
    claim.metadata.annotations.as_ref()?.get(key)
}

/// Returns true if a restored claim has the name that its volume had at the snapshot: in place it replaces the former claim. Without the
/// content any may have it.
fn is_original(observed: &Observed, restored: &VolumeRestore) -> bool {
    let Some(content) = observed.content.as_deref() else { return true };
    content.spec.volume_backups.iter().any(|backup| {
        backup.volume_name == restored.volume_name
            && backup.persistent_volume_claim.metadata.name.as_ref() == Some(&restored.persistent_volume_claim)
    })
}

/// Returns true if this restore has marked a claim that it deletes to replace it.
fn is_marked(observed: &Observed, claim: &CachedClaim) -> bool {
    annotated(claim, annotation::REPLACED_BY).is_some_and(|id| *id == observed.id())
}

/// Returns true for the end of a claim that a restore replaces.
fn is_going(claim: &CachedClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some() && annotated(claim, annotation::REPLACED_BY).is_some()
}

/// Returns true if a claim was deleted to be replaced, or the write before was done. New claims take nothing from the VM.
pub(super) fn is_begun(observed: &Observed) -> bool {
    has_replaced(observed, |claim| is_going(claim) || is_marked(observed, claim))
}

/// Returns true if a claim was deleted to be replaced. Of a refused deletion the mark is left.
pub(super) fn has_deleted(observed: &Observed) -> bool {
    has_replaced(observed, is_going)
}

fn has_replaced(observed: &Observed, goes: impl Fn(&CachedClaim) -> bool) -> bool {
    let restores = observed.status().restores;
    let originals = restores.iter().filter(|restored| is_original(observed, restored));
    let mut claims = originals.map(|restored| observed.claims.get(&restored.persistent_volume_claim));
    // One that is missing counts: it was deleted, or is not made yet, and failing would not bring it back.
    observed.is_in_place() && claims.any(|claim| claim.is_none_or(|claim| is_own(observed, claim) || goes(claim)))
}

/// Returns true if this restore has made all claims that it replaces.
pub(super) fn are_made(observed: &Observed) -> bool {
    let restores = observed.status().restores;
    let originals = restores.iter().filter(|restored| is_original(observed, restored));
    let mut claims = originals.map(|restored| observed.claims.get(&restored.persistent_volume_claim));
    claims.all(|claim| claim.is_some_and(|claim| is_own(observed, claim)))
}

/// Deletes the claims of a restore that leaves the VM as it was, and removes its marks.
pub(super) fn clean_up(observed: &Observed) -> Vec<Effect> {
    let is_in_place = observed.is_in_place();
    let holds = if is_in_place { let_go(observed, |is_made| !is_made) } else { Vec::new() };
    if observed.gives_up() {
        return holds;
    }
    let restores = observed.status().restores;
    let claim = |restored: &VolumeRestore| {
        let known = observed.claims.get(&restored.persistent_volume_claim);
        known.filter(|claim| claim.metadata.deletion_timestamp.is_none())
    };
    // The first writes: a claim that was deleted nevertheless has another version, which ends the rest.
    let marked = restores.iter().filter_map(claim).filter(|claim| is_marked(observed, claim));
    let unmarked = marked.map(|claim| {
        let patch = json!({"metadata": {"annotations": {annotation::REPLACED_BY: null}}});
        Effect::merge(Kind::Claim, &claim.metadata, patch).refused_as(REFUSED)
    });
    // The former content of a claim that was replaced is in the snapshot only.
    let new = restores.iter().filter(|restored| !(is_in_place && is_original(observed, restored)));
    let own = new.filter_map(claim).filter(|claim| is_own(observed, claim));
    let deleted = own.map(|claim| Effect::delete(Kind::Claim, &claim.metadata).refused_as(REFUSED));
    unmarked.chain(holds).chain(deleted).collect()
}

/// Returns the state of the claims, and the next writes. All snapshots and storage classes must be there before a claim is replaced. A
/// claim that was deleted already is made whatever else is missing: its content is in the snapshot only.
pub(super) fn progress(observed: &Observed, source: Source<'_>) -> Result<Progress, serde_json::Error> {
    let (mut effects, mut waits) = (Vec::new(), false);
    let (mut holds, mut replacements) = (Vec::new(), Vec::new());
    let restores = observed.status().restores;
    let missing = restores.iter().find_map(|restored| hindrance(observed, source, restored));
    if let Some(text) = missing.as_ref().filter(|_| !is_begun(observed)) {
        return Ok(Progress::Hindered(text.clone(), effects));
    }
    for restored in &restores {
        let name = &restored.persistent_volume_claim;
        match observed.claims.get(name) {
            Some(claim) if is_own(observed, claim) => match claim.phase.as_str() {
                _ if claim.metadata.deletion_timestamp.is_some() || is_left(observed, restored, claim) => waits = true,
                "Lost" => {
                    return Ok(Progress::Failed(format!("PVC {}/{name} in status \"Lost\"", observed.namespace())));
                }
                "Bound" => {}
                _ => waits |= !awaits_consumer(observed, claim),
            },
            Some(_) if missing.is_some() => {}
            Some(claim) if may_replace(observed, source, restored) => {
                if claim.metadata.deletion_timestamp.is_none() {
                    holds.extend(hold(observed, restored)?);
                    replacements.extend(replace(observed, claim));
                }
                waits = true;
            }
            Some(_) => return Ok(Progress::Failed(foreign(observed, name))),
            None if hindrance(observed, source, restored).is_some() => {}
            None => {
                let Some((backup, _)) = backups(source).find(|(backup, _)| backup.volume_name == restored.volume_name)
                else {
                    return Ok(Progress::Failed(format!("volume {} is not in the snapshot", restored.volume_name)));
                };
                let claim = claim::render(observed, source, restored, backup);
                effects.push(Effect::create(Kind::Claim, Some(observed.namespace()), &claim)?.refused_as(REFUSED));
                waits = true;
            }
        }
    }
    // The first content that is gone ends the rest: no claim is deleted then.
    effects.extend(holds);
    effects.extend(replacements);
    Ok(match missing {
        Some(text) => Progress::Hindered(text, effects),
        None if waits => Progress::Works(effects),
        None => Progress::Made,
    })
}

/// Returns true for the claim of a former VM of the name: the garbage collector is about to delete it. A DataVolume of that VM, which takes
/// over the claim, goes with it.
fn is_left(observed: &Observed, restored: &VolumeRestore, claim: &CachedClaim) -> bool {
    let vm = observed.vm.as_ref().and_then(|vm| vm.metadata.uid.as_ref());
    let volume = restored.data_volume_name.as_ref().and_then(|name| observed.data_volumes.get(name));
    let mut owned = [&claim.metadata].into_iter().chain(volume.map(|volume| &volume.metadata));
    owned.any(|meta| {
        let owner = owner::controller_of_kind::<VirtualMachine>(meta);
        owner.is_some_and(|owner| owner.name == observed.target() && vm != Some(&owner.uid))
    })
}

/// Returns why a claim that is not made yet cannot be made now.
fn hindrance(observed: &Observed, source: Source<'_>, restored: &VolumeRestore) -> Option<String> {
    let present = observed.claims.get(&restored.persistent_volume_claim);
    if present.is_some_and(|claim| is_own(observed, claim)) {
        return None;
    }
    // A claim that CDI made again before it saw the mark is replaced as well.
    let fills = |claim: &&Arc<CachedClaim>| {
        claim.populating && claim.metadata.deletion_timestamp.is_none() && !filler(observed, claim).1
    };
    if present.filter(fills).is_some_and(|_| may_replace(observed, source, restored)) {
        return Some(format!("PVC {} is being filled", restored.persistent_volume_claim));
    }
    let name = &restored.volume_snapshot_name;
    match observed.volume_snapshots.get(name) {
        None => Some(format!("missing volumeSnapshot {name}")),
        Some(snapshot) if !snapshot.ready => Some(format!("VolumeSnapshot {name} not ready")),
        // Nothing is made from it any more. The claim that was deleted already is made nevertheless, and keeps it.
        Some(snapshot)
            if snapshot.metadata.deletion_timestamp.is_some()
                && !(observed.is_in_place() && present.is_none() && is_original(observed, restored)) =>
        {
            Some(format!("VolumeSnapshot {name} is being deleted"))
        }
        Some(_) => {
            let class = missing_class(observed, source, restored)?;
            Some(format!("StorageClass {class} does not exist"))
        }
    }
}

/// Returns the storage class of a restored claim if it does not exist any more: the claim would never be bound.
fn missing_class<'a>(observed: &Observed, source: Source<'a>, restored: &VolumeRestore) -> Option<&'a str> {
    let mut backups = source.content.spec.volume_backups.iter();
    let backup = backups.find(|backup| backup.volume_name == restored.volume_name)?;
    let class = backup.persistent_volume_claim.spec.as_ref()?.storage_class_name.as_deref()?;
    (!class.is_empty() && !observed.classes.contains_key(class)).then_some(class)
}

/// Returns true if the claim is bound when a pod uses it.
fn awaits_consumer(observed: &Observed, claim: &CachedClaim) -> bool {
    let class = claim.storage_class.as_ref().and_then(|name| observed.classes.get(name));
    class.is_some_and(|class| class.is_late)
}

fn foreign(observed: &Observed, claim: &str) -> String {
    format!("PVC {}/{claim} exists and does not belong to this restore", observed.namespace())
}

/// Returns why a restore in place must not replace a claim: it is a disk of another VM as well, or none of this VM any more.
fn irreplaceable(observed: &Observed, source: Source<'_>, claim: &str) -> Option<String> {
    observed.claims.get(claim).filter(|_| observed.is_in_place())?;
    if let Some(other) = observed.others.get(claim) {
        return Some(format!("PVC {}/{claim} is a disk of VM {other} as well", observed.namespace()));
    }
    let is_present = observed.vm.as_ref().is_none_or(|vm| claim_names(vm).iter().any(|name| name == claim));
    (!(claim::is_same_vm(observed, source) && is_present)).then(|| foreign(observed, claim))
}

/// Returns true if a volume gets back the claim that it had, in place of the present one.
fn may_replace(observed: &Observed, source: Source<'_>, restored: &VolumeRestore) -> bool {
    observed.is_in_place() && claim::is_same_vm(observed, source) && is_original(observed, restored)
}

/// Returns the DataVolume of a claim, and true if it is kept from filling a new one.
fn filler<'a>(observed: &'a Observed, claim: &CachedClaim) -> (Option<&'a Arc<DataVolume>>, bool) {
    let [(key, restore), _] = marks(observed);
    let volume = claim.data_volume().and_then(|(name, _)| observed.data_volumes.get(name));
    let is_marked = volume.and_then(|volume| volume.metadata.annotations.as_ref()).is_some_and(|all| {
        let names_restore = all.get(key).map(String::as_str) == restore.as_str();
        names_restore && all.contains_key(cdi::PRE_POPULATED) && !all.contains_key(annotation::IMPORT)
    });
    (volume, is_marked)
}

/// Keeps the DataVolume of a claim from filling a new one, marks the claim and deletes it.
fn replace(observed: &Observed, claim: &CachedClaim) -> Vec<Effect> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let mut effects = Vec::new();
    let [(key, restore), _] = marks(observed);
    let (volume, is_marked) = filler(observed, claim);
    if let Some(volume) = volume.filter(|_| !is_marked) {
        // The importer would take back its own mark together with the other one.
        let annotations = json!({cdi::PRE_POPULATED: name, key: restore, annotation::IMPORT: null});
        let patch = json!({"metadata": {"annotations": annotations}});
        effects.push(Effect::merge(Kind::DataVolume, &volume.metadata, patch).refused_as(REFUSED));
    }
    // By its name the end of the claim wakes the restore.
    let mark = json!({"metadata": {"annotations": {annotation::REPLACED_BY: observed.id(), key: restore}}});
    effects.push(Effect::merge(Kind::Claim, &claim.metadata, mark).refused_as(REFUSED));
    effects.push(Effect::delete(Kind::Claim, &claim.metadata).refused_as(REFUSED));
    effects
}

/// Returns the name of the claim that holds the snapshot of a volume.
pub(super) fn hold_name(restore: &VirtualMachineRestore, restored: &VolumeRestore) -> String {
    let uid = restore.metadata.uid.as_deref().unwrap_or_default();
    names::object_name(&format!("hold-{uid}-{}", restored.volume_name), "")
}

/// Holds the snapshot of a claim that is about to be deleted, and then requires that the storage still has it. A quota that refuses the
/// holding claim does not keep the VM from being restored.
fn hold(observed: &Observed, restored: &VolumeRestore) -> Result<Vec<Effect>, serde_json::Error> {
    let mut effects = Vec::new();
    let name = hold_name(&observed.restore, restored);
    if !observed.claims.contains_key(&name) {
        let claim = claim::holding(observed, restored, name);
        let create = Effect::create(Kind::Claim, Some(observed.namespace()), &claim)?;
        effects.push(create.or_existing().independent());
    }
    let snapshot = observed.volume_snapshots.get(&restored.volume_snapshot_name);
    if let Some((snapshot, content)) = snapshot.and_then(|snapshot| Some((snapshot, snapshot.content.as_deref()?))) {
        effects.push(Effect::require_taken(&snapshot.metadata, content).refused_as(REFUSED));
    }
    Ok(effects)
}

/// Deletes claims that hold the snapshots of volumes. `goes`: chooses by whether the claim of the volume is made again.
pub(super) fn let_go(observed: &Observed, goes: impl Fn(bool) -> bool) -> Vec<Effect> {
    let claim = |name: &String| observed.claims.get(name).filter(|claim| is_own(observed, claim));
    let restores = observed.status().restores;
    let concerned = restores.iter().filter(|restored| goes(claim(&restored.persistent_volume_claim).is_some()));
    let holds = concerned.filter_map(|restored| claim(&hold_name(&observed.restore, restored)));
    let present = holds.filter(|hold| hold.metadata.deletion_timestamp.is_none());
    present.map(|hold| Effect::delete(Kind::Claim, &hold.metadata).independent()).collect()
}
