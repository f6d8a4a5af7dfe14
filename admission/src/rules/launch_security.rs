//! Confidential guests.

use api::{FeatureGate, StartStrategy, VirtualMachineInstanceSpec, config::ClusterConfig};

use super::gates;
use crate::context::FieldErrors;

/// Validates the launch security.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let Some(security) = &spec.domain.launch_security else { return };
    match spec.architecture.as_deref().unwrap_or_default() {
        "amd64" => {}
        "s390x" => return,
        other => {
            errors.invalid(
                format!("{root}.architecture"),
                format!("No launchSecurity support for architecture: {other}"),
            );
            return;
        }
    }
    let field = format!("{root}.launchSecurity");
    let (name, gate) = match (security.sev.is_some(), security.snp.is_some(), security.tdx.is_some()) {
        (true, false, false) => ("SEV", FeatureGate::WorkloadEncryptionSEV),
        (false, true, false) => ("SNP", FeatureGate::WorkloadEncryptionSEV),
        (false, false, true) => ("TDX", FeatureGate::WorkloadEncryptionTDX),
        _ => {
            errors.forbidden(field, "One and only one launchSecurity type can be set");
            return;
        }
    };
    if !gates::is_on("domain.launchSecurity", gate, &field, config, errors) {
        return;
    }
    let domain = &spec.domain;
    let smm = domain.features.as_ref().and_then(|features| features.smm.as_ref()).is_some_and(|smm| smm.is_enabled());
    if name == "TDX" && smm {
        errors.invalid(field.clone(), "TDX does not work along with SMM");
    }
    let efi = domain
        .firmware
        .as_ref()
        .and_then(|firmware| firmware.bootloader.as_ref())
        .and_then(|bootloader| bootloader.efi.as_ref());
    match efi {
        None => errors.invalid(field.clone(), format!("{name} requires OVMF (UEFI)")),
        Some(efi) => {
            if name != "TDX" && efi.secure_boot.unwrap_or(true) {
                errors.invalid(field.clone(), format!("{name} does not work along with SecureBoot"));
            }
            if name != "SEV" && efi.persistent == Some(true) {
                errors.invalid(field.clone(), format!("{name} does not work along with Persistent EFI variables"));
            }
        }
    }
    let attested = security.sev.as_ref().is_some_and(|sev| sev.attestation.is_some());
    if attested && spec.start_strategy != Some(StartStrategy::Paused) {
        errors.invalid(field.clone(), "SEV attestation requires VMI StartStrategy 'Paused'");
    }
    for interface in domain.devices.interfaces.iter().filter(|interface| interface.boot_order.is_some()) {
        errors.invalid(field.clone(), format!("{name} does not work with bootable NICs: {}", interface.name));
    }
}
