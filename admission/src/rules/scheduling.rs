//! Where a machine may run: the rules Kubernetes has for pods, so that a machine fails here and not as its pod.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Affinity, NodeSelectorRequirement, NodeSelectorTerm, PodAffinityTerm, Toleration, TopologySpreadConstraint,
        WeightedPodAffinityTerm,
    },
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};

use crate::{causes::Causes, names};

const WEIGHT: &str = "must be in the range 1-100";

fn invalid(path: &str, value: &str, detail: &str, causes: &mut Causes) {
    causes.invalid(path, format!("{path}: Invalid value: {value:?}: {detail}"));
}

fn required(path: &str, detail: &str, causes: &mut Causes) {
    causes.invalid(path, format!("{path}: Required value: {detail}"));
}

fn forbidden(path: &str, detail: &str, causes: &mut Causes) {
    causes.invalid(path, format!("{path}: Forbidden: {detail}"));
}

/// What is wrong with where a workload may run, for the pod spec at `root`.
pub(crate) fn placement(
    root: &str,
    affinity: Option<&Affinity>,
    selector: &BTreeMap<String, String>,
    tolerations: &[Toleration],
) -> Causes {
    let mut causes = Causes::new();
    self::affinity(&format!("{root}.affinity"), affinity, &mut causes);
    node_selector(root, selector, &mut causes);
    self::tolerations(root, tolerations, &mut causes);
    causes
}

/// What is wrong with the affinity.
pub(super) fn affinity(root: &str, affinity: Option<&Affinity>, causes: &mut Causes) {
    let Some(affinity) = affinity else { return };
    if let Some(node) = &affinity.node_affinity {
        let path = format!("{root}.nodeAffinity");
        if let Some(selector) = &node.required_during_scheduling_ignored_during_execution {
            let path = format!("{path}.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms");
            if selector.node_selector_terms.is_empty() {
                required(&path, "must have at least one node selector term", causes);
            }
            for (index, term) in selector.node_selector_terms.iter().enumerate() {
                node_term(&format!("{path}[{index}]"), term, causes);
            }
        }
        for (index, preferred) in node.preferred_during_scheduling_ignored_during_execution.iter().flatten().enumerate()
        {
            let path = format!("{path}.preferredDuringSchedulingIgnoredDuringExecution[{index}]");
            weight(&path, preferred.weight, causes);
            node_term(&format!("{path}.preference"), &preferred.preference, causes);
        }
    }
    if let Some(pod) = &affinity.pod_affinity {
        pod_terms(
            &format!("{root}.podAffinity"),
            pod.required_during_scheduling_ignored_during_execution.as_deref(),
            pod.preferred_during_scheduling_ignored_during_execution.as_deref(),
            causes,
        );
    }
    if let Some(pod) = &affinity.pod_anti_affinity {
        pod_terms(
            &format!("{root}.podAntiAffinity"),
            pod.required_during_scheduling_ignored_during_execution.as_deref(),
            pod.preferred_during_scheduling_ignored_during_execution.as_deref(),
            causes,
        );
    }
}

fn weight(path: &str, weight: i32, causes: &mut Causes) {
    if !(1..=100).contains(&weight) {
        let path = format!("{path}.weight");
        causes.invalid(path.clone(), format!("{path}: Invalid value: {weight}: {WEIGHT}"));
    }
}

fn node_term(path: &str, term: &NodeSelectorTerm, causes: &mut Causes) {
    for (index, requirement) in term.match_expressions.iter().flatten().enumerate() {
        node_requirement(&format!("{path}.matchExpressions[{index}]"), requirement, causes);
    }
    for (index, requirement) in term.match_fields.iter().flatten().enumerate() {
        let path = format!("{path}.matchFields[{index}]");
        let values = requirement.values.as_deref().unwrap_or_default();
        match requirement.operator.as_str() {
            "In" | "NotIn" if values.len() != 1 => required(
                &format!("{path}.values"),
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
                causes,
            ),
            "In" | "NotIn" => {}
            other => invalid(&format!("{path}.operator"), other, "not a valid selector operator", causes),
        }
        if requirement.key == "metadata.name" {
            for (index, value) in values.iter().enumerate() {
                for error in names::subdomain_errors(value) {
                    invalid(&format!("{path}.values[{index}]"), value, &error, causes);
                }
            }
        } else {
            invalid(&format!("{path}.key"), &requirement.key, "not a valid field selector key", causes);
        }
    }
}

fn node_requirement(path: &str, requirement: &NodeSelectorRequirement, causes: &mut Causes) {
    let values = requirement.values.as_ref().map_or(0, Vec::len);
    let field = format!("{path}.values");
    match requirement.operator.as_str() {
        "In" | "NotIn" if values == 0 => {
            required(&field, "must be specified when `operator` is 'In' or 'NotIn'", causes);
        }
        "Exists" | "DoesNotExist" if values > 0 => {
            forbidden(&field, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'", causes);
        }
        "Gt" | "Lt" if values != 1 => {
            required(&field, "must be specified single value when `operator` is 'Lt' or 'Gt'", causes);
        }
        "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
        other => invalid(&format!("{path}.operator"), other, "not a valid selector operator", causes),
    }
    for error in names::qualified_name_errors(&requirement.key) {
        invalid(&format!("{path}.key"), &requirement.key, &error, causes);
    }
}

fn pod_terms(
    path: &str,
    must: Option<&[PodAffinityTerm]>,
    should: Option<&[WeightedPodAffinityTerm]>,
    causes: &mut Causes,
) {
    for (index, term) in must.unwrap_or_default().iter().enumerate() {
        pod_term(&format!("{path}.requiredDuringSchedulingIgnoredDuringExecution[{index}]"), term, causes);
    }
    for (index, preferred) in should.unwrap_or_default().iter().enumerate() {
        let path = format!("{path}.preferredDuringSchedulingIgnoredDuringExecution[{index}]");
        weight(&path, preferred.weight, causes);
        pod_term(&format!("{path}.podAffinityTerm"), &preferred.pod_affinity_term, causes);
    }
}

fn pod_term(path: &str, term: &PodAffinityTerm, causes: &mut Causes) {
    for (name, selector) in [("labelSelector", &term.label_selector), ("namespaceSelector", &term.namespace_selector)] {
        if let Some(selector) = selector {
            label_selector(&format!("{path}.{name}"), selector, causes);
        }
    }
    for namespace in term.namespaces.iter().flatten() {
        for error in names::label_errors(namespace) {
            invalid(&format!("{path}.namespace"), namespace, &error, causes);
        }
    }
    topology_key(path, &term.topology_key, causes);
    if term.topology_key.is_empty() {
        // It is told as a name as well: clients know how many causes there are.
        for error in names::qualified_name_errors("") {
            invalid(&format!("{path}.topologyKey"), "", &error, causes);
        }
    }
}

fn topology_key(path: &str, key: &str, causes: &mut Causes) {
    let path = format!("{path}.topologyKey");
    if key.is_empty() {
        required(&path, "can not be empty", causes);
        return;
    }
    for error in names::qualified_name_errors(key) {
        invalid(&path, key, &error, causes);
    }
}

/// What a constraint says only once.
fn kind(constraint: &TopologySpreadConstraint) -> (&str, &str) {
    (constraint.topology_key.as_str(), constraint.when_unsatisfiable.as_str())
}

/// What is wrong with the spreading.
pub(super) fn topology_spread(root: &str, constraints: &[TopologySpreadConstraint], causes: &mut Causes) {
    // Of those that say the same, all but the last are told of.
    let last: BTreeMap<(&str, &str), usize> =
        constraints.iter().enumerate().map(|(index, constraint)| (kind(constraint), index)).collect();
    for (index, constraint) in constraints.iter().enumerate() {
        let path = format!("{root}.topologySpreadConstraints[{index}]");
        if constraint.max_skew <= 0 {
            let path = format!("{path}.maxSkew");
            let message = format!("{path}: Invalid value: {}: must be greater than zero", constraint.max_skew);
            causes.invalid(path, message);
        }
        topology_key(&path, &constraint.topology_key, causes);
        let action = constraint.when_unsatisfiable.as_str();
        if !["DoNotSchedule", "ScheduleAnyway"].contains(&action) {
            let path = format!("{path}.whenUnsatisfiable");
            let message = format!(
                "{path}: Unsupported value: \"{action}\": supported values: \"DoNotSchedule\", \"ScheduleAnyway\""
            );
            causes.invalid(path, message);
        }
        if let Some(selector) = &constraint.label_selector {
            label_selector(&format!("{root}.topologySpreadConstraints.labelSelector"), selector, causes);
        }
        if last.get(&kind(constraint)) != Some(&index) {
            let path = format!("{path}.{{topologyKey, whenUnsatisfiable}}");
            let message = format!("{path}: Duplicate value: \"{{{}, {action}}}\"", constraint.topology_key);
            causes.invalid(path, message);
        }
    }
}

/// What is wrong with the tolerations.
pub(super) fn tolerations(root: &str, tolerations: &[Toleration], causes: &mut Causes) {
    for (index, toleration) in tolerations.iter().enumerate() {
        let path = format!("{root}.tolerations[{index}]");
        let key = toleration.key.as_deref().unwrap_or_default();
        let value = toleration.value.as_deref().unwrap_or_default();
        if !key.is_empty() {
            for error in names::qualified_name_errors(key) {
                invalid(&format!("{path}.key"), key, &error, causes);
            }
        }
        match toleration.operator.as_deref().unwrap_or_default() {
            "Exists" if !value.is_empty() => {
                invalid(&format!("{path}.operator"), value, "value must be empty when `operator` is 'Exists'", causes);
            }
            "Exists" => {}
            "" | "Equal" if key.is_empty() => invalid(
                &format!("{path}.operator"),
                toleration.operator.as_deref().unwrap_or_default(),
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
                causes,
            ),
            "" | "Equal" => {
                for error in names::label_value_errors(value) {
                    invalid(&format!("{path}.operator"), value, &error, causes);
                }
            }
            other => unsupported(&format!("{path}.operator"), other, "\"Equal\", \"Exists\"", causes),
        }
        let effect = toleration.effect.as_deref().unwrap_or_default();
        if !["", "NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
            unsupported(
                &format!("{path}.effect"),
                effect,
                "\"NoSchedule\", \"PreferNoSchedule\", \"NoExecute\"",
                causes,
            );
        }
        if toleration.toleration_seconds.is_some() && effect != "NoExecute" {
            invalid(
                &format!("{path}.effect"),
                effect,
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
                causes,
            );
        }
    }
}

fn unsupported(path: &str, value: &str, known: &str, causes: &mut Causes) {
    causes.not_supported(path, format!("{path}: Unsupported value: \"{value}\": supported values: {known}"));
}

/// What is wrong with the node selector.
pub(super) fn node_selector(root: &str, selector: &BTreeMap<String, String>, causes: &mut Causes) {
    let path = || format!("{root}.nodeSelector");
    for (key, value) in selector {
        for error in names::qualified_name_errors(key) {
            invalid(&path(), key, &error, causes);
        }
        for error in names::label_value_errors(value) {
            invalid(&path(), value, &error, causes);
        }
    }
}

fn label_selector(path: &str, selector: &LabelSelector, causes: &mut Causes) {
    for (key, value) in selector.match_labels.iter().flatten() {
        for error in names::qualified_name_errors(key) {
            invalid(&format!("{path}.matchLabels"), key, &error, causes);
        }
        for error in names::label_value_errors(value) {
            invalid(&format!("{path}.matchLabels"), value, &error, causes);
        }
    }
    for (index, requirement) in selector.match_expressions.iter().flatten().enumerate() {
        let path = format!("{path}.matchExpressions[{index}]");
        let values = requirement.values.as_ref().map_or(0, Vec::len);
        match requirement.operator.as_str() {
            "In" | "NotIn" if values == 0 => {
                required(&format!("{path}.values"), "must be specified when `operator` is 'In' or 'NotIn'", causes)
            }
            "Exists" | "DoesNotExist" if values > 0 => forbidden(
                &format!("{path}.values"),
                "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                causes,
            ),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => invalid(&format!("{path}.operator"), other, "not a valid selector operator", causes),
        }
        for error in names::qualified_name_errors(&requirement.key) {
            invalid(&format!("{path}.key"), &requirement.key, &error, causes);
        }
        for (index, value) in requirement.values.iter().flatten().enumerate() {
            for error in names::label_value_errors(value) {
                invalid(&format!("{path}.values[{index}]"), value, &error, causes);
            }
        }
    }
}

/// Whether a selector takes in some labels; an error when it cannot be read.
pub(crate) fn selector_matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> Result<bool, String> {
    let mut causes = Causes::new();
    label_selector("spec.selector", selector, &mut causes);
    if let Some(cause) = causes.as_slice().first() {
        return Err(cause.message.clone());
    }
    let by_label = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let by_expression = selector.match_expressions.iter().flatten().all(|requirement| {
        let value = labels.get(&requirement.key);
        let listed = value.is_some_and(|value| requirement.values.iter().flatten().any(|one| one == value));
        match requirement.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => value.is_some(),
            _ => value.is_none(),
        }
    });
    Ok(by_label && by_expression)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
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
    fn spreading_is_possible_and_said_once() {
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
        refuses(json!({"nodeSelector": {"a b": "c"}}), "spec.nodeSelector", "Invalid value: \"a b\"");
    }

    #[test]
    fn selectors_match_labels() {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        for (selector, want) in [
            (json!({"matchLabels": {"app": "web"}}), Ok(true)),
            (json!({"matchLabels": {"app": "db"}}), Ok(false)),
            (json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "db"]}]}), Ok(true)),
            (json!({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}), Ok(false)),
            (json!({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}), Ok(true)),
        ] {
            assert_eq!(selector_matches(&serde_json::from_value(selector).unwrap(), &labels), want);
        }
        let broken = serde_json::from_value(json!({"matchExpressions": [{"key": "app", "operator": "Like"}]})).unwrap();
        assert!(selector_matches(&broken, &labels).is_err());
    }
}
