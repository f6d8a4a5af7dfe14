//! Guests of arm64, which QEMU emulates on nodes of amd64: the gate that they need, and the fields that the machine type `virt` does
//! not have. Rules of the reference for them are in [`crate::rules::architecture`].

use api::{FeatureGate, VirtualMachineInstanceSpec, config::ClusterConfig, vmi::features::FeatureState};

use super::super::gates;
use crate::context::FieldErrors;

/// Path of a field, and test for its use.
type Entry = (&'static str, fn(&VirtualMachineInstanceSpec) -> bool);

/// Fields that libvirt refuses for this machine type, or takes without an effect.
const LACKS: &[Entry] = &[
    ("domain.clock.timer", |spec| spec.domain.clock.as_ref().is_some_and(|clock| clock.timer.is_some())),
    ("domain.cpu.features", |spec| spec.domain.cpu.as_ref().is_some_and(|cpu| !cpu.features.is_empty())),
    ("domain.cpu.maxSockets", |spec| {
        spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.max_sockets.unwrap_or(0) > cpu.sockets.unwrap_or(1).max(1))
    }),
    ("domain.devices.panicDevices", |spec| {
        let models = spec.domain.devices.panic_devices.iter().filter_map(|device| device.model.as_deref());
        models.into_iter().any(|model| !["", "pvpanic"].contains(&model))
    }),
    ("domain.features.apic", |spec| has_feature(spec, |features| features.apic.is_some())),
    ("domain.features.hyperv", |spec| has_feature(spec, |features| features.hyperv.is_some())),
    ("domain.features.hypervPassthrough", |spec| has_feature(spec, |features| features.hyperv_passthrough.is_some())),
    ("domain.features.kvm", |spec| has_feature(spec, |features| features.kvm.is_some())),
    ("domain.features.pvspinlock", |spec| has_feature(spec, |features| features.pvspinlock.is_some())),
    ("domain.features.smm", |spec| {
        has_feature(spec, |features| features.smm.as_ref().is_some_and(FeatureState::is_enabled))
    }),
    ("domain.firmware.acpi", |spec| spec.domain.firmware.as_ref().is_some_and(|firmware| firmware.acpi.is_some())),
    ("domain.firmware.bootloader.efi.secureBoot", |spec| {
        let firmware = spec.domain.firmware.as_ref();
        let efi = firmware.and_then(|firmware| firmware.bootloader.as_ref()?.efi.as_ref());
        efi.is_some_and(|efi| efi.secure_boot == Some(true))
    }),
];

fn has_feature(spec: &VirtualMachineInstanceSpec, is_set: fn(&api::vmi::features::Features) -> bool) -> bool {
    spec.domain.features.as_ref().is_some_and(is_set)
}

/// Adds an error if the gate is off, else one for each field that such a guest does not have.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let gate = FeatureGate::CrossArchitectureVirtualization;
    if !spec.is_arm64() || !gates::is_on("architecture", gate, format_args!("{root}.architecture"), config, errors) {
        return;
    }
    for (path, _) in LACKS.iter().filter(|(_, used)| used(spec)) {
        let message = format!("{root}.{path} is not supported: guests of arm64 do not have it");
        errors.not_supported(format!("{root}.{path}"), message);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;
    use crate::rules::testing::vmi_spec;

    fn refused(change: Value, gates: &[&str]) -> Vec<String> {
        let mut change = change;
        change["architecture"] = json!("arm64");
        let feature_gates = gates.iter().map(|gate| (*gate).to_owned()).collect();
        let mut errors = FieldErrors::new();
        let config = ClusterConfig { feature_gates, ..ClusterConfig::default() };
        validate("spec", &vmi_spec(change), &config, &mut errors);
        errors.as_slice().iter().map(|error| error.field.clone()).collect()
    }

    #[test]
    fn the_gate_is_needed() {
        assert_eq!(refused(json!({}), &[]), ["spec.architecture"]);
        assert_eq!(refused(json!({}), &["MultiArchitecture"]), ["spec.architecture"]);
        assert!(refused(json!({}), &["CrossArchitectureVirtualization"]).is_empty());
        let mut errors = FieldErrors::new();
        validate("spec", &vmi_spec(json!({"architecture": "amd64"})), &ClusterConfig::default(), &mut errors);
        assert!(errors.is_empty());
    }

    #[test]
    fn each_field_that_the_machine_lacks_is_named() {
        let mut named = BTreeSet::new();
        for (domain, field) in [
            (json!({"clock": {"utc": {}, "timer": {"hpet": {}}}}), "domain.clock.timer"),
            (json!({"cpu": {"features": [{"name": "sve"}]}}), "domain.cpu.features"),
            (json!({"cpu": {"sockets": 1, "maxSockets": 2}}), "domain.cpu.maxSockets"),
            (json!({"devices": {"panicDevices": [{"model": "isa"}]}}), "domain.devices.panicDevices"),
            (json!({"features": {"apic": {}}}), "domain.features.apic"),
            (json!({"features": {"hyperv": {}}}), "domain.features.hyperv"),
            (json!({"features": {"hypervPassthrough": {}}}), "domain.features.hypervPassthrough"),
            (json!({"features": {"kvm": {"hidden": true}}}), "domain.features.kvm"),
            (json!({"features": {"pvspinlock": {}}}), "domain.features.pvspinlock"),
            (json!({"features": {"smm": {}}}), "domain.features.smm"),
            (json!({"firmware": {"acpi": {"slicNameRef": "s"}}}), "domain.firmware.acpi"),
            (
                json!({"firmware": {"bootloader": {"efi": {"secureBoot": true}}}}),
                "domain.firmware.bootloader.efi.secureBoot",
            ),
        ] {
            let found = refused(json!({"domain": domain}), &["CrossArchitectureVirtualization"]);
            assert_eq!(found, [format!("spec.{field}")], "{domain}");
            named.insert(field);
        }
        assert_eq!(named, LACKS.iter().map(|(path, _)| *path).collect(), "a row for each entry");
        let has = json!({
            "cpu": {"model": "host-passthrough", "sockets": 2, "maxSockets": 2},
            "devices": {"panicDevices": [{"model": "pvpanic"}], "tpm": {"persistent": true}, "rng": {}},
            "features": {"acpi": {}, "smm": {"enabled": false}},
            "firmware": {"bootloader": {"efi": {"secureBoot": false, "persistent": true}}},
        });
        assert!(refused(json!({"domain": has}), &["CrossArchitectureVirtualization"]).is_empty());
    }
}
