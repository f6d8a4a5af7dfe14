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
