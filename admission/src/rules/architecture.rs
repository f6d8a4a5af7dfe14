//! Features of CPU architectures.

use api::VirtualMachineInstanceSpec;

use crate::context::FieldErrors;

const ROOT: &str = "spec.domain";

/// Returns errors for fields that the VMI's architecture does not have.
pub(crate) fn validate(spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    match spec.architecture.as_deref().unwrap_or_default() {
        "amd64" => validate_amd64(spec, &mut errors),
        "arm64" => validate_arm64(spec, &mut errors),
        "s390x" => validate_s390x(spec, &mut errors),
        other => errors.invalid("spec.architecture", format!("unsupported architecture: {other}")),
    }
    errors
}

fn validate_video(spec: &VirtualMachineInstanceSpec, architecture: &str, known: &[&str], errors: &mut FieldErrors) {
    let type_ = spec.domain.devices.video.as_ref().and_then(|video| video.type_.as_deref()).unwrap_or_default();
    if !type_.is_empty() && !known.contains(&type_) {
        errors.not_supported(
            format!("{ROOT}.devices.video.type"),
            format!("video model '{type_}' is not supported on {architecture} architecture"),
        );
    }
}

fn validate_amd64(spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    if let Some(watchdog) = &spec.domain.devices.watchdog
        && (watchdog.i6300esb.is_none() || watchdog.diag288.is_some())
    {
        errors.not_supported(format!("{ROOT}.devices.watchdog"), "amd64 only supports I6300ESB watchdog device");
    }
    validate_video(spec, "amd64", &["vga", "cirrus", "virtio", "ramfb", "bochs"], errors);
}

fn validate_arm64(spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let domain = &spec.domain;
    let bootloader = domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref());
    if bootloader.is_some_and(|bootloader| bootloader.bios.is_some()) {
        errors.not_supported(
            format!("{ROOT}.firmware.bootloader.bios"),
            "Arm64 does not support bios boot, please change to uefi boot",
        );
    }
    let model = domain.cpu.as_ref().and_then(|cpu| cpu.model.as_deref()).unwrap_or_default();
    if !["", "host-passthrough"].contains(&model) {
        errors.not_supported(
            format!("{ROOT}.cpu.model"),
            "currently, host-passthrough is the only model supported on Arm64",
        );
    }
    for (index, disk) in domain.devices.disks.iter().enumerate() {
        for (target, bus) in [
            ("disk", disk.disk.as_ref().and_then(|disk| disk.bus.as_deref())),
            ("cdrom", disk.cdrom.as_ref().and_then(|cdrom| cdrom.bus.as_deref())),
            ("lun", disk.lun.as_ref().and_then(|lun| lun.bus.as_deref())),
        ] {
            if !["", "virtio", "scsi"].contains(&bus.unwrap_or_default()) {
                errors.not_supported(
                    format!("{ROOT}.devices.disks[{index}].{target}.bus"),
                    "Arm64 not support this disk bus type, please use virtio or scsi",
                );
            }
        }
    }
    if domain.devices.watchdog.is_some() {
        errors.not_supported(format!("{ROOT}.devices.watchdog"), "Arm64 not support Watchdog device");
    }
    if domain.devices.sound.is_some() {
        errors.not_supported(format!("{ROOT}.devices.sound"), "Arm64 not support sound device");
    }
    validate_video(spec, "arm64", &["virtio", "ramfb"], errors);
}

fn validate_s390x(spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    if let Some(watchdog) = &spec.domain.devices.watchdog
        && (watchdog.diag288.is_none() || watchdog.i6300esb.is_some())
    {
        errors.not_supported(format!("{ROOT}.devices.watchdog"), "s390x only supports Diag288 watchdog device");
    }
    validate_video(spec, "s390x", &["virtio"], errors);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::rules::testing::vmi_spec;

    fn fields(change: Value) -> Vec<String> {
        let errors = validate(&vmi_spec(change));
        errors.as_slice().iter().map(|error| error.field.clone()).collect()
    }

    #[test]
    fn architecture_is_known() {
        assert!(fields(json!({})).is_empty());
        assert_eq!(fields(json!({"architecture": "vax"})), ["spec.architecture"]);
    }

    #[test]
    fn amd64_has_its_own_watchdog_and_video() {
        assert!(
            fields(
                json!({"domain": {"devices": {"watchdog": {"name": "w", "i6300esb": {}}, "video": {"type": "vga"}}}})
            )
            .is_empty()
        );
        assert_eq!(
            fields(
                json!({"domain": {"devices": {"watchdog": {"name": "w", "diag288": {}}, "video": {"type": "xql"}}}})
            ),
            ["spec.domain.devices.watchdog", "spec.domain.devices.video.type"]
        );
    }

    #[test]
    fn arm64_has_no_bios_sata_watchdog_or_sound() {
        assert_eq!(
            fields(json!({
                "architecture": "arm64",
                "domain": {
                    "cpu": {"model": "cortex-a57"},
                    "firmware": {"bootloader": {"bios": {}}},
                    "devices": {
                        "disks": [{"name": "root", "disk": {"bus": "sata"}}],
                        "watchdog": {"name": "w"},
                        "sound": {"name": "s"},
                    },
                },
            })),
            [
                "spec.domain.firmware.bootloader.bios",
                "spec.domain.cpu.model",
                "spec.domain.devices.disks[0].disk.bus",
                "spec.domain.devices.watchdog",
                "spec.domain.devices.sound",
            ]
        );
    }
}
