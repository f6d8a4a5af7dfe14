//! Backing of the guest's memory.

use api::{VirtualMachineInstance, constants::annotation, quantity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    DomainError, annotation, cpu,
    numa::{Numa, NumaError},
    pinning::{HostCpus, Pinning},
    xml::Element,
};

/// More vCPUs than any machine type has. libvirt refuses the domain.
const MOST_VCPUS: u32 = 8192;

/// Returns the size of the huge pages that back the guest, in bytes.
pub(super) fn page_size(vmi: &VirtualMachineInstance) -> Result<Option<u64>, DomainError> {
    let Some(pages) = vmi.spec.domain.memory.as_ref().and_then(|memory| memory.hugepages.as_ref()) else {
        return Ok(None);
    };
    let text = pages.page_size.as_deref().unwrap_or_default();
    let size = quantity::units(&Quantity(text.to_owned())).ok().and_then(|size| u64::try_from(size).ok());
    let size = size.filter(|size| *size > 0).ok_or_else(|| DomainError::PageSize(text.to_owned()))?;
    Ok(Some(size))
}

/// Returns the NUMA cells of a guest that sees the nodes of its pinned CPUs.
pub(super) fn numa(
    vmi: &VirtualMachineInstance,
    cpus: Option<&HostCpus>,
    pinning: Option<&Pinning>,
    memory: u64,
    page: Option<u64>,
) -> Result<Option<Numa>, NumaError> {
    if !vmi.spec.domain.maps_numa() {
        return Ok(None);
    }
    let page = page.ok_or(NumaError::NoHugePages)?;
    let (cpus, pinning) = cpus.zip(pinning).ok_or(NumaError::NoPins)?;
    let most = usize::try_from(cpu::most_vcpus(&vmi.spec.domain).min(MOST_VCPUS)).unwrap_or_default();
    Numa::new(&cpus.topology.numa.cells, &pinning.vcpus, most, memory, page).map(Some)
}

/// Renders the backing of the guest's memory: huge pages of `page` bytes, and memory that virtiofsd shares.
///
/// Pages are allocated at once where a later lack of them would end the guest: a node of the host has no others, and those of a
/// memory device are not reserved.
pub(super) fn backing(
    vmi: &VirtualMachineInstance,
    page: Option<u64>,
    grows: bool,
    numa: Option<&Numa>,
) -> Option<Element> {
    let domain = &vmi.spec.domain;
    let is_shared = !domain.devices.filesystems.is_empty();
    let is_realtime = domain.cpu.as_ref().is_some_and(|cpu| cpu.realtime.is_some());
    let is_file = page.is_some() && annotation(vmi, annotation::MEMFD).is_some_and(|value| value == "false");
    let at_once = page.is_some() && (grows || numa.is_some());
    let pages = page.map(|page| Element::new("page").with("size", page.to_string()).with("unit", "b"));
    (pages.is_some() || is_shared).then(|| {
        Element::new("memoryBacking")
            .children(pages.map(|page| Element::new("hugepages").child(page)))
            .children((numa.is_some() && is_realtime).then(|| Element::new("nosharepages")))
            .children((!is_file).then(|| Element::new("source").with("type", "memfd")))
            .children(is_shared.then(|| Element::new("access").with("mode", "shared")))
            .children(at_once.then(|| Element::new("allocation").with("mode", "immediate")))
    })
}
