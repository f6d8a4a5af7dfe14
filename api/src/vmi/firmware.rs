//! Boot firmware and direct kernel boot.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Boot firmware.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Firmware {
    /// ACPI tables from Secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acpi: Option<Acpi>,
    /// BIOS or EFI; default: BIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootloader: Option<Bootloader>,
    /// Boot a kernel from a container image without boot loader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_boot: Option<Box<KernelBoot>>,
    /// System serial number shown in SMBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// System UUID shown in SMBIOS; default: a generated one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// ACPI tables from Secret volumes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Acpi {
    /// Volume with the MSDM table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub msdm_name_ref: Option<String>,
    /// Volume with the SLIC table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slic_name_ref: Option<String>,
}

/// Boot loader; exactly one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Bootloader {
    /// SeaBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bios: Option<BiOs>,
    /// OVMF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub efi: Option<Efi>,
}

/// SeaBIOS settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BiOs {
    /// Show BIOS output on the serial console.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_serial: Option<bool>,
}

/// OVMF settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Efi {
    /// Keep the variable store across restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Enforce secure boot; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
}

/// Direct kernel boot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelBoot {
    /// Image with kernel and initrd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<KernelBootContainer>,
    /// Kernel command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_args: Option<String>,
}

/// Image with boot files.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelBootContainer {
    /// Image reference.
    pub image: String,
    /// Pull policy of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Secret with the registry's credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_secret: Option<String>,
    /// Absolute path of the initrd in the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initrd_path: Option<String>,
    /// Absolute path of the kernel in the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_path: Option<String>,
}
