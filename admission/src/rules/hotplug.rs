//! Changes of a running VMI by a component, including hotplugged disks.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    FeatureGate, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    hotplug::{dump_claim, status_of},
    vmi::{disks::Disk, spec::UtilityVolume, volumes::Volume},
};
use serde_json::json;

use super::gates;
use crate::context::{FieldErrors, semantic};

/// Returns the first error of a change of a VMI's spec by a component.
pub(crate) fn validate(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    config: &ClusterConfig,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let checks: [fn(&VirtualMachineInstance, &VirtualMachineInstance, &ClusterConfig, &mut FieldErrors); 5] = [
        validate_maximums,
        validate_utility_volumes,
        validate_volume_count,
        validate_permanent_volumes,
        validate_hotplugged_volumes,
    ];
    for check in checks {
        check(vmi, old, config, &mut errors);
        if !errors.is_empty() {
            break;
        }
    }
    errors
}

/// Rejects changes of the limits to which the guest can grow.
fn validate_maximums(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    _: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let sockets =
        |spec: &VirtualMachineInstanceSpec| spec.domain.cpu.as_ref().and_then(|cpu| cpu.max_sockets).unwrap_or(0);
    if sockets(&vmi.spec) != sockets(&old.spec) {
        errors.invalid("", "CPU topology maxSockets changed");
        return;
    }
    let guest =
        |spec: &VirtualMachineInstanceSpec| spec.domain.memory.as_ref().and_then(|memory| memory.max_guest.clone());
    if let (Some(new), Some(old)) = (guest(&vmi.spec), guest(&old.spec))
        && !semantic::equal(&json!({"maxGuest": new.0}), &json!({"maxGuest": old.0}))
    {
        errors.invalid("", "Memory maxGuest changed");
    }
}

fn validate_utility_volumes(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let volumes = &vmi.spec.utility_volumes;
    if !volumes.is_empty() && !gates::are_on("utilityVolumes", "spec.utilityVolumes", config, errors) {
        return;
    }
    for (index, volume) in volumes.iter().enumerate() {
        validate_utility_volume(index, volume, vmi, old, errors);
        if !errors.is_empty() {
            return;
        }
    }
}

fn validate_utility_volume(
    index: usize,
    volume: &UtilityVolume,
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    errors: &mut FieldErrors,
) {
    let path = format!("spec.utilityVolumes[{index}]");
    let name = &volume.name;
    let earlier = vmi.spec.utility_volumes.iter().take(index).position(|other| other.name == *name);
    let permanent = vmi.spec.volumes.iter().position(|other| other.name == *name);
    if name.is_empty() {
        errors.required(format!("{path}.name"), "UtilityVolume 'name' must be set");
    } else if let Some(other) = earlier {
        errors.duplicate(
            format!("{path}.name"),
            format!("{path} and spec.utilityVolumes[{other}] must not have the same Name."),
        );
    } else if let Some(other) = permanent {
        errors.duplicate(
            format!("{path}.name"),
            format!("{path} conflicts with spec.volumes[{other}]. UtilityVolume names must be unique across both volumes and utilityVolumes."),
        );
    } else if volume.claim_name.is_empty() {
        errors.required(format!("{path}.claimName"), "UtilityVolume PVC 'claimName' must be set");
    } else if permanent_names(old).contains(name.as_str()) {
        errors.invalid(
            "",
            format!("utility volume {name} cannot be a permanent volume, utility volumes must always be hotplug"),
        );
    } else if old.spec.utility_volumes.iter().any(|known| known.name == *name && known != volume) {
        errors.invalid("", format!("utility volume {name} has changed"));
    }
}

/// Returns the volumes with which the VMI was started, according to its status.
fn permanent_names(vmi: &VirtualMachineInstance) -> BTreeSet<&str> {
    let statuses = vmi.status.as_ref().map(|status| status.volume_status.as_slice()).unwrap_or_default();
    statuses.iter().filter(|status| status.hotplug_volume.is_none()).map(|status| status.name.as_str()).collect()
}

fn validate_volume_count(
    vmi: &VirtualMachineInstance,
    _: &VirtualMachineInstance,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let spec = &vmi.spec;
    let volumes: BTreeSet<&str> =
        spec.volumes.iter().filter(|volume| volume.memory_dump.is_none()).map(|volume| volume.name.as_str()).collect();
    let empty_drives_pass = config.enabled(FeatureGate::DeclarativeHotplugVolumes);
    let disks = spec
        .domain
        .devices
        .disks
        .iter()
        .filter(|disk| !(empty_drives_pass && disk.cdrom.is_some() && !volumes.contains(disk.name.as_str())))
        .count();
    let required = disks + spec.domain.devices.filesystems.len();
    if volumes.len() != required {
        errors.invalid("", format!("mismatch between volumes declared ({}) and required ({required})", volumes.len()));
    }
}

type Named<'a> = BTreeMap<&'a str, &'a Volume>;

/// Splits the volumes of a spec into those in `permanent` and the others.
fn split<'a>(spec: &'a VirtualMachineInstanceSpec, permanent: &BTreeSet<&str>) -> (Named<'a>, Named<'a>) {
    spec.volumes.iter().map(|volume| (volume.name.as_str(), volume)).partition(|(name, _)| permanent.contains(*name))
}

fn disk<'a>(spec: &'a VirtualMachineInstanceSpec, name: &str) -> Option<&'a Disk> {
    spec.domain.devices.disks.iter().find(|disk| disk.name == name)
}

fn is_migrated(vmi: &VirtualMachineInstance, name: &str) -> bool {
    vmi.status.as_ref().is_some_and(|status| status.migrated_volumes.iter().any(|volume| volume.volume_name == name))
}

fn validate_permanent_volumes(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    _: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let names = permanent_names(old);
    let ((new, _), (known, _)) = (split(&vmi.spec, &names), split(&old.spec, &names));
    if new.len() != known.len() {
        errors.invalid("", "Number of permanent volumes has changed");
        return;
    }
    for (name, volume) in new {
        match known.get(name) {
            None => errors.invalid("", format!("permanent volume {name}, not found")),
            Some(known) if !semantic::equal(volume, *known) && !is_migrated(vmi, name) => {
                errors.invalid("", format!("permanent volume {name}, changed"));
            }
            Some(_) if !semantic::equal(&disk(&vmi.spec, name), &disk(&old.spec, name)) => {
                errors.invalid("", format!("permanent disk {name}, changed"));
            }
            Some(_) => continue,
        }
        return;
    }
}

fn validate_hotplugged_volumes(
    vmi: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    _: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let names = permanent_names(old);
    let ((_, new), (_, known)) = (split(&vmi.spec, &names), split(&old.spec, &names));
    for (name, volume) in new {
        let now = disk(&vmi.spec, name);
        let dump = volume.memory_dump.is_some();
        let message = match known.get(name) {
            Some(known) if !semantic::equal(volume, *known) && !is_migrated(vmi, name) => {
                Some(format!("hotplug volume {name}, changed"))
            }
            Some(_) if dump => None,
            Some(_) if now.is_none() => Some(format!("volume {name} doesn't have a matching disk")),
            Some(_) => {
                (!semantic::equal(&now, &disk(&old.spec, name))).then(|| format!("hotplug disk {name}, changed"))
            }
            None if !dump && volume.persistent_volume_claim.is_none() && volume.data_volume.is_none() => {
                Some(format!("volume {name} is not a PVC or DataVolume"))
            }
            None if is_detaching(old, volume) => Some(format!("volume {name} is still being detached")),
            None if dump => None,
            None if now.is_none() => Some(format!("disk {name} does not exist")),
            // The medium of a drive, which exists.
            None if semantic::equal(&now, &disk(&old.spec, name)) => None,
            None => {
                validate_hotplugged_disk("Hotplug configuration", name, now, "", errors);
                if !errors.is_empty() {
                    return;
                }
                None
            }
        };
        if let Some(message) = message {
            errors.invalid("", message);
            return;
        }
    }
}

/// Returns true if the guest can still have another volume by the name of an added one. Its status would pass for that of the
/// added volume, while the guest writes to the former one.
fn is_detaching(old: &VirtualMachineInstance, added: &Volume) -> bool {
    let Some(entry) = status_of(old, &added.name).filter(|entry| entry.hotplug_volume.is_some()) else { return false };
    let former = entry.persistent_volume_claim_info.as_ref().and_then(|info| info.claim_name.as_deref());
    let claim = added.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    let claim = claim.or_else(|| added.data_volume.as_ref().map(|source| source.name.as_str()));
    dump_claim(added).is_some() || former.is_some_and(|former| claim != Some(former))
}

/// Returns the first error of a hotplugged disk.
pub(crate) fn validate_hotplugged_disk(
    prefix: &str,
    name: &str,
    disk: Option<&Disk>,
    field: &str,
    errors: &mut FieldErrors,
) {
    let Some(disk) = disk else {
        errors.invalid(field, format!("{prefix} for [{name}] requires the disk field to be set."));
        return;
    };
    let bus_name = |bus: Option<&String>| bus.cloned().unwrap_or_default();
    let bus = match (&disk.disk, &disk.lun) {
        (Some(target), _) => {
            let bus = bus_name(target.bus.as_ref());
            if !["scsi", "virtio"].contains(&bus.as_str()) {
                errors.invalid(
                    field,
                    format!(
                        "{prefix} for disk [{name}] requires bus to be 'scsi' or 'virtio'. [{bus}] is not permitted."
                    ),
                );
                return;
            }
            bus
        }
        (None, Some(target)) => {
            let bus = bus_name(target.bus.as_ref());
            if bus != "scsi" {
                let message = format!("{prefix} for LUN [{name}] requires bus to be 'scsi'. [{bus}] is not permitted.");
                errors.invalid(field, message);
                return;
            }
            bus
        }
        (None, None) => {
            errors.invalid(
                field,
                format!("{prefix} for [{name}] requires diskDevice of type 'disk' or 'lun' to be used."),
            );
            return;
        }
    };
    if disk.dedicated_io_thread == Some(true) && bus != "virtio" {
        errors.invalid(field, format!("{prefix} for [{name}] requires virtio bus for IOThreads."));
    } else if disk.boot_order.is_some_and(|order| order < 1) {
        // The reference reports this index for every disk.
        let path = "spec.domain.devices.disks[1]";
        errors.invalid(format!("{path}.bootOrder"), format!("{path} must have a boot order > 0, if supplied"));
    }
}
