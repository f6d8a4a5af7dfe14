//! Which VMs are deleted or updated first, and which at all.

use std::collections::BTreeMap;

use api::{
    VirtualMachine,
    pool::{VirtualMachinePoolSelectionPolicy, VirtualMachinePoolSelectors},
};
use k8s_openapi::api::core::v1::NodeSelectorRequirement;
use kube::core::{Selector, SelectorExt};
use sha2::{Digest, Sha256};

use super::Member;

/// Returns the VMs that a policy selects, in its order.
pub(super) fn select<'a>(
    policy: Option<&VirtualMachinePoolSelectionPolicy>,
    mut members: Vec<&'a Member>,
) -> Vec<&'a Member> {
    let Some(policy) = policy else { return in_order(None, members) };
    if let Some(selectors) = &policy.selectors {
        members.retain(|member| matches(selectors, &member.vm));
    }
    in_order(policy.sort_policy.as_deref(), members)
}

fn in_order<'a>(sort_policy: Option<&str>, mut members: Vec<&'a Member>) -> Vec<&'a Member> {
    let created = |member: &&Member| member.vm.metadata.creation_timestamp.as_ref().map(|at| at.0);
    match sort_policy {
        Some("AscendingOrder") => members.sort_by_key(|member| ordinal(&member.vm)),
        Some("DescendingOrder") => members.sort_by_key(|member| std::cmp::Reverse(ordinal(&member.vm))),
        Some("Oldest") => members.sort_by_key(created),
        Some("Newest") => members.sort_by_key(|member| std::cmp::Reverse(created(member))),
        // UIDs are random. A second decision about the same VMs, also of another replica, chooses the same ones.
        _ => members.sort_by_cached_key(|member| Sha256::digest(member.vm.metadata.uid.as_deref().unwrap_or_default())),
    }
    members
}

/// Returns the number at the end of a VM's name.
fn ordinal(vm: &VirtualMachine) -> u32 {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    name.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).unwrap_or(0)
}

fn matches(selectors: &VirtualMachinePoolSelectors, vm: &VirtualMachine) -> bool {
    // A VM that is labelled after its creation can be selected, too.
    let template = vm.spec.template.metadata.labels.iter().chain(&vm.metadata.labels).flatten();
    let labels: BTreeMap<String, String> = template.map(|(key, value)| (key.clone(), value.clone())).collect();
    let has_labels = selectors
        .label_selector
        .clone()
        .is_none_or(|selector| Selector::try_from(selector).is_ok_and(|selector| selector.matches(&labels)));
    let node_selector = vm.spec.template.spec.as_ref().map(|spec| &spec.node_selector);
    let requirements = &selectors.node_selector_requirement_matcher;
    has_labels
        && requirements.iter().all(|requirement| {
            is_met(requirement, node_selector.and_then(|labels| labels.get(&requirement.key)).map(String::as_str))
        })
}

/// Returns true if the value of a label meets a requirement. An unknown operator is never met.
fn is_met(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = || requirement.values.iter().flatten().map(String::as_str);
    let number = |text: &str| text.parse::<i64>().ok();
    let compared = || Some((number(value?)?, number(values().next()?)?));
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values().any(|known| known == value)),
        "NotIn" => value.is_none_or(|value| values().all(|known| known != value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared().is_some_and(|(value, limit)| value > limit),
        "Lt" => compared().is_some_and(|(value, limit)| value < limit),
        _ => false,
    }
}
