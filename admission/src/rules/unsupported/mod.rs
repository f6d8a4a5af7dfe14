//! Fields of the API that Ferrovirt does not support yet. Those of a VMI's spec are rows of [`api::fields`].
//!
//! Unsupported fields are reported only if no rule is broken, because clients count the errors of a rule.

mod arm64;
pub mod migrations;

use api::{VirtualMachineInstanceSpec, VirtualMachineSpec, config::ClusterConfig, fields};

use crate::context::FieldErrors;

fn add_error(path: String, reason: &str, errors: &mut FieldErrors) {
    let message = format!("{path} is not supported yet: {reason}");
    errors.not_supported(path, message);
}

/// Adds an error for each unsupported field of the VMI spec at `root`, and of a guest of another architecture.
pub fn spec(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig, errors: &mut FieldErrors) {
    by_table(root, spec, errors);
    arm64::validate(root, spec, config, errors);
}

/// Adds an error for each of its fields that no architecture has.
pub(crate) fn by_table(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    for (path, reason) in fields::refused(spec) {
        add_error(format!("{root}.{path}"), reason, errors);
    }
}

/// Adds an error for each unsupported field of the volumes and disks that a changed spec has in addition to `old`.
pub(crate) fn added_volumes(
    root: &str,
    new: &VirtualMachineInstanceSpec,
    old: &VirtualMachineInstanceSpec,
    errors: &mut FieldErrors,
) {
    let (known_volumes, known_disks) = (&old.volumes, &old.domain.devices.disks);
    let volumes = new.volumes.iter().filter(|volume| !known_volumes.contains(volume)).cloned().collect();
    let mut added = VirtualMachineInstanceSpec { volumes, ..VirtualMachineInstanceSpec::default() };
    let disks = new.domain.devices.disks.iter();
    added.domain.devices.disks = disks.filter(|disk| !known_disks.contains(disk)).cloned().collect();
    by_table(root, &added, errors);
}

/// Path, reason, and test for the use of a field.
type VmEntry = (&'static str, &'static str, fn(&VirtualMachineSpec) -> bool);

/// Unsupported fields of a VM outside its template.
const VM: &[VmEntry] = &[("updateVolumesStrategy", "strategies other than Replacement and Migration", |spec| {
    let known = ["", "Replacement", "Migration"];
    spec.update_volumes_strategy.as_deref().is_some_and(|strategy| !known.contains(&strategy))
})];

/// Returns an error for each unsupported field of the VM spec at `root` outside its template.
pub fn vm(root: &str, spec: &VirtualMachineSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for (path, reason, _) in VM.iter().filter(|(_, _, used)| used(spec)) {
        add_error(format!("{root}.{path}"), reason, &mut errors);
    }
    errors
}

/// Unsupported kinds and their features.
const KINDS: &[(&str, &str)] = &[
    ("VirtualMachineExport", "export of volumes"),
    ("VirtualMachineBackup", "backup"),
    ("VirtualMachineBackupTracker", "backup"),
    ("Plugin", "plugins"),
];

/// Returns an error for a new object of an unsupported kind.
pub fn kind(kind: &str) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if let Some((kind, feature)) = KINDS.iter().find(|(name, _)| *name == kind) {
        errors.not_supported("kind", format!("{kind} is not supported yet: {feature}"));
    }
    errors
}

/// Returns the unsupported fields of a VM spec, each with its reason, and the unsupported kinds with their features, for
/// documents.
#[must_use]
pub fn tables() -> [Vec<(&'static str, &'static str)>; 2] {
    [VM.iter().map(|(path, reason, _)| (*path, *reason)).collect(), KINDS.to_vec()]
}

#[cfg(test)]
mod tests;
