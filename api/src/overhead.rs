//! Memory a launcher pod needs beyond the guest's own, by which its request is raised.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::{
    quantity,
    vmi::{domain::DomainSpec, spec::VirtualMachineInstanceSpec},
};

const MI: i64 = 1 << 20;
const GI: i64 = 1 << 30;

/// Supervisor, worker and libvirt daemon together; the budget a benchmark holds them to.
pub const OUTSIDE_QEMU: i64 = 60 * MI;
/// QEMU itself: code, heap and the buffers of its devices.
pub const QEMU: i64 = 50 * MI;
/// Each virtual CPU: thread stack and state.
pub const PER_VCPU: i64 = 8 * MI;
/// The thread that does disk IO.
pub const IO_THREAD: i64 = 8 * MI;
/// Frame buffer of the display.
pub const VIDEO: i64 = 32 * MI;
/// Flash images of arm64 firmware.
pub const ARM64_FLASH: i64 = 128 * MI;
/// IO mappings of devices handed to the guest.
pub const VFIO: i64 = GI;
/// The small disk with host metrics.
pub const DOWNWARD_METRICS: i64 = MI;
/// Each exec probe that may run.
pub const EXEC_PROBE: i64 = 10 * MI;
/// What the first exec probe costs on top.
pub const FIRST_EXEC_PROBE: i64 = 100 * MI;
/// Firmware and bounce buffers of encrypted guests.
pub const SEV: i64 = 256 * MI;
/// The TPM emulator.
pub const TPM: i64 = 53 * MI;
/// Slack of pods whose limit equals their request: there is nothing to borrow from.
pub const GUARANTEED: i64 = 100 * MI;
/// Smallest share of page tables: one entry of 8 bytes maps 4 KiB.
const PAGE_TABLE_SHARE: i64 = 512;

/// Overhead in bytes of the machine's launcher pod. `ratio` is the cluster's factor on it. `guaranteed` says whether
/// the pod's requests equal its limits.
pub fn bytes(spec: &VirtualMachineInstanceSpec, ratio: Option<f64>, guaranteed: bool) -> i64 {
    let domain = &spec.domain;
    let devices = &domain.devices;
    let mut sum = OUTSIDE_QEMU + QEMU + IO_THREAD + i64::from(vcpus(domain)) * PER_VCPU;

    if let Some(requested) = requested(domain, "memory") {
        sum = sum.saturating_add(requested / PAGE_TABLE_SHARE);
    }
    if devices.autoattach_graphics_device.unwrap_or(true) {
        sum += VIDEO;
    }
    if spec.architecture.as_deref() == Some("arm64") {
        sum += ARM64_FLASH;
    }
    let sriov = devices.interfaces.iter().any(|interface| interface.sriov.is_some());
    if sriov || !devices.gpus.is_empty() || !devices.host_devices.is_empty() {
        sum += VFIO;
    }
    if spec.volumes.iter().any(|volume| volume.downward_metrics.is_some()) {
        sum += DOWNWARD_METRICS;
    }
    let exec_probes = [&spec.liveness_probe, &spec.readiness_probe]
        .into_iter()
        .flatten()
        .filter(|probe| probe.exec.is_some())
        .count();
    if exec_probes > 0 {
        sum += FIRST_EXEC_PROBE + EXEC_PROBE * exec_probes.min(2) as i64;
    }
    if domain.launch_security.as_ref().is_some_and(|l| l.sev.is_some() || l.snp.is_some()) {
        sum += SEV;
    }
    if devices.tpm.as_ref().is_some_and(|tpm| tpm.enabled.unwrap_or(true)) {
        sum += TPM;
    }
    let dedicated = domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement);
    if guaranteed || dedicated {
        sum += GUARANTEED;
    }
    let added = domain
        .memory
        .as_ref()
        .and_then(|memory| memory.reserved_overhead.as_ref())
        .and_then(|overhead| overhead.added_overhead.as_ref())
        .and_then(|added| quantity::units(added).ok());
    if let Some(added) = added {
        sum = sum.saturating_add(added.max(0));
    }
    match ratio {
        // Float to integer saturates, so a silly ratio gives a request nothing can satisfy, not a small one.
        Some(ratio) if ratio > 1.0 => (sum as f64 * ratio) as i64,
        _ => sum,
    }
}

/// [`bytes`] as a quantity.
pub fn quantity(spec: &VirtualMachineInstanceSpec, ratio: Option<f64>, guaranteed: bool) -> Quantity {
    quantity::bytes(bytes(spec, ratio, guaranteed))
}

/// Virtual CPUs of a domain: its topology, else its CPU limit, else its CPU request, at least 1.
pub fn vcpus(domain: &DomainSpec) -> u32 {
    if let Some(cpu) = &domain.cpu {
        return cpu.vcpus();
    }
    let limit = domain.resources.limits.get("cpu").and_then(|limit| quantity::units(limit).ok());
    limit.or_else(|| requested(domain, "cpu")).and_then(|cpus| u32::try_from(cpus).ok()).unwrap_or(1).max(1)
}

fn requested(domain: &DomainSpec, resource: &str) -> Option<i64> {
    domain.resources.requests.get(resource).and_then(|request| quantity::units(request).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn overhead(domain: serde_json::Value) -> i64 {
        let spec = serde_json::from_value(json!({"domain": domain})).unwrap();
        bytes(&spec, None, false) / MI
    }

    #[test]
    fn smallest_machine_has_the_fixed_terms() {
        assert_eq!(overhead(json!({"devices": {}})), 60 + 50 + 8 + 8 + 32);
        assert_eq!(overhead(json!({"devices": {"autoattachGraphicsDevice": false}})), 126);
    }

    #[test]
    fn each_vcpu_and_each_requested_byte_counts() {
        let cpu = json!({"devices": {}, "cpu": {"sockets": 2, "cores": 2}});
        assert_eq!(overhead(cpu), 158 + 3 * 8);
        let memory = json!({"devices": {}, "resources": {"requests": {"memory": "1Gi"}}});
        assert_eq!(overhead(memory), 158 + 2);
    }

    #[test]
    fn ratio_multiplies() {
        let spec = serde_json::from_value(json!({"domain": {"devices": {}}})).unwrap();
        assert_eq!(bytes(&spec, Some(2.0), false), 2 * 158 * MI);
        assert_eq!(bytes(&spec, None, true), (158 + 100) * MI);
    }
}
