//! Fields of the API that Ferrovirt does not support yet.
//!
//! One table, so that no field is accepted and then ignored: each entry finds the uses of a field and has a reason. The
//! change that adds support for a field removes its entry. Unsupported fields are reported only if no rule is broken, because
//! clients count the errors of a rule.

pub mod migrations;

use api::{VirtualMachineInstanceSpec, VirtualMachineSpec};

use crate::context::FieldErrors;

type Spec = VirtualMachineInstanceSpec;

/// Finds the uses of a field: paths below the spec.
type Uses = fn(&Spec) -> Vec<String>;

struct Entry {
    /// The field below the spec, for documents. A list has no index.
    field: &'static str,
    reason: &'static str,
    uses: Uses,
}

/// Returns the path if the field is used.
fn when(used: bool, path: &str) -> Vec<String> {
    if used { vec![path.to_owned()] } else { vec![] }
}

/// Returns the paths of the list items that use a field.
fn each<T>(list: &[T], path: &str, field: &str, used: impl Fn(&T) -> bool) -> Vec<String> {
    list.iter()
        .enumerate()
        .filter(|(_, item)| used(item))
        .map(|(index, _)| match field {
            "" => format!("{path}[{index}]"),
            _ => format!("{path}[{index}].{field}"),
        })
        .collect()
}

fn is_set(text: Option<&String>) -> bool {
    text.is_some_and(|text| !text.is_empty())
}

const INTERFACES: &str = "domain.devices.interfaces";
const DISKS: &str = "domain.devices.disks";
const VOLUMES: &str = "volumes";
const GPUS: &str = "domain.devices.gpus";
const HOST_DEVICES: &str = "domain.devices.hostDevices";

const CLAIMED: &str = "devices by resource claims";
const ROLES: &str = "device roles";
const PINNING: &str = "pinned CPUs";
const ENCRYPTION: &str = "encrypted guests";

const SPEC: &[Entry] = &[
    Entry {
        field: "architecture",
        reason: "CPU architectures other than amd64",
        uses: |spec| {
            when(is_set(spec.architecture.as_ref()) && spec.architecture.as_deref() != Some("amd64"), "architecture")
        },
    },
    // CPU.
    Entry {
        field: "domain.cpu.dedicatedCpuPlacement",
        reason: PINNING,
        uses: |spec| {
            when(
                spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement),
                "domain.cpu.dedicatedCpuPlacement",
            )
        },
    },
    Entry {
        field: "domain.cpu.isolateEmulatorThread",
        reason: PINNING,
        uses: |spec| {
            when(
                spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.isolate_emulator_thread),
                "domain.cpu.isolateEmulatorThread",
            )
        },
    },
    Entry {
        field: "domain.cpu.realtime",
        reason: PINNING,
        uses: |spec| when(spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.realtime.is_some()), "domain.cpu.realtime"),
    },
    Entry {
        field: "domain.cpu.numa",
        reason: "NUMA topology",
        uses: |spec| when(spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.numa.is_some()), "domain.cpu.numa"),
    },
    // Memory.
    Entry {
        field: "domain.memory.hugepages",
        reason: "huge pages",
        uses: |spec| {
            when(
                spec.domain.memory.as_ref().is_some_and(|memory| memory.hugepages.is_some()),
                "domain.memory.hugepages",
            )
        },
    },
    Entry {
        field: "domain.memory.reservedOverhead.memLock",
        reason: "locked memory",
        uses: |spec| {
            let overhead = spec.domain.memory.as_ref().and_then(|memory| memory.reserved_overhead.as_ref());
            when(
                overhead.is_some_and(|overhead| overhead.mem_lock.as_deref() == Some("Required")),
                "domain.memory.reservedOverhead.memLock",
            )
        },
    },
    // Firmware.
    Entry {
        field: "domain.firmware.bootloader.efi.persistent",
        reason: "persistent state of a VM",
        uses: |spec| {
            let efi = spec.domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref()?.efi.as_ref());
            when(efi.is_some_and(|efi| efi.persistent == Some(true)), "domain.firmware.bootloader.efi.persistent")
        },
    },
    Entry {
        field: "domain.launchSecurity",
        reason: ENCRYPTION,
        uses: |spec| when(spec.domain.launch_security.is_some(), "domain.launchSecurity"),
    },
    // Devices.
    Entry {
        field: "domain.devices.tpm",
        reason: "an emulated TPM",
        uses: |spec| {
            let tpm = spec.domain.devices.tpm.as_ref();
            when(tpm.is_some_and(|tpm| tpm.enabled.unwrap_or(true)), "domain.devices.tpm")
        },
    },
    Entry {
        field: "domain.devices.gpus[].claimName",
        reason: CLAIMED,
        uses: |spec| {
            each(&spec.domain.devices.gpus, GPUS, "claimName", |gpu| {
                is_set(gpu.claim_name.as_ref()) || is_set(gpu.request_name.as_ref())
            })
        },
    },
    Entry {
        field: "domain.devices.hostDevices[].claimName",
        reason: CLAIMED,
        uses: |spec| {
            each(&spec.domain.devices.host_devices, HOST_DEVICES, "claimName", |device| {
                is_set(device.claim_name.as_ref()) || is_set(device.request_name.as_ref())
            })
        },
    },
    Entry {
        field: "resourceClaims[]",
        reason: CLAIMED,
        uses: |spec| each(&spec.resource_claims, "resourceClaims", "", |_| true),
    },
    Entry {
        field: "domain.devices.gpus[].virtualGPUOptions.display",
        reason: "displays of virtual GPUs",
        uses: |spec| {
            each(&spec.domain.devices.gpus, GPUS, "virtualGPUOptions.display", |gpu| {
                let display = gpu.virtual_gpu_options.as_ref().and_then(|options| options.display.as_ref());
                display.is_some_and(|display| display.enabled != Some(false))
            })
        },
    },
    Entry {
        field: "domain.devices.gpus[].tag",
        reason: ROLES,
        uses: |spec| each(&spec.domain.devices.gpus, GPUS, "tag", |gpu| is_set(gpu.tag.as_ref())),
    },
    Entry {
        field: "domain.devices.hostDevices[].tag",
        reason: ROLES,
        uses: |spec| each(&spec.domain.devices.host_devices, HOST_DEVICES, "tag", |device| is_set(device.tag.as_ref())),
    },
    Entry {
        field: "domain.devices.filesystems[]",
        reason: "virtiofs",
        uses: |spec| each(&spec.domain.devices.filesystems, "domain.devices.filesystems", "", |_| true),
    },
    Entry {
        field: "domain.devices.downwardMetrics",
        reason: "host metrics",
        uses: |spec| when(spec.domain.devices.downward_metrics.is_some(), "domain.devices.downwardMetrics"),
    },
    // Disks.
    Entry {
        field: "domain.devices.disks[].lun.reservation",
        reason: "SCSI persistent reservations",
        uses: |spec| {
            each(&spec.domain.devices.disks, DISKS, "lun.reservation", |disk| {
                disk.lun.as_ref().is_some_and(|lun| lun.reservation)
            })
        },
    },
    Entry {
        field: "domain.devices.disks[].changedBlockTracking",
        reason: "incremental backup",
        uses: |spec| {
            each(&spec.domain.devices.disks, DISKS, "changedBlockTracking", |disk| {
                disk.changed_block_tracking == Some(true)
            })
        },
    },
    Entry {
        field: "domain.devices.disks[].tag",
        reason: ROLES,
        uses: |spec| each(&spec.domain.devices.disks, DISKS, "tag", |disk| is_set(disk.tag.as_ref())),
    },
    // Networks.
    Entry {
        field: "domain.devices.interfaces[].sriov",
        reason: "SR-IOV",
        uses: |spec| each(&spec.domain.devices.interfaces, INTERFACES, "sriov", |interface| interface.sriov.is_some()),
    },
    Entry {
        field: "domain.devices.interfaces[].passtBinding",
        reason: "passt",
        uses: |spec| {
            each(&spec.domain.devices.interfaces, INTERFACES, "passtBinding", |interface| {
                interface.passt_binding.is_some()
            })
        },
    },
    Entry {
        field: "domain.devices.interfaces[].binding",
        reason: "binding plugins",
        uses: |spec| {
            each(&spec.domain.devices.interfaces, INTERFACES, "binding", |interface| interface.binding.is_some())
        },
    },
    Entry {
        field: "networks[].resourceClaim",
        reason: CLAIMED,
        uses: |spec| each(&spec.networks, "networks", "resourceClaim", |network| network.resource_claim.is_some()),
    },
    // Volumes.
    Entry {
        field: "volumes[].dataVolume",
        reason: "DataVolumes",
        // The claim of a hot-plugged DataVolume is attached as any other.
        uses: |spec| {
            each(&spec.volumes, VOLUMES, "dataVolume", |volume| {
                volume.data_volume.as_ref().is_some_and(|source| !source.hotpluggable)
            })
        },
    },
    Entry {
        field: "volumes[].hostDisk",
        reason: "host disks",
        uses: |spec| each(&spec.volumes, VOLUMES, "hostDisk", |volume| volume.host_disk.is_some()),
    },
    Entry {
        field: "volumes[].downwardMetrics",
        reason: "host metrics",
        uses: |spec| each(&spec.volumes, VOLUMES, "downwardMetrics", |volume| volume.downward_metrics.is_some()),
    },
    Entry {
        field: "volumes[].containerPath",
        reason: "virtiofs",
        uses: |spec| each(&spec.volumes, VOLUMES, "containerPath", |volume| volume.container_path.is_some()),
    },
    Entry {
        field: "volumes[]",
        reason: "more than one cloud-init volume: the guest reads only one",
        uses: |spec| {
            let mut seen = false;
            spec.volumes
                .iter()
                .enumerate()
                .filter(|(_, volume)| {
                    let data = volume.cloud_init_no_cloud.is_some() || volume.cloud_init_config_drive.is_some();
                    data && std::mem::replace(&mut seen, true)
                })
                .map(|(index, _)| format!("{VOLUMES}[{index}]"))
                .collect()
        },
    },
];

fn add_error(path: String, reason: &str, errors: &mut FieldErrors) {
    let message = format!("{path} is not supported yet: {reason}");
    errors.not_supported(path, message);
}

/// Adds an error for each unsupported field of the VMI spec at `root`.
pub fn spec(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    for entry in SPEC {
        for path in (entry.uses)(spec) {
            add_error(format!("{root}.{path}"), entry.reason, errors);
        }
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
    spec(root, &added, errors);
}

/// Path, reason, and test for the use of a field.
type VmEntry = (&'static str, &'static str, fn(&VirtualMachineSpec) -> bool);

/// Unsupported fields of a VM outside its template.
const VM: &[VmEntry] = &[
    ("dataVolumeTemplates", "DataVolumes", |spec| !spec.data_volume_templates.is_empty()),
    ("updateVolumesStrategy", "strategies other than Replacement and Migration", |spec| {
        let known = ["", "Replacement", "Migration"];
        spec.update_volumes_strategy.as_deref().is_some_and(|strategy| !known.contains(&strategy))
    }),
];

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
    ("VirtualMachinePool", "pools of virtual machines"),
    ("VirtualMachineSnapshot", "snapshots"),
    ("VirtualMachineRestore", "snapshots"),
    ("VirtualMachineExport", "export of volumes"),
    ("VirtualMachineClone", "clones"),
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

/// Returns the unsupported fields of a VMI spec and of a VM spec, each with its reason, and the unsupported kinds with their
/// features, for documents.
#[must_use]
pub fn tables() -> [Vec<(&'static str, &'static str)>; 3] {
    [
        SPEC.iter().map(|entry| (entry.field, entry.reason)).collect(),
        VM.iter().map(|(path, reason, _)| (*path, *reason)).collect(),
        KINDS.to_vec(),
    ]
}

#[cfg(test)]
mod tests;
