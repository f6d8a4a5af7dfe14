//! Defaults of new VMIs, set after those of [`super::spec`].

use api::{
    VirtualMachineInstanceSpec,
    config::ClusterConfig,
    vmi::{
        cpu::Cpu,
        devices::{Diag288Watchdog, I6300EsbWatchdog, Input},
        disks::{Disk, DiskTarget},
        features::Features,
        firmware::{Bootloader, Efi, Firmware},
        spec::Probe,
    },
};

use super::{features, is_empty};
use crate::context::Generated;

/// Sets the defaults.
pub fn set(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig, generated: &Generated) {
    let architecture = spec.architecture.clone().unwrap_or_default();
    let domain = &mut spec.domain;

    let firmware = domain.firmware.get_or_insert_with(Firmware::default);
    if is_empty(firmware.uuid.as_ref()) {
        firmware.uuid = Some(generated.uuid.clone());
    }
    if architecture == "arm64" {
        arm64_firmware(firmware);
    }

    let acpi_default = architecture != "s390x";
    let is_complete = features::set(domain.features.get_or_insert_with(Features::default), acpi_default);
    if let Some(timers) = domain.clock.as_mut().and_then(|clock| clock.timer.as_mut()) {
        features::timers(timers);
    }

    for disk in &mut domain.devices.disks {
        default_disk(disk, &architecture);
    }
    if domain.devices.autoattach_input_device == Some(true) && domain.devices.inputs.is_empty() {
        domain.devices.inputs.push(Input { name: "default-0".to_owned(), ..Input::default() });
    }
    for input in &mut domain.devices.inputs {
        if is_empty(input.bus.as_ref()) {
            input.bus = Some("usb".to_owned());
        }
        if input.type_.is_empty() {
            input.type_ = "tablet".to_owned();
        }
    }
    for gpu in &mut domain.devices.gpus {
        let display = gpu.virtual_gpu_options.as_mut().and_then(|options| options.display.as_mut());
        if let Some(frame_buffer) = display.and_then(|display| display.ram_fb.as_mut()) {
            frame_buffer.enabled.get_or_insert(true);
        }
    }
    if let Some(watchdog) = &mut domain.devices.watchdog {
        let action = |action: &mut Option<String>| {
            if is_empty(action.as_ref()) {
                *action = Some("reset".to_owned());
            }
        };
        if architecture == "s390x" {
            action(&mut watchdog.diag288.get_or_insert_with(Diag288Watchdog::default).action);
        } else if architecture == "amd64" {
            action(&mut watchdog.i6300esb.get_or_insert_with(I6300EsbWatchdog::default).action);
        }
    }
    for probe in [&mut spec.readiness_probe, &mut spec.liveness_probe].into_iter().flatten() {
        default_probe(probe);
    }

    let cpu = domain.cpu.get_or_insert_with(Cpu::default);
    if is_complete {
        features::require_vmx(cpu, domain.features.as_ref());
    }
    if is_empty(cpu.model.as_ref()) {
        let model = if architecture == "arm64" {
            "host-passthrough"
        } else {
            config.cpu_model.as_deref().unwrap_or("host-model")
        };
        cpu.model = Some(model.to_owned());
    }
}

fn arm64_firmware(firmware: &mut Firmware) {
    let bootloader =
        firmware.bootloader.get_or_insert_with(|| Bootloader { efi: Some(Efi::default()), ..Bootloader::default() });
    if let Some(efi) = &mut bootloader.efi {
        efi.secure_boot.get_or_insert(false);
    }
}

fn default_disk(disk: &mut Disk, architecture: &str) {
    let bus = if architecture == "amd64" { "sata" } else { "virtio" };
    let set = |value: &mut Option<String>| {
        if is_empty(value.as_ref()) {
            *value = Some(bus.to_owned());
        }
    };
    if disk.disk.is_none() && disk.cdrom.is_none() && disk.lun.is_none() {
        disk.disk = Some(DiskTarget::default());
    }
    if let Some(target) = &mut disk.disk {
        set(&mut target.bus);
    }
    if let Some(target) = &mut disk.lun {
        set(&mut target.bus);
    }
    if let Some(target) = &mut disk.cdrom {
        set(&mut target.bus);
        target.readonly.get_or_insert(true);
        if is_empty(target.tray.as_ref()) {
            target.tray = Some("closed".to_owned());
        }
    }
    if let Some(matching) = disk.block_size.as_mut().and_then(|size| size.match_volume.as_mut()) {
        matching.enabled.get_or_insert(true);
    }
}

fn default_probe(probe: &mut Probe) {
    let set = |field: &mut Option<i32>, default: i32| {
        if field.is_none_or(|value| value < 1) {
            *field = Some(default);
        }
    };
    set(&mut probe.timeout_seconds, 1);
    set(&mut probe.period_seconds, 10);
    set(&mut probe.success_threshold, 1);
    set(&mut probe.failure_threshold, 3);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn defaulted(object: Value) -> Value {
        let generated = Generated {
            now: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
            uuid: "u".to_owned(),
            serial: "s".to_owned(),
        };
        let mut spec: VirtualMachineInstanceSpec = serde_json::from_value(object).unwrap();
        let config = ClusterConfig::default();
        super::super::spec(&mut spec, &config).unwrap();
        set(&mut spec, &config, &generated);
        let once = serde_json::to_value(&spec).unwrap();
        super::super::spec(&mut spec, &config).unwrap();
        set(&mut spec, &config, &generated);
        assert_eq!(serde_json::to_value(&spec).unwrap(), once, "a second pass changes nothing");
        once
    }

    #[test]
    fn plain_vmi_gets_firmware_features_and_model() {
        let spec = defaulted(json!({"domain": {"devices": {}}}));
        assert_eq!(spec["domain"]["firmware"], json!({"uuid": "u"}));
        assert_eq!(spec["domain"]["features"], json!({"acpi": {"enabled": true}}));
        assert_eq!(spec["domain"]["cpu"]["model"], "host-model");
    }

    #[test]
    fn devices_are_completed() {
        let spec = defaulted(json!({
            "domain": {
                "devices": {
                    "disks": [{"name": "a"}, {"name": "b", "cdrom": {}}, {"name": "c", "disk": {"bus": "virtio"}}],
                    "inputs": [{"name": "t", "type": "tablet"}],
                    "watchdog": {"name": "w"},
                },
                "clock": {"timer": {"hpet": {}, "pit": {"present": false}}},
            },
            "readinessProbe": {"tcpSocket": {"port": 22}, "periodSeconds": 5},
        }));
        let devices = &spec["domain"]["devices"];
        assert_eq!(
            devices["disks"],
            json!([
                {"name": "a", "disk": {"bus": "sata"}},
                {"name": "b", "cdrom": {"bus": "sata", "readonly": true, "tray": "closed"}},
                {"name": "c", "disk": {"bus": "virtio"}},
            ])
        );
        assert_eq!(devices["inputs"][0]["bus"], "usb");
        assert_eq!(devices["watchdog"]["i6300esb"]["action"], "reset");
        assert_eq!(spec["domain"]["clock"]["timer"], json!({"hpet": {"present": true}, "pit": {"present": false}}));
        assert_eq!(
            spec["readinessProbe"],
            json!({"tcpSocket": {"port": 22}, "periodSeconds": 5, "timeoutSeconds": 1, "successThreshold": 1, "failureThreshold": 3})
        );
    }

    #[test]
    fn input_device_is_attached_on_request() {
        let spec = defaulted(json!({"domain": {"devices": {"autoattachInputDevice": true}}}));
        assert_eq!(spec["domain"]["devices"]["inputs"], json!([{"name": "default-0", "bus": "usb", "type": "tablet"}]));
    }

    #[test]
    fn arm64_boots_by_efi_on_the_host_model() {
        let spec = defaulted(json!({"architecture": "arm64", "domain": {"devices": {"disks": [{"name": "a"}]}}}));
        assert_eq!(spec["domain"]["firmware"]["bootloader"], json!({"efi": {"secureBoot": false}}));
        assert_eq!(spec["domain"]["cpu"]["model"], "host-passthrough");
        assert_eq!(spec["domain"]["devices"]["disks"][0]["disk"]["bus"], "virtio");
        assert_eq!(spec["domain"]["machine"]["type"], "virt");
    }
}
