//! What the API knows but Ferrovirt does not carry out yet.
//!
//! One table, so that nothing is accepted and then ignored: each entry names a field, finds its uses, and says why it
//! is refused. An entry goes when the launcher and the controllers carry the field out. What breaks a rule of the API is
//! told of that alone: clients know how many causes a rule has.

use api::{VirtualMachineInstanceSpec, VirtualMachineSpec, quantity};

use crate::causes::Causes;

type Spec = VirtualMachineInstanceSpec;

/// Where a spec uses a field: paths below the spec.
type Uses = fn(&Spec) -> Vec<String>;

struct Entry {
    why: &'static str,
    uses: Uses,
}

/// A field that is used or not.
fn when(used: bool, path: &str) -> Vec<String> {
    if used { vec![path.to_owned()] } else { vec![] }
}

/// Entries of a list that use a field.
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

const HOTPLUG: &str = "hot-plug";
const CLAIMED: &str = "devices by resource claims";
const ROLES: &str = "device roles";
const PINNING: &str = "pinned CPUs";
const ENCRYPTION: &str = "encrypted guests";

const SPEC: &[Entry] = &[
    Entry {
        why: "CPU architectures other than amd64",
        uses: |spec| {
            when(is_set(spec.architecture.as_ref()) && spec.architecture.as_deref() != Some("amd64"), "architecture")
        },
    },
    // CPU.
    Entry {
        why: PINNING,
        uses: |spec| {
            when(
                spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement),
                "domain.cpu.dedicatedCpuPlacement",
            )
        },
    },
    Entry {
        why: PINNING,
        uses: |spec| {
            when(
                spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.isolate_emulator_thread),
                "domain.cpu.isolateEmulatorThread",
            )
        },
    },
    Entry {
        why: PINNING,
        uses: |spec| when(spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.realtime.is_some()), "domain.cpu.realtime"),
    },
    Entry {
        why: "NUMA topology",
        uses: |spec| when(spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.numa.is_some()), "domain.cpu.numa"),
    },
    Entry {
        why: HOTPLUG,
        uses: |spec| {
            let grows = spec.domain.cpu.as_ref().is_some_and(|cpu| {
                let most = cpu.max_sockets.unwrap_or(0);
                most > cpu.sockets.unwrap_or(1).max(1)
            });
            when(grows, "domain.cpu.maxSockets")
        },
    },
    // Memory.
    Entry {
        why: HOTPLUG,
        uses: |spec| {
            let grows = spec.domain.memory.as_ref().is_some_and(|memory| match (&memory.max_guest, &memory.guest) {
                (Some(most), Some(guest)) => quantity::units(most) != quantity::units(guest),
                (most, _) => most.is_some(),
            });
            when(grows, "domain.memory.maxGuest")
        },
    },
    Entry {
        why: "huge pages",
        uses: |spec| {
            when(
                spec.domain.memory.as_ref().is_some_and(|memory| memory.hugepages.is_some()),
                "domain.memory.hugepages",
            )
        },
    },
    Entry {
        why: "locked memory",
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
        why: "state that outlives a machine",
        uses: |spec| {
            let efi = spec.domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref()?.efi.as_ref());
            when(efi.is_some_and(|efi| efi.persistent == Some(true)), "domain.firmware.bootloader.efi.persistent")
        },
    },
    Entry { why: ENCRYPTION, uses: |spec| when(spec.domain.launch_security.is_some(), "domain.launchSecurity") },
    // Devices.
    Entry {
        why: "an emulated TPM",
        uses: |spec| {
            let tpm = spec.domain.devices.tpm.as_ref();
            when(tpm.is_some_and(|tpm| tpm.enabled.unwrap_or(true)), "domain.devices.tpm")
        },
    },
    Entry {
        why: CLAIMED,
        uses: |spec| {
            each(&spec.domain.devices.gpus, GPUS, "claimName", |gpu| {
                is_set(gpu.claim_name.as_ref()) || is_set(gpu.request_name.as_ref())
            })
        },
    },
    Entry {
        why: CLAIMED,
        uses: |spec| {
            each(&spec.domain.devices.host_devices, HOST_DEVICES, "claimName", |device| {
                is_set(device.claim_name.as_ref()) || is_set(device.request_name.as_ref())
            })
        },
    },
    Entry { why: CLAIMED, uses: |spec| each(&spec.resource_claims, "resourceClaims", "", |_| true) },
    Entry {
        why: "displays of virtual GPUs",
        uses: |spec| {
            each(&spec.domain.devices.gpus, GPUS, "virtualGPUOptions.display", |gpu| {
                let display = gpu.virtual_gpu_options.as_ref().and_then(|options| options.display.as_ref());
                display.is_some_and(|display| display.enabled != Some(false))
            })
        },
    },
    Entry { why: ROLES, uses: |spec| each(&spec.domain.devices.gpus, GPUS, "tag", |gpu| is_set(gpu.tag.as_ref())) },
    Entry {
        why: ROLES,
        uses: |spec| each(&spec.domain.devices.host_devices, HOST_DEVICES, "tag", |device| is_set(device.tag.as_ref())),
    },
    Entry {
        why: "virtiofs",
        uses: |spec| each(&spec.domain.devices.filesystems, "domain.devices.filesystems", "", |_| true),
    },
    Entry {
        why: "host metrics",
        uses: |spec| when(spec.domain.devices.downward_metrics.is_some(), "domain.devices.downwardMetrics"),
    },
    // Disks.
    Entry {
        why: "SCSI persistent reservations",
        uses: |spec| {
            each(&spec.domain.devices.disks, DISKS, "lun.reservation", |disk| {
                disk.lun.as_ref().is_some_and(|lun| lun.reservation)
            })
        },
    },
    Entry {
        why: "incremental backup",
        uses: |spec| {
            each(&spec.domain.devices.disks, DISKS, "changedBlockTracking", |disk| {
                disk.changed_block_tracking == Some(true)
            })
        },
    },
    Entry { why: ROLES, uses: |spec| each(&spec.domain.devices.disks, DISKS, "tag", |disk| is_set(disk.tag.as_ref())) },
    // Networks.
    Entry {
        why: "SR-IOV",
        uses: |spec| each(&spec.domain.devices.interfaces, INTERFACES, "sriov", |interface| interface.sriov.is_some()),
    },
    Entry {
        why: "passt",
        uses: |spec| {
            each(&spec.domain.devices.interfaces, INTERFACES, "passtBinding", |interface| {
                interface.passt_binding.is_some()
            })
        },
    },
    Entry {
        why: "binding plugins",
        uses: |spec| {
            each(&spec.domain.devices.interfaces, INTERFACES, "binding", |interface| interface.binding.is_some())
        },
    },
    Entry {
        why: CLAIMED,
        uses: |spec| each(&spec.networks, "networks", "resourceClaim", |network| network.resource_claim.is_some()),
    },
    // Volumes.
    Entry {
        why: "DataVolumes",
        uses: |spec| each(&spec.volumes, VOLUMES, "dataVolume", |volume| volume.data_volume.is_some()),
    },
    Entry {
        why: "files of the node",
        uses: |spec| each(&spec.volumes, VOLUMES, "hostDisk", |volume| volume.host_disk.is_some()),
    },
    Entry {
        why: "host metrics",
        uses: |spec| each(&spec.volumes, VOLUMES, "downwardMetrics", |volume| volume.downward_metrics.is_some()),
    },
    Entry {
        why: "memory dumps",
        uses: |spec| each(&spec.volumes, VOLUMES, "memoryDump", |volume| volume.memory_dump.is_some()),
    },
    Entry {
        why: "virtiofs",
        uses: |spec| each(&spec.volumes, VOLUMES, "containerPath", |volume| volume.container_path.is_some()),
    },
    Entry {
        why: HOTPLUG,
        uses: |spec| {
            each(&spec.volumes, VOLUMES, "persistentVolumeClaim.hotpluggable", |volume| {
                volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.hotpluggable)
            })
        },
    },
    Entry {
        why: "more than one cloud-init volume: the guest reads only one",
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

fn refuse(path: String, why: &str, causes: &mut Causes) {
    let message = format!("{path} is not supported yet: {why}");
    causes.not_supported(path, message);
}

/// What a machine's spec at `root` asks for that is not carried out.
pub fn spec(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    for entry in SPEC {
        for path in (entry.uses)(spec) {
            refuse(format!("{root}.{path}"), entry.why, causes);
        }
    }
}

/// What a VM's spec at `root` asks for beyond its template that is not carried out.
pub fn vm(root: &str, spec: &VirtualMachineSpec) -> Causes {
    let mut causes = Causes::new();
    for (used, path, why) in [
        (!spec.data_volume_templates.is_empty(), "dataVolumeTemplates", "DataVolumes"),
        (
            spec.update_volumes_strategy.as_deref().is_some_and(|strategy| !["", "Replacement"].contains(&strategy)),
            "updateVolumesStrategy",
            "volume migration",
        ),
    ] {
        if used {
            refuse(format!("{root}.{path}"), why, &mut causes);
        }
    }
    causes
}

/// Kinds that nothing works on yet, with what they are for.
const KINDS: &[(&str, &str)] = &[
    ("VirtualMachineInstanceMigration", "live migration"),
    ("VirtualMachinePool", "pools of virtual machines"),
    ("MigrationPolicy", "live migration"),
    ("VirtualMachineSnapshot", "snapshots"),
    ("VirtualMachineRestore", "snapshots"),
    ("VirtualMachineExport", "export of volumes"),
    ("VirtualMachineClone", "clones"),
    ("VirtualMachineBackup", "backup"),
    ("VirtualMachineBackupTracker", "backup"),
    ("Plugin", "plugins"),
];

/// Why a new object of a kind is refused though it breaks no rule; nothing for kinds that are carried out.
pub fn kind(kind: &str) -> Causes {
    let mut causes = Causes::new();
    if let Some((kind, what)) = KINDS.iter().find(|(name, _)| *name == kind) {
        causes.not_supported("kind", format!("{kind} is not supported yet: {what}"));
    }
    causes
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{causes::CauseType, rules::testing::machine};

    fn refused(change: Value) -> Vec<String> {
        let mut causes = Causes::new();
        spec("spec", &machine(change), &mut causes);
        assert!(causes.as_slice().iter().all(|cause| cause.type_ == Some(CauseType::FieldValueNotSupported)));
        causes.as_slice().iter().map(|cause| cause.field.clone()).collect()
    }

    #[test]
    fn what_is_carried_out_is_let_through() {
        for change in [
            json!({}),
            json!({"evictionStrategy": "LiveMigrate"}),
            json!({"evictionStrategy": "LiveMigrateIfPossible"}),
            json!({"evictionStrategy": "External"}),
            json!({"domain": {"cpu": {"sockets": 2, "maxSockets": 2}}}),
            json!({"domain": {"memory": {"guest": "1Gi", "maxGuest": "1024Mi"}}}),
            json!({"domain": {"devices": {"tpm": {"enabled": false}}}}),
            json!({"domain": {"devices": {"clientPassthrough": {}}}}),
            json!({"domain": {"devices": {"hostDevices": [{"name": "h", "deviceName": "v/h"}]}}}),
            json!({"domain": {"devices": {"gpus": [
                {"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {"enabled": false}}},
            ]}}}),
            json!({"domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}}]}}}),
            json!({"networks": [{"name": "default", "multus": {"networkName": "n", "default": true}}]}),
            json!({"domain": {"firmware": {"bootloader": {"efi": {"secureBoot": false}}}}}),
            json!({"volumes": [
                {"name": "a", "cloudInitConfigDrive": {"userData": "x"}},
                {"name": "b", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}},
                {"name": "c", "sysprep": {"secret": {"name": "s"}}},
                {"name": "d", "downwardAPI": {}},
            ]}),
        ] {
            assert_eq!(refused(change.clone()), Vec::<String>::new(), "{change}");
        }
    }

    #[test]
    fn each_entry_names_its_field() {
        let devices = |devices: Value| json!({"domain": {"devices": devices}});
        let disk = |disk: Value| json!({"domain": {"devices": {"disks": [disk]}}});
        let interface = |interface: Value| json!({"domain": {"devices": {"interfaces": [interface]}}});
        let volume = |source: Value| json!({"volumes": [source]});
        for (change, field) in [
            (json!({"architecture": "arm64"}), "architecture"),
            (json!({"domain": {"cpu": {"dedicatedCpuPlacement": true}}}), "domain.cpu.dedicatedCpuPlacement"),
            (json!({"domain": {"cpu": {"isolateEmulatorThread": true}}}), "domain.cpu.isolateEmulatorThread"),
            (json!({"domain": {"cpu": {"realtime": {}}}}), "domain.cpu.realtime"),
            (json!({"domain": {"cpu": {"numa": {}}}}), "domain.cpu.numa"),
            (json!({"domain": {"cpu": {"maxSockets": 4}}}), "domain.cpu.maxSockets"),
            (json!({"domain": {"memory": {"maxGuest": "1Gi"}}}), "domain.memory.maxGuest"),
            (json!({"domain": {"memory": {"hugepages": {"pageSize": "2Mi"}}}}), "domain.memory.hugepages"),
            (
                json!({"domain": {"memory": {"reservedOverhead": {"memLock": "Required"}}}}),
                "domain.memory.reservedOverhead.memLock",
            ),
            (
                json!({"domain": {"firmware": {"bootloader": {"efi": {"persistent": true}}}}}),
                "domain.firmware.bootloader.efi.persistent",
            ),
            (json!({"domain": {"launchSecurity": {"sev": {}}}}), "domain.launchSecurity"),
            (devices(json!({"tpm": {}})), "domain.devices.tpm"),
            (devices(json!({"gpus": [{"name": "g", "claimName": "c"}]})), "domain.devices.gpus[0].claimName"),
            (
                devices(json!({"hostDevices": [{"name": "h", "requestName": "r"}]})),
                "domain.devices.hostDevices[0].claimName",
            ),
            (
                devices(json!({"gpus": [{"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}}]})),
                "domain.devices.gpus[0].virtualGPUOptions.display",
            ),
            (devices(json!({"gpus": [{"name": "g", "deviceName": "v/g", "tag": "t"}]})), "domain.devices.gpus[0].tag"),
            (
                devices(json!({"hostDevices": [{"name": "h", "deviceName": "v/h", "tag": "t"}]})),
                "domain.devices.hostDevices[0].tag",
            ),
            (json!({"resourceClaims": [{"name": "r"}]}), "resourceClaims[0]"),
            (devices(json!({"filesystems": [{"name": "f", "virtiofs": {}}]})), "domain.devices.filesystems[0]"),
            (devices(json!({"downwardMetrics": {}})), "domain.devices.downwardMetrics"),
            (disk(json!({"name": "root", "lun": {"reservation": true}})), "domain.devices.disks[0].lun.reservation"),
            (
                disk(json!({"name": "root", "changedBlockTracking": true})),
                "domain.devices.disks[0].changedBlockTracking",
            ),
            (disk(json!({"name": "root", "tag": "boot"})), "domain.devices.disks[0].tag"),
            (interface(json!({"name": "default", "sriov": {}})), "domain.devices.interfaces[0].sriov"),
            (interface(json!({"name": "default", "passtBinding": {}})), "domain.devices.interfaces[0].passtBinding"),
            (interface(json!({"name": "default", "binding": {"name": "b"}})), "domain.devices.interfaces[0].binding"),
            (json!({"networks": [{"name": "default", "resourceClaim": {}}]}), "networks[0].resourceClaim"),
            (volume(json!({"name": "root", "dataVolume": {"name": "d"}})), "volumes[0].dataVolume"),
            (volume(json!({"name": "root", "hostDisk": {"path": "/d", "type": "Disk"}})), "volumes[0].hostDisk"),
            (volume(json!({"name": "root", "downwardMetrics": {}})), "volumes[0].downwardMetrics"),
            (volume(json!({"name": "root", "memoryDump": {"claimName": "c"}})), "volumes[0].memoryDump"),
            (volume(json!({"name": "root", "containerPath": {"path": "/p"}})), "volumes[0].containerPath"),
            (
                volume(json!({"name": "root", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}})),
                "volumes[0].persistentVolumeClaim.hotpluggable",
            ),
            (
                json!({"volumes": [{"name": "a", "cloudInitNoCloud": {}}, {"name": "b", "cloudInitConfigDrive": {}}]}),
                "volumes[1]",
            ),
        ] {
            assert_eq!(refused(change.clone()), [format!("spec.{field}")], "{change}");
        }
    }

    /// The metrics of a node reach a guest in no way, whoever asks and whatever gates are open: the channel is refused, and
    /// the volume.
    #[test]
    fn cve_2024_31419_cve_2024_31420_no_guest_gets_metrics_of_its_node() {
        let device = json!({"domain": {"devices": {"downwardMetrics": {}}}});
        assert_eq!(refused(device), ["spec.domain.devices.downwardMetrics"]);
        let volume = json!({"volumes": [{"name": "root", "downwardMetrics": {}}]});
        assert_eq!(refused(volume), ["spec.volumes[0].downwardMetrics"]);
    }

    #[test]
    fn reasons_are_no_fields() {
        for entry in SPEC {
            assert!(!entry.why.contains("domain."), "{}", entry.why);
        }
    }

    #[test]
    fn what_a_vm_adds_is_refused_where_it_stands() {
        let causes = |spec: Value| super::vm("spec", &serde_json::from_value(spec).unwrap());
        assert!(causes(json!({"template": {}, "updateVolumesStrategy": "Replacement"})).is_empty());
        for (spec, field) in [
            (json!({"template": {}, "dataVolumeTemplates": [{"spec": {}}]}), "spec.dataVolumeTemplates"),
            (json!({"template": {}, "updateVolumesStrategy": "Migration"}), "spec.updateVolumesStrategy"),
            (json!({"template": {}, "updateVolumesStrategy": "Copy"}), "spec.updateVolumesStrategy"),
        ] {
            assert_eq!(causes(spec).as_slice()[0].field, field);
        }
    }
}
