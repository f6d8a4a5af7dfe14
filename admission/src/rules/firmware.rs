//! Boot firmware and direct kernel boot.

use api::{VirtualMachineInstanceSpec, vmi::firmware::Firmware};

use super::images::{validate_path, validate_pull_policy};
use crate::context::FieldErrors;

/// Validates the ACPI tables.
pub(super) fn validate_acpi(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let Some(acpi) = spec.domain.firmware.as_ref().and_then(|firmware| firmware.acpi.as_ref()) else { return };
    let field = format!("{root}.acpi");
    let nonempty = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    let references = [("slicNameRef", nonempty(&acpi.slic_name_ref)), ("msdmNameRef", nonempty(&acpi.msdm_name_ref))];
    if references.iter().all(|(_, name)| name.is_none()) {
        errors.invalid(field, "ACPI was set but no SLIC nor MSDM volume reference was set");
        return;
    }
    for (which, name) in references {
        let Some(name) = name else { continue };
        match spec.volumes.iter().find(|volume| volume.name == name) {
            None => errors.invalid(format!("{field}.{which}"), format!("{field} does not have a matching Volume.")),
            Some(volume) if volume.secret.is_none() => {
                errors.invalid(format!("{field}.{which}"), format!("{field} refers to Volume of unsupported type."));
            }
            Some(_) => {}
        }
    }
}

/// Validates boot loader and kernel of the firmware at `path`, of a VMI or a preset.
pub(crate) fn validate_boot(path: &str, firmware: &Firmware, errors: &mut FieldErrors) {
    if let Some(bootloader) = &firmware.bootloader {
        let field = format!("{path}.bootloader");
        if bootloader.efi.is_some() && bootloader.bios.is_some() {
            let message = format!("{field} has both EFI and BIOS configured, but they are mutually exclusive.");
            errors.invalid(field, message);
        }
    }
    if let Some(boot) = &firmware.kernel_boot {
        let field = format!("{path}.kernelBoot");
        let arguments = boot.kernel_args.as_deref().unwrap_or_default();
        match &boot.container {
            None => {
                if !arguments.is_empty() {
                    errors.invalid(
                        format!("{field}.kernelArgs"),
                        "kernel arguments cannot be provided without an external kernel",
                    );
                }
            }
            Some(container) => {
                let field = format!("{field}.container");
                if container.image.trim().is_empty() {
                    errors.required(format!("{field}.image"), format!("{field} must be defined with an image"));
                }
                validate_pull_policy(format_args!("{field}"), container.image_pull_policy.as_deref(), errors);
                let files = [("kernelPath", &container.kernel_path), ("initrdPath", &container.initrd_path)];
                if files.iter().all(|(_, file)| file.as_deref().unwrap_or_default().is_empty()) {
                    errors.required(
                        field.clone(),
                        format!("{field} must be defined with at least one of the following: kernelPath, initrdPath"),
                    );
                }
                for (name, file) in files {
                    if let Some(file) = file.as_deref().filter(|file| !file.is_empty()) {
                        let label = format!("{field}.{name}");
                        validate_path(&label, &label, file, errors);
                    }
                }
            }
        }
    }
}

/// Validates the firmware.
pub(super) fn validate(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let domain = &spec.domain;
    let Some(firmware) = &domain.firmware else { return };
    let path = format!("{root}.domain.firmware");
    validate_boot(&path, firmware, errors);
    let efi = firmware.bootloader.as_ref().and_then(|bootloader| bootloader.efi.as_ref());
    let smm = domain.features.as_ref().and_then(|features| features.smm.as_ref()).is_some_and(|smm| smm.is_enabled());
    let tdx = domain.launch_security.as_ref().is_some_and(|security| security.tdx.is_some());
    if efi.is_some_and(|efi| efi.secure_boot.unwrap_or(true)) && !smm && !tdx {
        errors.invalid(
            format!("{root}.domain"),
            format!("{root}.domain has EFI SecureBoot enabled. SecureBoot requires SMM, which is currently disabled."),
        );
    }
    if firmware.serial.as_deref().is_some_and(|serial| serial.chars().any(char::is_control)) {
        errors.invalid(format!("{path}.serial"), format!("{path}.serial must not hold control characters"));
    }
}

/// Returns the error of the UUID of a new VMI. A template may name any, which a clone of its VM removes.
pub(crate) fn validate_uuid(root: &str, spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let uuid = spec.domain.firmware.as_ref().and_then(|firmware| firmware.uuid.as_deref());
    if let Some(uuid) = uuid.filter(|uuid| !uuid.is_empty() && uuid::Uuid::try_parse(uuid).is_err()) {
        let path = format!("{root}.domain.firmware.uuid");
        errors.invalid(&path, format!("{path} '{uuid}' is not a UUID"));
    }
    errors
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    fn firmware(firmware: Value) -> Value {
        json!({"domain": {"firmware": firmware}})
    }

    #[test]
    fn boot_loader_is_bios_or_efi() {
        accepts(firmware(json!({"bootloader": {"bios": {"useSerial": true}}})));
        refuses(
            firmware(json!({"bootloader": {"bios": {}, "efi": {"secureBoot": false}}})),
            "spec.domain.firmware.bootloader",
            "has both EFI and BIOS configured",
        );
        refuses(firmware(json!({"bootloader": {"efi": {}}})), "spec.domain", "SecureBoot requires SMM");
    }

    #[test]
    fn kernel_boot_names_image_and_files() {
        let boot = |boot: Value| firmware(json!({"kernelBoot": boot}));
        let field = "spec.domain.firmware.kernelBoot.container";
        accepts(boot(
            json!({"kernelArgs": "quiet", "container": {"image": "k:1", "kernelPath": "/boot/vmlinuz", "initrdPath": "/boot/initrd"}}),
        ));
        refuses(
            boot(json!({"kernelArgs": "quiet"})),
            "spec.domain.firmware.kernelBoot.kernelArgs",
            "cannot be provided without an external kernel",
        );
        refuses(
            boot(json!({"container": {"image": "", "kernelPath": "/k"}})),
            &format!("{field}.image"),
            "must be defined with an image",
        );
        refuses(
            boot(json!({"container": {"image": "k"}})),
            field,
            "at least one of the following: kernelPath, initrdPath",
        );
        refuses(
            boot(json!({"container": {"image": "k", "kernelPath": "/"}})),
            &format!("{field}.kernelPath"),
            "must not point to root",
        );
        for path in ["boot/vmlinuz", "/boot/../vmlinuz", "/boot//vmlinuz", "/./vmlinuz"] {
            refuses(
                boot(json!({"container": {"image": "k", "kernelPath": path}})),
                &format!("{field}.kernelPath"),
                "must be an absolute path to a file without relative components",
            );
        }
    }

    #[test]
    fn acpi_tables_are_secrets() {
        refuses(firmware(json!({"acpi": {}})), "spec.acpi", "no SLIC nor MSDM volume reference was set");
        refuses(
            firmware(json!({"acpi": {"slicNameRef": "none"}})),
            "spec.acpi.slicNameRef",
            "does not have a matching Volume.",
        );
        refuses(
            firmware(json!({"acpi": {"msdmNameRef": "root"}})),
            "spec.acpi.msdmNameRef",
            "refers to Volume of unsupported type.",
        );
    }

    #[test]
    fn identifiers_are_well_formed() {
        accepts(firmware(json!({"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "serial": "e4686d2c"})));
        refuses(firmware(json!({"serial": "a\nb"})), "spec.domain.firmware.serial", "control characters");
    }

    #[test]
    fn uuid_of_a_vmi_alone_is_checked() {
        accepts(firmware(json!({"uuid": "one"})));
        for (uuid, expected) in [
            ("5d307ca9-b3ef-428c-8861-06e72d69f223", None),
            ("", None),
            ("one", Some(("spec.domain.firmware.uuid", "spec.domain.firmware.uuid 'one' is not a UUID"))),
        ] {
            let errors = super::validate_uuid("spec", &vmi_spec(firmware(json!({"uuid": uuid}))));
            let found = errors.as_slice().first().map(|error| (error.field.as_str(), error.message.as_str()));
            assert_eq!(found, expected, "{uuid}");
        }
    }
}
