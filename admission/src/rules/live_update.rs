//! Changing a machine while it runs: what it must have been started with.

use api::{VirtualMachineInstanceSpec, quantity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::causes::Causes;

const GUEST_MIN: i64 = 1 << 30;

/// What is wrong with a template at `root` under rollout strategy LiveUpdate.
pub fn causes(root: &str, spec: &VirtualMachineInstanceSpec) -> Causes {
    let mut causes = Causes::new();
    if let Some(cpu) = &spec.domain.cpu
        && let (Some(sockets), Some(most)) = (cpu.sockets, cpu.max_sockets)
        && most != 0
        && sockets > most
    {
        causes.invalid(
            format!("{root}.domain.cpu.sockets"),
            "Number of sockets in CPU topology is greater than the maximum sockets allowed",
        );
    }
    if spec.domain.memory.as_ref().is_some_and(|memory| memory.max_guest.is_some())
        && let Err(message) = memory(spec)
    {
        causes.invalid(format!("{root}.domain.memory.guest"), message);
    }
    causes
}

/// Whether memory can be added to a machine; the first reason why not.
pub fn memory(spec: &VirtualMachineInstanceSpec) -> Result<(), String> {
    let refuse = |message: &str| Err(message.to_owned());
    let domain = &spec.domain;
    let cpu = domain.cpu.as_ref();
    if cpu.is_some_and(|cpu| cpu.realtime.is_some()) {
        return refuse("Memory hotplug is not compatible with realtime VMs");
    }
    if cpu.and_then(|cpu| cpu.numa.as_ref()).is_some_and(|numa| numa.guest_mapping_passthrough.is_some()) {
        return refuse("Memory hotplug is not compatible with guest mapping passthrough");
    }
    if domain.launch_security.is_some() {
        return refuse("Memory hotplug is not compatible with encrypted VMs");
    }
    let memory = domain.memory.as_ref();
    let bytes = |amount: &Quantity| quantity::units(amount).unwrap_or(0);
    let Some(guest) = memory.and_then(|memory| memory.guest.as_ref()).map(bytes) else {
        return refuse("Guest memory must be configured when memory hotplug is enabled");
    };
    let Some(most) = memory.and_then(|memory| memory.max_guest.as_ref()).map(bytes) else {
        return refuse("Max guest memory must be configured when memory hotplug is enabled");
    };
    if guest > most {
        return refuse("Guest memory is greater than the configured maxGuest memory");
    }
    let page = memory.and_then(|memory| memory.hugepages.as_ref()).and_then(|pages| pages.page_size.as_deref());
    let (block, name) = if page == Some("1Gi") { (1_i64 << 30, "1Gi") } else { (2_i64 << 20, "2Mi") };
    if guest % block != 0 {
        return Err(format!("Guest memory must be {name} aligned"));
    }
    if most % block != 0 {
        return Err(format!("MaxGuest must be {name} aligned"));
    }
    if spec.architecture.as_deref() != Some("amd64") {
        return refuse("Memory hotplug is only available for x86_64 VMs");
    }
    if guest < GUEST_MIN {
        return refuse("Memory hotplug is only available for VMs with at least 1Gi of guest memory");
    }
    Ok(())
}
