//! Dependencies of Hyper-V enlightenments.

use api::{
    VirtualMachineInstanceSpec,
    vmi::features::{FeatureHyperv, FeatureState},
};

use crate::context::FieldErrors;

/// Path of the enlightenments in messages of the reference.
const PATH: &str = "spec.domain.features.hyperv.domain.features.hyperv";

/// Returns the errors of a VMI's enlightenments.
pub(crate) fn validate(spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let Some(features) = &spec.domain.features else { return errors };
    let Some(hyperv) = &features.hyperv else { return errors };
    for (name, needed, set, there) in dependencies(hyperv) {
        if set && !there {
            let field = format!("{PATH}.{name}");
            errors.invalid(field.clone(), format!("'{field}' requires '{PATH}.{needed}', which was disabled."));
        }
    }
    if hyperv.evmcs.as_ref().is_some_and(FeatureState::is_enabled) {
        let cpu_features = spec.domain.cpu.as_ref().map(|cpu| cpu.features.as_slice()).unwrap_or_default();
        if cpu_features.is_empty() {
            errors.required("spec.domain.cpu.features", "vmx cpu feature is required when evmcs is set");
        }
        for (index, feature) in cpu_features.iter().enumerate().filter(|(_, feature)| feature.name == "vmx") {
            if feature.policy.as_deref() != Some("require") {
                errors.invalid(
                    format!("spec.domain.cpu.features[{index}].policy"),
                    "vmx cpu feature has to be set to require policy",
                );
            }
        }
    }
    if features.hyperv_passthrough.as_ref().is_some_and(|passthrough| passthrough.enabled.unwrap_or(true)) {
        errors.invalid(
            "spec.domain.features.hyperv",
            "Cannot explicitly set hyperV features if HypervPassthrough is being used. Please use either HyperV or HypervPassthrough.",
        );
    }
    errors
}

type Dependency = (&'static str, &'static str, bool, bool);

/// Dependencies of enlightenments. Only explicit values count: with defaults set, all are explicit.
fn dependencies(hyperv: &FeatureHyperv) -> [Dependency; 5] {
    let on = |state: &Option<FeatureState>| state.as_ref().is_some_and(|state| state.enabled == Some(true));
    let timer = hyperv.synictimer.as_ref().is_some_and(|timer| timer.enabled == Some(true));
    let flush = hyperv.tlbflush.as_ref().is_some_and(|flush| flush.enabled == Some(true));
    let (vpindex, synic) = (on(&hyperv.vpindex), on(&hyperv.synic));
    [
        ("evmcs", "vapic", on(&hyperv.evmcs), on(&hyperv.vapic)),
        ("ipi", "vpindex", on(&hyperv.ipi), vpindex),
        ("tlbflush", "vpindex", flush, vpindex),
        ("synictimer", "synic", timer, synic),
        ("synic", "vpindex", synic, vpindex),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::rules::testing::vmi_spec;

    fn check(domain: Value) -> Vec<String> {
        let errors = validate(&vmi_spec(json!({"domain": domain})));
        errors.as_slice().iter().map(|error| error.message.clone()).collect()
    }

    #[test]
    fn enlightenments_need_each_other() {
        assert!(check(json!({"features": {"hyperv": {"synic": {}, "vpindex": {}}}})).is_empty());
        assert!(check(json!({"features": {"hyperv": {"synic": {}, "ipi": {}, "tlbflush": {}}}})).is_empty());
        let found = check(json!({"features": {"hyperv": {"synic": {"enabled": true}, "vpindex": {"enabled": false}}}}));
        assert!(found[0].contains("synic' requires") && found[0].ends_with("vpindex', which was disabled."));
    }

    #[test]
    fn evmcs_needs_vmx() {
        let evmcs = json!({"hyperv": {"evmcs": {}, "vapic": {}}});
        let vmx = |policy| json!({"features": evmcs, "cpu": {"features": [{"name": "vmx", "policy": policy}]}});
        assert!(check(vmx("require")).is_empty());
        assert_eq!(check(vmx("optional")), ["vmx cpu feature has to be set to require policy"]);
        assert_eq!(check(json!({"features": evmcs})), ["vmx cpu feature is required when evmcs is set"]);
        assert!(check(json!({"features": evmcs, "cpu": {"features": [{"name": "pcid"}]}})).is_empty());
    }

    #[test]
    fn passthrough_excludes_a_choice() {
        assert_eq!(check(json!({"features": {"hyperv": {}, "hypervPassthrough": {}}})).len(), 1);
    }
}
