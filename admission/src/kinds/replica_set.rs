//! Replica sets of VMIs: rules.

use api::{VirtualMachineInstanceReplicaSet, config::ClusterConfig};

use super::host_disk;
use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, semantic},
    rules::{self, unsupported},
};

/// Serves `/virtualmachinereplicaset-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let set: VirtualMachineInstanceReplicaSet = context.object()?;
    let old: Option<VirtualMachineInstanceReplicaSet> = context.old_object()?;
    // The end of a replica set, and changes of metadata, wait for no repair of a template that was stored earlier.
    let is_same = old.as_ref().is_some_and(|old| semantic::equal(&set.spec, &old.spec));
    if set.metadata.deletion_timestamp.is_some() || is_same {
        return Ok(context.allowed());
    }
    let is_component = context.is_component();
    let mut errors = field_errors(&set, old.as_ref(), context.config, is_component);
    let former = old.as_ref().map(|old| &old.spec.template);
    host_disk::validate_right(context, "spec.template", &set.spec.template, former, &mut errors)?;
    Ok(context.decide(errors, if is_component { vec![] } else { warnings(&set, old.as_ref()) }))
}

/// Returns warnings about a new template that no guest can use.
fn warnings(set: &VirtualMachineInstanceReplicaSet, old: Option<&VirtualMachineInstanceReplicaSet>) -> Vec<String> {
    let template = &set.spec.template;
    let Some(spec) = template.spec.as_ref().filter(|_| old.is_none_or(|old| old.spec.template != *template)) else {
        return vec![];
    };
    let mut warnings = rules::cloud_init::warnings("spec.template.spec", spec);
    warnings.extend(rules::resources::memory_warning("spec.template.spec", spec));
    warnings
}

/// Returns the errors of a new or changed replica set.
pub fn field_errors(
    set: &VirtualMachineInstanceReplicaSet,
    old: Option<&VirtualMachineInstanceReplicaSet>,
    config: &ClusterConfig,
    is_component: bool,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let root = "spec.template.spec";
    let Some(spec) = &set.spec.template.spec else {
        errors.required("spec.template", "missing virtual machine template.");
        return errors;
    };
    let metadata = &set.spec.template.metadata;
    // A replica set with a stored invalid template can still be scaled down or deleted.
    if old.is_none_or(|old| old.spec.template.metadata != *metadata) {
        errors.extend(rules::metadata::validate("spec.template.metadata", metadata, config, is_component));
    }
    let creates_vmis = old.is_none_or(|old| changes_template_or_grows(set, old));
    if creates_vmis {
        errors.extend(rules::grace::validate_annotations("spec.template.metadata", metadata, spec, config));
        errors.extend(rules::validate_spec(root, spec, config));
    }
    rules::label_selector::validate_match(&set.spec.selector, metadata.labels.as_ref(), &mut errors);
    if set.spec.replicas.is_some_and(|replicas| replicas < 0) {
        errors.invalid("spec.replicas", "spec.replicas must be greater than or equal to 0.");
    }
    if old.is_none() {
        errors.extend(rules::discontinued_gates(spec, config));
    }
    errors.or_else(|errors| {
        if creates_vmis {
            unsupported::spec(root, spec, config, errors);
            rules::metadata::validate_supported("spec.template.metadata", metadata, errors);
        }
    })
}

/// Returns true if a change modifies the template or adds replicas. A replica set whose stored template has unsupported fields or
/// breaks a rule can still be scaled down, labelled or deleted.
fn changes_template_or_grows(set: &VirtualMachineInstanceReplicaSet, old: &VirtualMachineInstanceReplicaSet) -> bool {
    let replicas = |set: &VirtualMachineInstanceReplicaSet| set.spec.replicas.unwrap_or(1);
    replicas(set) > replicas(old) || !semantic::equal(&set.spec.template, &old.spec.template)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use api::constants::label;

    use super::*;
    use crate::rules::testing::vmi_spec;

    fn set(replicas: u32, change: Value) -> VirtualMachineInstanceReplicaSet {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet", "metadata": {"name": "r"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": vmi_spec(change)},
            },
        }))
        .unwrap()
    }

    #[test]
    fn template_of_a_replica_set_has_no_reserved_labels() {
        let with = |key: &str, replicas: u32| {
            let mut set = set(replicas, json!({}));
            set.spec.template.metadata.labels.get_or_insert_default().insert(key.to_owned(), "n1".to_owned());
            set
        };
        let refused = |set: &VirtualMachineInstanceReplicaSet, old: Option<&VirtualMachineInstanceReplicaSet>| {
            let errors = field_errors(set, old, &ClusterConfig::default(), false);
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
        };
        let field = "spec.template.metadata.labels";
        for key in label::RESERVED_ON_VMI {
            let reserved = with(key, 3);
            assert_eq!(refused(&reserved, None), [field], "{key}");
            assert_eq!(refused(&reserved, Some(&set(3, json!({})))), [field], "{key}");
            // A stored one.
            assert_eq!(refused(&with(key, 1), Some(&reserved)), Vec::<String>::new(), "{key}");
            assert!(field_errors(&reserved, None, &ClusterConfig::default(), true).is_empty(), "{key}");
        }
        assert_eq!(refused(&with("team", 3), None), Vec::<String>::new());
        let mut annotated = set(1, json!({}));
        let placed = "hooks.kubevirt.io/hookSidecars".to_owned();
        annotated.spec.template.metadata.annotations = Some([(placed, "[]".to_owned())].into());
        assert_eq!(refused(&annotated, None), ["spec.template.metadata.annotations"]);
    }

    #[test]
    fn stored_replica_set_with_unsupported_fields_can_be_scaled_down_and_labelled() {
        let refused = |set: &VirtualMachineInstanceReplicaSet, old: Option<&VirtualMachineInstanceReplicaSet>| {
            let errors = field_errors(set, old, &ClusterConfig::default(), false);
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
        };
        let display = || json!({"domain": {"devices": {"gpus": [{"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}}]}}});
        let field = "spec.template.spec.domain.devices.gpus[0].virtualGPUOptions.display";
        let old = set(3, display());
        let mut labelled = old.clone();
        labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        assert_eq!(refused(&old, None), [field]);
        assert_eq!(refused(&labelled, Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&set(1, display()), Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&set(4, display()), Some(&old)), [field]);
        assert_eq!(refused(&set(3, display()), Some(&set(3, json!({})))), [field]);
    }

    #[test]
    fn stored_replica_set_whose_template_breaks_a_rule_can_be_scaled_down() {
        let refused = |set: &VirtualMachineInstanceReplicaSet, old: Option<&VirtualMachineInstanceReplicaSet>| {
            let errors = field_errors(set, old, &ClusterConfig::default(), false);
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
        };
        let broken = |replicas: u32| set(replicas, json!({"hostname": "Web"}));
        let (old, field) = (broken(3), "spec.template.spec.hostname");
        assert_eq!(refused(&broken(1), Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&broken(4), Some(&old)), [field]);
        assert_eq!(refused(&broken(3), Some(&set(3, json!({})))), [field]);
        assert_eq!(refused(&set(1, json!({"hostname": "Other"})), Some(&old)), [field]);
    }
}
