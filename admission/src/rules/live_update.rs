//! Live updates: requirements of a VMI that can grow while it runs, and the sizes to which it can grow.

use api::{
    VirtualMachineInstanceSpec,
    config::{ClusterConfig, RolloutStrategy},
    quantity,
    vmi::memory::Memory,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::context::FieldErrors;

const GUEST_MIN: i64 = 1 << 30;
/// vCPUs that a default allows at most.
const VCPUS_MAX: u32 = 512;

/// Sets the sizes to which a new VMI can grow, unless it names its own.
pub(crate) fn set_maximums(spec: &mut VirtualMachineInstanceSpec, config: &ClusterConfig) {
    let is_on = config.vm_rollout_strategy == RolloutStrategy::LiveUpdate;
    if !is_on || spec.is_arm64() {
        return;
    }
    let limits = &config.live_update;
    if let Some(cpu) = spec.domain.cpu.as_mut().filter(|cpu| cpu.max_sockets.unwrap_or(0) == 0) {
        let part = |value: Option<u32>| value.unwrap_or(1).max(1);
        let (sockets, per_socket) = (part(cpu.sockets), part(cpu.cores).saturating_mul(part(cpu.threads)));
        let by_ratio = sockets.saturating_mul(limits.max_hotplug_ratio);
        let most = match limits.max_cpu_sockets {
            Some(most) => most,
            None if by_ratio.saturating_mul(per_socket) > VCPUS_MAX => VCPUS_MAX / per_socket,
            None => by_ratio,
        };
        cpu.max_sockets = Some(most.max(sockets));
    }
    let memory = spec.domain.memory.as_ref().filter(|memory| memory.max_guest.is_none());
    let Some(guest) = memory.and_then(|memory| quantity::units(memory.guest.as_ref()?).ok()) else { return };
    let by_ratio = || quantity::bytes(guest.saturating_mul(i64::from(limits.max_hotplug_ratio)));
    let most = limits.max_guest.clone().unwrap_or_else(by_ratio);
    let mut grown = spec.clone();
    grown.domain.memory.get_or_insert_default().max_guest = Some(most);
    if memory_hotplug(&grown).is_ok() {
        *spec = grown;
    }
}

/// Returns the errors of a template at `root` under rollout strategy LiveUpdate.
pub(crate) fn validate(root: &str, spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if let Some(cpu) = &spec.domain.cpu
        && let (Some(sockets), Some(max)) = (cpu.sockets, cpu.max_sockets)
        && max != 0
        && sockets > max
    {
        errors.invalid(format!("{root}.domain.cpu.sockets"), super::cpu::too_many_sockets(sockets, max));
    }
    if spec.domain.memory.as_ref().is_some_and(|memory| memory.max_guest.is_some())
        && let Err(error) = memory_hotplug(spec)
    {
        let amount = |of: fn(&Memory) -> Option<&Quantity>| {
            spec.domain.memory.as_ref().and_then(of).map(|amount| amount.0.clone()).unwrap_or_default()
        };
        let message = match error {
            MemoryHotplugError::AboveMaxGuest => {
                let (guest, max) = (amount(|memory| memory.guest.as_ref()), amount(|memory| memory.max_guest.as_ref()));
                format!("{error}: {guest} of at most {max}")
            }
            _ => error.to_string(),
        };
        errors.invalid(format!("{root}.domain.memory.guest"), message);
    }
    errors
}

/// Reason why memory cannot be added to a running VMI.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MemoryHotplugError {
    /// vCPUs have real-time priority.
    #[error("Memory hotplug is not compatible with realtime VMs")]
    Realtime,
    /// The guest sees the NUMA topology of the node.
    #[error("Memory hotplug is not compatible with guest mapping passthrough")]
    GuestMappingPassthrough,
    /// The memory is encrypted.
    #[error("Memory hotplug is not compatible with encrypted VMs")]
    Encrypted,
    /// The guest memory is not named.
    #[error("Guest memory must be configured when memory hotplug is enabled")]
    NoGuestMemory,
    /// The size to which it can grow is not named.
    #[error("Max guest memory must be configured when memory hotplug is enabled")]
    NoMaxGuest,
    /// It is more than it can grow to.
    #[error("Guest memory is greater than the configured maxGuest memory")]
    AboveMaxGuest,
    /// It is no multiple of the block size.
    #[error("Guest memory must be {0} aligned")]
    GuestNotAligned(&'static str),
    /// The size to which it can grow is no multiple of the block size.
    #[error("MaxGuest must be {0} aligned")]
    MaxGuestNotAligned(&'static str),
    /// The architecture has no such device.
    #[error("Memory hotplug is only available for x86_64 VMs")]
    Architecture,
    /// It is too little.
    #[error("Memory hotplug is only available for VMs with at least 1Gi of guest memory")]
    TooSmall,
}

/// Checks that memory can be added to a running VMI.
///
/// # Errors
/// The first reason why it cannot.
pub fn memory_hotplug(spec: &VirtualMachineInstanceSpec) -> Result<(), MemoryHotplugError> {
    let domain = &spec.domain;
    let cpu = domain.cpu.as_ref();
    if cpu.is_some_and(|cpu| cpu.realtime.is_some()) {
        return Err(MemoryHotplugError::Realtime);
    }
    if domain.maps_numa() {
        return Err(MemoryHotplugError::GuestMappingPassthrough);
    }
    if domain.launch_security.is_some() {
        return Err(MemoryHotplugError::Encrypted);
    }
    let memory = domain.memory.as_ref();
    let bytes = |amount: &Quantity| quantity::units(amount).unwrap_or(0);
    let guest = memory.and_then(|memory| memory.guest.as_ref()).map(bytes);
    let guest = guest.ok_or(MemoryHotplugError::NoGuestMemory)?;
    let max_guest = memory.and_then(|memory| memory.max_guest.as_ref()).map(bytes);
    let max_guest = max_guest.ok_or(MemoryHotplugError::NoMaxGuest)?;
    if guest > max_guest {
        return Err(MemoryHotplugError::AboveMaxGuest);
    }
    let page = memory.and_then(|memory| memory.hugepages.as_ref()).and_then(|pages| pages.page_size.as_deref());
    let (block, name) = if page == Some("1Gi") { (1_i64 << 30, "1Gi") } else { (2_i64 << 20, "2Mi") };
    if guest % block != 0 {
        return Err(MemoryHotplugError::GuestNotAligned(name));
    }
    if max_guest % block != 0 {
        return Err(MemoryHotplugError::MaxGuestNotAligned(name));
    }
    if spec.architecture.as_deref() != Some("amd64") {
        return Err(MemoryHotplugError::Architecture);
    }
    if guest < GUEST_MIN {
        return Err(MemoryHotplugError::TooSmall);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn new_vmi_can_grow_by_the_ratio_or_to_the_limits_of_the_cluster() {
        let limits = |change: Value| {
            let object = json!({"metadata": {}, "spec": {"configuration": {"liveUpdateConfiguration": change}}});
            ClusterConfig::from_kubevirt(&serde_json::from_value(object).unwrap()).unwrap()
        };
        let plain = limits(Value::Null);
        let stage = ClusterConfig { vm_rollout_strategy: RolloutStrategy::Stage, ..ClusterConfig::default() };
        let cpu = |sockets: u32, cores: u32| json!({"sockets": sockets, "cores": cores});
        let guest = |guest: &str| json!({"guest": guest});
        // Configuration, CPU and memory; sockets and memory to which the VMI can grow.
        for (config, cpu, memory, sockets, most) in [
            (&plain, cpu(1, 1), guest("1Gi"), Some(4), Some("4Gi")),
            (&plain, cpu(2, 4), guest("1536Mi"), Some(8), Some("6Gi")),
            (&plain, cpu(2, 100), guest("1Gi"), Some(5), Some("4Gi")),
            (&plain, cpu(6, 100), guest("1Gi"), Some(6), Some("4Gi")),
            // Too small, not aligned, or no amount.
            (&plain, cpu(1, 1), guest("512Mi"), Some(4), None),
            (&plain, cpu(1, 1), guest("1025Mi"), Some(4), None),
            (&plain, cpu(1, 1), json!({}), Some(4), None),
            // Its own.
            (
                &plain,
                json!({"sockets": 1, "maxSockets": 2}),
                json!({"guest": "1Gi", "maxGuest": "2Gi"}),
                Some(2),
                Some("2Gi"),
            ),
            (&stage, cpu(1, 1), guest("1Gi"), None, None),
            (&limits(json!({"maxCpuSockets": 3})), cpu(1, 1), guest("1Gi"), Some(3), Some("4Gi")),
            (&limits(json!({"maxCpuSockets": 3})), cpu(5, 1), guest("1Gi"), Some(5), Some("4Gi")),
            (&limits(json!({"maxGuest": "3Gi"})), cpu(1, 1), guest("2Gi"), Some(4), Some("3Gi")),
            (&limits(json!({"maxGuest": "3Gi"})), cpu(1, 1), guest("4Gi"), Some(4), None),
            (&limits(json!({"maxHotplugRatio": 1})), cpu(2, 1), guest("2Gi"), Some(2), Some("2Gi")),
        ] {
            let object = json!({"architecture": "amd64", "domain": {"cpu": cpu, "memory": memory, "devices": {}}});
            let mut spec: VirtualMachineInstanceSpec = serde_json::from_value(object.clone()).unwrap();
            set_maximums(&mut spec, config);
            let found = spec.domain.memory.and_then(|memory| memory.max_guest);
            assert_eq!(spec.domain.cpu.unwrap().max_sockets, sockets, "{object}");
            assert_eq!(found.map(|most| most.0).as_deref(), most, "{object}");
        }
    }

    #[test]
    fn template_names_why_its_memory_cannot_grow() {
        let check = |memory: Value| {
            let object = json!({"architecture": "amd64", "domain": {"memory": memory, "devices": {}}});
            memory_hotplug(&serde_json::from_value(object).unwrap()).err()
        };
        assert_eq!(check(json!({"guest": "1Gi", "maxGuest": "2Gi"})), None);
        assert_eq!(check(json!({"guest": "3Gi", "maxGuest": "2Gi"})), Some(MemoryHotplugError::AboveMaxGuest));
    }
}
