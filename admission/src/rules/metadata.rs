//! Labels and annotations of a machine.

use api::{
    config::ClusterConfig,
    constants::{annotation, label},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{causes::Causes, names};

/// What is wrong with the metadata at `root`.
pub fn causes(root: &str, metadata: &ObjectMeta, config: &ClusterConfig, is_component: bool) -> Causes {
    let mut causes = Causes::new();
    let labels = metadata.labels.iter().flatten();
    for (key, value) in labels.clone() {
        for error in names::qualified_name_errors(key) {
            causes.invalid(format!("{root}.labels"), format!("{root}.labels '{key}': {error}"));
        }
        for error in names::label_value_errors(value) {
            causes.invalid(format!("{root}.labels"), format!("{root}.labels '{key}: {value}': {error}"));
        }
    }
    if !is_component && labels.clone().any(|(key, _)| label::RESERVED_ON_VMI.contains(&key.as_str())) {
        causes.not_supported(
            format!("{root}.labels"),
            "creation of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
        );
    }
    for (key, gate, message) in [
        (
            annotation::IGNITION_DATA,
            "ExperimentalIgnitionSupport",
            "ExperimentalIgnitionSupport feature gate is not enabled in kubevirt-config",
        ),
        (annotation::HOOK_SIDECARS, "Sidecar", "sidecar feature gate is not enabled in kubevirt-config"),
    ] {
        let set = metadata.annotations.as_ref().and_then(|all| all.get(key)).is_some_and(|value| !value.is_empty());
        if !set {
            continue;
        }
        let field = format!("{root}.annotations");
        if config.enabled(gate) {
            causes.not_supported(field.clone(), format!("{field}.{key} is not supported yet"));
        } else {
            let message = format!("{message}, invalid entry {field}.{key}");
            causes.invalid(field, message);
        }
    }
    let key = annotation::PLACE_PCI_DEVICES_ON_ROOT_COMPLEX;
    if metadata.annotations.as_ref().and_then(|all| all.get(key)).is_some_and(|value| value == "true") {
        let field = format!("{root}.annotations");
        causes.not_supported(field.clone(), format!("{field}.{key} is not supported yet"));
    }
    causes
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(metadata: Value, is_component: bool) -> Vec<String> {
        let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
        let causes = causes("metadata", &metadata, &ClusterConfig::default(), is_component);
        causes.as_slice().iter().map(|cause| cause.message.clone()).collect()
    }

    #[test]
    fn reserved_labels_are_for_components() {
        let metadata = json!({"labels": {"kubevirt.io/nodeName": "n1"}});
        assert!(check(metadata.clone(), true).is_empty());
        assert_eq!(
            check(metadata, false),
            ["creation of the following reserved kubevirt.io/ labels on a VMI object is prohibited"]
        );
        assert!(check(json!({"labels": {"app": "web"}}), false).is_empty());
    }

    #[test]
    fn annotations_of_absent_features_are_refused() {
        assert!(check(json!({"annotations": {"kubevirt.io/ignitiondata": ""}}), false).is_empty());
        for key in ["kubevirt.io/ignitiondata", "hooks.kubevirt.io/hookSidecars"] {
            assert_eq!(check(json!({"annotations": {key: "x"}}), false).len(), 1);
        }
    }

    #[test]
    fn placement_of_devices_that_is_not_carried_out_is_refused() {
        let key = "kubevirt.io/placePCIDevicesOnRootComplex";
        for (value, refused) in [("true", 1), ("false", 0), ("True", 0), ("", 0)] {
            assert_eq!(check(json!({"annotations": {key: value}}), false).len(), refused, "{value:?}");
        }
    }

    #[test]
    fn labels_are_well_formed() {
        assert!(!check(json!({"labels": {"a b": "c"}}), false).is_empty());
        assert!(!check(json!({"labels": {"a": "c d"}}), false).is_empty());
    }
}
