//! Checks that a VM, or a snapshot of it, can be cloned.

use api::{
    VirtualMachine,
    hotplug::dump_claim,
    persistent_state::{PREFIX, is_kept},
    snapshot::content::{SourceVirtualMachine, VirtualMachineSnapshotContent},
    vmi::volumes::Volume,
};

use crate::resources::claims::claim_name;

/// Reason of the event about a snapshot that cannot be cloned.
const INVALID: &str = "SnapshotContentInvalid";

/// Returns the disks whose content a clone has. A memory dump is none.
fn disks(volumes: &[Volume]) -> impl Iterator<Item = &Volume> {
    volumes.iter().filter(|volume| claim_name(volume).is_some() && dump_claim(volume).is_none())
}

/// Returns why a VM cannot be cloned at all: the clone would lack its TPM or its UEFI variables.
pub(super) fn state(path: &str, vm: &VirtualMachine) -> Option<String> {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    let known = vm.status.as_ref().map(|status| status.volume_snapshot_statuses.as_slice()).unwrap_or_default();
    // A preference can ask for it as well.
    let has_claim = known.iter().any(|known| known.name.strip_prefix(PREFIX) == Some(name));
    let keeps = vm.spec.template.spec.as_ref().is_some_and(is_kept) || has_claim;
    keeps.then(|| with_state(&format!("VM {path}")))
}

fn with_state(source: &str) -> String {
    format!("Clone of source with backendstorage is not supported: {source}")
}

/// Returns why a VM cannot be cloned yet: all disks without snapshots, one a line.
pub(super) fn unsupported_volumes(vm: &VirtualMachine) -> Option<String> {
    let known = vm.status.as_ref().map(|status| status.volume_snapshot_statuses.as_slice()).unwrap_or_default();
    let volumes = vm.spec.template.spec.as_ref().map(|spec| spec.volumes.as_slice()).unwrap_or_default();
    let unsupported = |volume: &Volume| match known.iter().find(|known| known.name == volume.name) {
        Some(known) if known.enabled => None,
        Some(_) => Some(format!("Virtual Machine volume {} does not support snapshots", volume.name)),
        None => Some(format!("Virtual Machine volume {} snapshot support unknown", volume.name)),
    };
    let all: Vec<String> = disks(volumes).filter_map(unsupported).collect();
    (!all.is_empty()).then(|| all.join("\n"))
}

/// Rejects the snapshot of a VM with state, and one without the content of a disk. Returns reason and message of the event.
pub(super) fn content(
    path: &str,
    content: &VirtualMachineSnapshotContent,
    source: &SourceVirtualMachine,
) -> Result<(), (&'static str, String)> {
    let template = source.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let backups = &content.spec.volume_backups;
    if template.is_some_and(is_kept) || backups.iter().any(|backup| backup.volume_name.starts_with(PREFIX)) {
        return Err((INVALID, with_state(&format!("snapshot {path}"))));
    }
    let is_missing = |volume: &&Volume| {
        !backups.iter().any(|backup| backup.volume_name == volume.name && backup.volume_snapshot_name.is_some())
    };
    let snapshot = path.rsplit('/').next().unwrap_or_default();
    let volumes = template.map(|spec| spec.volumes.as_slice()).unwrap_or_default();
    let missing: Vec<String> = disks(volumes)
        .filter(is_missing)
        .map(|volume| format!("volume {} is not backed up in snapshot {snapshot}", volume.name))
        .collect();
    if missing.is_empty() { Ok(()) } else { Err((INVALID, missing.join("\n"))) }
}
