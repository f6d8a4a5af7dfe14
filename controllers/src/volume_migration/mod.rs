//! Volume migration: the running VMI of a VM with `updateVolumesStrategy: Migration` moves to other claims.
//!
//! ```text
//!                claims of the template differ               migrated               finalized by virt-handler
//!   (nothing) ───────────────────────────────> in progress ──────────> in progress ─────────────────────────> (nothing)
//!       ^                                           │ the template names the former claims again
//!       │   claims and status are set back          v
//!       └─────────────────────────────────────── cancelled: virt-controller aborts the migration
//! ```
//! In progress, the VMI has the new claims in its spec, `status.migratedVolumes` with both claims of each volume, and
//! condition VolumesChange. The workload update controller migrates it. A cancelled update is set back once no migration is
//! left: the guest could have the new claims at that moment. New claims that DataVolumes fill are waited for. `state.rs` keeps the status of the VM.

mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use api::{
    Condition, VirtualMachine, VirtualMachineInstance, VirtualMachineSpec, VmiPhase,
    cdi::annotation,
    condition::{remove, set},
    constants::condition::{STORAGE_LIVE_MIGRATABLE, VOLUMES_CHANGE},
    hotplug::{is_hotpluggable, is_hotplugged, status_of},
    quantity,
    vmi::{
        status::{PersistentVolumeClaimInfo, StorageMigratedVolumeInfo},
        volumes::Volume,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(crate) use self::state::{ended_while_moving, needs_recovery, update_state};
use crate::{
    data_volumes::{DataVolumes, Readiness, described},
    resources::{
        Caches,
        claims::{CachedClaim, amounts},
        vms::claim_names,
    },
};

/// Strategy of a VM whose VMI moves to other claims.
const MIGRATION: &str = "Migration";
/// Reason of condition VolumesChange after the former claims were restored.
const CANCELLED: &str = "VolumesChangeCancellation";
/// Access modes of claims that a target pod can use beside the source pod.
const SHARED: [&str; 2] = ["ReadOnlyMany", "ReadWriteMany"];
/// Phase of a claim that has lost its volume.
const LOST: &str = "Lost";

/// Everything that a decision depends on.
pub(crate) struct Observed<'a> {
    /// The VMI.
    pub vmi: &'a VirtualMachineInstance,
    /// Volumes of its VM's template.
    pub template: &'a [Volume],
    /// Its VM has strategy Migration, and the cluster changes running VMIs.
    pub migrates: bool,
    /// Claims of the namespace that the template names.
    pub claims: &'a BTreeMap<String, Arc<CachedClaim>>,
    /// DataVolumes of these claims.
    pub data_volumes: &'a DataVolumes,
    /// A migration of the VMI has not ended.
    pub in_migration: bool,
}

/// What becomes of the claims of a running VMI.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Nothing to do.
    Same,
    /// The next start takes the claims over, for this reason.
    Restart(String),
    /// The claims cannot change now, for this reason.
    Refused(&'static str),
    /// A new claim cannot be used yet, for this reason.
    Waits(String),
    /// The VMI moves to other claims.
    Begin {
        /// Volumes with their new claims.
        volumes: Vec<Volume>,
        /// Both claims of each.
        migrated: Vec<StorageMigratedVolumeInfo>,
    },
    /// The VMI moves after all.
    Resume,
    /// The migration is aborted.
    Cancel,
    /// The VMI gets these volumes back.
    Restore(Vec<Volume>),
    /// Nothing moves any more.
    Forget,
}

/// Returns true if the VM's volumes move to other claims.
pub(crate) fn is_wanted(spec: &VirtualMachineSpec) -> bool {
    spec.update_volumes_strategy.as_deref() == Some(MIGRATION)
}

/// Returns the DataVolumes of the claims that a VM's volumes may move to.
pub(crate) fn destinations(caches: &Caches, vm: &VirtualMachine) -> DataVolumes {
    if !is_wanted(&vm.spec) {
        return DataVolumes::default();
    }
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let names = claim_names(vm);
    DataVolumes::of(caches, namespace, &caches.claims_named(namespace, names.iter().cloned()), names)
}

/// Returns the claim of a disk.
fn claim(volume: &Volume) -> Option<&str> {
    let claim = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    claim.or_else(|| volume.data_volume.as_ref().map(|source| source.name.as_str()))
}

fn named<'a>(volumes: &'a [Volume], name: &str) -> Option<&'a Volume> {
    volumes.iter().find(|volume| volume.name == name)
}

/// Returns the volumes of a template whose claims differ from those of the VMI.
fn changed<'a>(template: &'a [Volume], vmi: &VirtualMachineInstance) -> Vec<&'a Volume> {
    let differs = |volume: &&Volume| {
        let present = named(&vmi.spec.volumes, &volume.name).and_then(claim);
        claim(volume).zip(present).is_some_and(|(wanted, present)| wanted != present)
    };
    template.iter().filter(differs).collect()
}

/// Returns true if the VMI has the claims of a template, apart from volumes that it follows by plugging.
pub(crate) fn has_same_claims(template: &[Volume], vmi: &VirtualMachineInstance) -> bool {
    changed(template, vmi).into_iter().all(is_hotpluggable)
}

/// Decides about the claims of a running VMI.
pub(crate) fn decide(observed: &Observed<'_>) -> Step {
    let vmi = observed.vmi;
    if *vmi.phase() != VmiPhase::Running {
        return Step::Same;
    }
    let migrated = vmi.status.as_ref().map(|status| status.migrated_volumes.as_slice()).unwrap_or_default();
    let changed = changed(observed.template, vmi);
    if !migrated.is_empty() {
        return in_progress(observed, migrated, &changed);
    }
    if !observed.migrates || changed.is_empty() {
        let condition = vmi.condition(VOLUMES_CHANGE);
        let waited = condition.is_some_and(|known| known.is_false() && known.reason.as_deref() != Some(CANCELLED));
        return if waited { Step::Forget } else { Step::Same };
    }
    if let Some(reason) = invalid(vmi, &changed) {
        return Step::Restart(reason);
    }
    if let Some(reason) = unusable(&changed, observed) {
        return Step::Waits(reason);
    }
    let migrated: Vec<StorageMigratedVolumeInfo> =
        changed.iter().filter_map(|volume| moved(vmi, volume, observed.claims)).collect();
    if let Some(reason) = immovable(vmi, &migrated) {
        return Step::Restart(reason);
    }
    if observed.in_migration {
        return Step::Refused("volumes cannot be updated while the VMI is migrating");
    }
    Step::Begin { volumes: changed.into_iter().cloned().collect(), migrated }
}

/// Returns true if these volumes have the claims that the VMI had before.
fn are_former(volumes: &[Volume], migrated: &[StorageMigratedVolumeInfo]) -> bool {
    migrated.iter().all(|migrated| {
        let former = migrated.source_pvc_info.as_ref().and_then(|info| info.claim_name.as_deref());
        let present = named(volumes, &migrated.volume_name).and_then(claim);
        former.is_some() && former == present
    })
}

fn in_progress(observed: &Observed<'_>, migrated: &[StorageMigratedVolumeInfo], changed: &[&Volume]) -> Step {
    let vmi = observed.vmi;
    let is_cancelled = vmi.condition(VOLUMES_CHANGE).is_some_and(Condition::is_false);
    if are_former(&vmi.spec.volumes, migrated) {
        return Step::Forget;
    }
    if changed.is_empty() {
        return if vmi.has_true(VOLUMES_CHANGE) { Step::Same } else { Step::Resume };
    }
    let is_migrated = |volume: &&Volume| migrated.iter().any(|known| known.volume_name == volume.name);
    if !are_former(observed.template, migrated) || !changed.iter().all(is_migrated) {
        return Step::Refused("The volume can only be reverted to the previous version during the update");
    }
    match (observed.in_migration, is_cancelled) {
        (true, true) => Step::Same,
        (true, false) => Step::Cancel,
        (false, _) => Step::Restore(changed.iter().map(|volume| (*volume).clone()).collect()),
    }
}

/// Returns why volumes can never move to other claims.
fn invalid(vmi: &VirtualMachineInstance, changed: &[&Volume]) -> Option<String> {
    let devices = &vmi.spec.domain.devices;
    let disk = |name: &str| devices.disks.iter().find(|disk| disk.name == name);
    let is_plugged = |volume: &Volume| {
        is_hotpluggable(volume) || named(&vmi.spec.volumes, &volume.name).is_some_and(|known| is_hotplugged(vmi, known))
    };
    let of = |is: &dyn Fn(&Volume) -> bool| -> Vec<&str> {
        changed.iter().filter(|volume| is(volume)).map(|volume| volume.name.as_str()).collect()
    };
    let parts = [
        ("hotplugged", of(&is_plugged)),
        ("filesystems", of(&|volume| devices.filesystems.iter().any(|known| known.name == volume.name))),
        ("shareable", of(&|volume| disk(&volume.name).is_some_and(|disk| disk.shareable == Some(true)))),
        ("luns", of(&|volume| disk(&volume.name).is_some_and(|disk| disk.lun.is_some()))),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!(" {what}: [{}]", names.join(" ")))
        .collect();
    (!parts.is_empty()).then(|| format!("invalid volumes to update with migration:{}", parts.concat()))
}

/// Returns why a new claim cannot be used yet.
fn unusable(changed: &[&Volume], observed: &Observed<'_>) -> Option<String> {
    let claims = observed.claims;
    let names = || changed.iter().filter_map(|volume| claim(volume));
    let missing: BTreeSet<&str> =
        names().filter(|name| claims.get(*name).is_none_or(|claim| claim.phase == LOST)).collect();
    if !missing.is_empty() {
        let names = Vec::from_iter(missing).join(" ");
        return Some(format!("One of the destination volumes doesn't exist: [{names}]"));
    }
    names().find_map(|name| {
        let claim = claims.get(name)?;
        match observed.data_volumes.readiness(claim) {
            Readiness::Ready if claim.populating => Some(format!("the destination volume {name} is being filled")),
            Readiness::Ready => None,
            // The target pod would use it before it is filled.
            Readiness::AwaitsConsumer(volume) => Some(format!(
                "the destination volume {name} waits for its first consumer, which a migration cannot be: {}; annotation \
                 {} of the DataVolume makes it bind without one",
                described(volume),
                annotation::BIND_IMMEDIATE,
            )),
            Readiness::Waits(volume) | Readiness::Failed(volume) => {
                Some(format!("the destination volume {name} cannot be used yet: {}", described(volume)))
            }
            Readiness::Orphaned(volume) => {
                Some(format!("the destination volume {name} cannot be used: DataVolume {volume} does not exist"))
            }
        }
    })
}

/// Returns both claims of a volume.
fn moved(
    vmi: &VirtualMachineInstance,
    volume: &Volume,
    claims: &BTreeMap<String, Arc<CachedClaim>>,
) -> Option<StorageMigratedVolumeInfo> {
    let (to, from) = (claim(volume)?, claim(named(&vmi.spec.volumes, &volume.name)?)?);
    let known = status_of(vmi, &volume.name).and_then(|entry| entry.persistent_volume_claim_info.as_ref());
    let known = known.filter(|known| known.claim_name.as_deref() == Some(from)).cloned().unwrap_or_default();
    let source = PersistentVolumeClaimInfo {
        claim_name: Some(from.to_owned()),
        filesystem_overhead: None,
        preallocated: None,
        ..known
    };
    let claim = claims.get(to)?;
    let destination = PersistentVolumeClaimInfo {
        access_modes: claim.access_modes.clone(),
        capacity: amounts(claim.capacity.as_ref()),
        claim_name: Some(to.to_owned()),
        requests: amounts(claim.requests.as_ref()),
        volume_mode: Some(if claim.block { "Block" } else { "Filesystem" }.to_owned()),
        ..PersistentVolumeClaimInfo::default()
    };
    Some(StorageMigratedVolumeInfo {
        destination_pvc_info: Some(destination),
        source_pvc_info: Some(source),
        volume_name: volume.name.clone(),
    })
}

/// Returns why the VMI cannot move to other claims.
fn immovable(vmi: &VirtualMachineInstance, migrated: &[StorageMigratedVolumeInfo]) -> Option<String> {
    if let Some(obstacle) = vmi.condition(STORAGE_LIVE_MIGRATABLE).filter(|known| known.is_false()) {
        let message = obstacle.message.as_deref().unwrap_or_default();
        return Some(format!("cannot migrate the volumes as the VMI isn't migratable: {message}"));
    }
    let is_shared =
        |info: &PersistentVolumeClaimInfo| info.access_modes.iter().any(|mode| SHARED.contains(&mode.as_str()));
    let entries = vmi.status.iter().flat_map(|status| &status.volume_status);
    let stays = entries
        .filter(|entry| !migrated.iter().any(|migrated| migrated.volume_name == entry.name))
        .filter(|entry| named(&vmi.spec.volumes, &entry.name).and_then(claim).is_some())
        .find(|entry| entry.persistent_volume_claim_info.as_ref().is_some_and(|info| !is_shared(info)));
    if let Some(stays) = stays {
        let name = &stays.name;
        return Some(format!(
            "cannot migrate the VM. The volume {name} is RWO and not included in the migration volumes"
        ));
    }
    // A block device cannot hold a larger one. The size of an image in a file system is not known here.
    let size = |info: Option<&PersistentVolumeClaimInfo>| {
        let info = info.filter(|info| info.volume_mode.as_deref() == Some("Block"))?;
        quantity::units(info.capacity.get("storage")?).ok()
    };
    let too_small = migrated.iter().find(|migrated| {
        let (from, to) = (size(migrated.source_pvc_info.as_ref()), size(migrated.destination_pvc_info.as_ref()));
        from.zip(to).is_some_and(|(from, to)| to < from)
    })?;
    Some(format!(
        "cannot migrate the VM. The destination of volume {} is smaller than its source",
        too_small.volume_name
    ))
}

impl Step {
    /// Returns the versions of the VMI that carry the step out, in order. The claims are set back before the status forgets them,
    /// because admission accepts other claims only for the volumes in `status.migratedVolumes`.
    pub(crate) fn apply(&self, vmi: &VirtualMachineInstance, now: &Time) -> Vec<VirtualMachineInstance> {
        let mut wanted = vmi.clone();
        match self {
            Self::Same | Self::Restart(_) | Self::Refused(_) => return Vec::new(),
            Self::Waits(reason) => put_condition(&mut wanted, false, "", reason, now),
            Self::Begin { volumes, migrated } => {
                put_volumes(&mut wanted, volumes);
                wanted.status.get_or_insert_default().migrated_volumes.clone_from(migrated);
                put_condition(&mut wanted, true, "", "migrate volumes", now);
            }
            Self::Resume => put_condition(&mut wanted, true, "", "migrate volumes", now),
            Self::Cancel => put_condition(&mut wanted, false, CANCELLED, "", now),
            Self::Restore(volumes) => {
                put_volumes(&mut wanted, volumes);
                let mut forgotten = vmi.clone();
                forget(&mut forgotten, now);
                return vec![wanted, forgotten];
            }
            Self::Forget => forget(&mut wanted, now),
        }
        vec![wanted]
    }
}

fn put_volumes(vmi: &mut VirtualMachineInstance, volumes: &[Volume]) {
    for volume in volumes {
        if let Some(known) = vmi.spec.volumes.iter_mut().find(|known| known.name == volume.name) {
            *known = volume.clone();
        }
    }
}

fn put_condition(vmi: &mut VirtualMachineInstance, holds: bool, reason: &str, message: &str, now: &Time) {
    let conditions = &mut vmi.status.get_or_insert_default().conditions;
    set(conditions, Condition::new(VOLUMES_CHANGE, holds, reason, message, now));
}

/// Clears the status. A cancellation stays visible.
fn forget(vmi: &mut VirtualMachineInstance, now: &Time) {
    let status = vmi.status.get_or_insert_default();
    let was_moving = !status.migrated_volumes.is_empty();
    status.migrated_volumes.clear();
    if was_moving {
        put_condition(vmi, false, CANCELLED, "", now);
    } else {
        remove(&mut status.conditions, VOLUMES_CHANGE);
    }
}
