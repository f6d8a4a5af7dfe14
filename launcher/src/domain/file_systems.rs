//! File systems that virtiofsd serves, and the memory that it reads and writes.

use api::VirtualMachineInstance;

use super::{Environment, xml::Element};
use crate::virtiofs;

/// Entries of a device's request queue.
const QUEUE: &str = "1024";

/// Renders the file systems. The guest mounts each by its name.
pub(super) fn file_systems(vmi: &VirtualMachineInstance, env: &Environment<'_>) -> impl Iterator<Item = Element> {
    vmi.spec.domain.devices.filesystems.iter().map(|filesystem| {
        let socket = env.virtiofs.join(virtiofs::socket_name(&filesystem.name));
        Element::new("filesystem")
            .with("type", "mount")
            .with("accessmode", "passthrough")
            .child(Element::new("driver").with("type", "virtiofs").with("queue", QUEUE))
            .child(Element::new("source").with("socket", socket.to_string_lossy()))
            .child(Element::new("target").with("dir", filesystem.name.clone()))
    })
}

/// Renders the backing of the guest's memory, which huge pages and virtiofsd need.
pub(super) fn memory_backing(vmi: &VirtualMachineInstance) -> Option<Element> {
    let spec = &vmi.spec.domain;
    let has_huge_pages = spec.memory.as_ref().is_some_and(|memory| memory.hugepages.is_some());
    let is_shared = !spec.devices.filesystems.is_empty();
    (has_huge_pages || is_shared).then(|| {
        Element::new("memoryBacking")
            .children(has_huge_pages.then(|| Element::new("hugepages")))
            .child(Element::new("source").with("type", "memfd"))
            .children(is_shared.then(|| Element::new("access").with("mode", "shared")))
    })
}
