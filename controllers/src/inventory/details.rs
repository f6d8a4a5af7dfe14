//! Metrics of the network cards of VMIs and VMs, of the memory of launchers, and of the time of a VM's last status change.

use api::{
    Condition, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    constants::condition,
    quantity,
    vmi::network::{Interface, Network},
};
use kube::ResourceExt;
use prometheus::{CounterVec, GaugeVec, Opts, core::Collector, proto::MetricFamily};

/// Value of the label `model` of interfaces without a model, as in the reference. Other labels without a value are empty.
const NONE: &str = "<none>";
const NAMES: [&str; 2] = ["name", "namespace"];
const CARD: [&str; 7] = ["name", "namespace", "vnic_name", "binding_type", "network", "binding_name", "model"];
/// Metrics of the groups of statuses: name, help, group. A status of no group counts as an error.
const GROUPS: [(&str, &str, &str); 5] = [
    (
        "kubevirt_vm_starting_status_last_transition_timestamp_seconds",
        "When a VirtualMachine came to a status of starting",
        "starting",
    ),
    (
        "kubevirt_vm_running_status_last_transition_timestamp_seconds",
        "When a VirtualMachine came to a status of running",
        "running",
    ),
    (
        "kubevirt_vm_migrating_status_last_transition_timestamp_seconds",
        "When a VirtualMachine came to a status of migrating",
        "migrating",
    ),
    (
        "kubevirt_vm_non_running_status_last_transition_timestamp_seconds",
        "When a VirtualMachine came to a status of not running",
        "non_running",
    ),
    (
        "kubevirt_vm_error_status_last_transition_timestamp_seconds",
        "When a VirtualMachine came to a status of an error",
        ERROR,
    ),
];
const ERROR: &str = "error";
/// Conditions whose last change is that of the status.
const CHANGING: [&str; 3] = [condition::READY, condition::FAILURE, condition::PAUSED];

/// The metrics.
pub(super) struct Details {
    overhead: GaugeVec,
    vmi_cards: GaugeVec,
    cards: GaugeVec,
    changes: Vec<(&'static str, CounterVec)>,
}

impl Details {
    /// Creates empty metrics.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str, labels: &[&str]| GaugeVec::new(Opts::new(name, help), labels);
        let mut changes = Vec::new();
        for (name, help, group) in GROUPS {
            changes.push((group, CounterVec::new(Opts::new(name, help), &NAMES)?));
        }
        Ok(Self {
            overhead: gauge(
                "kubevirt_vmi_launcher_memory_overhead_bytes",
                "Memory of a launcher pod beside the guest's",
                &NAMES,
            )?,
            vmi_cards: gauge("kubevirt_vmi_vnic_info", "Network cards of VMIs", &CARD)?,
            cards: gauge("kubevirt_vm_vnic_info", "Network cards of VirtualMachines", &CARD)?,
            changes,
        })
    }

    /// Adds a VMI.
    pub(super) fn vmi(&self, vmi: &VirtualMachineInstance) {
        let (name, namespace) = (vmi.name_any(), vmi.namespace().unwrap_or_default());
        set_cards(&self.vmi_cards, &name, &namespace, &vmi.spec);
        let memory = vmi.status.as_ref().and_then(|status| status.memory.as_ref());
        let overhead = memory.and_then(|memory| quantity::units(memory.memory_overhead.as_ref()?).ok());
        if let Some(bytes) = overhead {
            self.overhead.with_label_values(&[&name, &namespace]).set(bytes as f64);
        }
    }

    /// Adds a VM whose status is of a group.
    pub(super) fn vm(&self, vm: &VirtualMachine, group: &str) {
        let (name, namespace) = (vm.name_any(), vm.namespace().unwrap_or_default());
        let conditions = vm.status.iter().flat_map(|status| &status.conditions);
        let changed = last_change(conditions.filter(|known| CHANGING.contains(&known.type_.as_str())));
        let group = if GROUPS.iter().any(|(_, _, known)| *known == group) { group } else { ERROR };
        for (of, counter) in &self.changes {
            let counter = counter.with_label_values(&[&name, &namespace]);
            if *of == group {
                counter.inc_by(changed as f64);
            }
        }
        let Some(spec) = &vm.spec.template.spec else { return };
        set_cards(&self.cards, &name, &namespace, spec);
    }

    /// Returns all of them.
    pub(super) fn families(&self) -> Vec<MetricFamily> {
        let gauges = [&self.overhead, &self.vmi_cards, &self.cards];
        let mut families: Vec<MetricFamily> = gauges.into_iter().flat_map(|gauge| gauge.collect()).collect();
        families.extend(self.changes.iter().flat_map(|(_, counter)| counter.collect()));
        families
    }
}

/// Seconds since 1970 at which the last of these conditions changed; 0 if none has.
fn last_change<'a>(conditions: impl Iterator<Item = &'a Condition>) -> i64 {
    let changes = conditions.filter_map(|known| Some(known.last_transition_time.as_ref()?.0.as_second()));
    changes.max().unwrap_or(0).max(0)
}

fn set_cards(metric: &GaugeVec, name: &str, namespace: &str, spec: &VirtualMachineInstanceSpec) {
    for interface in &spec.domain.devices.interfaces {
        let (kind, binding) = binding(interface);
        let Some(network) = spec.networks.iter().find(|network| network.name == interface.name).map(network_name)
        else {
            continue;
        };
        let model = interface.model.as_deref().filter(|model| !model.is_empty()).unwrap_or(NONE);
        metric.with_label_values(&[name, namespace, interface.name.as_str(), kind, network, binding, model]).set(1.0);
    }
}

/// Returns the binding of an interface: `core` or `plugin`, and its name.
fn binding(interface: &Interface) -> (&'static str, &str) {
    if let Some(plugin) = &interface.binding {
        return ("plugin", plugin.name.as_str());
    }
    let known = [
        (interface.masquerade.is_some(), "masquerade"),
        (interface.bridge.is_some(), "bridge"),
        (interface.sriov.is_some(), "sriov"),
        (interface.passt_binding.is_some(), "passt"),
    ];
    ("core", known.into_iter().find(|(used, _)| *used).map_or("", |(_, name)| name))
}

fn network_name(network: &Network) -> &str {
    match &network.multus {
        Some(multus) => multus.network_name.as_str(),
        None if network.pod.is_some() => "pod networking",
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(details: &Details) -> String {
        let registry = prometheus::Registry::new();
        for gauge in [&details.overhead, &details.vmi_cards, &details.cards] {
            registry.register(Box::new(gauge.clone())).unwrap();
        }
        for (_, counter) in &details.changes {
            registry.register(Box::new(counter.clone())).unwrap();
        }
        String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap()
    }

    #[test]
    fn vm_is_shown_with_its_network_cards_and_its_last_change() {
        let details = Details::new().unwrap();
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "v", "namespace": "ns"},
            "spec": {"template": {"spec": {
                "domain": {
                    "devices": {"interfaces": [
                        {"name": "default", "masquerade": {}, "model": "e1000"}, {"name": "lan", "bridge": {}},
                    ]},
                },
                "networks": [{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "blue"}}],
            }}},
            "status": {"conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2030-01-01T00:00:00Z"},
                {"type": "AgentConnected", "status": "True", "lastTransitionTime": "2031-01-01T00:00:00Z"},
            ]},
        });
        details.vm(&serde_json::from_value(vm).unwrap(), "running");
        let text = text(&details);
        for wanted in [
            r#"kubevirt_vm_vnic_info{binding_name="masquerade",binding_type="core",model="e1000",name="v",namespace="ns",network="pod networking",vnic_name="default"} 1"#,
            r#"kubevirt_vm_vnic_info{binding_name="bridge",binding_type="core",model="<none>",name="v",namespace="ns",network="blue",vnic_name="lan"} 1"#,
            r#"kubevirt_vm_running_status_last_transition_timestamp_seconds{name="v",namespace="ns"} 1893456000"#,
            r#"kubevirt_vm_error_status_last_transition_timestamp_seconds{name="v",namespace="ns"} 0"#,
        ] {
            assert!(text.lines().any(|line| line == wanted), "{wanted} is not in {text}");
        }
    }

    #[test]
    fn vmi_is_shown_with_the_overhead_of_its_pod() {
        let details = Details::new().unwrap();
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "namespace": "ns"},
            "spec": {
                "domain": {"devices": {"interfaces": [
                    {"name": "default", "binding": {"name": "mine"}}, {"name": "of no network", "bridge": {}},
                ]}},
                "networks": [{"name": "default", "pod": {}}],
            },
            "status": {"memory": {"memoryOverhead": "1Mi"}},
        });
        details.vmi(&serde_json::from_value(vmi).unwrap());
        let text = text(&details);
        let overhead = r#"kubevirt_vmi_launcher_memory_overhead_bytes{name="m",namespace="ns"} 1048576"#;
        assert!(text.contains(overhead), "{text}");
        assert!(text.contains(r#"binding_name="mine",binding_type="plugin""#), "{text}");
        assert!(!text.contains("of no network"), "{text}");
    }
}
