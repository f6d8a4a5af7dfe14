//! Network interfaces.

use api::{VirtualMachineInstance, vmi::network::Interface};

use super::{DomainError, Environment, alias, pci_address, virtio_model, xml::Element};

/// Limit of an interface's queues.
const QUEUE_LIMIT: u32 = 256;
/// Emulated models, passed to QEMU unchanged.
const EMULATED: [&str; 6] = ["e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139"];

/// Renders the `<interface>` elements.
pub(super) fn interfaces(
    vmi: &VirtualMachineInstance,
    env: &Environment<'_>,
    vcpus: u32,
) -> Result<Vec<Element>, DomainError> {
    let devices = &vmi.spec.domain.devices;
    let multi_queue = devices.network_interface_multiqueue == Some(true);
    devices
        .interfaces
        .iter()
        .filter(|interface| !interface.is_absent())
        .map(|interface| one(vmi, interface, env, multi_queue.then_some(vcpus.min(QUEUE_LIMIT))))
        .collect()
}

fn one(
    vmi: &VirtualMachineInstance,
    interface: &Interface,
    env: &Environment<'_>,
    queues: Option<u32>,
) -> Result<Element, DomainError> {
    let nic = env
        .options
        .nics
        .iter()
        .find(|nic| nic.name == interface.name)
        .ok_or_else(|| DomainError::NoNic(interface.name.clone()))?;
    let model = interface.model.as_deref().filter(|m| !m.is_empty()).unwrap_or("virtio");
    let virtio = model == "virtio";
    if !virtio && !EMULATED.contains(&model) {
        return Err(DomainError::Unsupported {
            field: "spec.domain.devices.interfaces.model",
            value: model.to_owned(),
        });
    }
    let mac = interface.mac().unwrap_or_else(|| nic.mac.clone());
    let mut element = Element::new("interface").with("type", "ethernet");
    if !mac.is_empty() {
        element = element.child(Element::new("mac").with("address", mac));
    }
    element = element
        .child(Element::new("target").with("dev", &nic.tap).with("managed", "no"))
        .child(Element::new("model").with("type", if virtio { virtio_model(vmi) } else { model }));
    if virtio && let Some(queues) = queues {
        element = element.child(Element::new("driver").with("name", "vhost").with("queues", queues.to_string()));
    }
    match interface.state.as_deref() {
        None | Some("" | "up") => {}
        Some("down") => element = element.child(Element::new("link").with("state", "down")),
        Some(other) => {
            return Err(DomainError::Unsupported {
                field: "spec.domain.devices.interfaces.state",
                value: other.to_owned(),
            });
        }
    }
    if nic.mtu != 0 {
        element = element.child(Element::new("mtu").with("size", nic.mtu.to_string()));
    }
    if let Some(order) = interface.boot_order {
        element = element.child(Element::new("boot").with("order", order.to_string()));
    } else {
        // The guest does not boot from this interface: its option ROM would only cost time and memory.
        element = element.child(Element::new("rom").with("enabled", "no"));
    }
    element = element.child(alias(&interface.name));
    if let Some(index) = interface.acpi_index.filter(|index| *index > 0) {
        element = element.child(Element::new("acpi").with("index", index.to_string()));
    }
    if let Some(address) = interface.pci_address.as_deref().filter(|a| !a.is_empty()) {
        element = element.child(pci_address(address)?);
    }
    Ok(element)
}
