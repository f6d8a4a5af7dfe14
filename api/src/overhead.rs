//! Memory overhead of a launcher pod, which is added to its memory request.

use crate::{
    dedicated, persistent_state, quantity,
    vmi::{domain::DomainSpec, spec::VirtualMachineInstanceSpec},
};

const MI: i64 = 1 << 20;
const GI: i64 = 1 << 30;

/// Supervisor, worker and libvirt daemon together, and what they take for a moment. A benchmark compares this and the following
/// with the memory of an idle VMI.
pub const OUTSIDE_QEMU: i64 = 30 * MI;
/// QEMU itself: code, heap and device buffers.
pub const QEMU: i64 = 42 * MI;
/// Each vCPU: thread stack and state.
pub const PER_VCPU: i64 = 8 * MI;
/// The thread for disk IO.
pub const IO_THREAD: i64 = 8 * MI;
/// Frame buffer of the display.
pub const VIDEO: i64 = 32 * MI;
/// Code that QEMU translates under software emulation. A small guest that boots makes 72 MiB of it.
pub const EMULATION: i64 = 48 * MI;
/// Flash images of arm64 firmware.
pub const ARM64_FLASH: i64 = 128 * MI;
/// IO mappings of passthrough devices.
pub const VFIO: i64 = GI;
/// The disk with downward metrics.
pub const DOWNWARD_METRICS: i64 = MI;
/// Each exec probe.
pub const EXEC_PROBE: i64 = 10 * MI;
/// Additional memory of the first exec probe.
pub const FIRST_EXEC_PROBE: i64 = 100 * MI;
/// Firmware and bounce buffers of encrypted guests.
pub const SEV: i64 = 256 * MI;
/// virtiofsd of each file system: its code, and what it keeps of open files. A benchmark checks that an idle one has 6 MiB.
pub const VIRTIOFSD: i64 = 16 * MI;
/// The TPM emulator: about 8 MiB, and the programs that make a new TPM before the guest runs.
pub const TPM: i64 = 16 * MI;
/// Reserve of pods whose limits equal their requests, which cannot exceed them.
pub const GUARANTEED: i64 = 100 * MI;
/// Page tables take at least this fraction: an entry of 8 bytes maps 4 KiB.
const PAGE_TABLE_SHARE: i64 = 512;

/// Returns the overhead of the VMI's launcher pod in bytes. `ratio` is the factor of the cluster. `guaranteed` is true if
/// the pod's requests equal its limits, `emulated` if QEMU may emulate the processor.
pub fn bytes(spec: &VirtualMachineInstanceSpec, ratio: Option<f64>, guaranteed: bool, emulated: bool) -> i64 {
    let domain = &spec.domain;
    let devices = &domain.devices;
    let mut sum = OUTSIDE_QEMU + QEMU + IO_THREAD + i64::from(vcpus(domain)) * PER_VCPU;

    if let Some(requested) = requested(domain, "memory") {
        sum = sum.saturating_add(requested / PAGE_TABLE_SHARE);
    }
    if devices.autoattach_graphics_device.unwrap_or(true) {
        sum += VIDEO;
    }
    if emulated {
        sum += EMULATION;
    }
    if spec.is_arm64() {
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
    if persistent_state::has_tpm(spec) {
        sum += TPM;
    }
    sum = sum.saturating_add(i64::try_from(devices.filesystems.len()).unwrap_or(i64::MAX).saturating_mul(VIRTIOFSD));
    if guaranteed || dedicated::is_dedicated(domain) {
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
        // The conversion to an integer saturates, so an excessive ratio gives an unsatisfiable request, not a small one.
        Some(ratio) if ratio > 1.0 => (sum as f64 * ratio) as i64,
        _ => sum,
    }
}

/// Returns the number of vCPUs of a domain: from its topology, else its CPU limit, else its CPU request; at least 1.
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
        bytes(&spec, None, false, false) / MI
    }

    #[test]
    fn smallest_vmi_has_the_fixed_overhead() {
        assert_eq!(overhead(json!({"devices": {}})), 30 + 42 + 8 + 8 + 32);
        assert_eq!(overhead(json!({"devices": {"autoattachGraphicsDevice": false}})), 88);
    }

    #[test]
    fn each_vcpu_and_each_requested_byte_counts() {
        let cpu = json!({"devices": {}, "cpu": {"sockets": 2, "cores": 2}});
        assert_eq!(overhead(cpu), 120 + 3 * 8);
        let memory = json!({"devices": {}, "resources": {"requests": {"memory": "1Gi"}}});
        assert_eq!(overhead(memory), 120 + 2);
    }

    #[test]
    fn each_file_system_counts() {
        let filesystems = json!([{"name": "a", "virtiofs": {}}, {"name": "b", "virtiofs": {}}]);
        assert_eq!(overhead(json!({"devices": {"filesystems": filesystems}})), 120 + 2 * 16);
    }

    #[test]
    fn reserved_overhead_is_added() {
        let added = |amount: &str| json!({"devices": {}, "memory": {"reservedOverhead": {"addedOverhead": amount}}});
        assert_eq!(overhead(added("64Mi")), 120 + 64);
        assert_eq!(overhead(added("-64Mi")), 120);
    }

    #[test]
    fn a_tpm_that_is_not_switched_off_counts() {
        for (tpm, mebibytes) in [(json!({}), 16), (json!({"persistent": true}), 16), (json!({"enabled": false}), 0)] {
            assert_eq!(overhead(json!({"devices": {"tpm": tpm}})), 120 + mebibytes, "{tpm}");
        }
    }

    #[test]
    fn ratio_multiplies() {
        let spec = serde_json::from_value(json!({"domain": {"devices": {}}})).unwrap();
        assert_eq!(bytes(&spec, Some(2.0), false, false), 2 * 120 * MI);
        assert_eq!(bytes(&spec, None, true, false), (120 + 100) * MI);
        assert_eq!(bytes(&spec, None, false, true), (120 + 48) * MI);
    }
}
