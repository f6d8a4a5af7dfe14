//! Labels and annotations of VMIs.

use api::{
    config::ClusterConfig,
    constants::{HELM_TEST_VMI, label},
    fields,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::context::{FieldErrors, names};

/// Returns the errors of the metadata at `root`.
pub(crate) fn validate(root: &str, metadata: &ObjectMeta, config: &ClusterConfig, is_component: bool) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let labels = metadata.labels.iter().flatten();
    for (key, value) in labels.clone() {
        for error in names::qualified_name_errors(key) {
            errors.invalid(format!("{root}.labels"), format!("{root}.labels '{key}': {error}"));
        }
        for error in names::label_value_errors(value) {
            errors.invalid(format!("{root}.labels"), format!("{root}.labels '{key}: {value}': {error}"));
        }
    }
    if !is_component && labels.clone().any(|(key, _)| label::RESERVED_ON_VMI.contains(&key.as_str())) {
        errors.not_supported(
            format!("{root}.labels"),
            "creation of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
        );
    }
    for (key, gated) in fields::GATED_ANNOTATIONS {
        if !annotation_of(metadata, key).is_empty() && !config.enabled(gated.gate) {
            let field = format!("{root}.annotations");
            let message = gated.message.replace("{field}", &format!("{field}.{key}"));
            errors.invalid(field, message);
        }
    }
    errors
}

/// Returns the error of a new VM or VMI in a namespace where virt-controller creates no pods: those of the control plane, and
/// that of the installation, except for the VMI of `helm test`. The admission policy for pods has the same rule.
pub(crate) fn validate_namespace(metadata: &ObjectMeta, namespace: &str, installation: &str) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let of_whom = if namespace == installation && metadata.name.as_deref() != Some(HELM_TEST_VMI) {
        "the installation of KubeVirt"
    } else if namespace != installation && namespace.starts_with("kube-") {
        "the control plane"
    } else {
        return errors;
    };
    errors.forbidden(
        "metadata.namespace",
        format!("namespace {namespace} is that of {of_whom}: no pods of VMIs are created in it"),
    );
    errors
}

/// Adds errors for unsupported annotations in the metadata at `root`.
pub(crate) fn validate_supported(root: &str, metadata: &ObjectMeta, errors: &mut FieldErrors) {
    for key in fields::refused_annotations(|key| Some(annotation_of(metadata, key))) {
        let field = format!("{root}.annotations");
        let message = format!("{field}.{key} is not supported yet");
        errors.not_supported(field, message);
    }
}

fn annotation_of<'a>(metadata: &'a ObjectMeta, key: &str) -> &'a str {
    metadata.annotations.as_ref().and_then(|all| all.get(key)).map(String::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(metadata: Value, is_component: bool) -> Vec<String> {
        let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
        let errors = validate("metadata", &metadata, &ClusterConfig::default(), is_component);
        errors.as_slice().iter().map(|error| error.message.clone()).collect()
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
    fn namespaces_of_components_have_no_vmis() {
        for (namespace, name, refused) in [
            ("default", "a", 0),
            ("kube", "a", 0),
            ("kube-system", "a", 1),
            ("kube-system", "ferrovirt-test", 1),
            ("kubevirt", "a", 1),
            ("kubevirt", "ferrovirt-test", 0),
        ] {
            let metadata = serde_json::from_value(json!({"name": name})).unwrap();
            let errors = validate_namespace(&metadata, namespace, "kubevirt");
            assert_eq!(errors.as_slice().len(), refused, "{namespace}/{name}");
        }
    }

    #[test]
    fn annotations_of_absent_features_are_refused() {
        assert!(check(json!({"annotations": {"kubevirt.io/ignitiondata": ""}}), false).is_empty());
        for key in ["kubevirt.io/ignitiondata", "hooks.kubevirt.io/hookSidecars"] {
            assert_eq!(check(json!({"annotations": {key: "x"}}), false).len(), 1);
        }
    }

    #[test]
    fn unsupported_annotations_are_refused() {
        for (key, value, refused) in [
            ("kubevirt.io/placePCIDevicesOnRootComplex", "true", 0),
            ("kubevirt.io/ignitiondata", "{}", 0),
            ("hooks.kubevirt.io/hookSidecars", "[]", 1),
            ("hooks.kubevirt.io/hookSidecars", "", 0),
        ] {
            let metadata = serde_json::from_value(json!({"annotations": {key: value}})).unwrap();
            let mut errors = FieldErrors::new();
            validate_supported("metadata", &metadata, &mut errors);
            assert_eq!(errors.as_slice().len(), refused, "{key} {value:?}");
        }
    }

    #[test]
    fn labels_are_well_formed() {
        assert!(!check(json!({"labels": {"a b": "c"}}), false).is_empty());
        assert!(!check(json!({"labels": {"a": "c d"}}), false).is_empty());
    }
}
