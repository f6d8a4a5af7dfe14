//! CPUs of the host that a VMI with dedicated CPUs needs: the pod requests them, and the launcher distributes them.

use crate::{
    VirtualMachineInstance, constants::annotation::EMULATOR_THREAD_COMPLETE_TO_EVEN_PARITY, quantity,
    vmi::domain::DomainSpec,
};

/// Counts of CPUs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct DedicatedCpus {
    /// One for each vCPU.
    pub vcpus: u32,
    /// One for each I/O thread of the supplemental pool.
    pub io_threads: u32,
    /// CPUs of the emulator, and of the processes beside it.
    pub emulator: u32,
}

impl DedicatedCpus {
    /// Returns the sum.
    #[must_use]
    pub fn total(self) -> u32 {
        self.vcpus.saturating_add(self.io_threads).saturating_add(self.emulator)
    }
}

/// Returns true if each vCPU has a CPU of the host for itself.
#[must_use]
pub fn is_dedicated(domain: &DomainSpec) -> bool {
    domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement)
}

/// Returns the CPUs that a VMI needs; `None` if it has no dedicated ones.
#[must_use]
pub fn cpus(vmi: &VirtualMachineInstance) -> Option<DedicatedCpus> {
    let domain = &vmi.spec.domain;
    let cpu = domain.cpu.as_ref().filter(|cpu| cpu.dedicated_cpu_placement)?;
    let has_topology = [cpu.sockets, cpu.cores, cpu.threads].iter().any(|part| part.is_some_and(|part| part > 0));
    let amount = || {
        let amounts = &domain.resources;
        let amount = amounts.limits.get("cpu").or_else(|| amounts.requests.get("cpu"))?;
        u32::try_from(quantity::units(amount).ok()?).ok().filter(|count| *count > 0)
    };
    let vcpus = if has_topology { cpu.vcpus() } else { amount().unwrap_or(1) };
    let io_threads = domain.io_threads.as_ref().and_then(|pool| pool.supplemental_pool_thread_count).unwrap_or(0);
    let annotations = vmi.metadata.annotations.as_ref();
    let is_even = annotations.is_some_and(|all| all.contains_key(EMULATOR_THREAD_COMPLETE_TO_EVEN_PARITY));
    let emulator = match vcpus.saturating_add(io_threads) % 2 {
        _ if !cpu.isolate_emulator_thread => 0,
        0 if is_even => 2,
        _ => 1,
    };
    Some(DedicatedCpus { vcpus, io_threads, emulator })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn cpus_are_counted_for_vcpus_pool_and_emulator() {
        let even = json!({"alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity": ""});
        let isolated =
            |cores: u32| json!({"cpu": {"cores": cores, "dedicatedCpuPlacement": true, "isolateEmulatorThread": true}});
        let pinned = |more: &Value| {
            let mut domain = json!({"cpu": {"dedicatedCpuPlacement": true}});
            domain.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            domain
        };
        for (annotations, domain, expected) in [
            (json!({}), json!({"cpu": {"cores": 2}}), None),
            (json!({}), json!({}), None),
            (json!({}), pinned(&json!({})), Some((1, 0, 0))),
            (json!({}), pinned(&json!({"resources": {"requests": {"cpu": "3"}}})), Some((3, 0, 0))),
            (json!({}), pinned(&json!({"resources": {"limits": {"cpu": "2"}}})), Some((2, 0, 0))),
            (json!({}), pinned(&json!({"ioThreads": {"supplementalPoolThreadCount": 2}})), Some((1, 2, 0))),
            (json!({}), isolated(2), Some((2, 0, 1))),
            (even.clone(), isolated(2), Some((2, 0, 2))),
            (even.clone(), isolated(3), Some((3, 0, 1))),
            // The annotation is for an isolated emulator.
            (even, pinned(&json!({"resources": {"limits": {"cpu": "2"}}})), Some((2, 0, 0))),
        ] {
            let mut domain = domain;
            domain["devices"] = json!({});
            let vmi = json!({"metadata": {"annotations": annotations}, "spec": {"domain": domain}});
            let vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
            let expected = expected.map(|(vcpus, io_threads, emulator)| DedicatedCpus { vcpus, io_threads, emulator });
            assert_eq!(cpus(&vmi), expected, "{domain}");
        }
    }
}
