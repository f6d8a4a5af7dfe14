//! Replica sets of machines: rules.

use api::{VirtualMachineInstanceReplicaSet, config::ClusterConfig};

use crate::{
    causes::Causes,
    review::AdmissionReview,
    rules, semantic, unsupported,
    webhook::{Context, Stop},
};

/// The webhook that checks.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let set: VirtualMachineInstanceReplicaSet = context.object()?;
    let old: Option<VirtualMachineInstanceReplicaSet> = context.old_object()?;
    Ok(context.verdict(&causes(&set, old.as_ref(), context.config, context.is_component()), vec![]))
}

/// What is wrong with a replica set; `old` is there when it is changed.
pub fn causes(
    set: &VirtualMachineInstanceReplicaSet,
    old: Option<&VirtualMachineInstanceReplicaSet>,
    config: &ClusterConfig,
    is_component: bool,
) -> Causes {
    let mut causes = Causes::new();
    let root = "spec.template.spec";
    let Some(spec) = &set.spec.template.spec else {
        causes.required("spec.template", "missing virtual machine template.");
        return causes;
    };
    let metadata = &set.spec.template.metadata;
    // A template that was let in before must not keep a replica set from being scaled down or deleted.
    if old.is_none_or(|old| old.spec.template.metadata != *metadata) {
        causes.extend(rules::metadata::causes("spec.template.metadata", metadata, config, is_component));
    }
    causes.extend(rules::grace::annotations("spec.template.metadata", metadata, spec, config));
    causes.extend(rules::spec(root, spec, config));
    let labels = set.spec.template.metadata.labels.clone().unwrap_or_default();
    match rules::scheduling::selector_matches(&set.spec.selector, &labels) {
        Ok(true) => {}
        Ok(false) => causes.invalid("spec.selector", "selector does not match labels."),
        Err(message) => causes.invalid("spec.selector", message),
    }
    if set.spec.replicas.is_some_and(|replicas| replicas < 0) {
        causes.invalid("spec.replicas", "spec.replicas must be greater than or equal to 0.");
    }
    if old.is_none() {
        causes.extend(rules::discontinued_gates(spec, config));
    }
    causes.or_else(|causes| {
        let mut missing = Causes::new();
        unsupported::spec(root, spec, &mut missing);
        rules::metadata::unsupported("spec.template.metadata", metadata, &mut missing);
        if !missing.is_empty() && old.is_none_or(|old| asks_for_more(set, old)) {
            causes.extend(missing);
        }
    })
}

/// Whether a change asks for other machines than before, or for more of them. What was let in before must not keep a
/// replica set from being scaled down, labelled or deleted.
fn asks_for_more(set: &VirtualMachineInstanceReplicaSet, old: &VirtualMachineInstanceReplicaSet) -> bool {
    let replicas = |set: &VirtualMachineInstanceReplicaSet| set.spec.replicas.unwrap_or(1);
    replicas(set) > replicas(old) || !semantic::equal(&set.spec.template, &old.spec.template)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use api::constants::label;

    use super::*;
    use crate::rules::testing::machine;

    fn set(replicas: u32, change: Value) -> VirtualMachineInstanceReplicaSet {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet", "metadata": {"name": "r"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": machine(change)},
            },
        }))
        .unwrap()
    }

    #[test]
    fn the_template_of_a_replica_set_has_no_reserved_labels() {
        let with = |key: &str, replicas: u32| {
            let mut set = set(replicas, json!({}));
            set.spec.template.metadata.labels.get_or_insert_default().insert(key.to_owned(), "n1".to_owned());
            set
        };
        let refused = |set: &VirtualMachineInstanceReplicaSet, old: Option<&VirtualMachineInstanceReplicaSet>| {
            let causes = causes(set, old, &ClusterConfig::default(), false);
            causes.as_slice().iter().map(|cause| cause.field.clone()).collect::<Vec<_>>()
        };
        let field = "spec.template.metadata.labels";
        for key in label::RESERVED_ON_VMI {
            let reserved = with(key, 3);
            assert_eq!(refused(&reserved, None), [field], "{key}");
            assert_eq!(refused(&reserved, Some(&set(3, json!({})))), [field], "{key}");
            // One from before.
            assert_eq!(refused(&with(key, 1), Some(&reserved)), Vec::<String>::new(), "{key}");
            assert!(causes(&reserved, None, &ClusterConfig::default(), true).is_empty(), "{key}");
        }
        assert_eq!(refused(&with("team", 3), None), Vec::<String>::new());
        let mut annotated = set(1, json!({}));
        let placed = "kubevirt.io/placePCIDevicesOnRootComplex".to_owned();
        annotated.spec.template.metadata.annotations = Some([(placed, "true".to_owned())].into());
        assert_eq!(refused(&annotated, None), ["spec.template.metadata.annotations"]);
    }

    #[test]
    fn a_replica_set_from_before_can_be_scaled_down_and_labelled() {
        let refused = |set: &VirtualMachineInstanceReplicaSet, old: Option<&VirtualMachineInstanceReplicaSet>| {
            let causes = causes(set, old, &ClusterConfig::default(), false);
            causes.as_slice().iter().map(|cause| cause.field.clone()).collect::<Vec<_>>()
        };
        let tpm = || json!({"domain": {"devices": {"tpm": {}}}});
        let field = "spec.template.spec.domain.devices.tpm";
        let old = set(3, tpm());
        let mut labelled = old.clone();
        labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        assert_eq!(refused(&old, None), [field]);
        assert_eq!(refused(&labelled, Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&set(1, tpm()), Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&set(4, tpm()), Some(&old)), [field]);
        assert_eq!(refused(&set(3, tpm()), Some(&set(3, json!({})))), [field]);
    }
}
