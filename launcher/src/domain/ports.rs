//! PCIe root ports for devices that are plugged into a running domain.
//!
//! A device keeps its PCI address from start to start, and across an addition of interfaces. libvirt assigns addresses in an
//! order in which interfaces come first. Placeholders for interfaces are therefore defined behind the VMI's own, libvirt adds
//! ports for all, and the placeholders are removed from the definition, but not their ports. Further ports follow at the end.

use std::ops::Range;

use api::{VirtualMachineInstance, constants::annotation};
use roxmltree::{Document, Node};

use super::{Domain, DomainError, root_complex, virtio_model, xml::Element};

/// Ports that interfaces have without an annotation, placeholders included.
const INTERFACE_PORTS: usize = 4;
/// Devices including free ports, and least free ports.
const SMALL: (usize, usize) = (8, 3);
/// The same with more memory than [`LARGE_MEMORY`].
const LARGE: (usize, usize) = (16, 6);
const LARGE_MEMORY: u64 = 2 << 30;
/// Highest index of a port. A root bus has 31 slots for them without functions.
const MAX_INDEX: u32 = 31;
/// Prefix of the names of placeholders.
const PLACEHOLDER: &str = "placeholder-";
/// Longest definition that is parsed.
const XML_LIMIT: usize = 4 << 20;

/// Free ports of a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreePorts {
    /// Placeholders of interfaces.
    pub(super) placeholders: usize,
    /// Ports at the end.
    pub(super) extra: usize,
}

impl FreePorts {
    /// Returns true if the definition has to be changed.
    pub(crate) fn any(self) -> bool {
        self.placeholders > 0 || self.extra > 0
    }
}

/// Computes the free ports of a VMI whose devices are rendered as `devices`.
pub(super) fn free_ports(
    vmi: &VirtualMachineInstance,
    memory: u64,
    interfaces: usize,
    devices: &[Element],
) -> Result<FreePorts, DomainError> {
    if !super::is_pcie(vmi) || root_complex::is_wanted(vmi) {
        return Ok(FreePorts::default());
    }
    let placeholders = match super::annotation(vmi, annotation::PCI_INTERFACE_SLOT_COUNT) {
        Some(count) => {
            let count: usize = count.parse().map_err(|_| DomainError::SlotCount(count.to_owned()))?;
            count.min(usize::try_from(MAX_INDEX).unwrap_or_default()).saturating_sub(interfaces)
        }
        None if interfaces == 0 => 0,
        None => INTERFACE_PORTS.saturating_sub(interfaces),
    };
    let (total, least) = if memory > LARGE_MEMORY { LARGE } else { SMALL };
    let used = devices.iter().filter(|device| device.is_on_pci()).count();
    let extra = total.saturating_sub(used).max(least).saturating_sub(placeholders);
    Ok(FreePorts { placeholders, extra })
}

/// Renders the placeholders.
pub(super) fn placeholders(vmi: &VirtualMachineInstance, count: usize) -> impl Iterator<Item = Element> {
    let model = virtio_model(vmi);
    (0..count).map(move |index| {
        let name = format!("{PLACEHOLDER}{index}");
        Element::new("interface")
            .with("type", "ethernet")
            .child(Element::new("target").with("dev", name).with("managed", "no"))
            .child(Element::new("model").with("type", model))
    })
}

impl Domain {
    /// Returns the definition with free ports, from the first definition as libvirt completed it: without placeholders, with
    /// further ports, and without hotplug on the ports of devices that stay.
    pub(crate) fn with_free_ports(&self, definition: &str) -> Result<String, DomainError> {
        let unreadable = || DomainError::Definition;
        if definition.len() > XML_LIMIT {
            return Err(unreadable());
        }
        let document = Document::parse(definition).map_err(|_| unreadable())?;
        let devices =
            document.root_element().children().find(|node| node.has_tag_name("devices")).ok_or_else(unreadable)?;
        let mut edits: Vec<(Range<usize>, String)> = Vec::new();
        let mut highest = 0_u32;
        let mut fixed = Vec::new();
        for device in devices.children().filter(Node::is_element) {
            if is_placeholder(device) {
                edits.push((device.range(), String::new()));
            } else if device.has_tag_name("controller") && device.attribute("type") == Some("pci") {
                highest = device.attribute("index").and_then(|index| index.parse().ok()).unwrap_or(0).max(highest);
            } else if !device.has_tag_name("interface") && !self.is_plugged(device) {
                fixed.extend(bus(device));
            }
        }
        for port in devices.children().filter(|node| is_root_port(*node)) {
            let index: Option<u32> = port.attribute("index").and_then(|index| index.parse().ok());
            let target = port.children().find(|node| node.has_tag_name("target"));
            if let (Some(index), Some(target)) = (index, target)
                && fixed.contains(&index)
                && !target.has_attribute("hotplug")
            {
                let at = target.range().start + "<target".len();
                edits.push((at..at, " hotplug='off'".to_owned()));
            }
        }
        let more: String = (highest.saturating_add(1)..=MAX_INDEX)
            .take(self.ports.extra)
            .map(|index| format!("<controller type='pci' index='{index}' model='pcie-root-port'/>\n"))
            .collect();
        let end = definition.get(..devices.range().end).and_then(|text| text.rfind("</devices>"));
        let end = end.ok_or_else(unreadable)?;
        edits.push((end..end, more));
        edits.sort_by_key(|(range, _)| range.start);
        let (mut changed, mut from) = (String::with_capacity(definition.len() + 1024), 0);
        for (range, text) in edits {
            changed.push_str(definition.get(from..range.start).ok_or_else(unreadable)?);
            changed.push_str(&text);
            from = range.end;
        }
        changed.push_str(definition.get(from..).ok_or_else(unreadable)?);
        Ok(changed)
    }

    /// Returns true for the disk of a hot-plugged volume, which can be detached.
    fn is_plugged(&self, device: Node<'_, '_>) -> bool {
        let alias = device.children().find(|node| node.has_tag_name("alias")).and_then(|node| node.attribute("name"));
        let name = alias.and_then(|alias| alias.strip_prefix("ua-"));
        device.has_tag_name("disk") && name.is_some_and(|name| self.plugged.iter().any(|plugged| plugged == name))
    }
}

fn is_placeholder(device: Node<'_, '_>) -> bool {
    let mut children = device.children();
    let target = children.find(|node| node.has_tag_name("target")).and_then(|node| node.attribute("dev"));
    device.has_tag_name("interface") && target.is_some_and(|target| target.starts_with(PLACEHOLDER))
}

fn is_root_port(device: Node<'_, '_>) -> bool {
    device.has_tag_name("controller") && device.attribute("model") == Some("pcie-root-port")
}

/// Returns the PCI bus of a device.
fn bus(device: Node<'_, '_>) -> Option<u32> {
    let address = device.children().find(|node| node.has_tag_name("address"))?;
    let is_pci = address.attribute("type") == Some("pci");
    is_pci.then(|| u32::from_str_radix(address.attribute("bus")?.strip_prefix("0x")?, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFINED: &str = "<domain>\n  <devices>
    <disk><target dev='vda' bus='virtio'/><alias name='ua-root'/>\
<address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/></disk>
    <disk><target dev='vdb' bus='virtio'/><alias name='ua-data'/>\
<address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/></disk>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'><target chassis='1' port='0x10'/></controller>
    <controller type='pci' index='2' model='pcie-root-port'><target chassis='2' port='0x11'/></controller>
    <controller type='pci' index='4' model='pcie-root-port'><target chassis='4' port='0x13'/></controller>
    <controller type='pci' index='5' model='pcie-root-port'><target chassis='5' port='0x14'/></controller>
    <interface type='ethernet'><target dev='tap0' managed='no'/>\
<address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></interface>
    <interface type='ethernet'><target dev='placeholder-0' managed='no'/>\
<address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/></interface>
  </devices>\n</domain>";

    fn domain(extra: usize) -> Domain {
        Domain { ports: FreePorts { placeholders: 1, extra }, plugged: vec!["data".into()], ..Domain::default() }
    }

    #[test]
    fn placeholders_leave_their_ports_and_devices_that_stay_cannot_be_unplugged() {
        let changed = domain(2).with_free_ports(DEFINED).unwrap();
        Document::parse(&changed).unwrap();
        assert!(!changed.contains("placeholder"), "{changed}");
        assert!(changed.contains("<target dev='tap0'"), "{changed}");
        for (port, hotplug) in [(1, true), (2, true), (4, false), (5, true)] {
            let target = format!("index='{port}' model='pcie-root-port'><target hotplug='off'");
            assert_eq!(!changed.contains(&target), hotplug, "{port}: {changed}");
        }
        for port in [6, 7] {
            assert!(changed.contains(&format!("index='{port}' model='pcie-root-port'/>")), "{changed}");
        }
        assert!(!changed.contains("index='8'"));
    }

    #[test]
    fn the_indexes_of_ports_are_limited() {
        let changed = domain(100).with_free_ports(DEFINED).unwrap();
        assert!(changed.contains("index='31'") && !changed.contains("index='32'"), "{changed}");
    }

    #[test]
    fn a_definition_that_cannot_be_read_is_an_error() {
        for text in ["", "<domain/>", "<domain><devices/></domain>", "<domain>"] {
            assert_eq!(domain(1).with_free_ports(text), Err(DomainError::Definition), "{text}");
        }
    }

    #[test]
    fn free_ports_follow_the_table_of_the_reference() {
        let vmi = |machine: &str, annotations: serde_json::Value| -> VirtualMachineInstance {
            let spec = serde_json::json!({"domain": {"machine": {"type": machine}, "devices": {}}});
            serde_json::from_value(serde_json::json!({"metadata": {"annotations": annotations}, "spec": spec})).unwrap()
        };
        let none = serde_json::json!({});
        let count = |count: &str| serde_json::json!({"kubevirt.io/pci-interface-slot-count": count});
        let root = serde_json::json!({"kubevirt.io/placePCIDevicesOnRootComplex": "true"});
        let device = Element::new("memballoon").with("model", "virtio");
        for (vmi, memory, interfaces, used, placeholders, extra) in [
            (vmi("q35", none.clone()), 1 << 30, 1, 7, 3, 0),
            (vmi("q35", none.clone()), (2 << 30) + 1, 1, 7, 3, 6),
            (vmi("q35", none.clone()), 2 << 30, 1, 2, 3, 3),
            (vmi("", none.clone()), 1 << 30, 0, 3, 0, 5),
            (vmi("pc-q35-9.2", none.clone()), 1 << 30, 6, 20, 0, 3),
            (vmi("q35", count("6")), 1 << 30, 2, 7, 4, 0),
            (vmi("virt-10.0", none.clone()), 1 << 30, 1, 7, 3, 0),
            (vmi("pc", none), 1 << 30, 1, 7, 0, 0),
            (vmi("q35", root), 1 << 30, 1, 7, 0, 0),
        ] {
            let devices = vec![device.clone(); used];
            let ports = free_ports(&vmi, memory, interfaces, &devices).unwrap();
            assert_eq!(ports, FreePorts { placeholders, extra }, "{memory} {interfaces} {used}");
        }
        let error = free_ports(&vmi("q35", count("many")), 1, 1, &[]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid kubevirt.io/pci-interface-slot-count annotation value \"many\": not a number"
        );
    }

    #[test]
    fn devices_on_pci_are_counted() {
        let controller = |kind: &str, model: &str| Element::new("controller").with("type", kind).with("model", model);
        for (device, counts) in [
            (Element::new("interface"), true),
            (Element::new("disk").child(Element::new("target").with("bus", "virtio")), true),
            (Element::new("disk").child(Element::new("target").with("bus", "scsi")), false),
            (controller("scsi", "virtio-non-transitional"), true),
            (controller("usb", "none"), true),
            (controller("pci", "pcie-root"), false),
            (Element::new("input").with("bus", "virtio"), true),
            (Element::new("input").with("bus", "usb"), false),
            (Element::new("hostdev").with("type", "pci"), true),
            (Element::new("hostdev").with("type", "usb"), false),
            (Element::new("memballoon").with("model", "none"), false),
            (Element::new("rng"), true),
            (Element::new("serial"), false),
        ] {
            assert_eq!(device.is_on_pci(), counts, "{device:?}");
        }
    }
}
