//! What a component may change of a running machine, and disks that are plugged while it runs.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    vmi::{disks::Disk, spec::UtilityVolume, volumes::Volume},
};
use serde_json::json;

use crate::{causes::Causes, semantic};

/// What is wrong with the change of a machine's spec by a component: the first thing found.
pub fn causes(machine: &VirtualMachineInstance, old: &VirtualMachineInstance, config: &ClusterConfig) -> Causes {
    let mut causes = Causes::new();
    let checks: [fn(&VirtualMachineInstance, &VirtualMachineInstance, &ClusterConfig, &mut Causes); 5] =
        [bounds, utility_volumes, counts, permanent, plugged];
    for check in checks {
        check(machine, old, config, &mut causes);
        if !causes.is_empty() {
            break;
        }
    }
    causes
}

/// What the guest was started to grow to at most stays.
fn bounds(machine: &VirtualMachineInstance, old: &VirtualMachineInstance, _: &ClusterConfig, causes: &mut Causes) {
    let sockets =
        |spec: &VirtualMachineInstanceSpec| spec.domain.cpu.as_ref().and_then(|cpu| cpu.max_sockets).unwrap_or(0);
    if sockets(&machine.spec) != sockets(&old.spec) {
        causes.invalid("", "CPU topology maxSockets changed");
        return;
    }
    let guest =
        |spec: &VirtualMachineInstanceSpec| spec.domain.memory.as_ref().and_then(|memory| memory.max_guest.clone());
    if let (Some(new), Some(old)) = (guest(&machine.spec), guest(&old.spec))
        && !semantic::equal(&json!({"maxGuest": new.0}), &json!({"maxGuest": old.0}))
    {
        causes.invalid("", "Memory maxGuest changed");
    }
}

fn utility_volumes(
    machine: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    config: &ClusterConfig,
    causes: &mut Causes,
) {
    let volumes = &machine.spec.utility_volumes;
    if !volumes.is_empty() && !config.enabled("UtilityVolumes") {
        causes.invalid("spec.utilityVolumes", "UtilityVolumes feature gate is not enabled");
        return;
    }
    for (index, volume) in volumes.iter().enumerate() {
        utility_volume(index, volume, machine, old, causes);
        if !causes.is_empty() {
            return;
        }
    }
}

fn utility_volume(
    index: usize,
    volume: &UtilityVolume,
    machine: &VirtualMachineInstance,
    old: &VirtualMachineInstance,
    causes: &mut Causes,
) {
    let path = format!("spec.utilityVolumes[{index}]");
    let name = &volume.name;
    let earlier = machine.spec.utility_volumes.iter().take(index).position(|other| other.name == *name);
    let permanent = machine.spec.volumes.iter().position(|other| other.name == *name);
    if name.is_empty() {
        causes.required(format!("{path}.name"), "UtilityVolume 'name' must be set");
    } else if let Some(other) = earlier {
        causes.duplicate(
            format!("{path}.name"),
            format!("{path} and spec.utilityVolumes[{other}] must not have the same Name."),
        );
    } else if let Some(other) = permanent {
        causes.duplicate(
            format!("{path}.name"),
            format!("{path} conflicts with spec.volumes[{other}]. UtilityVolume names must be unique across both volumes and utilityVolumes."),
        );
    } else if volume.claim_name.is_empty() {
        causes.required(format!("{path}.claimName"), "UtilityVolume PVC 'claimName' must be set");
    } else if permanent_names(old).contains(name.as_str()) {
        causes.invalid(
            "",
            format!("utility volume {name} cannot be a permanent volume, utility volumes must always be hotplug"),
        );
    } else if old.spec.utility_volumes.iter().any(|known| known.name == *name && known != volume) {
        causes.invalid("", format!("utility volume {name} has changed"));
    }
}

/// Volumes that the machine was started with, by what its status says.
fn permanent_names(machine: &VirtualMachineInstance) -> BTreeSet<&str> {
    let statuses = machine.status.as_ref().map(|status| status.volume_status.as_slice()).unwrap_or_default();
    statuses.iter().filter(|status| status.hotplug_volume.is_none()).map(|status| status.name.as_str()).collect()
}

fn counts(machine: &VirtualMachineInstance, _: &VirtualMachineInstance, config: &ClusterConfig, causes: &mut Causes) {
    let spec = &machine.spec;
    let volumes: BTreeSet<&str> =
        spec.volumes.iter().filter(|volume| volume.memory_dump.is_none()).map(|volume| volume.name.as_str()).collect();
    let empty_drives_pass = config.enabled("DeclarativeHotplugVolumes");
    let disks = spec
        .domain
        .devices
        .disks
        .iter()
        .filter(|disk| !(empty_drives_pass && disk.cdrom.is_some() && !volumes.contains(disk.name.as_str())))
        .count();
    let required = disks + spec.domain.devices.filesystems.len();
    if volumes.len() != required {
        causes.invalid("", format!("mismatch between volumes declared ({}) and required ({required})", volumes.len()));
    }
}

type Named<'a> = BTreeMap<&'a str, &'a Volume>;

/// Volumes of a spec: those in `permanent`, and the others.
fn split<'a>(spec: &'a VirtualMachineInstanceSpec, permanent: &BTreeSet<&str>) -> (Named<'a>, Named<'a>) {
    spec.volumes.iter().map(|volume| (volume.name.as_str(), volume)).partition(|(name, _)| permanent.contains(*name))
}

fn disk<'a>(spec: &'a VirtualMachineInstanceSpec, name: &str) -> Option<&'a Disk> {
    spec.domain.devices.disks.iter().find(|disk| disk.name == name)
}

fn is_migrated(machine: &VirtualMachineInstance, name: &str) -> bool {
    machine
        .status
        .as_ref()
        .is_some_and(|status| status.migrated_volumes.iter().any(|volume| volume.volume_name == name))
}

fn permanent(machine: &VirtualMachineInstance, old: &VirtualMachineInstance, _: &ClusterConfig, causes: &mut Causes) {
    let names = permanent_names(old);
    let ((new, _), (known, _)) = (split(&machine.spec, &names), split(&old.spec, &names));
    if new.len() != known.len() {
        causes.invalid("", "Number of permanent volumes has changed");
        return;
    }
    for (name, volume) in new {
        match known.get(name) {
            None => causes.invalid("", format!("permanent volume {name}, not found")),
            Some(known) if !semantic::equal(volume, *known) && !is_migrated(machine, name) => {
                causes.invalid("", format!("permanent volume {name}, changed"));
            }
            Some(_) if !semantic::equal(&disk(&machine.spec, name), &disk(&old.spec, name)) => {
                causes.invalid("", format!("permanent disk {name}, changed"));
            }
            Some(_) => continue,
        }
        return;
    }
}

fn plugged(machine: &VirtualMachineInstance, old: &VirtualMachineInstance, _: &ClusterConfig, causes: &mut Causes) {
    let names = permanent_names(old);
    let ((_, new), (_, known)) = (split(&machine.spec, &names), split(&old.spec, &names));
    for (name, volume) in new {
        let now = disk(&machine.spec, name);
        let dump = volume.memory_dump.is_some();
        let message = match known.get(name) {
            Some(known) if !semantic::equal(volume, *known) && !is_migrated(machine, name) => {
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
            None if dump => None,
            None if now.is_none() => Some(format!("disk {name} does not exist")),
            None => {
                configuration("Hotplug configuration", name, now, "", causes);
                if !causes.is_empty() {
                    return;
                }
                None
            }
        };
        if let Some(message) = message {
            causes.invalid("", message);
            return;
        }
    }
}

/// What is wrong with a disk that is to be plugged: the first thing found.
pub fn configuration(prefix: &str, name: &str, disk: Option<&Disk>, field: &str, causes: &mut Causes) {
    let Some(disk) = disk else {
        causes.invalid(field, format!("{prefix} for [{name}] requires the disk field to be set."));
        return;
    };
    let word = |bus: Option<&String>| bus.cloned().unwrap_or_default();
    let bus = match (&disk.disk, &disk.lun) {
        (Some(target), _) => {
            let bus = word(target.bus.as_ref());
            if !["scsi", "virtio"].contains(&bus.as_str()) {
                causes.invalid(
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
            let bus = word(target.bus.as_ref());
            if bus != "scsi" {
                let message = format!("{prefix} for LUN [{name}] requires bus to be 'scsi'. [{bus}] is not permitted.");
                causes.invalid(field, message);
                return;
            }
            bus
        }
        (None, None) => {
            causes.invalid(
                field,
                format!("{prefix} for [{name}] requires diskDevice of type 'disk' or 'lun' to be used."),
            );
            return;
        }
    };
    if disk.dedicated_io_thread == Some(true) && bus != "virtio" {
        causes.invalid(field, format!("{prefix} for [{name}] requires virtio bus for IOThreads."));
    } else if disk.boot_order.is_some_and(|order| order < 1) {
        // Tools know the path with this index, whichever disk it is.
        let path = "spec.domain.devices.disks[1]";
        causes.invalid(format!("{path}.bootOrder"), format!("{path} must have a boot order > 0, if supplied"));
    }
}
