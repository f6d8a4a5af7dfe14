//! Labels of nodes that a launcher pod requires, in words.

use std::collections::BTreeMap;

use api::{VirtualMachineInstance, config::ClusterConfig, constants::label};

use super::scheduling::node_selector;

/// Requirements that are named at most.
const MOST: usize = 8;

/// Labels with a part that names what is required.
const PREFIXES: [(&str, &str, &str); 8] = [
    (label::MACHINE_TYPE_PREFIX, "the machine type ", ""),
    (label::CPU_MODEL_PREFIX, "the CPU model ", ""),
    (label::CPU_MODEL_MIGRATION_PREFIX, "the CPU model ", ""),
    (label::CPU_FEATURE_PREFIX, "the CPU feature ", ""),
    (label::CPU_VENDOR_PREFIX, "a CPU by ", ""),
    (label::HYPERV_PREFIX, "the Hyper-V feature ", ""),
    (label::TSC_FREQUENCY_PREFIX, "a time stamp counter of ", " Hz"),
    (label::VM_ARCH_PREFIX, "guests of ", " (feature gate CrossArchitectureVirtualization)"),
];
/// Other labels.
const KEYS: [(&str, &str); 6] = [
    (label::CPU_MANAGER, "dedicated CPUs (kubelet's static CPU manager policy)"),
    (label::REALTIME, "real-time scheduling"),
    (label::SEV, "AMD SEV"),
    (label::SEV_ES, "AMD SEV-ES"),
    (label::SEV_SNP, "AMD SEV-SNP"),
    (label::TDX, "Intel TDX"),
];

/// Returns the labels that the launcher pod of a VMI requires of its node, without those that users name.
pub(crate) fn required_labels(vmi: &VirtualMachineInstance, config: &ClusterConfig) -> impl Iterator<Item = String> {
    let selector = node_selector(vmi, config).into_iter();
    selector.filter(|(key, value)| value == "true" && label::is_on_nodes(key)).map(|(key, _)| key)
}

/// Returns the labels that the target pod of a migration requires of its node, each once. `cpu`: those of the guest's CPU in its node
/// selector, which repeat the model and the features that the VMI names.
pub(crate) fn required_of_target(
    vmi: &VirtualMachineInstance,
    config: &ClusterConfig,
    cpu: &BTreeMap<String, String>,
) -> Vec<String> {
    let mut labels: Vec<String> = required_labels(vmi, config).collect();
    let more: Vec<String> = cpu.keys().filter(|key| !labels.contains(key)).cloned().collect();
    labels.extend(more);
    labels
}

/// Returns the words for a label, if it stands for something that nodes offer.
fn described(key: &str) -> Option<String> {
    let by_prefix = PREFIXES
        .iter()
        .find_map(|(prefix, before, after)| key.strip_prefix(prefix).map(|name| format!("{before}{name}{after}")));
    by_prefix.or_else(|| KEYS.iter().find(|(known, _)| *known == key).map(|(_, words)| (*words).to_owned()))
}

/// Appends the labels that no node has to the message of the scheduler. `nodes` is `no node` or `no other node`.
#[must_use]
pub(crate) fn with_unoffered(message: &str, nodes: &str, labels: &[String]) -> String {
    let mut words: Vec<String> = labels.iter().filter_map(|key| described(key)).collect();
    words.dedup();
    if words.is_empty() {
        return message.to_owned();
    }
    let more = words.len().saturating_sub(MOST);
    words.truncate(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let separator = if message.is_empty() { "" } else { "; " };
    format!("{}{separator}{nodes} offers {}{more}", message.trim_end_matches('.'), words.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn labels_that_no_node_has_are_named() {
        let scheduler = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.";
        let begin = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector; no node offers ";
        for (labels, expected) in [
            (vec!["machine-type.node.kubevirt.io/pc-q35-99"], "the machine type pc-q35-99"),
            (vec!["cpu-model.node.kubevirt.io/Skylakee"], "the CPU model Skylakee"),
            (vec!["cpu-model-migration.node.kubevirt.io/Skylakee"], "the CPU model Skylakee"),
            (
                vec!["cpu-feature.node.kubevirt.io/x", "hyperv.node.kubevirt.io/ipi"],
                "the CPU feature x, the Hyper-V feature ipi",
            ),
            (vec!["scheduling.node.kubevirt.io/tsc-frequency-100"], "a time stamp counter of 100 Hz"),
            (vec!["kubevirt.io/sev"], "AMD SEV"),
            (
                vec!["kubevirt.io/cpumanager", "kubevirt.io/realtime"],
                "dedicated CPUs (kubelet's static CPU manager policy), real-time scheduling",
            ),
        ] {
            let labels: Vec<String> = labels.into_iter().map(str::to_owned).collect();
            assert_eq!(with_unoffered(scheduler, "no node", &labels), format!("{begin}{expected}"));
        }
        assert_eq!(with_unoffered(scheduler, "no node", &[]), scheduler);
        let tdx = ["kubevirt.io/tdx".to_owned()];
        assert_eq!(with_unoffered("", "no other node", &tdx), "no other node offers Intel TDX");
        let many: Vec<String> = (0..10).map(|number| format!("cpu-feature.node.kubevirt.io/f{number}")).collect();
        assert!(with_unoffered("m", "no node", &many).ends_with("the CPU feature f7 and 2 more"));
    }

    #[test]
    fn machine_type_and_cpu_are_required_and_labels_of_users_are_not() {
        let vmi = json!({
            "metadata": {"name": "m"},
            "spec": {
                "nodeSelector": {"zone": "true"}, "architecture": "amd64",
                "domain": {"devices": {}, "machine": {"type": "pc-q35-99"}, "cpu": {"model": "Skylakee",
                    "features": [{"name": "aes"}]}},
            },
        });
        let vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
        let labels: Vec<String> = required_labels(&vmi, &ClusterConfig::default()).collect();
        assert_eq!(
            labels,
            [
                "cpu-feature.node.kubevirt.io/aes",
                "cpu-model.node.kubevirt.io/Skylakee",
                "machine-type.node.kubevirt.io/pc-q35-99",
            ]
        );
        let moved = ["cpu-feature.node.kubevirt.io/aes", "cpu-model-migration.node.kubevirt.io/Skylakee"];
        let cpu = BTreeMap::from(moved.map(|key| (key.to_owned(), "true".to_owned())));
        assert_eq!(
            required_of_target(&vmi, &ClusterConfig::default(), &cpu),
            [labels.as_slice(), &[moved[1].to_owned()]].concat()
        );
    }
}
