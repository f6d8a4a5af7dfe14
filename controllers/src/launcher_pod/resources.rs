//! Requests and limits of the container.

use std::collections::BTreeMap;

use api::{constants::device, dedicated, overhead, persistent_state, quantity};
use k8s_openapi::{
    api::core::v1::{ResourceClaim, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};

use super::{Inputs, RenderError, networks};

/// Space for logs and sockets in the pod's own file systems.
const EPHEMERAL_STORAGE: i64 = 50_000_000;
/// Memory limit over request in namespaces whose quota requires limits.
const DEFAULT_LIMIT_RATIO: f64 = 2.0;

/// Resources with the overhead that they contain.
pub(super) struct PodResources {
    pub(super) requirements: ResourceRequirements,
    pub(super) overhead: i64,
}

type Amounts = BTreeMap<String, Quantity>;

fn bytes_of(amounts: &Amounts, name: &str, field: &'static str) -> Result<Option<i64>, RenderError> {
    amounts
        .get(name)
        .map(|amount| quantity::units(amount).map_err(|source| RenderError::Quantity { field, source }))
        .transpose()
        .map(|bytes| bytes.filter(|bytes| *bytes != 0))
}

fn milli_of(amounts: &Amounts, name: &str, field: &'static str) -> Result<Option<i64>, RenderError> {
    amounts
        .get(name)
        .map(|amount| quantity::milli(amount).map_err(|source| RenderError::Quantity { field, source }))
        .transpose()
        .map(|milli| milli.filter(|milli| *milli != 0))
}

pub(super) fn resources(inputs: &Inputs<'_>) -> Result<PodResources, RenderError> {
    let spec = &inputs.instance.spec;
    let domain = &spec.domain;
    let mut requests: Amounts = domain.resources.requests.clone();
    let mut limits: Amounts = domain.resources.limits.clone();
    let guaranteed = is_guaranteed(&domain.resources.requests, &limits);
    let emulated = super::is_emulated(inputs.instance, inputs.config);
    let overhead = overhead::bytes(spec, inputs.config.overhead_ratio, guaranteed, emulated);

    let storage = bytes_of(&requests, "ephemeral-storage", "requests.ephemeral-storage")?.unwrap_or(0);
    let own = EPHEMERAL_STORAGE + if spec.is_arm64() { persistent_state::ARM64_VARIABLES } else { 0 };
    requests.insert("ephemeral-storage".to_owned(), decimal(storage.saturating_add(own)));
    if let Some(limit) = bytes_of(&limits, "ephemeral-storage", "limits.ephemeral-storage")? {
        limits.insert("ephemeral-storage".to_owned(), decimal(limit.saturating_add(own)));
    }

    cpu(inputs, &mut requests, &mut limits)?;
    memory(inputs, &mut requests, &mut limits, overhead)?;
    let mut counts = devices(inputs, &mut limits)?;
    for name in networks::resources(inputs)? {
        *counts.entry(name).or_default() += 1;
    }
    request_devices(counts, &mut requests, &mut limits);
    // Only targets of migrations have this device, whatever a VMI or a definition of a network requests.
    for amounts in [&mut requests, &mut limits] {
        amounts.remove(device::USERFAULTFD);
    }

    let claims = device_claims(inputs);
    Ok(PodResources {
        requirements: ResourceRequirements {
            requests: Some(requests),
            limits: (!limits.is_empty()).then_some(limits),
            claims: (!claims.is_empty()).then_some(claims),
        },
        overhead,
    })
}

/// Returns true if the user requests the Guaranteed class.
fn is_guaranteed(requests: &Amounts, limits: &Amounts) -> bool {
    // By value: `1Gi` is `1024Mi`. Invalid quantities are rejected where they are used.
    let bytes = |amounts: &Amounts| {
        amounts.get("memory").and_then(|amount| quantity::units(amount).ok()).filter(|bytes| *bytes != 0)
    };
    let milli = |amounts: &Amounts| {
        amounts.get("cpu").and_then(|amount| quantity::milli(amount).ok()).filter(|milli| *milli != 0)
    };
    let memory = bytes(limits).is_some_and(|limit| bytes(requests).is_none_or(|request| request == limit));
    memory && milli(requests).is_some_and(|request| milli(limits) == Some(request))
}

fn cpu(inputs: &Inputs<'_>, requests: &mut Amounts, limits: &mut Amounts) -> Result<(), RenderError> {
    let domain = &inputs.instance.spec.domain;
    if let Some(cpus) = dedicated::cpus(inputs.instance) {
        let amount = Quantity(cpus.total().to_string());
        requests.insert("cpu".to_owned(), amount.clone());
        limits.insert("cpu".to_owned(), amount);
        return Ok(());
    }
    let threads = domain.io_threads.as_ref().and_then(|threads| threads.supplemental_pool_thread_count).unwrap_or(0);
    let vcpus = i64::from(domain.cpu.as_ref().map_or(1, |cpu| cpu.vcpus()));
    let total = vcpus.saturating_add(i64::from(threads));
    if milli_of(requests, "cpu", "requests.cpu")?.is_none() {
        let ratio = i64::from(inputs.config.cpu_allocation_ratio.max(1));
        let milli = total.saturating_mul(1000) / ratio;
        requests.insert("cpu".to_owned(), quantity::from_milli(milli.max(1)));
    }
    if inputs.limits.cpu && milli_of(limits, "cpu", "limits.cpu")?.is_none() {
        limits.insert("cpu".to_owned(), Quantity(total.to_string()));
    }
    Ok(())
}

fn memory(inputs: &Inputs<'_>, requests: &mut Amounts, limits: &mut Amounts, overhead: i64) -> Result<(), RenderError> {
    let domain = &inputs.instance.spec.domain;
    let memory = domain.memory.as_ref();
    let guest = memory
        .and_then(|memory| memory.guest.as_ref())
        .map(|guest| quantity::units(guest).map_err(|source| RenderError::Quantity { field: "memory.guest", source }))
        .transpose()?;
    let page_size = memory.and_then(|memory| memory.hugepages.as_ref()).and_then(|pages| pages.page_size.clone());
    let limit = bytes_of(limits, "memory", "limits.memory")?;
    let pinned = dedicated::is_dedicated(domain);
    let request = match (bytes_of(requests, "memory", "requests.memory")?, limit) {
        (Some(request), _) => request,
        (None, Some(limit)) => limit,
        (None, None) => {
            let base = match (guest, &page_size) {
                (Some(guest), _) => guest,
                (None, Some(size)) => quantity::units(&Quantity(size.clone()))
                    .map_err(|source| RenderError::Quantity { field: "memory.hugepages.pageSize", source })?,
                (None, None) => 0,
            };
            let overcommit = if pinned { 100 } else { i128::from(inputs.config.memory_overcommit.max(1)) };
            i64::try_from(i128::from(base) * 100 / overcommit).unwrap_or(i64::MAX)
        }
    };
    // The request becomes the limit, and the kernel would end a guest that uses more.
    let request = if pinned && limit.is_none() { request.max(guest.unwrap_or(0)) } else { request };
    let limit = if pinned { Some(request) } else { limit };
    let (request, limit, least) = if let Some(size) = page_size {
        // All of the guest: what a pod takes beyond its request belongs to others.
        let pages = guest.unwrap_or(request);
        let name = format!("hugepages-{size}");
        requests.insert(name.clone(), quantity::bytes(pages));
        limits.insert(name, quantity::bytes(pages));
        let beside = |amount: i64| guest.map_or(0, |guest| (amount - guest).max(0)).saturating_add(overhead);
        (beside(request), limit.map(beside), beside(request))
    } else {
        let overcommits = domain.resources.overcommit_guest_overhead;
        let raised = if overcommits { request } else { request.saturating_add(overhead) };
        let least = guest.unwrap_or(request).saturating_add(overhead);
        (raised, limit.map(|limit| limit.saturating_add(overhead)), least)
    };
    requests.insert("memory".to_owned(), quantity::bytes(request));
    if let Some(limit) = limit {
        limits.insert("memory".to_owned(), quantity::bytes(limit));
    } else if inputs.limits.memory {
        let ratio = inputs.limits.memory_ratio.filter(|ratio| *ratio >= 1.0).unwrap_or(DEFAULT_LIMIT_RATIO);
        #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "saturates, and is rounded")]
        let limit = (request as f64 * ratio) as i64;
        limits.insert(
            "memory".to_owned(),
            quantity::bytes(if inputs.limits.below_guest { limit } else { limit.max(least) }),
        );
    }
    Ok(())
}

/// Adds the devices that QEMU needs. Returns the number of GPUs and host devices of each resource.
fn devices(inputs: &Inputs<'_>, limits: &mut Amounts) -> Result<BTreeMap<String, i64>, RenderError> {
    let spec = &inputs.instance.spec;
    let devices = &spec.domain.devices;
    let one = || Quantity("1".to_owned());
    if !devices.interfaces.is_empty() || devices.autoattach_pod_interface != Some(false) {
        limits.insert(device::TUN.to_owned(), one());
    }
    if !super::is_emulated(inputs.instance, inputs.config) {
        limits.insert(device::KVM.to_owned(), one());
        let virtio =
            |model: &Option<String>| model.as_deref().is_none_or(|model| model.is_empty() || model == "virtio");
        if devices.interfaces.iter().any(|interface| virtio(&interface.model)) {
            limits.insert(device::VHOST_NET.to_owned(), one());
        }
    }
    if api::vsock::is_attached(inputs.instance) {
        limits.insert(device::VHOST_VSOCK.to_owned(), one());
    }
    let mut counts: BTreeMap<String, i64> = BTreeMap::new();
    let mut refused = Vec::new();
    let permitted = inputs.config.permitted_host_devices.as_ref();
    let gpus = devices.gpus.iter().map(|gpu| ("GPU", &gpu.device_name));
    let host_devices = devices.host_devices.iter().map(|device| ("HostDevice", &device.device_name));
    for (what, name) in gpus.chain(host_devices) {
        let Some(name) = name.as_ref().filter(|name| !name.is_empty()) else { continue };
        if permitted.is_some_and(|permitted| !permitted.permits(name)) {
            refused.push(format!("{what} {name} is not permitted in permittedHostDevices configuration"));
        }
        *counts.entry(name.clone()).or_default() += 1;
    }
    if refused.is_empty() { Ok(counts) } else { Err(RenderError::NotPermitted(refused.join(" "))) }
}

/// Requests these numbers of devices. The amount of a user counts in their place if it is not smaller, and for both lists if it is in
/// one only: Kubernetes refuses a request that differs from the limit.
fn request_devices(counts: BTreeMap<String, i64>, requests: &mut Amounts, limits: &mut Amounts) {
    for (name, count) in counts {
        let suffices = |amount: &&Quantity| quantity::units(amount).is_ok_and(|amount| amount >= count);
        let requested = requests.get(&name).filter(suffices).cloned();
        let limited = limits.get(&name).filter(suffices).cloned();
        let counted = || Quantity(count.to_string());
        let request = requested.clone().or_else(|| limited.clone()).unwrap_or_else(counted);
        let limit = limited.or(requested).unwrap_or_else(counted);
        requests.insert(name.clone(), request);
        limits.insert(name, limit);
    }
}

fn device_claims(inputs: &Inputs<'_>) -> Vec<ResourceClaim> {
    let devices = &inputs.instance.spec.domain.devices;
    let gpus = devices.gpus.iter().map(|gpu| (&gpu.claim_name, &gpu.request_name));
    let host_devices = devices.host_devices.iter().map(|device| (&device.claim_name, &device.request_name));
    gpus.chain(host_devices)
        .filter_map(|(claim, request)| Some(ResourceClaim { name: claim.clone()?, request: request.clone() }))
        .collect()
}

fn decimal(bytes: i64) -> Quantity {
    if bytes % 1_000_000 == 0 { Quantity(format!("{}M", bytes / 1_000_000)) } else { Quantity(bytes.to_string()) }
}
