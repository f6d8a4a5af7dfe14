//! Boot firmware, direct kernel boot, and paths inside images.

use api::{VirtualMachineInstanceSpec, vmi::firmware::Firmware};

use super::volumes::pull_policy;
use crate::causes::Causes;

/// What is wrong with the ACPI tables.
pub(super) fn acpi(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let Some(acpi) = spec.domain.firmware.as_ref().and_then(|firmware| firmware.acpi.as_ref()) else { return };
    let field = format!("{root}.acpi");
    let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    let references = [("slicNameRef", given(&acpi.slic_name_ref)), ("msdmNameRef", given(&acpi.msdm_name_ref))];
    if references.iter().all(|(_, name)| name.is_none()) {
        causes.invalid(field, "ACPI was set but no SLIC nor MSDM volume reference was set");
        return;
    }
    for (which, name) in references {
        let Some(name) = name else { continue };
        match spec.volumes.iter().find(|volume| volume.name == name) {
            None => causes.invalid(format!("{field}.{which}"), format!("{field} does not have a matching Volume.")),
            Some(volume) if volume.secret.is_none() => {
                causes.invalid(format!("{field}.{which}"), format!("{field} refers to Volume of unsupported type."));
            }
            Some(_) => {}
        }
    }
}

/// What is wrong with boot loader and kernel of the firmware at `path`, of a machine or a preset.
pub(crate) fn boot(path: &str, firmware: &Firmware, causes: &mut Causes) {
    if let Some(bootloader) = &firmware.bootloader {
        let field = format!("{path}.bootloader");
        if bootloader.efi.is_some() && bootloader.bios.is_some() {
            let message = format!("{field} has both EFI and BIOS configured, but they are mutually exclusive.");
            causes.invalid(field, message);
        }
    }
    if let Some(boot) = &firmware.kernel_boot {
        let field = format!("{path}.kernelBoot");
        let arguments = boot.kernel_args.as_deref().unwrap_or_default();
        match &boot.container {
            None => {
                if !arguments.is_empty() {
                    causes.invalid(
                        format!("{field}.kernelArgs"),
                        "kernel arguments cannot be provided without an external kernel",
                    );
                }
            }
            Some(container) => {
                let field = format!("{field}.container");
                if container.image.trim().is_empty() {
                    causes.required(format!("{field}.image"), format!("{field} must be defined with an image"));
                }
                pull_policy(format_args!("{field}"), container.image_pull_policy.as_deref(), causes);
                let files = [("kernelPath", &container.kernel_path), ("initrdPath", &container.initrd_path)];
                if files.iter().all(|(_, file)| file.as_deref().unwrap_or_default().is_empty()) {
                    causes.required(
                        field.clone(),
                        format!("{field} must be defined with at least one of the following: kernelPath, initrdPath"),
                    );
                }
                for (name, file) in files {
                    if let Some(file) = file.as_deref().filter(|file| !file.is_empty()) {
                        let label = format!("{field}.{name}");
                        image_path(&label, &label, file, causes);
                    }
                }
            }
        }
    }
}

/// What is wrong with the firmware.
pub(super) fn causes(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let domain = &spec.domain;
    let Some(firmware) = &domain.firmware else { return };
    let path = format!("{root}.domain.firmware");
    boot(&path, firmware, causes);
    let efi = firmware.bootloader.as_ref().and_then(|bootloader| bootloader.efi.as_ref());
    let smm = domain.features.as_ref().and_then(|features| features.smm.as_ref()).is_some_and(|smm| smm.is_enabled());
    let tdx = domain.launch_security.as_ref().is_some_and(|security| security.tdx.is_some());
    if efi.is_some_and(|efi| efi.secure_boot.unwrap_or(true)) && !smm && !tdx {
        causes.invalid(
            format!("{root}.domain"),
            format!("{root}.domain has EFI SecureBoot enabled. SecureBoot requires SMM, which is currently disabled."),
        );
    }
    if let Some(uuid) = firmware.uuid.as_deref().filter(|uuid| !uuid.is_empty())
        && !is_uuid(uuid)
    {
        causes.invalid(format!("{path}.uuid"), format!("{path}.uuid '{uuid}' is not a UUID"));
    }
    if firmware.serial.as_deref().is_some_and(|serial| serial.chars().any(char::is_control)) {
        causes.invalid(format!("{path}.serial"), format!("{path}.serial must not hold control characters"));
    }
}

fn is_uuid(text: &str) -> bool {
    uuid::Uuid::try_parse(text).is_ok()
}

/// Paths inside images are absolute and clean, so that nobody has to wonder where they lead.
pub(super) fn image_path(field: &str, label: &str, path: &str, causes: &mut Causes) {
    if path == "/" {
        causes.invalid(field, format!("{label} must not point to root"));
        return;
    }
    let clean = path.strip_suffix('/').unwrap_or(path);
    let parts = clean.strip_prefix('/');
    let valid = parts.is_some_and(|parts| parts.split('/').all(|part| !["", ".", ".."].contains(&part)))
        && !path.contains('\0');
    if !valid {
        causes.invalid(field, format!("{label} must be an absolute path to a file without relative components"));
    }
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
        refuses(firmware(json!({"uuid": "one"})), "spec.domain.firmware.uuid", "is not a UUID");
        refuses(firmware(json!({"serial": "a\nb"})), "spec.domain.firmware.serial", "control characters");
    }
}
