//! The volume migration in the status of a VM, and the recovery from one that was interrupted.

use api::{
    Condition, VirtualMachine, VirtualMachineInstance,
    condition::{remove, set},
    constants::condition::{MANUAL_RECOVERY_REQUIRED, VOLUMES_CHANGE},
    vm::status::{VirtualMachineStatus, VolumeMigrationState, VolumeUpdateState},
    vmi::status::{PersistentVolumeClaimInfo, StorageMigratedVolumeInfo},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{claim, is_wanted, named};

/// Reason of condition ManualRecoveryRequired, as in the reference.
const INTERRUPTED: &str = "VMI was removed or was final during the volume migration";

fn recorded(status: &VirtualMachineStatus) -> Option<&[StorageMigratedVolumeInfo]> {
    let state = status.volume_update_state.as_ref()?.volume_migration_state.as_ref()?;
    Some(&state.migrated_volumes)
}

/// Returns what a VM shows of a volume that moves: names and modes of both claims, which clients compare as a whole.
fn shown(migrated: &StorageMigratedVolumeInfo) -> StorageMigratedVolumeInfo {
    let shown = |info: &PersistentVolumeClaimInfo| PersistentVolumeClaimInfo {
        claim_name: info.claim_name.clone(),
        volume_mode: info.volume_mode.clone(),
        ..PersistentVolumeClaimInfo::default()
    };
    StorageMigratedVolumeInfo {
        destination_pvc_info: migrated.destination_pvc_info.as_ref().map(shown),
        source_pvc_info: migrated.source_pvc_info.as_ref().map(shown),
        volume_name: migrated.volume_name.clone(),
    }
}

/// Returns true if nobody has decided yet which claims a VM continues with: its template names a new one. A user decides for the former
/// claims, and a restore for others.
fn is_open(vm: &VirtualMachine, migrated: &[StorageMigratedVolumeInfo]) -> bool {
    let volumes = vm.spec.template.spec.as_ref().map(|spec| spec.volumes.as_slice()).unwrap_or_default();
    let names_new = |migrated: &StorageMigratedVolumeInfo| {
        let new = migrated.destination_pvc_info.as_ref().and_then(|info| info.claim_name.as_deref());
        new.is_some() && new == named(volumes, &migrated.volume_name).and_then(claim)
    };
    is_wanted(&vm.spec) && migrated.iter().any(names_new)
}

fn was_moving(vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>) -> bool {
    match vmi {
        Some(vmi) => vmi.has_true(VOLUMES_CHANGE),
        // The VM still shows the conditions of the VMI that is gone.
        None => vm.condition(VOLUMES_CHANGE).is_some_and(Condition::is_true),
    }
}

/// Returns true until somebody decides which claims a VM continues with whose volumes did not arrive at the new ones.
pub(crate) fn needs_recovery(vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>) -> bool {
    let migrated = vm.status.as_ref().and_then(recorded);
    vm.condition(MANUAL_RECOVERY_REQUIRED).is_some_and(Condition::is_true)
        || migrated.is_some_and(|migrated| is_interrupted(vm, vmi, migrated))
}

/// Returns true if the VMI of a VM has ended while these volumes moved, so that none of the claims may hold all data.
fn is_interrupted(
    vm: &VirtualMachine,
    vmi: Option<&VirtualMachineInstance>,
    migrated: &[StorageMigratedVolumeInfo],
) -> bool {
    let has_ended = vmi.is_none_or(VirtualMachineInstance::is_final);
    has_ended && is_open(vm, migrated) && was_moving(vm, vmi)
}

/// Returns true for a VMI that has ended while its volumes moved.
pub(crate) fn ended_while_moving(vmi: &VirtualMachineInstance) -> bool {
    vmi.is_final() && vmi.has_true(VOLUMES_CHANGE)
}

/// Updates the volume migration and condition ManualRecoveryRequired in the status of a VM.
pub(crate) fn update_state(
    vm: &VirtualMachine,
    vmi: Option<&VirtualMachineInstance>,
    status: &mut VirtualMachineStatus,
    now: &Time,
) {
    // A VMI can end before the VM has recorded that its volumes move.
    let moving = vmi.filter(|vmi| !vmi.is_final() || ended_while_moving(vmi)).and_then(|vmi| vmi.status.as_ref());
    if let Some(moving) = moving.filter(|moving| !moving.migrated_volumes.is_empty()) {
        let state = VolumeMigrationState { migrated_volumes: moving.migrated_volumes.iter().map(shown).collect() };
        status.volume_update_state = Some(VolumeUpdateState { volume_migration_state: Some(state) });
    }
    let Some(migrated) = recorded(status) else { return };
    if !is_open(vm, migrated) {
        status.volume_update_state = None;
        remove(&mut status.conditions, MANUAL_RECOVERY_REQUIRED);
    } else if is_interrupted(vm, vmi, migrated) {
        set(&mut status.conditions, Condition::new(MANUAL_RECOVERY_REQUIRED, true, INTERRUPTED, "", now));
    }
}
