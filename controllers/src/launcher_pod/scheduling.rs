//! Selection of the pod's node.
//!
//! Required terms use properties of a node that do not change while it runs: the kubelet checks them when it restarts and
//! would end VMIs of which a term fails. The readiness of a node for VMIs is a preference (label `kubevirt.io/schedulable`),
//! and follows from its devices, which vanish with virt-handler.

use std::collections::BTreeMap;

use api::{
    FeatureGate, VirtualMachineInstance,
    config::ClusterConfig,
    constants::label,
    vmi::{
        cpu::Cpu,
        features::{FeatureHyperv, FeatureState},
    },
};
use k8s_openapi::api::core::v1::{
    Affinity, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PreferredSchedulingTerm,
};

use super::Inputs;

/// Label of Kubernetes with the architecture of a node.
const ARCHITECTURE: &str = "kubernetes.io/arch";

pub(super) fn node_selector(vmi: &VirtualMachineInstance, config: &ClusterConfig) -> BTreeMap<String, String> {
    let spec = &vmi.spec;
    let mut selector = BTreeMap::new();
    if let Some(architecture) = spec.architecture.as_ref().filter(|name| !name.is_empty()) {
        selector.insert(ARCHITECTURE.to_owned(), architecture.to_lowercase());
    }
    selector.extend(config.node_selectors.clone());
    selector.extend(spec.node_selector.clone());
    if spec.is_arm64() {
        // The image is of amd64, also if the user names the node's architecture.
        selector.insert(ARCHITECTURE.to_owned(), "amd64".to_owned());
        selector.insert(format!("{}arm64", label::VM_ARCH_PREFIX), "true".to_owned());
    }
    let mut require = |key: String| selector.insert(key, "true".to_owned());
    if let Some(cpu) = &spec.domain.cpu {
        if cpu.dedicated_cpu_placement {
            require(label::CPU_MANAGER.to_owned());
        }
        if cpu.realtime.is_some() {
            require(label::REALTIME.to_owned());
        }
        // Under emulation QEMU offers every model that it knows, and features do not depend on the node.
        let emulates = super::is_emulated(vmi, config);
        if let Some(model) = named_model(cpu) {
            let prefix = if emulates { label::CPU_MODEL_MIGRATION_PREFIX } else { label::CPU_MODEL_PREFIX };
            require(format!("{prefix}{model}"));
        }
        if !emulates && cpu.model.as_ref().is_some_and(|model| !model.is_empty()) {
            for feature in &cpu.features {
                if matches!(feature.policy.as_deref(), None | Some("" | "require")) {
                    require(format!("{}{}", label::CPU_FEATURE_PREFIX, feature.name));
                }
            }
        }
    }
    let hyperv = spec.domain.features.as_ref().and_then(|features| features.hyperv.as_ref());
    if let Some(hyperv) = hyperv.filter(|_| config.enabled(FeatureGate::HypervStrictCheck)) {
        for name in enlightenments(hyperv) {
            require(format!("{}{name}", label::HYPERV_PREFIX));
        }
        // Only these processors have the feature behind this enlightenment.
        if hyperv.evmcs.as_ref().is_some_and(FeatureState::is_enabled) {
            require(format!("{}Intel", label::CPU_VENDOR_PREFIX));
        }
    }
    if let Some(frequency) = api::tsc::frequency(vmi) {
        require(format!("{}{frequency}", label::TSC_FREQUENCY_PREFIX));
    }
    // The labels are of the plain launcher image.
    if let Some(board) = board(vmi).filter(|_| !spec.is_arm64()) {
        require(format!("{}{board}", label::MACHINE_TYPE_PREFIX));
    }
    if let Some(security) = &spec.domain.launch_security {
        if security.sev.is_some() || security.snp.is_some() {
            require(label::SEV.to_owned());
        }
        let encrypted =
            security.sev.as_ref().and_then(|sev| sev.policy.as_ref()).and_then(|policy| policy.encrypted_state);
        if encrypted == Some(true) {
            require(label::SEV_ES.to_owned());
        }
        if security.snp.is_some() {
            require(label::SEV_SNP.to_owned());
        }
        if security.tdx.is_some() {
            require(label::TDX.to_owned());
        }
    }
    selector
}

/// Returns the Hyper-V features of a VMI that not every node offers, as labels of nodes name them.
fn enlightenments(hyperv: &FeatureHyperv) -> impl Iterator<Item = &'static str> {
    let plain = |feature: &Option<FeatureState>| feature.as_ref().and_then(|feature| feature.enabled);
    [
        ("frequencies", plain(&hyperv.frequencies)),
        ("ipi", plain(&hyperv.ipi)),
        ("reenlightenment", plain(&hyperv.reenlightenment)),
        ("reset", plain(&hyperv.reset)),
        ("runtime", plain(&hyperv.runtime)),
        ("synic", plain(&hyperv.synic)),
        ("synictimer", hyperv.synictimer.as_ref().and_then(|timer| timer.enabled)),
        ("tlbflush", hyperv.tlbflush.as_ref().and_then(|flush| flush.enabled)),
        ("vpindex", plain(&hyperv.vpindex)),
    ]
    .into_iter()
    .filter(|(_, enabled)| *enabled == Some(true))
    .map(|(name, _)| name)
}

/// Returns a named CPU model, not `host-model` or `host-passthrough`.
fn named_model(cpu: &Cpu) -> Option<&str> {
    cpu.model.as_deref().filter(|model| !matches!(*model, "" | "host-model" | "host-passthrough"))
}

/// Returns the machine type: the one in use, else the requested one.
fn board(vmi: &VirtualMachineInstance) -> Option<&str> {
    let running = vmi.status.as_ref().and_then(|status| status.machine.as_ref());
    let requested = vmi.spec.domain.machine.as_ref();
    [running, requested].into_iter().flatten().map(|hardware| hardware.type_.as_str()).find(|name| !name.is_empty())
}

pub(super) fn affinity(inputs: &Inputs<'_>) -> Affinity {
    let spec = &inputs.instance.spec;
    let requirement =
        |key: String, operator: &str| NodeSelectorRequirement { key, operator: operator.to_owned(), values: None };
    let mut required = vec![requirement(label::SCHEDULABLE.to_owned(), "Exists")];
    let cpu = spec.domain.cpu.as_ref();
    let model = cpu.and_then(|cpu| cpu.model.as_deref()).unwrap_or_default();
    if model.is_empty() || model == "host-model" {
        required.push(requirement(label::OBSOLETE_HOST_MODEL.to_owned(), "DoesNotExist"));
    }
    for feature in cpu.map(|cpu| cpu.features.as_slice()).unwrap_or_default() {
        if feature.policy.as_deref() == Some("forbid") {
            required.push(requirement(format!("{}{}", label::CPU_FEATURE_PREFIX, feature.name), "DoesNotExist"));
        }
    }
    let mut affinity = spec.affinity.as_deref().cloned().unwrap_or_default();
    let node = affinity.node_affinity.get_or_insert_with(NodeAffinity::default);
    let selector = node.required_during_scheduling_ignored_during_execution.get_or_insert_with(NodeSelector::default);
    if selector.node_selector_terms.is_empty() {
        selector.node_selector_terms.push(NodeSelectorTerm::default());
    }
    selector.node_selector_terms = both(&selector.node_selector_terms, &inputs.config.workload_terms);
    for term in &mut selector.node_selector_terms {
        term.match_expressions.get_or_insert_with(Vec::new).extend(required.iter().cloned());
    }
    let preferred = node.preferred_during_scheduling_ignored_during_execution.get_or_insert_with(Vec::new);
    let is_in = |key: &str, value: &str| {
        vec![NodeSelectorRequirement {
            key: key.to_owned(),
            operator: "In".to_owned(),
            values: Some(vec![value.to_owned()]),
        }]
    };
    let schedulable = Some(is_in(label::SCHEDULABLE, "true"));
    let preference = NodeSelectorTerm { match_expressions: schedulable, match_fields: None };
    preferred.push(PreferredSchedulingTerm { weight: 100, preference });
    // A guest that continues from saved memory needs the CPU of the node on which it ran.
    let memory = inputs.instance.status.as_ref().and_then(|status| status.hibernation.as_ref());
    if let Some(node) = memory.and_then(|memory| memory.preferred_node.as_deref()) {
        let named = Some(is_in("metadata.name", node));
        let preference = NodeSelectorTerm { match_expressions: None, match_fields: named };
        preferred.push(PreferredSchedulingTerm { weight: 100, preference });
    }
    affinity
}

/// Returns the terms of which a node matches one if it matches one of each list. An empty second list matches every node.
fn both(terms: &[NodeSelectorTerm], others: &[NodeSelectorTerm]) -> Vec<NodeSelectorTerm> {
    if others.is_empty() {
        return terms.to_vec();
    }
    let joined = |one: &Option<Vec<NodeSelectorRequirement>>, other: &Option<Vec<NodeSelectorRequirement>>| {
        let all: Vec<_> = [one, other].into_iter().flatten().flatten().cloned().collect();
        (!all.is_empty()).then_some(all)
    };
    let pairs = terms.iter().flat_map(|term| others.iter().map(move |other| (term, other)));
    pairs
        .map(|(term, other)| NodeSelectorTerm {
            match_expressions: joined(&term.match_expressions, &other.match_expressions),
            match_fields: joined(&term.match_fields, &other.match_fields),
        })
        .collect()
}
