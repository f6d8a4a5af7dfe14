//! Rules of VMI specs, shared by VMs, VMIs, replica sets, pools and presets.
//!
//! One module an area. Each adds to [`FieldErrors`]; `root` is the path of the spec, so that messages name the field as the
//! user wrote it. The order of errors is the order of the calls in [`spec`]. Unsupported fields are in [`unsupported`].

pub(crate) mod access;
pub(crate) mod architecture;
pub(crate) mod cloud_init;
pub(crate) mod cpu;
pub(crate) mod data_volume_spec;
pub(crate) mod data_volumes;
pub(crate) mod devices;
pub(crate) mod disks;
pub(crate) mod dns;
pub(crate) mod dra;
mod file_systems;
pub(crate) mod firmware;
mod gates;
pub(crate) mod grace;
pub(crate) mod hotplug;
pub(crate) mod hyperv;
mod images;
pub(crate) mod label_selector;
pub(crate) mod launch_security;
pub mod live_update;
pub mod metadata;
pub(crate) mod network;
pub mod patches;
mod pod_errors;
pub(crate) mod probes;
pub(crate) mod resources;
pub(crate) mod scheduling;
pub mod unsupported;
pub(crate) mod volumes;

use api::{EvictionStrategy, FeatureGate, StartStrategy, VirtualMachineInstanceSpec, config::ClusterConfig};

use crate::context::{FieldErrors, accepted, names};

/// Returns the errors of a spec.
pub fn validate_spec(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig) -> FieldErrors {
    let mut errors = FieldErrors::new();
    validate_host_names(root, spec, &mut errors);
    resources::validate_memory(root, spec, &mut errors);
    validate_machine_type(root, spec, config, &mut errors);
    firmware::validate_acpi(root, spec, &mut errors);
    resources::validate_cpu(root, spec, &mut errors);
    cpu::validate(root, spec, config, &mut errors);
    validate_start_strategy(root, spec, &mut errors);
    cpu::validate_realtime(root, spec, &mut errors);
    scheduling::validate_affinity(root, spec.affinity.as_deref(), &mut errors);
    scheduling::validate_topology_spread(root, &spec.topology_spread_constraints, &mut errors);
    scheduling::validate_tolerations(root, &spec.tolerations, &mut errors);
    scheduling::validate_node_selector(root, &spec.node_selector, &mut errors);
    network::validate(root, spec, config, &mut errors);
    dra::validate(root, spec, config, &mut errors);
    disks::validate_mapping(root, spec, config, &mut errors);
    devices::validate_inputs(root, spec, &mut errors);
    devices::validate_io_threads(root, spec, &mut errors);
    probes::validate(root, spec, &mut errors);
    disks::validate(root, spec, &mut errors);
    firmware::validate(root, spec, &mut errors);
    volumes::validate(root, spec, config, &mut errors);
    access::validate(root, spec, &mut errors);
    dns::validate(root, spec, &mut errors);
    validate_eviction_strategy(root, spec, config, &mut errors);
    devices::validate_displays(root, spec, config, &mut errors);
    grace::validate(root, spec, config, &mut errors);
    devices::validate(root, spec, config, &mut errors);
    validate_service_account(root, spec, &mut errors);
    errors
}

/// Returns errors for removed features whose feature gate is still listed. Applies to new objects only.
pub fn discontinued_gates(spec: &VirtualMachineInstanceSpec, config: &ClusterConfig) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let interfaces = &spec.domain.devices.interfaces;
    for (gate, used) in [
        (FeatureGate::Passt, interfaces.iter().any(|interface| interface.passt.is_some())),
        (FeatureGate::Macvtap, interfaces.iter().any(|interface| interface.macvtap.is_some())),
    ] {
        if used && gate.is_in(&config.feature_gates) {
            errors.not_supported("", gate.message().unwrap_or(gate.name()));
        }
    }
    errors
}

/// Returns the same errors, and those of removed bindings.
pub fn discontinued(spec: &VirtualMachineInstanceSpec, root: &str, config: &ClusterConfig) -> FieldErrors {
    let mut errors = discontinued_gates(spec, config);
    for (index, interface) in spec.domain.devices.interfaces.iter().enumerate() {
        for (binding, used, message) in [
            ("slirp", interface.slirp.is_some(), "Slirp interface support has been discontinued since v1.3"),
            ("passt", interface.passt.is_some(), "Passt network binding has been discontinued since v1.3"),
            ("macvtap", interface.macvtap.is_some(), "Macvtap network binding has been discontinued since v1.3"),
        ] {
            if used {
                errors.invalid(format!("{root}.domain.devices.interfaces[{index}].{binding}"), message);
            }
        }
    }
    errors
}

fn validate_host_names(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    for (field, value, rules, check) in [
        ("hostname", &spec.hostname, "DNS_LABEL", names::label_errors as fn(&str) -> Vec<String>),
        ("subdomain", &spec.subdomain, "DNS_SUBDOMAIN", names::subdomain_errors),
    ] {
        let Some(value) = value.as_deref().filter(|value| !value.is_empty()) else { continue };
        let problems = check(value);
        if !problems.is_empty() {
            let path = format!("{root}.{field}");
            let message = format!("{path} does not conform to the kubernetes {rules} rules : {}", problems.join(", "));
            errors.invalid(path, message);
        }
    }
}

fn validate_machine_type(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let Some(type_) = spec.domain.machine.as_ref().map(|machine| &machine.type_).filter(|type_| !type_.is_empty())
    else {
        return;
    };
    let arch = config.arch(spec.architecture.as_deref().unwrap_or_default());
    if !arch.allows_machine(type_) {
        let path = format!("{root}.domain.machine.type");
        let message =
            format!("{path} is not supported: {type_} (allowed values: [{}])", arch.emulated_machines.join(" "));
        errors.invalid(path, message);
    }
}

fn validate_start_strategy(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let path = format_args!("{root}.startStrategy");
    match &spec.start_strategy {
        None => {}
        Some(StartStrategy::Other(name)) => {
            let message = format!("{path} is set with an unrecognized option: {name}, {}", accepted(&["Paused"]));
            errors.invalid(path, message);
        }
        Some(StartStrategy::Paused) if spec.liveness_probe.is_some() => {
            let message = format!(
                "either {path} or {root}.livenessProbe should be provided.Pausing VMI with LivenessProbe is not supported"
            );
            errors.invalid(path, message);
        }
        Some(StartStrategy::Paused) => {}
    }
}

fn validate_eviction_strategy(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    if let EvictionStrategy::Other(name) = spec.eviction_strategy.as_ref().unwrap_or(&config.eviction_strategy) {
        let path = format!("{root}.evictionStrategy");
        let known = accepted(&["None", "LiveMigrate", "LiveMigrateIfPossible", "External"]);
        let message = format!("{path} is set with an unrecognized option: {name}, {known}");
        errors.invalid(path, message);
    }
}

fn validate_service_account(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let Some(name) = spec.service_account_name.as_deref().filter(|name| !name.is_empty()) else { return };
    let path = format!("{root}.serviceAccountName");
    let problems = names::subdomain_errors(name);
    if !problems.is_empty() {
        let message = format!("{path} is not a valid service account name: {}", problems.join("; "));
        errors.invalid(path.clone(), message);
    }
    let other = spec
        .volumes
        .iter()
        .filter_map(|volume| volume.service_account.as_ref()?.service_account_name.as_deref())
        .find(|other| *other != name);
    if let Some(other) = other {
        errors.invalid(
            path,
            format!(
                "spec.serviceAccountName \"{name}\" and serviceAccount volume \"{other}\" must reference the same service account"
            ),
        );
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Helpers for tests: one accepted and one rejected case of a rule, in one line each.

    use serde_json::{Value, json};

    use super::*;

    /// Returns a valid VMI spec with `change` merged into it.
    pub(crate) fn vmi_spec(change: Value) -> VirtualMachineInstanceSpec {
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

    /// Returns the messages for a VMI with a change.
    pub(crate) fn messages(change: Value) -> Vec<String> {
        messages_with(change, &ClusterConfig::default())
    }

    /// Returns the messages for a VMI with a change under a configuration.
    pub(crate) fn messages_with(change: Value, config: &ClusterConfig) -> Vec<String> {
        let errors = validate_spec("spec", &vmi_spec(change), config);
        errors.as_slice().iter().map(|error| error.message.clone()).collect()
    }

    /// Asserts that a change is accepted.
    pub(crate) fn accepts(change: Value) {
        assert_eq!(messages(change.clone()), Vec::<String>::new(), "{change}");
    }

    /// Asserts that a change is refused with a message, at a field.
    pub(crate) fn refuses(change: Value, field: &str, message: &str) {
        let errors = validate_spec("spec", &vmi_spec(change.clone()), &ClusterConfig::default());
        let found = errors.as_slice().iter().any(|error| error.field == field && error.message.contains(message));
        assert!(found, "{change}\n expected {field}: {message}\n got {:#?}", errors.as_slice());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::*;

    #[test]
    fn plain_vmi_is_accepted() {
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
    fn eviction_strategy_is_known() {
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
    fn removed_bindings_are_refused() {
        let spec = vmi_spec(json!({"domain": {"devices": {"interfaces": [{"name": "default", "slirp": {}}]}}}));
        let errors = super::discontinued(&spec, "spec", &Default::default());
        assert_eq!(errors.as_slice()[0].field, "spec.domain.devices.interfaces[0].slirp");
    }
}
