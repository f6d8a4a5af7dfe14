//! Replica sets of machines: rules.

use api::{VirtualMachineInstanceReplicaSet, config::ClusterConfig};

use crate::{
    causes::Causes,
    review::AdmissionReview,
    rules,
    webhook::{Context, Stop},
};

/// The webhook that checks.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let set: VirtualMachineInstanceReplicaSet = context.object()?;
    Ok(context.verdict(&causes(&set, context.config, context.is_create()), vec![]))
}

/// What is wrong with a replica set.
pub fn causes(set: &VirtualMachineInstanceReplicaSet, config: &ClusterConfig, created: bool) -> Causes {
    let mut causes = Causes::new();
    let root = "spec.template.spec";
    let Some(spec) = &set.spec.template.spec else {
        causes.required("spec.template", "missing virtual machine template.");
        return causes;
    };
    let metadata = &set.spec.template.metadata;
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
    if created {
        causes.extend(rules::discontinued_gates(spec, config));
    }
    causes
}
