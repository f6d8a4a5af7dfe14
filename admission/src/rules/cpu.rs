//! Virtual CPUs.

use api::{VirtualMachineInstanceSpec, config::ClusterConfig, quantity, vmi::cpu::Cpu};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::gates;
use crate::context::{FieldErrors, supported};

/// Most virtual CPUs whose number is computed. The scheduler rejects what no node can run.
const VCPUS_MAX: u32 = u32::MAX - 1;

const POLICIES: [&str; 5] = ["force", "require", "optional", "disable", "forbid"];

/// Validates the CPU.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let Some(cpu) = &spec.domain.cpu else { return };
    let path = |field: &str| format!("{root}.domain.cpu.{field}");
    if cpu.dedicated_cpu_placement {
        validate_dedicated(root, spec, cpu, config, errors);
    }
    if spec.domain.maps_numa() {
        let field = path("numa.guestMappingPassthrough");
        gates::are_on("domain.cpu.numa", &field, config, errors);
        if !cpu.dedicated_cpu_placement {
            let needed = path("dedicatedCpuPlacement");
            let message = format!("{needed} must be set to true when NUMA topology strategy is set in {field}");
            errors.invalid(field.clone(), message);
        }
        if spec.domain.memory.as_ref().is_none_or(|memory| memory.hugepages.is_none()) {
            let message = format!(
                "{root}.domain.memory.hugepages must be requested when NUMA topology strategy is set in {field}"
            );
            errors.invalid(field, message);
        }
    }
    if cpu.isolate_emulator_thread && !cpu.dedicated_cpu_placement {
        errors.invalid(
            path("isolateEmulatorThread"),
            "IsolateEmulatorThread should be only set in combination with DedicatedCPUPlacement",
        );
    }
    for (index, feature) in cpu.features.iter().enumerate() {
        let policy = feature.policy.as_deref().unwrap_or_default();
        if !policy.is_empty() && !POLICIES.contains(&policy) {
            let message = format!("CPU feature {} uses policy {policy} that is not supported.", feature.name);
            errors.not_supported(
                path(&format!("features[{index}].policy")),
                format!("{message} {}", supported(&POLICIES)),
            );
        }
        if !is_model_name(&feature.name) {
            errors.invalid(
                path(&format!("features[{index}].name")),
                format!("CPU feature name '{}' can only contain letters, digits, '-', '_' and '.'", feature.name),
            );
        }
    }
    if let Some(model) = cpu.model.as_deref().filter(|model| !model.is_empty() && !is_model_name(model)) {
        errors
            .invalid(path("model"), format!("CPU model '{model}' can only contain letters, digits, '-', '_' and '.'"));
    }
    let sockets = cpu.sockets.unwrap_or(0);
    if let Some(max) = cpu.max_sockets.filter(|max| *max != 0 && sockets > *max) {
        errors.invalid(path("sockets"), too_many_sockets(sockets, max));
    }
    if cpu.vcpus() > VCPUS_MAX {
        errors.invalid(
            format!("{root}.domain.cpu"),
            format!("{root}.domain.cpu requests {} virtual CPUs, but at most {VCPUS_MAX} are supported", cpu.vcpus()),
        );
    }
}

/// Returns the message about more sockets than `max`.
pub(super) fn too_many_sockets(sockets: u32, max: u32) -> String {
    format!("Number of sockets in CPU topology is greater than the maximum sockets allowed: {sockets} of at most {max}")
}

/// Validates the requirements of real-time guests.
pub(super) fn validate_realtime(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let Some(cpu) = spec.domain.cpu.as_ref().filter(|cpu| cpu.realtime.is_some()) else { return };
    let path = |field: &str| format!("{root}.domain.cpu.{field}");
    if !cpu.dedicated_cpu_placement {
        let field = path("dedicatedCpuPlacement");
        let message = format!("{field} must be set to true when {} is used", path("realtime"));
        errors.required(field, message);
    }
    if !spec.domain.maps_numa() {
        let field = path("numa.guestMappingPassthrough");
        let message = format!("{field} must be defined when {} is used", path("realtime"));
        errors.required(field, message);
    }
}

/// Validates dedicated CPUs: whole ones, the same number in all fields, and memory without overcommitment.
fn validate_dedicated(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    cpu: &Cpu,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let resources = &spec.domain.resources;
    let memory = spec.domain.memory.as_ref();
    let path = |list: &str, name: &str| format!("{root}.domain.resources.{list}.{name}");
    let whole = |amount: Option<&Quantity>| amount.and_then(|amount| quantity::units(amount).ok()).unwrap_or(0);
    let (request, limit) = (whole(resources.requests.get("memory")), whole(resources.limits.get("memory")));
    if request == 0 && limit == 0 && memory.is_none_or(|memory| memory.hugepages.is_none() && memory.guest.is_none()) {
        errors.invalid(
            path("limits", "memory"),
            format!(
                "{}, {}, {root}.domain.memory.hugepages or {root}.domain.memory.guest should be provided",
                path("requests", "memory"),
                path("limits", "memory")
            ),
        );
    }
    // A fraction of a CPU counts as a whole one from here on.
    let (request_cpu, limit_cpu) = (whole(resources.requests.get("cpu")), whole(resources.limits.get("cpu")));
    for (which, amounts) in [("requests", &resources.requests), ("limits", &resources.limits)] {
        let milli = amounts.get("cpu").and_then(|amount| quantity::milli(amount).ok()).unwrap_or(0);
        if milli > 0 && milli % 1000 != 0 {
            errors.invalid(path(which, "cpu"), format!("provided resources CPU {which} must be an interger"));
        }
    }
    if request > 0 && limit > 0 && request != limit {
        let message = format!("{} must be equal to {}", path("requests", "memory"), path("limits", "memory"));
        errors.invalid(path("requests", "memory"), message);
    }

    let field = format!("{root}.domain.cpu.dedicatedCpuPlacement");
    let cores = format!("{root}.domain.cpu.cores");
    let (request_path, limit_path) = (path("requests", "cpu"), path("limits", "cpu"));
    let parts = [cpu.sockets, cpu.cores, cpu.threads].map(|part| i64::from(part.unwrap_or(0)));
    let vcpus = if parts.iter().all(|part| *part == 0) {
        0
    } else {
        parts.iter().fold(1_i64, |product, part| product.saturating_mul((*part).max(1)))
    };
    if request_cpu == 0 && limit_cpu == 0 && vcpus == 0 {
        errors.invalid(
            field.clone(),
            format!(
                "either {request_path} or {limit_path} or {cores} must be provided when DedicatedCPUPlacement is true "
            ),
        );
    }
    if request_cpu > 0 && limit_cpu > 0 && request_cpu != limit_cpu {
        errors.invalid(
            field.clone(),
            format!("{request_path} or {limit_path} must be equal when DedicatedCPUPlacement is true "),
        );
    }
    if (request_cpu > 0 || limit_cpu > 0) && vcpus > 0 && request_cpu != vcpus && limit_cpu != vcpus {
        errors.invalid(
            field.clone(),
            format!("{request_path} or {limit_path} must not be provided at the same time with {cores} when DedicatedCPUPlacement is true "),
        );
    }
    let threads = cpu.threads.unwrap_or(0);
    let architecture =
        spec.architecture.as_deref().filter(|name| !name.is_empty()).unwrap_or(config.default_architecture.as_str());
    if architecture == "arm64" && threads > 1 {
        errors.invalid(
            format!("{root}.architecture"),
            format!("threads must not be greater than 1 at {root}.domain.cpu.threads (got {threads}) when {root}.architecture is arm64"),
        );
    }
    if threads > 2 {
        errors.invalid(
            field,
            format!("Not more than two threads must be provided at {root}.domain.cpu.threads (got {threads}) when DedicatedCPUPlacement is true"),
        );
    }
}

/// Validates a name that is passed to the hypervisor.
fn is_model_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    fn cpu(cpu: Value) -> Value {
        json!({"domain": {"cpu": cpu}})
    }

    #[test]
    fn features_have_known_policies() {
        accepts(cpu(json!({"features": [{"name": "vmx", "policy": "require"}, {"name": "sse4.2"}]})));
        refuses(
            cpu(json!({"features": [{"name": "vmx", "policy": "maybe"}]})),
            "spec.domain.cpu.features[0].policy",
            "CPU feature vmx uses policy maybe that is not supported.",
        );
        refuses(cpu(json!({"features": [{"name": "a b"}]})), "spec.domain.cpu.features[0].name", "can only contain");
    }

    #[test]
    fn model_is_well_formed() {
        accepts(cpu(json!({"model": "Skylake-Client-noTSX-IBRS"})));
        refuses(cpu(json!({"model": "<x/>"})), "spec.domain.cpu.model", "can only contain");
    }

    #[test]
    fn topology_is_possible() {
        accepts(cpu(json!({"sockets": 2, "cores": 4, "threads": 2})));
        refuses(cpu(json!({"sockets": 4_000_000, "cores": 4000})), "spec.domain.cpu", "at most 4294967294");
        refuses(cpu(json!({"sockets": 4, "maxSockets": 2})), "spec.domain.cpu.sockets", "greater than the maximum");
    }

    #[test]
    fn emulator_thread_is_isolated_only_with_dedicated_cpus() {
        refuses(
            cpu(json!({"isolateEmulatorThread": true})),
            "spec.domain.cpu.isolateEmulatorThread",
            "only set in combination",
        );
    }

    #[test]
    fn fraction_of_a_cpu_counts_as_a_whole_one() {
        let vmi = json!({"domain": {
            "cpu": {"dedicatedCpuPlacement": true, "cores": 2},
            "resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "2"}},
        }});
        let found = messages(vmi);
        assert!(found.contains(&"provided resources CPU requests must be an interger".to_owned()), "{found:?}");
        assert!(!found.iter().any(|text| text.ends_with("DedicatedCPUPlacement is true ")), "{found:?}");
    }

    #[test]
    fn realtime_needs_dedicated_cpus() {
        refuses(cpu(json!({"realtime": {}})), "spec.domain.cpu.dedicatedCpuPlacement", "must be set to true");
    }
}
