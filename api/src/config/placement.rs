//! Nodes for VMIs, as `spec.workloads.nodePlacement` of the KubeVirt object selects them.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm};

use crate::kubevirt::spec::NodePlacement;

/// Returns the terms of which a node must match one; empty: VMIs run on all nodes with virt-handler.
///
/// The reference places virt-handler by them, and with it VMIs. Here the chart places virt-handler, and the terms apply to launcher
/// pods.
pub(super) fn terms(placement: Option<&NodePlacement>) -> Vec<NodeSelectorTerm> {
    let Some(placement) = placement else { return Vec::new() };
    let affinity = placement.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    let mut terms = required.map(|selector| selector.node_selector_terms.clone()).unwrap_or_default();
    // A term without requirements matches no node.
    terms.retain(|term| {
        [&term.match_expressions, &term.match_fields].iter().any(|list| !list.as_deref().unwrap_or_default().is_empty())
    });
    if terms.is_empty() && !placement.node_selector.is_empty() {
        terms.push(NodeSelectorTerm::default());
    }
    let labels: Vec<NodeSelectorRequirement> = placement
        .node_selector
        .iter()
        .map(|(key, value)| NodeSelectorRequirement {
            key: key.clone(),
            operator: "In".to_owned(),
            values: Some(vec![value.clone()]),
        })
        .collect();
    if !labels.is_empty() {
        for term in &mut terms {
            term.match_expressions.get_or_insert_default().extend(labels.iter().cloned());
        }
    }
    terms
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn labels_are_part_of_each_term() {
        let rack = json!({"key": "rack", "operator": "Exists"});
        let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
        let name = json!({"key": "metadata.name", "operator": "In", "values": ["n1"]});
        let required = |terms: Value| {
            let selector = json!({"nodeSelectorTerms": terms});
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}})
        };
        for (placement, expected) in [
            (json!({}), json!([])),
            (json!({"tolerations": [{"operator": "Exists"}]}), json!([])),
            (json!({"nodeSelector": {"zone": "a"}}), json!([{"matchExpressions": [zone]}])),
            (
                json!({"nodeSelector": {"zone": "a"}, "affinity": required(json!([{"matchExpressions": [rack]}, {"matchFields": [name]}]))}),
                json!([{"matchExpressions": [rack, zone]}, {"matchExpressions": [zone], "matchFields": [name]}]),
            ),
            (
                json!({"affinity": required(json!([{}, {"matchExpressions": [rack]}]))}),
                json!([{"matchExpressions": [rack]}]),
            ),
        ] {
            let parsed = serde_json::from_value(placement.clone()).unwrap();
            assert_eq!(serde_json::to_value(terms(Some(&parsed))).unwrap(), expected, "{placement}");
        }
        assert_eq!(terms(None), []);
    }
}
