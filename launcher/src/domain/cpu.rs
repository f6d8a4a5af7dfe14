//! CPUs.

use api::{
    VirtualMachineInstance, dedicated, quantity,
    vmi::{cpu::Realtime, domain::DomainSpec},
};

use super::{
    DomainError, check,
    disks::IoThreads,
    pinning::{self, Demand, HostCpus, Pinning, PinningError},
    xml::Element,
};

/// Returns the number of vCPUs.
pub(super) fn vcpus(spec: &DomainSpec) -> u32 {
    let (sockets, cores, threads) = topology(spec);
    sockets.saturating_mul(cores).saturating_mul(threads).max(1)
}

/// Returns the number of vCPUs to which the domain can grow.
pub(super) fn most_vcpus(spec: &DomainSpec) -> u32 {
    let (_, cores, threads) = topology(spec);
    most_sockets(spec).saturating_mul(cores).saturating_mul(threads).max(1)
}

/// Returns the sockets of the topology, which includes those without a processor.
fn most_sockets(spec: &DomainSpec) -> u32 {
    spec.cpu.as_ref().and_then(|cpu| cpu.max_sockets).unwrap_or(0).max(topology(spec).0)
}

/// Renders the number of vCPUs.
pub(super) fn vcpu(spec: &DomainSpec) -> Element {
    let (present, most) = (vcpus(spec), most_vcpus(spec));
    let element = Element::new("vcpu").with("placement", "static");
    if present == most { element } else { element.with("current", present.to_string()) }.text(most.to_string())
}

/// Assigns the CPUs of the pod to the threads of a VMI with dedicated CPUs. vCPUs that can be plugged later have none: they come with
/// another pod, after a migration.
pub(super) fn pinning(
    vmi: &VirtualMachineInstance,
    cpus: Option<&HostCpus>,
    io_threads: &IoThreads,
) -> Result<Option<Pinning>, PinningError> {
    let Some(needed) = dedicated::cpus(vmi) else { return Ok(None) };
    let cpus = cpus.ok_or(PinningError::Unreported)?;
    let (sockets, cores, threads) = topology(&vmi.spec.domain);
    let (pool, shared) = io_threads.own_and_shared();
    let demand = Demand {
        cores: sockets.saturating_mul(cores),
        threads,
        pool,
        shared,
        emulator: needed.emulator,
        strict: vmi.spec.domain.maps_numa(),
    };
    let pinning = pinning::assign(cpus, &demand)?;
    let realtime = vmi.spec.domain.cpu.as_ref().and_then(|cpu| cpu.realtime.as_ref());
    let realtime = realtime.map(|realtime| real_time(realtime, pinning.vcpus.len())).transpose()?;
    Ok(Some(Pinning { realtime, ..pinning }))
}

/// Returns the vCPUs with real-time scheduling: all without a mask.
fn real_time(realtime: &Realtime, vcpus: usize) -> Result<String, PinningError> {
    match realtime.mask.as_deref().filter(|mask| !mask.is_empty()) {
        None => Ok(format!("0-{}", vcpus.saturating_sub(1))),
        Some(mask) if mask.bytes().all(|byte| byte.is_ascii_digit() || b",-^".contains(&byte)) => Ok(mask.to_owned()),
        Some(mask) => Err(PinningError::Mask(mask.to_owned())),
    }
}

/// Returns sockets, cores and threads. Without any of them the CPU limit or request gives the sockets.
fn topology(spec: &DomainSpec) -> (u32, u32, u32) {
    let part = |value: Option<u32>| value.unwrap_or(1).max(1);
    match &spec.cpu {
        Some(cpu) if [cpu.sockets, cpu.cores, cpu.threads].iter().any(|v| v.is_some_and(|v| v > 0)) => {
            (part(cpu.sockets), part(cpu.cores), part(cpu.threads))
        }
        _ => {
            let quantity = spec.resources.limits.get("cpu").or_else(|| spec.resources.requests.get("cpu"));
            let sockets = quantity.and_then(|q| quantity::units(q).ok()).and_then(|n| u32::try_from(n).ok());
            (part(sockets), 1, 1)
        }
    }
}

/// Renders the `<cpu>` element.
///
/// Software emulation cannot copy the host's CPU: `host-model` and `host-passthrough` become the emulator's maximum,
/// and a named model is used without the features that the emulator lacks.
pub(super) fn cpu(spec: &DomainSpec, kvm: bool, cells: Option<Element>) -> Result<Element, DomainError> {
    let model = spec.cpu.as_ref().and_then(|cpu| cpu.model.as_deref()).unwrap_or_default();
    let mut element = match (model, kvm) {
        ("" | "host-model", true) => Element::new("cpu").with("mode", "host-model"),
        ("host-passthrough", true) => Element::new("cpu").with("mode", "host-passthrough"),
        ("" | "host-model" | "host-passthrough", false) => Element::new("cpu").with("mode", "maximum"),
        (name, true) => Element::new("cpu").with("mode", "custom").child(Element::new("model").text(name)),
        (name, false) => {
            Element::new("cpu").with("mode", "custom").with("check", "none").child(Element::new("model").text(name))
        }
    };
    let (_, cores, threads) = topology(spec);
    element = element.child(
        Element::new("topology")
            .with("sockets", most_sockets(spec).to_string())
            .with("cores", cores.to_string())
            .with("threads", threads.to_string()),
    );
    let mut has_mpx = false;
    for feature in spec.cpu.iter().flat_map(|cpu| &cpu.features) {
        let policy = feature.policy.as_deref().filter(|p| !p.is_empty()).unwrap_or("require");
        check("spec.domain.cpu.features.policy", policy, &["force", "require", "optional", "disable", "forbid"])?;
        has_mpx |= feature.name == "mpx";
        element = element.child(Element::new("feature").with("policy", policy).with("name", &feature.name));
    }
    // Named models include MPX, which no current CPU or kernel supports.
    if !matches!(model, "" | "host-model" | "host-passthrough") && !has_mpx {
        element = element.child(Element::new("feature").with("policy", "disable").with("name", "mpx"));
    }
    Ok(element.children(cells))
}

/// Renders the NUMA cell with all vCPUs and the memory of a domain that can grow. The memory device belongs to it.
pub(super) fn cell(spec: &DomainSpec, memory: u64) -> Element {
    let vcpus = most_vcpus(spec);
    let cpus = if vcpus == 1 { "0".to_owned() } else { format!("0-{}", vcpus.saturating_sub(1)) };
    Element::new("numa").child(
        Element::new("cell").with("id", "0").with("cpus", cpus).with("memory", memory.to_string()).with("unit", "b"),
    )
}
