//! VMIs that depend on the frequency of the host's time stamp counter.

use crate::{VirtualMachineInstance, vmi::features::FeatureHyperv};

/// Dependency of a VMI on a TSC frequency.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Need {
    /// No dependency.
    Nothing,
    /// Required for migration: the guest measures time with the TSC.
    Migration,
    /// Required for the start: the guest has an invariant TSC.
    Boot,
}

/// Returns the dependency of a VMI. Only x86 guests have a TSC.
#[must_use]
pub fn need(instance: &VirtualMachineInstance) -> Need {
    let spec = &instance.spec;
    if !matches!(spec.architecture.as_deref(), None | Some("" | "amd64")) {
        return Need::Nothing;
    }
    let mut features = spec.domain.cpu.iter().flat_map(|cpu| &cpu.features);
    let invariant = |policy: Option<&str>| matches!(policy, Some("require" | "force"));
    if features.any(|feature| feature.name == "invtsc" && invariant(feature.policy.as_deref())) {
        return Need::Boot;
    }
    let on = |hyperv: &FeatureHyperv| hyperv.reenlightenment.as_ref().and_then(|feature| feature.enabled) == Some(true);
    let hyperv = spec.domain.features.as_ref().and_then(|features| features.hyperv.as_ref());
    if hyperv.is_some_and(on) { Need::Migration } else { Need::Nothing }
}

/// Returns the frequency selected for a VMI that requires one.
#[must_use]
pub fn frequency(instance: &VirtualMachineInstance) -> Option<i64> {
    let hints = instance.status.as_ref()?.topology_hints.as_ref()?;
    hints.tsc_frequency.filter(|frequency| *frequency > 0 && need(instance) != Need::Nothing)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn need_follows_from_features_of_cpu_and_hypervisor() {
        let invtsc = |policy: &str| json!({"cpu": {"features": [{"name": "invtsc", "policy": policy}]}});
        let hyperv = |feature: serde_json::Value| json!({"features": {"hyperv": {"reenlightenment": feature}}});
        for (architecture, domain, expected) in [
            ("amd64", json!({}), Need::Nothing),
            ("amd64", invtsc("require"), Need::Boot),
            ("", invtsc("force"), Need::Boot),
            ("amd64", invtsc("optional"), Need::Nothing),
            ("arm64", invtsc("require"), Need::Nothing),
            ("amd64", hyperv(json!({"enabled": true})), Need::Migration),
            ("amd64", hyperv(json!({"enabled": false})), Need::Nothing),
            ("amd64", hyperv(json!({})), Need::Nothing),
        ] {
            let mut object = json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
                "spec": {"architecture": architecture, "domain": domain},
                "status": {"topologyHints": {"tscFrequency": 2_000_000_000}},
            });
            object["spec"]["domain"]["devices"] = json!({});
            let instance: VirtualMachineInstance = serde_json::from_value(object.clone()).unwrap();
            assert_eq!(need(&instance), expected, "{object}");
            assert_eq!(frequency(&instance).is_some(), expected != Need::Nothing, "{object}");
        }
    }
}
