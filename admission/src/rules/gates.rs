//! Fields that depend on a feature gate. The rows of [`api::fields`] hold the gates and the messages.

use std::fmt::Display;

use api::{FeatureGate, config::ClusterConfig, fields};

use crate::context::FieldErrors;

/// Returns true if the feature gates of a field are on, and else adds the error. `path` is that of the row, `field` the one that
/// the error names.
pub(super) fn are_on(path: &str, field: impl Display, config: &ClusterConfig, errors: &mut FieldErrors) -> bool {
    let gates = fields::row(path).0.map_or(&[][..], |row| row.gates);
    gates.iter().all(|gated| is_on(path, gated.gate, &field, config, errors))
}

/// Does the same for a use of the field that depends on one of its gates.
pub(super) fn is_on(
    path: &str,
    gate: FeatureGate,
    field: impl Display,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) -> bool {
    let Some(gated) = fields::gated(path, gate).filter(|_| !config.enabled(gate)) else { return true };
    let field = field.to_string();
    let message = gated.message.replace("{field}", &field);
    errors.invalid(field, message);
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path whose row is missing or has no gate would be accepted. The gate of NUMA cannot be turned off.
    #[test]
    fn every_field_that_a_rule_asks_for_is_refused_without_its_gate() {
        for (path, gate) in [
            ("architecture", FeatureGate::CrossArchitectureVirtualization),
            ("domain.devices.autoattachVSOCK", FeatureGate::Vsock),
            ("domain.devices.disks[].cdrom.bus", FeatureGate::DeclarativeHotplugVolumes),
            ("domain.devices.downwardMetrics", FeatureGate::DownwardMetrics),
            ("domain.devices.filesystems[].name", FeatureGate::EnableVirtioFsStorageVolumes),
            ("domain.devices.gpus[].claimName", FeatureGate::GPUsWithDRA),
            ("domain.devices.hostDevices[].claimName", FeatureGate::HostDevicesWithDRA),
            ("domain.devices.hostDevices[].name", FeatureGate::HostDevices),
            ("domain.devices.interfaces[].passtBinding", FeatureGate::PasstBinding),
            ("domain.devices.interfaces[].portRanges[].start", FeatureGate::PortRangesSpec),
            ("domain.launchSecurity", FeatureGate::WorkloadEncryptionSEV),
            ("domain.launchSecurity", FeatureGate::WorkloadEncryptionTDX),
            ("domain.memory.reservedOverhead.memLock", FeatureGate::ReservedOverheadMemlock),
            ("domain.rebootPolicy", FeatureGate::RebootPolicy),
            ("networks[].resourceClaim", FeatureGate::NetworkDevicesWithDRA),
            ("utilityVolumes", FeatureGate::UtilityVolumes),
            ("volumes[].downwardMetrics", FeatureGate::DownwardMetrics),
            ("volumes[].hostDisk.path", FeatureGate::HostDisk),
        ] {
            let name = vec![gate.name().to_owned()];
            let off = ClusterConfig { disabled_feature_gates: name.clone(), ..ClusterConfig::default() };
            let on = ClusterConfig { feature_gates: name, ..ClusterConfig::default() };
            for (config, expected) in [(off, false), (on, true)] {
                let mut errors = FieldErrors::new();
                assert_eq!(is_on(path, gate, "spec.x", &config, &mut errors), expected, "{path} {gate}");
                assert_eq!(errors.is_empty(), expected, "{path} {gate}");
                if !expected {
                    assert!(!are_on(path, "spec.x", &config, &mut errors), "{path} {gate}");
                }
            }
        }
    }
}
