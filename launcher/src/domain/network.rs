//! Network interfaces.

use api::{VirtualMachineInstance, vmi::network::Interface};

use super::{DomainError, Environment, alias, check, given, pci_address, virtio_model, xml::Element};

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
    let model = given(&interface.model).unwrap_or("virtio");
    let virtio = model == "virtio";
    if !virtio {
        check("spec.domain.devices.interfaces.model", model, &EMULATED)?;
    }
    let mac = Some(interface.mac().unwrap_or_else(|| nic.mac.clone())).filter(|mac| !mac.is_empty());
    let state = given(&interface.state).unwrap_or("up");
    check("spec.domain.devices.interfaces.state", state, &["up", "down"])?;
    let queues = queues.filter(|_| virtio);
    let boot = match interface.boot_order {
        Some(order) => Element::new("boot").with("order", order.to_string()),
        // The guest does not boot from this interface: its option ROM would only cost time and memory.
        None => Element::new("rom").with("enabled", "no"),
    };
    let index = interface.acpi_index.filter(|index| *index > 0);
    Ok(Element::new("interface")
        .with("type", "ethernet")
        .children(mac.map(|mac| Element::new("mac").with("address", mac)))
        .child(Element::new("target").with("dev", &nic.tap).with("managed", "no"))
        .child(Element::new("model").with("type", if virtio { virtio_model(vmi) } else { model }))
        .children(queues.map(|queues| Element::new("driver").with("name", "vhost").with("queues", queues.to_string())))
        .children((state == "down").then(|| Element::new("link").with("state", "down")))
        .children((nic.mtu != 0).then(|| Element::new("mtu").with("size", nic.mtu.to_string())))
        .child(boot)
        .child(alias(&interface.name))
        .children(index.map(|index| Element::new("acpi").with("index", index.to_string())))
        .children(given(&interface.pci_address).map(pci_address).transpose()?))
}
