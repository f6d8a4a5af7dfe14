//! Applies a preference to a VMI spec: sets fields that are unset.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::preference::{
    ClockPreferences, DevicePreferences, FeaturePreferences, FirmwarePreferences, VirtualMachinePreferenceSpec,
};
use crate::vmi::{
    devices::{Devices, PanicDevice},
    disks::Disk,
    domain::DomainSpec,
    features::FeatureHyperv,
    firmware::{BiOs, Efi},
    network::Interface,
    spec::VirtualMachineInstanceSpec,
};

pub(super) fn apply(
    preference: &VirtualMachinePreferenceSpec,
    spec: &mut VirtualMachineInstanceSpec,
    metadata: &mut ObjectMeta,
) {
    if let Some(cpu) = preference.cpu.as_ref().filter(|cpu| !cpu.preferred_cpu_features.is_empty()) {
        let features = &mut spec.domain.cpu.get_or_insert_default().features;
        for feature in &cpu.preferred_cpu_features {
            if features.iter().all(|known| known.name != feature.name) {
                features.push(feature.clone());
            }
        }
    }
    apply_autoattach(preference, &mut spec.domain.devices);
    if let Some(devices) = &preference.devices {
        apply_devices(devices, spec);
    }
    if let Some(features) = &preference.features {
        apply_features(features, &mut spec.domain);
    }
    if let Some(firmware) = &preference.firmware {
        apply_firmware(firmware, &mut spec.domain);
    }
    if let Some(type_) = preference.machine.as_ref().and_then(|machine| machine.preferred_machine_type.as_ref()) {
        let machine = spec.domain.machine.get_or_insert_default();
        if machine.type_.is_empty() {
            machine.type_.clone_from(type_);
        }
    }
    if let Some(clock) = &preference.clock {
        apply_clock(clock, &mut spec.domain);
    }
    fill_text(&mut spec.subdomain, preference.preferred_subdomain.as_ref());
    fill(&mut spec.termination_grace_period_seconds, preference.preferred_termination_grace_period_seconds.as_ref());
    fill_text(&mut spec.architecture, preference.preferred_architecture.as_ref());
    if !preference.annotations.is_empty() {
        let annotations = metadata.annotations.get_or_insert_default();
        for (key, value) in &preference.annotations {
            annotations.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    fill(&mut spec.domain.launch_security, preference.preferred_launch_security.as_ref());
}

/// Applies preferences for automatically attached devices, before these are added.
pub(super) fn apply_autoattach(preference: &VirtualMachinePreferenceSpec, devices: &mut Devices) {
    let Some(preferred) = &preference.devices else { return };
    fill(&mut devices.autoattach_graphics_device, preferred.preferred_autoattach_graphics_device.as_ref());
    fill(&mut devices.autoattach_mem_balloon, preferred.preferred_autoattach_mem_balloon.as_ref());
    fill(&mut devices.autoattach_pod_interface, preferred.preferred_autoattach_pod_interface.as_ref());
    fill(&mut devices.autoattach_serial_console, preferred.preferred_autoattach_serial_console.as_ref());
    fill(&mut devices.autoattach_input_device, preferred.preferred_autoattach_input_device.as_ref());
}

fn apply_devices(preferred: &DevicePreferences, spec: &mut VirtualMachineInstanceSpec) {
    let on_pod_network = |interface: &Interface| {
        spec.networks.iter().any(|network| network.name == interface.name && network.pod.is_some())
    };
    let devices = &mut spec.domain.devices;
    fill(&mut devices.use_virtio_transitional, preferred.preferred_use_virtio_transitional.as_ref());
    fill(&mut devices.block_multi_queue, preferred.preferred_block_multi_queue.as_ref());
    fill(&mut devices.network_interface_multiqueue, preferred.preferred_network_interface_multi_queue.as_ref());
    if let Some(disable) = preferred.preferred_disable_hotplug {
        devices.disable_hotplug = disable;
    }
    if let Some(sound) = &mut devices.sound {
        fill_text(&mut sound.model, preferred.preferred_sound_model.as_ref());
    }
    fill(&mut devices.rng, preferred.preferred_rng.as_ref());
    fill(&mut devices.tpm, preferred.preferred_tpm.as_ref());
    if let Some(type_) = &preferred.preferred_video_type {
        fill_text(&mut devices.video.get_or_insert_default().type_, Some(type_));
    }
    for gpu in &mut devices.gpus {
        fill(&mut gpu.virtual_gpu_options, preferred.preferred_virtual_gpu_options.as_ref());
    }
    devices.disks.iter_mut().for_each(|disk| apply_disk(preferred, disk));
    for interface in &mut devices.interfaces {
        fill_text(&mut interface.model, preferred.preferred_interface_model.as_ref());
        if !is_bound(interface) && on_pod_network(interface) {
            interface.masquerade = preferred.preferred_interface_masquerade;
        }
    }
    for input in &mut devices.inputs {
        fill_text(&mut input.bus, preferred.preferred_input_bus.as_ref());
        if let Some(type_) = preferred.preferred_input_type.as_ref().filter(|_| input.type_.is_empty()) {
            input.type_.clone_from(type_);
        }
    }
    if let Some(model) = &preferred.preferred_panic_device_model {
        if devices.panic_devices.is_empty() {
            devices.panic_devices.push(PanicDevice::default());
        }
        for device in &mut devices.panic_devices {
            fill_text(&mut device.model, Some(model));
        }
    }
}

fn apply_disk(preferred: &DevicePreferences, disk: &mut Disk) {
    if let Some(cdrom) = &mut disk.cdrom {
        fill_text(&mut cdrom.bus, preferred.preferred_cdrom_bus.as_ref());
    } else if let Some(lun) = &mut disk.lun {
        fill_text(&mut lun.bus, preferred.preferred_lun_bus.as_ref());
    } else {
        let target = disk.disk.get_or_insert_default();
        fill_text(&mut target.bus, preferred.preferred_disk_bus.as_ref());
        if disk.block_size.is_none() {
            disk.block_size = preferred.preferred_disk_block_size.clone().map(Box::new);
        }
        fill_text(&mut disk.cache, preferred.preferred_disk_cache.as_ref());
        fill_text(&mut disk.io, preferred.preferred_disk_io.as_ref());
        if target.bus.as_deref() == Some("virtio") {
            fill(&mut disk.dedicated_io_thread, preferred.preferred_disk_dedicated_io_thread.as_ref());
        }
    }
}

fn is_bound(interface: &Interface) -> bool {
    interface.binding.is_some()
        || interface.bridge.is_some()
        || interface.masquerade.is_some()
        || interface.sriov.is_some()
        || interface.passt_binding.is_some()
        || interface.macvtap.is_some()
        || interface.passt.is_some()
        || interface.slirp.is_some()
}

fn apply_features(preferred: &FeaturePreferences, domain: &mut DomainSpec) {
    let features = domain.features.get_or_insert_default();
    if let Some(acpi) = &preferred.preferred_acpi {
        features.acpi = acpi.clone();
    }
    fill(&mut features.apic, preferred.preferred_apic.as_ref());
    if let Some(hyperv) = &preferred.preferred_hyperv {
        apply_hyperv(hyperv, features.hyperv.get_or_insert_default());
    }
    fill(&mut features.kvm, preferred.preferred_kvm.as_ref());
    fill(&mut features.pvspinlock, preferred.preferred_pvspinlock.as_ref());
    fill(&mut features.smm, preferred.preferred_smm.as_ref());
}

fn apply_hyperv(preferred: &FeatureHyperv, hyperv: &mut FeatureHyperv) {
    fill(&mut hyperv.evmcs, preferred.evmcs.as_ref());
    fill(&mut hyperv.frequencies, preferred.frequencies.as_ref());
    fill(&mut hyperv.ipi, preferred.ipi.as_ref());
    fill(&mut hyperv.reenlightenment, preferred.reenlightenment.as_ref());
    fill(&mut hyperv.relaxed, preferred.relaxed.as_ref());
    fill(&mut hyperv.reset, preferred.reset.as_ref());
    fill(&mut hyperv.runtime, preferred.runtime.as_ref());
    fill(&mut hyperv.spinlocks, preferred.spinlocks.as_ref());
    fill(&mut hyperv.synic, preferred.synic.as_ref());
    fill(&mut hyperv.synictimer, preferred.synictimer.as_ref());
    fill(&mut hyperv.tlbflush, preferred.tlbflush.as_ref());
    fill(&mut hyperv.vapic, preferred.vapic.as_ref());
    fill(&mut hyperv.vendorid, preferred.vendorid.as_ref());
    fill(&mut hyperv.vpindex, preferred.vpindex.as_ref());
}

fn apply_firmware(preferred: &FirmwarePreferences, domain: &mut DomainSpec) {
    let bootloader = domain.firmware.get_or_insert_default().bootloader.get_or_insert_default();
    let is_open = bootloader.bios.is_none() && bootloader.efi.is_none();
    if is_open && preferred.preferred_use_bios == Some(true) {
        bootloader.bios = Some(BiOs::default());
    }
    if let Some(bios) = &mut bootloader.bios {
        fill(&mut bios.use_serial, preferred.preferred_use_bios_serial.as_ref());
        return;
    }
    if let Some(efi) = preferred.preferred_efi.as_ref().filter(|_| is_open) {
        // The older fields are ignored in favour of this one.
        bootloader.efi = Some(efi.clone());
        return;
    }
    if is_open && preferred.preferred_use_efi == Some(true) {
        bootloader.efi = Some(Efi::default());
    }
    if let Some(efi) = &mut bootloader.efi {
        fill(&mut efi.secure_boot, preferred.preferred_use_secure_boot.as_ref());
    }
}

fn apply_clock(preferred: &ClockPreferences, domain: &mut DomainSpec) {
    let clock = domain.clock.get_or_insert_default();
    if let Some(offset) =
        preferred.preferred_clock_offset.as_ref().filter(|_| clock.utc.is_none() && clock.timezone.is_none())
    {
        clock.utc.clone_from(&offset.utc);
        clock.timezone.clone_from(&offset.timezone);
    }
    fill(&mut clock.timer, preferred.preferred_timer.as_ref());
}

fn fill<T: Clone>(field: &mut Option<T>, preferred: Option<&T>) {
    if field.is_none() {
        *field = preferred.cloned();
    }
}

fn fill_text(field: &mut Option<String>, preferred: Option<&String>) {
    if field.as_ref().is_none_or(String::is_empty) && preferred.is_some() {
        *field = preferred.cloned();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn preferred(preference: Value, vmi: Value) -> Value {
        let preference = serde_json::from_value(preference).unwrap();
        let mut spec: VirtualMachineInstanceSpec = serde_json::from_value(vmi).unwrap();
        apply(&preference, &mut spec, &mut ObjectMeta::default());
        serde_json::to_value(&spec).unwrap()
    }

    /// Applies device preferences to devices.
    fn devices(preference: Value, devices: Value) -> Value {
        let vmi = json!({
            "domain": {"devices": devices},
            "networks": [{"name": "pod", "pod": {}}, {"name": "other", "multus": {"networkName": "n"}}],
        });
        preferred(json!({"devices": preference}), vmi)["domain"]["devices"].clone()
    }

    #[test]
    fn open_fields_of_devices_are_filled_in() {
        // preference, devices before, devices after
        for (preference, before, after) in [
            (json!({"preferredUseVirtioTransitional": true}), json!({}), json!({"useVirtioTransitional": true})),
            (
                json!({"preferredUseVirtioTransitional": true}),
                json!({"useVirtioTransitional": false}),
                json!({"useVirtioTransitional": false}),
            ),
            (json!({"preferredBlockMultiQueue": true}), json!({}), json!({"blockMultiQueue": true})),
            (
                json!({"preferredNetworkInterfaceMultiQueue": true}),
                json!({}),
                json!({"networkInterfaceMultiqueue": true}),
            ),
            (json!({"preferredDisableHotplug": true}), json!({}), json!({"disableHotplug": true})),
            (json!({"preferredSoundModel": "ac97"}), json!({}), json!({})),
            (
                json!({"preferredSoundModel": "ac97"}),
                json!({"sound": {"name": "s"}}),
                json!({"sound": {"name": "s", "model": "ac97"}}),
            ),
            (json!({"preferredRng": {}}), json!({}), json!({"rng": {}})),
            (json!({"preferredTPM": {"persistent": true}}), json!({}), json!({"tpm": {"persistent": true}})),
            (json!({"preferredTPM": {}}), json!({"tpm": {"enabled": false}}), json!({"tpm": {"enabled": false}})),
            (json!({"preferredVideoType": "vga"}), json!({}), json!({"video": {"type": "vga"}})),
            (
                json!({"preferredVirtualGPUOptions": {"display": {"enabled": false}}}),
                json!({"gpus": [{"name": "g"}]}),
                json!({"gpus": [{"name": "g", "virtualGPUOptions": {"display": {"enabled": false}}}]}),
            ),
            (
                json!({"preferredDiskBus": "scsi"}),
                json!({"disks": [{"name": "d"}]}),
                json!({"disks": [{"name": "d", "disk": {"bus": "scsi"}}]}),
            ),
            (
                json!({"preferredDiskBus": "scsi"}),
                json!({"disks": [{"name": "d", "disk": {"bus": "sata"}}]}),
                json!({"disks": [{"name": "d", "disk": {"bus": "sata"}}]}),
            ),
            (
                json!({"preferredDiskBus": "virtio", "preferredDiskDedicatedIoThread": true, "preferredDiskCache": "none", "preferredDiskIO": "native", "preferredDiskBlockSize": {"matchVolume": {}}}),
                json!({"disks": [{"name": "d"}]}),
                json!({"disks": [{"name": "d", "disk": {"bus": "virtio"}, "cache": "none", "io": "native", "dedicatedIOThread": true, "blockSize": {"matchVolume": {}}}]}),
            ),
            (
                json!({"preferredDiskDedicatedIoThread": true}),
                json!({"disks": [{"name": "d", "disk": {"bus": "sata"}}]}),
                json!({"disks": [{"name": "d", "disk": {"bus": "sata"}}]}),
            ),
            (
                json!({"preferredCdromBus": "sata", "preferredDiskBus": "virtio"}),
                json!({"disks": [{"name": "d", "cdrom": {}}]}),
                json!({"disks": [{"name": "d", "cdrom": {"bus": "sata"}}]}),
            ),
            (
                json!({"preferredLunBus": "scsi"}),
                json!({"disks": [{"name": "d", "lun": {}}]}),
                json!({"disks": [{"name": "d", "lun": {"bus": "scsi"}}]}),
            ),
            (
                json!({"preferredInterfaceModel": "e1000"}),
                json!({"interfaces": [{"name": "other", "bridge": {}}]}),
                json!({"interfaces": [{"name": "other", "bridge": {}, "model": "e1000"}]}),
            ),
            (
                json!({"preferredInterfaceMasquerade": {}}),
                json!({"interfaces": [{"name": "pod"}, {"name": "other"}]}),
                json!({"interfaces": [{"name": "pod", "masquerade": {}}, {"name": "other"}]}),
            ),
            (
                json!({"preferredInterfaceMasquerade": {}}),
                json!({"interfaces": [{"name": "pod", "bridge": {}}]}),
                json!({"interfaces": [{"name": "pod", "bridge": {}}]}),
            ),
            (
                json!({"preferredInputBus": "virtio", "preferredInputType": "tablet"}),
                json!({"inputs": [{"name": "i", "type": ""}]}),
                json!({"inputs": [{"name": "i", "type": "tablet", "bus": "virtio"}]}),
            ),
            (json!({"preferredPanicDeviceModel": "isa"}), json!({}), json!({"panicDevices": [{"model": "isa"}]})),
            (
                json!({"preferredPanicDeviceModel": "isa"}),
                json!({"panicDevices": [{}, {"model": "hyperv"}]}),
                json!({"panicDevices": [{"model": "isa"}, {"model": "hyperv"}]}),
            ),
        ] {
            assert_eq!(devices(preference.clone(), before), after, "{preference}");
        }
    }

    #[test]
    fn automatic_devices_follow_the_preference_if_unset() {
        let preference = serde_json::from_value(json!({"devices": {
            "preferredAutoattachGraphicsDevice": false, "preferredAutoattachMemBalloon": false,
            "preferredAutoattachPodInterface": false, "preferredAutoattachSerialConsole": false,
            "preferredAutoattachInputDevice": true,
        }}))
        .unwrap();
        let mut devices = Devices { autoattach_serial_console: Some(true), ..Devices::default() };
        apply_autoattach(&preference, &mut devices);
        assert_eq!(
            serde_json::to_value(&devices).unwrap(),
            json!({
                "autoattachGraphicsDevice": false, "autoattachMemBalloon": false, "autoattachPodInterface": false,
                "autoattachSerialConsole": true, "autoattachInputDevice": true,
            })
        );
    }

    #[test]
    fn boot_loader_follows_the_preference_when_none_is_chosen() {
        let bootloader = |preference: Value, given: Value| {
            let vmi = json!({"domain": {"devices": {}, "firmware": {"bootloader": given}}});
            preferred(json!({"firmware": preference}), vmi)["domain"]["firmware"]["bootloader"].clone()
        };
        for (preference, before, after) in [
            (json!({"preferredUseBios": true}), json!({}), json!({"bios": {}})),
            (
                json!({"preferredUseBios": true, "preferredUseBiosSerial": true}),
                json!({}),
                json!({"bios": {"useSerial": true}}),
            ),
            (json!({"preferredUseBios": true}), json!({"efi": {}}), json!({"efi": {}})),
            (
                json!({"preferredEfi": {"secureBoot": false}, "preferredUseSecureBoot": true}),
                json!({}),
                json!({"efi": {"secureBoot": false}}),
            ),
            (json!({"preferredEfi": {}}), json!({"bios": {}}), json!({"bios": {}})),
            (
                json!({"preferredEfi": {"persistent": true}, "preferredUseSecureBoot": false}),
                json!({"efi": {}}),
                json!({"efi": {"secureBoot": false}}),
            ),
            (
                json!({"preferredUseEfi": true, "preferredUseSecureBoot": true}),
                json!({}),
                json!({"efi": {"secureBoot": true}}),
            ),
            (
                json!({"preferredUseSecureBoot": true}),
                json!({"efi": {"secureBoot": false}}),
                json!({"efi": {"secureBoot": false}}),
            ),
        ] {
            assert_eq!(bootloader(preference.clone(), before), after, "{preference}");
        }
    }

    #[test]
    fn features_cpu_clock_and_the_rest_are_filled_in() {
        let empty = json!({"domain": {"devices": {}}});
        let spec = preferred(
            json!({
                "cpu": {"preferredCPUFeatures": [{"name": "vmx"}, {"name": "sse", "policy": "require"}]},
                "features": {
                    "preferredAcpi": {"enabled": false}, "preferredApic": {"endOfInterrupt": true},
                    "preferredHyperv": {"relaxed": {}, "vapic": {"enabled": true}}, "preferredKvm": {"hidden": true},
                    "preferredPvspinlock": {}, "preferredSmm": {},
                },
                "machine": {"preferredMachineType": "q35"},
                "clock": {"preferredClockOffset": {"utc": {"offsetSeconds": 5}}, "preferredTimer": {"hpet": {"present": false}}},
                "preferredSubdomain": "s", "preferredTerminationGracePeriodSeconds": 7, "preferredArchitecture": "amd64",
                "preferredLaunchSecurity": {"snp": {}},
            }),
            json!({"domain": {
                "devices": {}, "cpu": {"features": [{"name": "sse"}]},
                "features": {"acpi": {}, "hyperv": {"vapic": {"enabled": false}}},
            }}),
        );
        assert_eq!(
            spec,
            json!({
                "architecture": "amd64",
                "domain": {
                    "clock": {"utc": {"offsetSeconds": 5}, "timer": {"hpet": {"present": false}}},
                    "cpu": {"features": [{"name": "sse"}, {"name": "vmx"}]},
                    "devices": {},
                    "features": {
                        "acpi": {"enabled": false}, "apic": {"endOfInterrupt": true},
                        "hyperv": {"relaxed": {}, "vapic": {"enabled": false}}, "kvm": {"hidden": true},
                        "pvspinlock": {}, "smm": {},
                    },
                    "launchSecurity": {"snp": {}}, "machine": {"type": "q35"}, "resources": {},
                },
                "subdomain": "s", "terminationGracePeriodSeconds": 7,
            })
        );
        assert_eq!(preferred(json!({}), empty.clone())["domain"], json!({"devices": {}, "resources": {}}));
        let zoned = json!({"domain": {"devices": {}, "clock": {"timezone": "Europe/Rome"}}});
        let offset = json!({"clock": {"preferredClockOffset": {"utc": {}}}});
        assert_eq!(preferred(offset, zoned)["domain"]["clock"], json!({"timezone": "Europe/Rome"}));
    }

    #[test]
    fn annotations_of_the_vmi_are_kept() {
        let preference = serde_json::from_value(json!({"annotations": {"a": "1", "b": "2"}})).unwrap();
        let mut spec = VirtualMachineInstanceSpec::default();
        let mut meta =
            ObjectMeta { annotations: Some([("a".to_owned(), "mine".to_owned())].into()), ..ObjectMeta::default() };
        apply(&preference, &mut spec, &mut meta);
        assert_eq!(serde_json::to_value(&meta.annotations).unwrap(), json!({"a": "mine", "b": "2"}));
    }
}
