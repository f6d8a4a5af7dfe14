//! Virtual CPUs.

use api::VirtualMachineInstanceSpec;

use crate::causes::Causes;

/// Most virtual CPUs a machine can have on any board.
const VCPUS_MAX: u32 = 4096;

/// What is wrong with the CPU.
pub(super) fn causes(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let Some(cpu) = &spec.domain.cpu else { return };
    let path = |field: &str| format!("{root}.domain.cpu.{field}");
    if cpu.isolate_emulator_thread && !cpu.dedicated_cpu_placement {
        causes.invalid(
            path("isolateEmulatorThread"),
            "IsolateEmulatorThread should be only set in combination with DedicatedCPUPlacement",
        );
    }
    for (index, feature) in cpu.features.iter().enumerate() {
        let policy = feature.policy.as_deref().unwrap_or_default();
        if !["", "force", "require", "optional", "disable", "forbid"].contains(&policy) {
            causes.not_supported(
                path(&format!("features[{index}].policy")),
                format!("CPU feature {} uses policy {policy} that is not supported.", feature.name),
            );
        }
        if !is_word(&feature.name) {
            causes.invalid(
                path(&format!("features[{index}].name")),
                format!("CPU feature name '{}' can only contain letters, digits, '-', '_' and '.'", feature.name),
            );
        }
    }
    if let Some(model) = cpu.model.as_deref().filter(|model| !model.is_empty() && !is_word(model)) {
        causes
            .invalid(path("model"), format!("CPU model '{model}' can only contain letters, digits, '-', '_' and '.'"));
    }
    let sockets = cpu.sockets.unwrap_or(0);
    if cpu.max_sockets.is_some_and(|most| most != 0 && sockets > most) {
        causes
            .invalid(path("sockets"), "Number of sockets in CPU topology is greater than the maximum sockets allowed");
    }
    if cpu.vcpus() > VCPUS_MAX {
        causes.invalid(
            format!("{root}.domain.cpu"),
            format!(
                "{root}.domain.cpu asks for {} virtual CPUs, more than the {VCPUS_MAX} a machine can have",
                cpu.vcpus()
            ),
        );
    }
    if cpu.realtime.is_some() && !cpu.dedicated_cpu_placement {
        causes.required(
            path("dedicatedCpuPlacement"),
            format!("{} must be set to true when {} is used", path("dedicatedCpuPlacement"), path("realtime")),
        );
    }
}

/// Names that go to the hypervisor are words.
fn is_word(text: &str) -> bool {
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
    fn model_is_a_word() {
        accepts(cpu(json!({"model": "Skylake-Client-noTSX-IBRS"})));
        refuses(cpu(json!({"model": "<x/>"})), "spec.domain.cpu.model", "can only contain");
    }

    #[test]
    fn topology_is_possible() {
        accepts(cpu(json!({"sockets": 2, "cores": 4, "threads": 2})));
        refuses(cpu(json!({"sockets": 4_000_000, "cores": 4000})), "spec.domain.cpu", "more than the 4096");
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
    fn realtime_needs_dedicated_cpus() {
        refuses(cpu(json!({"realtime": {}})), "spec.domain.cpu.dedicatedCpuPlacement", "must be set to true");
    }
}
