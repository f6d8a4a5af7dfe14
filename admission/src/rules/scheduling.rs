//! Scheduling constraints: the rules of Kubernetes for pods, so that a VMI is rejected instead of its pod.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, NodeSelectorRequirement, NodeSelectorTerm, PodAffinityTerm, Toleration, TopologySpreadConstraint,
    WeightedPodAffinityTerm,
};

use super::{
    label_selector,
    pod_errors::{forbidden, invalid, required, unsupported},
};
use crate::context::{FieldErrors, names};

const WEIGHT: &str = "must be in the range 1-100";

/// Returns the errors of the scheduling constraints of a workload with the pod spec at `root`.
pub(crate) fn validate_placement(
    root: &str,
    affinity: Option<&Affinity>,
    selector: &BTreeMap<String, String>,
    tolerations: &[Toleration],
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    validate_affinity(&format!("{root}.affinity"), affinity, &mut errors);
    validate_node_selector(root, selector, &mut errors);
    validate_tolerations(root, tolerations, &mut errors);
    errors
}

/// Validates the affinity.
pub(super) fn validate_affinity(root: &str, affinity: Option<&Affinity>, errors: &mut FieldErrors) {
    let Some(affinity) = affinity else { return };
    if let Some(node) = &affinity.node_affinity {
        let path = format!("{root}.nodeAffinity");
        if let Some(selector) = &node.required_during_scheduling_ignored_during_execution {
            let path = format!("{path}.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms");
            if selector.node_selector_terms.is_empty() {
                required(&path, "must have at least one node selector term", errors);
            }
            for (index, term) in selector.node_selector_terms.iter().enumerate() {
                validate_node_term(&format!("{path}[{index}]"), term, errors);
            }
        }
        for (index, preferred) in node.preferred_during_scheduling_ignored_during_execution.iter().flatten().enumerate()
        {
            let path = format!("{path}.preferredDuringSchedulingIgnoredDuringExecution[{index}]");
            validate_weight(&path, preferred.weight, errors);
            validate_node_term(&format!("{path}.preference"), &preferred.preference, errors);
        }
    }
    if let Some(pod) = &affinity.pod_affinity {
        validate_pod_terms(
            &format!("{root}.podAffinity"),
            pod.required_during_scheduling_ignored_during_execution.as_deref(),
            pod.preferred_during_scheduling_ignored_during_execution.as_deref(),
            errors,
        );
    }
    if let Some(pod) = &affinity.pod_anti_affinity {
        validate_pod_terms(
            &format!("{root}.podAntiAffinity"),
            pod.required_during_scheduling_ignored_during_execution.as_deref(),
            pod.preferred_during_scheduling_ignored_during_execution.as_deref(),
            errors,
        );
    }
}

fn validate_weight(path: &str, weight: i32, errors: &mut FieldErrors) {
    if !(1..=100).contains(&weight) {
        let path = format!("{path}.weight");
        errors.invalid(path.clone(), format!("{path}: Invalid value: {weight}: {WEIGHT}"));
    }
}

fn validate_node_term(path: &str, term: &NodeSelectorTerm, errors: &mut FieldErrors) {
    for (index, requirement) in term.match_expressions.iter().flatten().enumerate() {
        validate_node_requirement(&format!("{path}.matchExpressions[{index}]"), requirement, errors);
    }
    for (index, requirement) in term.match_fields.iter().flatten().enumerate() {
        let path = format!("{path}.matchFields[{index}]");
        let values = requirement.values.as_deref().unwrap_or_default();
        match requirement.operator.as_str() {
            "In" | "NotIn" if values.len() != 1 => required(
                &format!("{path}.values"),
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
                errors,
            ),
            "In" | "NotIn" => {}
            other => invalid(&format!("{path}.operator"), other, "not a valid selector operator", errors),
        }
        if requirement.key == "metadata.name" {
            for (index, value) in values.iter().enumerate() {
                for error in names::subdomain_errors(value) {
                    invalid(&format!("{path}.values[{index}]"), value, &error, errors);
                }
            }
        } else {
            invalid(&format!("{path}.key"), &requirement.key, "not a valid field selector key", errors);
        }
    }
}

pub(crate) fn validate_node_requirement(path: &str, requirement: &NodeSelectorRequirement, errors: &mut FieldErrors) {
    let values = requirement.values.as_ref().map_or(0, Vec::len);
    let field = format!("{path}.values");
    match requirement.operator.as_str() {
        "In" | "NotIn" if values == 0 => {
            required(&field, "must be specified when `operator` is 'In' or 'NotIn'", errors);
        }
        "Exists" | "DoesNotExist" if values > 0 => {
            forbidden(&field, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'", errors);
        }
        "Gt" | "Lt" if values != 1 => {
            required(&field, "must be specified single value when `operator` is 'Lt' or 'Gt'", errors);
        }
        "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
        other => invalid(&format!("{path}.operator"), other, "not a valid selector operator", errors),
    }
    for error in names::qualified_name_errors(&requirement.key) {
        invalid(&format!("{path}.key"), &requirement.key, &error, errors);
    }
}

fn validate_pod_terms(
    path: &str,
    required: Option<&[PodAffinityTerm]>,
    preferred: Option<&[WeightedPodAffinityTerm]>,
    errors: &mut FieldErrors,
) {
    for (index, term) in required.unwrap_or_default().iter().enumerate() {
        validate_pod_term(&format!("{path}.requiredDuringSchedulingIgnoredDuringExecution[{index}]"), term, errors);
    }
    for (index, preferred) in preferred.unwrap_or_default().iter().enumerate() {
        let path = format!("{path}.preferredDuringSchedulingIgnoredDuringExecution[{index}]");
        validate_weight(&path, preferred.weight, errors);
        validate_pod_term(&format!("{path}.podAffinityTerm"), &preferred.pod_affinity_term, errors);
    }
}

fn validate_pod_term(path: &str, term: &PodAffinityTerm, errors: &mut FieldErrors) {
    for (name, selector) in [("labelSelector", &term.label_selector), ("namespaceSelector", &term.namespace_selector)] {
        if let Some(selector) = selector {
            label_selector::validate(&format!("{path}.{name}"), selector, errors);
        }
    }
    for namespace in term.namespaces.iter().flatten() {
        for error in names::label_errors(namespace) {
            invalid(&format!("{path}.namespace"), namespace, &error, errors);
        }
    }
    validate_topology_key(path, &term.topology_key, errors);
    if term.topology_key.is_empty() {
        // An empty key is also reported as an invalid name, as Kubernetes does: clients count the errors.
        for error in names::qualified_name_errors("") {
            invalid(&format!("{path}.topologyKey"), "", &error, errors);
        }
    }
}

fn validate_topology_key(path: &str, key: &str, errors: &mut FieldErrors) {
    let path = format!("{path}.topologyKey");
    if key.is_empty() {
        required(&path, "can not be empty", errors);
        return;
    }
    for error in names::qualified_name_errors(key) {
        invalid(&path, key, &error, errors);
    }
}

/// Returns the fields that must be unique among the constraints.
fn unique_key(constraint: &TopologySpreadConstraint) -> (&str, &str) {
    (constraint.topology_key.as_str(), constraint.when_unsatisfiable.as_str())
}

/// Validates the topology spread constraints.
pub(super) fn validate_topology_spread(root: &str, constraints: &[TopologySpreadConstraint], errors: &mut FieldErrors) {
    // All duplicates but the last are reported.
    let last: BTreeMap<(&str, &str), usize> =
        constraints.iter().enumerate().map(|(index, constraint)| (unique_key(constraint), index)).collect();
    for (index, constraint) in constraints.iter().enumerate() {
        let path = format!("{root}.topologySpreadConstraints[{index}]");
        if constraint.max_skew <= 0 {
            let path = format!("{path}.maxSkew");
            let message = format!("{path}: Invalid value: {}: must be greater than zero", constraint.max_skew);
            errors.invalid(path, message);
        }
        validate_topology_key(&path, &constraint.topology_key, errors);
        let action = constraint.when_unsatisfiable.as_str();
        if !["DoNotSchedule", "ScheduleAnyway"].contains(&action) {
            let path = format!("{path}.whenUnsatisfiable");
            let message = format!(
                "{path}: Unsupported value: \"{action}\": supported values: \"DoNotSchedule\", \"ScheduleAnyway\""
            );
            errors.invalid(path, message);
        }
        if let Some(selector) = &constraint.label_selector {
            label_selector::validate(&format!("{root}.topologySpreadConstraints.labelSelector"), selector, errors);
        }
        if last.get(&unique_key(constraint)) != Some(&index) {
            let path = format!("{path}.{{topologyKey, whenUnsatisfiable}}");
            let message = format!("{path}: Duplicate value: \"{{{}, {action}}}\"", constraint.topology_key);
            errors.invalid(path, message);
        }
    }
}

/// Validates the tolerations.
pub(super) fn validate_tolerations(root: &str, tolerations: &[Toleration], errors: &mut FieldErrors) {
    for (index, toleration) in tolerations.iter().enumerate() {
        let path = format!("{root}.tolerations[{index}]");
        let key = toleration.key.as_deref().unwrap_or_default();
        let value = toleration.value.as_deref().unwrap_or_default();
        if !key.is_empty() {
            for error in names::qualified_name_errors(key) {
                invalid(&format!("{path}.key"), key, &error, errors);
            }
        }
        match toleration.operator.as_deref().unwrap_or_default() {
            "Exists" if !value.is_empty() => {
                invalid(&format!("{path}.operator"), value, "value must be empty when `operator` is 'Exists'", errors);
            }
            "" | "Equal" | "Gt" | "Lt" if key.is_empty() => invalid(
                &format!("{path}.operator"),
                toleration.operator.as_deref().unwrap_or_default(),
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
                errors,
            ),
            "" | "Equal" => {
                for error in names::label_value_errors(value) {
                    invalid(&format!("{path}.operator"), value, &error, errors);
                }
            }
            "Gt" | "Lt" if !is_integer(value) => invalid(
                &format!("{path}.value"),
                value,
                "must be a decimal integer of 64 bits when `operator` is 'Gt' or 'Lt'",
                errors,
            ),
            // The API server decides by its feature gate whether a pod may compare numbers.
            "Exists" | "Gt" | "Lt" => {}
            other => unsupported(&format!("{path}.operator"), other, "\"Equal\", \"Exists\", \"Gt\", \"Lt\"", errors),
        }
        let effect = toleration.effect.as_deref().unwrap_or_default();
        if !["", "NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
            unsupported(
                &format!("{path}.effect"),
                effect,
                "\"NoSchedule\", \"PreferNoSchedule\", \"NoExecute\"",
                errors,
            );
        }
        if toleration.toleration_seconds.is_some() && effect != "NoExecute" {
            invalid(
                &format!("{path}.effect"),
                effect,
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
                errors,
            );
        }
    }
}

/// Returns true if a text is an integer as Kubernetes writes it, without plus sign and leading zeros.
fn is_integer(text: &str) -> bool {
    text.parse::<i64>().is_ok_and(|number| number.to_string() == text)
}

/// Validates the node selector.
pub(super) fn validate_node_selector(root: &str, selector: &BTreeMap<String, String>, errors: &mut FieldErrors) {
    let path = || format!("{root}.nodeSelector");
    for (key, value) in selector {
        for error in names::qualified_name_errors(key) {
            invalid(&path(), key, &error, errors);
        }
        for error in names::label_value_errors(value) {
            invalid(&path(), value, &error, errors);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    #[test]
    fn node_affinity_has_terms_with_known_operators() {
        let node = |expression: Value| {
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [expression]}]
            }}}})
        };
        let path = "spec.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";
        accepts(node(json!({"key": "zone", "operator": "In", "values": ["a"]})));
        refuses(
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}}),
            path,
            "Required value: must have at least one node selector term",
        );
        let expression = format!("{path}[0].matchExpressions[0]");
        refuses(node(json!({"key": "zone", "operator": "In"})), &format!("{expression}.values"), "must be specified");
        refuses(
            node(json!({"key": "zone", "operator": "Exists", "values": ["a"]})),
            &format!("{expression}.values"),
            "may not be specified",
        );
        refuses(
            node(json!({"key": "zone", "operator": "Near"})),
            &format!("{expression}.operator"),
            "not a valid selector operator",
        );
        refuses(
            node(json!({"key": "a b", "operator": "Exists"})),
            &format!("{expression}.key"),
            "Invalid value: \"a b\"",
        );
    }

    #[test]
    fn pod_affinity_has_topology_and_weight() {
        let pod = |term: Value, weight: i32| json!({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": weight, "podAffinityTerm": term}]}}});
        let path = "spec.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0]";
        accepts(pod(json!({"topologyKey": "kubernetes.io/hostname"}), 1));
        refuses(pod(json!({"topologyKey": ""}), 1), &format!("{path}.podAffinityTerm.topologyKey"), "can not be empty");
        refuses(pod(json!({"topologyKey": "a"}), 101), &format!("{path}.weight"), "must be in the range 1-100");
        assert_eq!(messages(pod(json!({"topologyKey": ""}), 1)).len(), 3);
        let labelled = |value: &str| {
            let expression = json!({"key": "a", "operator": "In", "values": ["b", value]});
            pod(json!({"topologyKey": "a", "labelSelector": {"matchExpressions": [expression]}}), 1)
        };
        accepts(labelled("c"));
        let field = format!("{path}.podAffinityTerm.labelSelector.matchExpressions[0].values[1]");
        refuses(labelled("\"c d"), &field, &format!("{field}: Invalid value: \"\\\"c d\": a valid label must be"));
    }

    #[test]
    fn topology_spread_constraints_are_valid_and_unique() {
        let spread =
            |skew: i32, action: &str| json!({"maxSkew": skew, "topologyKey": "zone", "whenUnsatisfiable": action});
        let path = "spec.topologySpreadConstraints[0]";
        accepts(json!({"topologySpreadConstraints": [spread(1, "DoNotSchedule"), spread(1, "ScheduleAnyway")]}));
        refuses(
            json!({"topologySpreadConstraints": [spread(0, "DoNotSchedule")]}),
            &format!("{path}.maxSkew"),
            "greater than zero",
        );
        refuses(
            json!({"topologySpreadConstraints": [spread(1, "Pray")]}),
            &format!("{path}.whenUnsatisfiable"),
            "Unsupported value: \"Pray\"",
        );
        refuses(
            json!({"topologySpreadConstraints": [spread(1, "DoNotSchedule"), spread(2, "DoNotSchedule")]}),
            "spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}",
            "Duplicate value: \"{zone, DoNotSchedule}\"",
        );
        let thrice = ["DoNotSchedule"; 3].map(|action| spread(1, action));
        assert_eq!(messages(json!({"topologySpreadConstraints": thrice})).len(), 2);
    }

    #[test]
    fn tolerations_and_node_selectors_are_those_of_pods() {
        accepts(
            json!({"tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}], "nodeSelector": {"a": "b"}}),
        );
        refuses(
            json!({"tolerations": [{"operator": "Like"}]}),
            "spec.tolerations[0].operator",
            "Unsupported value: \"Like\"",
        );
        refuses(
            json!({"tolerations": [{"key": "a", "effect": "Never"}]}),
            "spec.tolerations[0].effect",
            "Unsupported value",
        );
        let compared = |key: &str, operator: &str, value: &str| json!({"tolerations": [{"key": key, "operator": operator, "value": value, "effect": "NoSchedule"}]});
        accepts(compared("a", "Gt", "5"));
        accepts(compared("a", "Lt", "-3"));
        accepts(compared("a", "Lt", "0"));
        for value in ["", "x", "+5", "05", "-0", "1.5", "9223372036854775808"] {
            refuses(compared("a", "Gt", value), "spec.tolerations[0].value", "must be a decimal integer");
        }
        refuses(compared("", "Gt", "5"), "spec.tolerations[0].operator", "operator must be Exists when `key` is empty");
        refuses(json!({"nodeSelector": {"a b": "c"}}), "spec.nodeSelector", "Invalid value: \"a b\"");
    }
}
