//! Rules on a machine's spec, alone or in a template.
//!
//! Each function takes the path the spec stands at, so that messages name the field as the user wrote it. The order
//! of the causes is the order of the calls here.

pub mod access;
pub mod architecture;
pub mod cpu;
pub mod data_volumes;
pub mod devices;
pub mod disks;
pub mod dns;
pub mod dra;
pub mod firmware;
pub mod grace;
pub mod hotplug;
pub mod hyperv;
pub mod launch_security;
pub mod live_update;
pub mod metadata;
pub mod network;
pub mod probes;
pub mod resources;
pub mod scheduling;
pub mod volumes;

use api::{EvictionStrategy, StartStrategy, VirtualMachineInstanceSpec, config::ClusterConfig, gates};

use crate::{causes::Causes, names};

/// What is wrong with a spec.
pub fn spec(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig) -> Causes {
    let mut causes = Causes::new();
    host_names(root, spec, &mut causes);
    resources::memory(root, spec, &mut causes);
    machine_type(root, spec, config, &mut causes);
    firmware::acpi(root, spec, &mut causes);
    resources::cpu(root, spec, &mut causes);
    cpu::causes(root, spec, config, &mut causes);
    start_strategy(root, spec, &mut causes);
    cpu::realtime(root, spec, &mut causes);
    scheduling::affinity(root, spec.affinity.as_ref(), &mut causes);
    scheduling::topology_spread(root, &spec.topology_spread_constraints, &mut causes);
    scheduling::tolerations(root, &spec.tolerations, &mut causes);
    scheduling::node_selector(root, &spec.node_selector, &mut causes);
    network::causes(root, spec, config, &mut causes);
    dra::causes(root, spec, config, &mut causes);
    disks::mapping(root, spec, config, &mut causes);
    devices::inputs(root, spec, &mut causes);
    devices::io_threads(root, spec, &mut causes);
    probes::causes(root, spec, &mut causes);
    disks::causes(root, spec, &mut causes);
    firmware::causes(root, spec, &mut causes);
    volumes::causes(root, spec, config, &mut causes);
    access::causes(root, spec, &mut causes);
    dns::causes(root, spec, &mut causes);
    eviction_strategy(root, spec, config, &mut causes);
    devices::displays(root, spec, config, &mut causes);
    grace::causes(root, spec, config, &mut causes);
    devices::causes(root, spec, config, &mut causes);
    service_account(root, spec, &mut causes);
    causes
}

/// Features that are gone for good but still named by the cluster's configuration. Only new objects are refused.
pub fn discontinued_gates(spec: &VirtualMachineInstanceSpec, config: &ClusterConfig) -> Causes {
    let mut causes = Causes::new();
    let interfaces = &spec.domain.devices.interfaces;
    let listed = |gate: &str| config.feature_gates.iter().any(|name| name == gate);
    for (gate, used) in [
        (gates::PASST, interfaces.iter().any(|interface| interface.passt.is_some())),
        (gates::MACVTAP, interfaces.iter().any(|interface| interface.macvtap.is_some())),
    ] {
        if used && listed(gate) {
            causes.not_supported("", gates::message(gate).unwrap_or(gate));
        }
    }
    causes
}

/// The former, and bindings that are gone for good.
pub fn discontinued(spec: &VirtualMachineInstanceSpec, root: &str, config: &ClusterConfig) -> Causes {
    let mut causes = discontinued_gates(spec, config);
    for (index, interface) in spec.domain.devices.interfaces.iter().enumerate() {
        for (binding, used, message) in [
            ("slirp", interface.slirp.is_some(), "Slirp interface support has been discontinued since v1.3"),
            ("passt", interface.passt.is_some(), "Passt network binding has been discontinued since v1.3"),
            ("macvtap", interface.macvtap.is_some(), "Macvtap network binding has been discontinued since v1.3"),
        ] {
            if used {
                causes.invalid(format!("{root}.domain.devices.interfaces[{index}].{binding}"), message);
            }
        }
    }
    causes
}

fn host_names(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    for (field, value, rules, check) in [
        ("hostname", &spec.hostname, "DNS_LABEL", names::label_errors as fn(&str) -> Vec<String>),
        ("subdomain", &spec.subdomain, "DNS_SUBDOMAIN", names::subdomain_errors),
    ] {
        let Some(value) = value.as_deref().filter(|value| !value.is_empty()) else { continue };
        let errors = check(value);
        if !errors.is_empty() {
            let path = format!("{root}.{field}");
            let message = format!("{path} does not conform to the kubernetes {rules} rules : {}", errors.join(", "));
            causes.invalid(path, message);
        }
    }
}

fn machine_type(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig, causes: &mut Causes) {
    let Some(type_) = spec.domain.machine.as_ref().map(|machine| &machine.type_).filter(|type_| !type_.is_empty())
    else {
        return;
    };
    let arch = config.arch(spec.architecture.as_deref().unwrap_or_default());
    if !arch.allows_machine(type_) {
        let path = format!("{root}.domain.machine.type");
        let message =
            format!("{path} is not supported: {type_} (allowed values: [{}])", arch.emulated_machines.join(" "));
        causes.invalid(path, message);
    }
}

fn start_strategy(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let path = format_args!("{root}.startStrategy");
    match &spec.start_strategy {
        None => {}
        Some(StartStrategy::Other(word)) => {
            let message = format!("{path} is set with an unrecognized option: {word}");
            causes.invalid(path, message);
        }
        Some(StartStrategy::Paused) if spec.liveness_probe.is_some() => {
            let message = format!(
                "either {path} or {root}.livenessProbe should be provided.Pausing VMI with LivenessProbe is not supported"
            );
            causes.invalid(path, message);
        }
        Some(StartStrategy::Paused) => {}
    }
}

fn eviction_strategy(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig, causes: &mut Causes) {
    if let EvictionStrategy::Other(word) = spec.eviction_strategy.as_ref().unwrap_or(&config.eviction_strategy) {
        let path = format!("{root}.evictionStrategy");
        let message = format!("{path} is set with an unrecognized option: {word}");
        causes.invalid(path, message);
    }
}

fn service_account(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let Some(name) = spec.service_account_name.as_deref().filter(|name| !name.is_empty()) else { return };
    let path = format!("{root}.serviceAccountName");
    let errors = names::subdomain_errors(name);
    if !errors.is_empty() {
        let message = format!("{path} is not a valid service account name: {}", errors.join("; "));
        causes.invalid(path.clone(), message);
    }
    let other = spec
        .volumes
        .iter()
        .filter_map(|volume| volume.service_account.as_ref()?.service_account_name.as_deref())
        .find(|other| *other != name);
    if let Some(other) = other {
        causes.invalid(
            path,
            format!(
                "spec.serviceAccountName \"{name}\" and serviceAccount volume \"{other}\" must reference the same service account"
            ),
        );
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! One accepted and one rejected case for a rule, as one line each.

    use serde_json::{Value, json};

    use super::*;

    /// A machine that breaks no rule, with `change` merged into it.
    pub(crate) fn machine(change: Value) -> VirtualMachineInstanceSpec {
        let mut spec = json!({
            "architecture": "amd64",
            "domain": {
                "devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                },
                "machine": {"type": "q35"},
                "memory": {"guest": "128Mi"},
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "containerDisk": {"image": "a:b"}}],
        });
        merge(&mut spec, change);
        serde_json::from_value(spec).unwrap()
    }

    fn merge(into: &mut Value, from: Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                for (key, value) in from {
                    match into.get_mut(&key) {
                        Some(inner) => merge(inner, value),
                        None => {
                            into.insert(key, value);
                        }
                    }
                }
            }
            (into, from) => *into = from,
        }
    }

    /// Messages about a machine with a change.
    pub(crate) fn messages(change: Value) -> Vec<String> {
        messages_with(change, &ClusterConfig::default())
    }

    /// Messages about a machine with a change under a configuration.
    pub(crate) fn messages_with(change: Value, config: &ClusterConfig) -> Vec<String> {
        let causes = spec("spec", &machine(change), config);
        causes.as_slice().iter().map(|cause| cause.message.clone()).collect()
    }

    /// Asserts that a change is accepted.
    pub(crate) fn accepts(change: Value) {
        assert_eq!(messages(change.clone()), Vec::<String>::new(), "{change}");
    }

    /// Asserts that a change is refused with a message, at a field.
    pub(crate) fn refuses(change: Value, field: &str, message: &str) {
        let causes = spec("spec", &machine(change.clone()), &ClusterConfig::default());
        let found = causes.as_slice().iter().any(|cause| cause.field == field && cause.message.contains(message));
        assert!(found, "{change}\n wanted {field}: {message}\n got {:#?}", causes.as_slice());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::*;

    #[test]
    fn plain_machine_is_accepted() {
        accepts(json!({}));
    }

    #[test]
    fn host_names_are_dns_names() {
        accepts(json!({"hostname": "web-1", "subdomain": "a.b"}));
        refuses(json!({"hostname": "Web"}), "spec.hostname", "does not conform to the kubernetes DNS_LABEL rules");
        refuses(json!({"subdomain": "a..b"}), "spec.subdomain", "DNS_SUBDOMAIN");
    }

    #[test]
    fn machine_type_is_one_of_the_allowed() {
        accepts(json!({"domain": {"machine": {"type": "pc-q35-8.2"}}}));
        refuses(
            json!({"domain": {"machine": {"type": "pc-i440fx-2.12"}}}),
            "spec.domain.machine.type",
            "spec.domain.machine.type is not supported: pc-i440fx-2.12 (allowed values: [q35* pc-q35*])",
        );
    }

    #[test]
    fn start_strategy_is_paused_without_liveness_probe() {
        accepts(json!({"startStrategy": "Paused"}));
        refuses(json!({"startStrategy": "Later"}), "spec.startStrategy", "unrecognized option: Later");
        refuses(
            json!({"startStrategy": "Paused", "livenessProbe": {"tcpSocket": {"port": 22}}}),
            "spec.startStrategy",
            "Pausing VMI with LivenessProbe is not supported",
        );
    }

    #[test]
    fn eviction_strategy_is_a_known_word() {
        accepts(json!({"evictionStrategy": "None"}));
        refuses(json!({"evictionStrategy": "Kick"}), "spec.evictionStrategy", "unrecognized option: Kick");
    }

    #[test]
    fn service_account_name_is_a_dns_name() {
        accepts(json!({"serviceAccountName": "robot"}));
        refuses(
            json!({"serviceAccountName": "Robot!"}),
            "spec.serviceAccountName",
            "is not a valid service account name",
        );
    }

    #[test]
    fn removed_bindings_say_so() {
        let spec = machine(json!({"domain": {"devices": {"interfaces": [{"name": "default", "slirp": {}}]}}}));
        let causes = super::discontinued(&spec, "spec", &Default::default());
        assert_eq!(causes.as_slice()[0].field, "spec.domain.devices.interfaces[0].slirp");
    }
}
