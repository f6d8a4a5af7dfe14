//! Firmware, boot and SMBIOS.

use std::path::{Path, PathBuf};

use api::{StartStrategy, VirtualMachineInstance};

use super::{DomainError, Environment, given, xml::Element, yes_no};
use crate::storage::Prepared;

/// UEFI firmware: code and the template of its variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Uefi {
    pub(crate) code: PathBuf,
    /// Template of the variables.
    pub(crate) vars: PathBuf,
    /// Enforces secure boot.
    pub(crate) secure: bool,
}

/// File names of code and variables with secure boot and enrolled keys; distributions differ.
const SECURE: [(&str, &str); 2] =
    [("OVMF_CODE.secboot.fd", "OVMF_VARS.secboot.fd"), ("OVMF_CODE_4M.secboot.fd", "OVMF_VARS_4M.ms.fd")];
/// File names without secure boot. A build with secure boot needs SMM, which the guest may not have.
const PLAIN: [(&str, &str); 3] = [
    ("OVMF_CODE.fd", "OVMF_VARS.fd"),
    ("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"),
    ("OVMF_CODE.secboot.fd", "OVMF_VARS.fd"),
];

/// File names for arm64, which has no secure boot.
const ARM64: [(&str, &str); 1] = [("AAVMF_CODE.fd", "AAVMF_VARS.fd")];

/// Name under which Ignition looks for its configuration in the firmware configuration device.
const IGNITION_KEY: &str = "opt/com.coreos/config";

/// Finds UEFI firmware of a VMI in the first directory that has it.
pub(crate) fn select_uefi(
    vmi: &VirtualMachineInstance,
    directories: &[&Path],
    exists: impl Fn(&Path) -> bool,
) -> Option<Uefi> {
    let efi = vmi.spec.domain.firmware.as_ref()?.bootloader.as_ref()?.efi.as_ref()?;
    let secure = efi.secure_boot.unwrap_or(true);
    let candidates: &[(&str, &str)] = match (vmi.spec.is_arm64(), secure) {
        (true, true) => &[],
        (true, false) => &ARM64,
        (false, true) => &SECURE,
        (false, false) => &PLAIN,
    };
    directories
        .iter()
        .flat_map(|directory| candidates.iter().map(|(code, vars)| (directory.join(code), directory.join(vars))))
        .find(|(code, vars)| exists(code) && exists(vars))
        .map(|(code, vars)| Uefi { code, vars, secure })
}

/// Renders the `<os>` element.
pub(super) fn os(vmi: &VirtualMachineInstance, env: &Environment<'_>) -> Result<Element, DomainError> {
    let (arch, usual) = if vmi.spec.is_arm64() { ("aarch64", "virt") } else { ("x86_64", "q35") };
    let machine_type =
        vmi.spec.domain.machine.as_ref().map(|m| m.type_.as_str()).filter(|t| !t.is_empty()).unwrap_or(usual);
    let mut os =
        Element::new("os").child(Element::new("type").with("arch", arch).with("machine", machine_type).text("hvm"));
    let firmware = vmi.spec.domain.firmware.as_ref();
    if let Some(efi) = firmware.and_then(|f| f.bootloader.as_ref()).and_then(|b| b.efi.as_ref()) {
        let secure = efi.secure_boot.unwrap_or(true);
        let uefi = env.uefi.filter(|uefi| uefi.secure == secure).ok_or(DomainError::NoFirmware(secure))?;
        os = os
            .child(
                Element::new("loader")
                    .with("readonly", "yes")
                    .with("secure", yes_no(secure))
                    .with("type", "pflash")
                    .text(uefi.code.to_string_lossy()),
            )
            .child(
                Element::new("nvram").with("template", uefi.vars.to_string_lossy()).text(env.nvram.to_string_lossy()),
            );
    }
    if let Some(boot) = firmware.and_then(|f| f.kernel_boot.as_ref()) {
        os = os
            .children(env.prepared.kernel.as_ref().map(|path| Element::new("kernel").text(path.to_string_lossy())))
            .children(env.prepared.initrd.as_ref().map(|path| Element::new("initrd").text(path.to_string_lossy())))
            .children(given(&boot.kernel_args).map(|arguments| Element::new("cmdline").text(arguments)));
    }
    if let Some(acpi) = firmware.and_then(|f| f.acpi.as_ref()) {
        let mut tables = Element::new("acpi");
        for (kind, volume) in [("slic", &acpi.slic_name_ref), ("msdm", &acpi.msdm_name_ref)] {
            let Some(volume) = given(volume) else { continue };
            if !vmi.spec.volumes.iter().any(|v| v.name == volume && v.secret.is_some()) {
                return Err(DomainError::AcpiTable(kind));
            }
            let path = env.secrets.join(volume).join(format!("{kind}.bin"));
            tables = tables.child(Element::new("table").with("type", kind).text(path.to_string_lossy()));
        }
        os = os.child(tables);
    }
    let is_paused = vmi.spec.start_strategy == Some(StartStrategy::Paused);
    let use_serial = firmware.and_then(|firmware| firmware.bootloader.as_ref()?.bios.as_ref()?.use_serial);
    Ok(os
        .children(is_paused.then(|| Element::new("bootmenu").with("enable", "yes").with("timeout", "10000")))
        .child(Element::new("smbios").with("mode", "sysinfo"))
        .children((use_serial == Some(true)).then(|| Element::new("bios").with("useserial", "yes"))))
}

/// Renders the `<sysinfo>` element through which the guest reads its Ignition configuration.
pub(super) fn ignition(prepared: &Prepared) -> Option<Element> {
    let file = prepared.ignition.as_ref()?;
    let entry = Element::new("entry").with("name", IGNITION_KEY).with("file", file.to_string_lossy());
    Some(Element::new("sysinfo").with("type", "fwcfg").child(entry))
}

/// Renders the `<sysinfo>` element of SMBIOS.
pub(super) fn sysinfo(vmi: &VirtualMachineInstance, options: &protocol::VmiOptions) -> Element {
    let entry = |name: &'static str, value: Option<&str>| {
        value.filter(|v| !v.is_empty()).map(|value| Element::new("entry").with("name", name).text(value))
    };
    let firmware = vmi.spec.domain.firmware.as_ref();
    let mut system = Element::new("system");
    if let Some(smbios) = &options.smbios {
        system = system
            .children(entry("manufacturer", Some(&smbios.manufacturer)))
            .children(entry("product", Some(&smbios.product)))
            .children(entry("version", Some(&smbios.version)));
    }
    system = system
        .children(entry("serial", firmware.and_then(|f| f.serial.as_deref())))
        .children(entry("uuid", firmware.and_then(|f| f.uuid.as_deref())));
    if let Some(smbios) = &options.smbios {
        system = system.children(entry("sku", Some(&smbios.sku))).children(entry("family", Some(&smbios.family)));
    }
    let mut sysinfo = Element::new("sysinfo").with("type", "smbios").child(system);
    if let Some(chassis) = &vmi.spec.domain.chassis {
        sysinfo = sysinfo.child(
            Element::new("chassis")
                .children(entry("manufacturer", chassis.manufacturer.as_deref()))
                .children(entry("version", chassis.version.as_deref()))
                .children(entry("serial", chassis.serial.as_deref()))
                .children(entry("asset", chassis.asset.as_deref()))
                .children(entry("sku", chassis.sku.as_deref())),
        );
    }
    sysinfo
}
