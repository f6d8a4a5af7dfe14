//! State of a VMI that outlives its launcher pod: its TPM and its UEFI variables, in a claim that the launcher pod mounts as a
//! whole. Names, labels and directories are those of the reference, so that its claims stay usable.
//!
//! Layout of the claim:
//! ```text
//!  swtpm/<firmware UUID>/tpm2   state of the TPM
//!  swtpm-localca                certificate authority of the TPM emulator
//!  nvram/<VMI>_VARS.fd          UEFI variables
//!  meta/migrated                UID of the migration that took the state to another claim
//! ```

use crate::{
    constants::label,
    vmi::{migration::VirtualMachineInstanceMigrationState, spec::VirtualMachineInstanceSpec, status::VolumeStatus},
};

/// Label of the claim with the state of a VMI: the name of the VMI.
pub const LABEL: &str = label::PERSISTENT_STATE_FOR;
/// Start of the names of these claims, before the name of the VMI.
pub const PREFIX: &str = "persistent-state-for-";
/// Label of the claim to which a migration moves the state: the name of the migration.
pub const MIGRATION_LABEL: &str = label::STATE_MIGRATION;
/// Name of the claim's entry in the volume status of a VMI.
pub const STATUS_VOLUME: &str = "persistent-state-for-this-vm";

/// Volume of the launcher pod.
pub const POD_VOLUME: &str = "vm-state";
/// Mount of the whole claim in the launcher pod. Its group is that of the launcher.
pub const DIRECTORY: &str = "/var/run/kubevirt-private/vm-state";
/// Directory in the claim with states of TPMs.
pub const SWTPM: &str = "swtpm";
/// Directory in the claim with the certificate authority of the TPM emulator.
pub const LOCAL_CA: &str = "swtpm-localca";
/// Directory in the claim with UEFI variables.
pub const NVRAM: &str = "nvram";
/// Size of the UEFI variables of arm64, a whole flash. Those of amd64 take less than 1 MiB.
pub const ARM64_VARIABLES: i64 = 64 << 20;
/// Directory in the claim with [`MIGRATED`].
pub const META: &str = "meta";
/// File in [`META`] that the source of a migration to another claim writes and syncs once the guest runs from the other claim, before
/// its pod ends. It holds the UID of the migration, so that what an earlier migration left proves nothing.
pub const MIGRATED: &str = "migrated";

/// Exit code of `virt-launcher find-migrated` for a claim without the mark of the migration.
pub const NOT_MIGRATED: u8 = 42;

/// Returns true if the VMI has a TPM.
#[must_use]
pub fn has_tpm(spec: &VirtualMachineInstanceSpec) -> bool {
    spec.domain.devices.tpm.as_ref().is_some_and(|tpm| tpm.enabled != Some(false))
}

/// Returns true if the VMI has a TPM whose state outlives the launcher pod.
#[must_use]
pub fn keeps_tpm(spec: &VirtualMachineInstanceSpec) -> bool {
    has_tpm(spec) && spec.domain.devices.tpm.as_ref().is_some_and(|tpm| tpm.persistent == Some(true))
}

/// Returns true if the UEFI variables of the VMI outlive the launcher pod.
#[must_use]
pub fn keeps_variables(spec: &VirtualMachineInstanceSpec) -> bool {
    let boot = spec.domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref());
    boot.and_then(|boot| boot.efi.as_ref()).is_some_and(|efi| efi.persistent == Some(true))
}

/// Returns true if the VMI needs a claim for its state.
#[must_use]
pub fn is_kept(spec: &VirtualMachineInstanceSpec) -> bool {
    keeps_tpm(spec) || keeps_variables(spec)
}

/// Returns true if the migration takes the state to another claim, which the target pod mounts instead of the claim of the source.
#[must_use]
pub fn changes_claim(state: &VirtualMachineInstanceMigrationState) -> bool {
    let (source, target) = (&state.source_persistent_state_pvc_name, &state.target_persistent_state_pvc_name);
    source.is_some() && target.is_some() && source != target
}

/// Sorts the volume status of a VMI: the claim with its state comes first.
pub fn sort_volumes(entries: &mut [VolumeStatus]) {
    entries.sort_by(|left, right| {
        (left.name != STATUS_VOLUME, &left.name).cmp(&(right.name != STATUS_VOLUME, &right.name))
    });
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn only_persistent_devices_need_a_claim() {
        for (domain, tpm, variables) in [
            (json!({"devices": {}}), false, false),
            (json!({"devices": {"tpm": {}}}), false, false),
            (json!({"devices": {"tpm": {"persistent": true}}}), true, false),
            (json!({"devices": {"tpm": {"persistent": true, "enabled": true}}}), true, false),
            (json!({"devices": {"tpm": {"persistent": true, "enabled": false}}}), false, false),
            (json!({"devices": {}, "firmware": {"bootloader": {"efi": {}}}}), false, false),
            (json!({"devices": {}, "firmware": {"bootloader": {"efi": {"persistent": true}}}}), false, true),
        ] {
            let spec: VirtualMachineInstanceSpec = serde_json::from_value(json!({"domain": domain})).unwrap();
            assert_eq!((keeps_tpm(&spec), keeps_variables(&spec)), (tpm, variables), "{domain}");
            assert_eq!(is_kept(&spec), tpm || variables);
        }
    }

    #[test]
    fn a_migration_changes_the_claim_if_it_names_two() {
        let changes = |state: Value| changes_claim(&serde_json::from_value(state).unwrap());
        assert!(changes(json!({"sourcePersistentStatePVCName": "a", "targetPersistentStatePVCName": "b"})));
        assert!(!changes(json!({"sourcePersistentStatePVCName": "a", "targetPersistentStatePVCName": "a"})));
        assert!(!changes(json!({"targetPersistentStatePVCName": "b"})) && !changes(json!({})));
    }
}
