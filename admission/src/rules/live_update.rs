//! Live updates: requirements of a VMI that can grow while it runs.

use api::{VirtualMachineInstanceSpec, quantity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::context::FieldErrors;

const GUEST_MIN: i64 = 1 << 30;

/// Returns the errors of a template at `root` under rollout strategy LiveUpdate.
pub(crate) fn validate(root: &str, spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if let Some(cpu) = &spec.domain.cpu
        && let (Some(sockets), Some(max)) = (cpu.sockets, cpu.max_sockets)
        && max != 0
        && sockets > max
    {
        errors.invalid(
            format!("{root}.domain.cpu.sockets"),
            "Number of sockets in CPU topology is greater than the maximum sockets allowed",
        );
    }
    if spec.domain.memory.as_ref().is_some_and(|memory| memory.max_guest.is_some())
        && let Err(error) = memory_hotplug(spec)
    {
        errors.invalid(format!("{root}.domain.memory.guest"), error.to_string());
    }
    errors
}

/// Reason why memory cannot be added to a running VMI.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
enum MemoryHotplugError {
    #[error("Memory hotplug is not compatible with realtime VMs")]
    Realtime,
    #[error("Memory hotplug is not compatible with guest mapping passthrough")]
    GuestMappingPassthrough,
    #[error("Memory hotplug is not compatible with encrypted VMs")]
    Encrypted,
    #[error("Guest memory must be configured when memory hotplug is enabled")]
    NoGuestMemory,
    #[error("Max guest memory must be configured when memory hotplug is enabled")]
    NoMaxGuest,
    #[error("Guest memory is greater than the configured maxGuest memory")]
    AboveMaxGuest,
    #[error("Guest memory must be {0} aligned")]
    GuestNotAligned(&'static str),
    #[error("MaxGuest must be {0} aligned")]
    MaxGuestNotAligned(&'static str),
    #[error("Memory hotplug is only available for x86_64 VMs")]
    Architecture,
    #[error("Memory hotplug is only available for VMs with at least 1Gi of guest memory")]
    TooSmall,
}

/// Checks that memory can be added to a running VMI; fails with the first reason why not.
fn memory_hotplug(spec: &VirtualMachineInstanceSpec) -> Result<(), MemoryHotplugError> {
    let domain = &spec.domain;
    let cpu = domain.cpu.as_ref();
    if cpu.is_some_and(|cpu| cpu.realtime.is_some()) {
        return Err(MemoryHotplugError::Realtime);
    }
    if cpu.and_then(|cpu| cpu.numa.as_ref()).is_some_and(|numa| numa.guest_mapping_passthrough.is_some()) {
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
