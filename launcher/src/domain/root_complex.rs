//! Places the devices of a domain on its root complex instead of behind root ports, as an annotation asks for.
//!
//! libvirt gives each device without an address a root port of its own. A device on the root complex cannot be unplugged, and
//! nothing can be plugged in beside it: there are no free ports then.

use std::{collections::BTreeSet, ops::RangeInclusive};

use api::{VirtualMachineInstance, constants::annotation};

use super::{DomainError, pci_address, xml::Element};

/// Slots that are free on a root complex of the machine types q35 and virt: the host bridge has slot 0, the display slot 1, and the
/// chipset of q35 slot 0x1f.
const SLOTS: RangeInclusive<u32> = 0x02..=0x1e;
/// Slot that libvirt gives to the sound card ich9.
const SOUND: u32 = 0x1b;

/// Returns true if the VMI wants its devices on the root complex, and its machine type has one.
pub(super) fn is_wanted(vmi: &VirtualMachineInstance) -> bool {
    super::is_pcie(vmi) && super::annotation(vmi, annotation::PLACE_PCI_DEVICES_ON_ROOT_COMPLEX) == Some("true")
}

/// Gives each device without an address the next free slot.
pub(super) fn place(devices: Vec<Element>) -> Result<Vec<Element>, DomainError> {
    let taken: BTreeSet<u32> = devices.iter().filter_map(taken_slot).collect();
    let mut free = SLOTS.filter(|slot| *slot != SOUND && !taken.contains(slot));
    let place = |device: Element| {
        if !device.takes_pci_slot() || device.find_child("address").is_some() {
            return Ok(device);
        }
        let slot = free.next().ok_or(DomainError::RootComplexFull)?;
        Ok(device.child(pci_address(&format!("0000:00:{slot:02x}.0"))?))
    };
    devices.into_iter().map(place).collect()
}

/// Returns the slot of a device that the user has placed on the root complex.
fn taken_slot(device: &Element) -> Option<u32> {
    let address = device.find_child("address").filter(|address| address.attribute("type") == Some("pci"))?;
    let number = |name| u32::from_str_radix(address.attribute(name)?.strip_prefix("0x")?, 16).ok();
    (number("domain") == Some(0) && number("bus") == Some(0)).then(|| number("slot")).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(bus: &str) -> Element {
        Element::new("disk").child(Element::new("target").with("bus", bus))
    }

    fn slots(devices: Vec<Element>) -> Vec<Option<String>> {
        let placed = place(devices).unwrap();
        placed.iter().map(|device| Some(device.find_child("address")?.attribute("slot")?.to_owned())).collect()
    }

    #[test]
    fn each_device_of_the_bus_has_a_slot() {
        let none = Element::new("controller").with("type", "usb").with("model", "none");
        let at = |address: &str| disk("virtio").child(pci_address(address).unwrap());
        let devices = vec![
            Element::new("interface"),
            at("0000:00:03.0"),
            disk("virtio"),
            disk("scsi"),
            none,
            Element::new("controller").with("type", "scsi").with("model", "virtio-non-transitional"),
            at("0000:04:05.0"),
            Element::new("hostdev").with("type", "usb"),
            Element::new("vsock"),
            Element::new("memballoon").with("model", "none"),
        ];
        let slot = |slot: &str| Some(slot.to_owned());
        let expected = [
            slot("0x02"),
            slot("0x03"),
            slot("0x04"),
            None,
            None,
            slot("0x05"),
            slot("0x05"),
            None,
            slot("0x06"),
            None,
        ];
        assert_eq!(slots(devices), expected);
    }

    #[test]
    fn the_bus_holds_a_limited_number_of_devices() {
        let most = vec![disk("virtio"); 28];
        let slots = slots(most.clone());
        assert!(!slots.contains(&Some("0x1b".into())) && slots.last() == Some(&Some("0x1e".into())), "{slots:?}");
        let more = [most, vec![disk("virtio")]].concat();
        assert_eq!(place(more), Err(DomainError::RootComplexFull));
    }
}
