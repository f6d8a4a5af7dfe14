//! Finds the guest addresses of tagged devices.

use std::collections::HashMap;

use api::VirtualMachineInstance;
use roxmltree::{Document, Node};

use super::given;
use crate::storage::cloud_init::TaggedDevice;

/// Longest domain XML that is parsed.
const XML_LIMIT: usize = 4 * 1024 * 1024;

/// A device with a tag in the VMI.
struct Wanted<'a> {
    kind: &'static str,
    /// Names that the device can have in the domain.
    aliases: Vec<String>,
    serial: &'a str,
    tag: &'a str,
}

/// Returns the VMI's tagged devices with their addresses in the domain's XML. Devices without an address are left out.
pub(crate) fn tagged_devices(vmi: &VirtualMachineInstance, definition: &str) -> Vec<TaggedDevice> {
    let parsed = (definition.len() <= XML_LIMIT).then(|| Document::parse(definition).ok()).flatten();
    let Some(document) = parsed else { return Vec::new() };
    let devices = document.root_element().children().filter(|node| node.has_tag_name("devices"));
    let by_alias: HashMap<&str, Node<'_, '_>> = devices
        .flat_map(|devices| devices.children())
        .filter_map(|device| Some((child(device, "alias")?.attribute("name")?, device)))
        .collect();
    let found = |wanted: Wanted<'_>| {
        let device = wanted.aliases.iter().find_map(|alias| by_alias.get(alias.as_str()))?;
        let (bus, address) = address(*device)?;
        let mac = child(*device, "mac").and_then(|mac| mac.attribute("address")).unwrap_or_default().to_owned();
        let Wanted { kind, serial, tag, .. } = wanted;
        Some(TaggedDevice { kind, bus, address, mac, serial: serial.to_owned(), tags: [tag.to_owned()] })
    };
    wanted(vmi).into_iter().filter_map(found).collect()
}

fn wanted(vmi: &VirtualMachineInstance) -> Vec<Wanted<'_>> {
    let devices = &vmi.spec.domain.devices;
    let of_host = |kind: &[&str], name: &str| kind.iter().map(|kind| format!("ua-{kind}-{name}")).collect();
    let mut wanted = Vec::new();
    let mut add = |kind, aliases, serial, tag| {
        wanted.extend(given(tag).map(|tag| Wanted { kind, aliases, serial, tag }));
    };
    for nic in &devices.interfaces {
        add("nic", vec![format!("ua-{}", nic.name)], "", &nic.tag);
    }
    for disk in &devices.disks {
        add("disk", vec![format!("ua-{}", disk.name)], given(&disk.serial).unwrap_or_default(), &disk.tag);
    }
    for device in &devices.host_devices {
        add("hostdev", of_host(&["hostdevice", "usb-host"], &device.name), "", &device.tag);
    }
    for gpu in &devices.gpus {
        add("hostdev", of_host(&["gpu"], &gpu.name), "", &gpu.tag);
    }
    wanted
}

/// Returns the bus and the guest address of a device.
fn address(device: Node<'_, '_>) -> Option<(String, String)> {
    let address = child(device, "address")?;
    let part = |name: &str| address.attribute(name);
    match part("type")? {
        "pci" => {
            let part = |name: &str| part(name)?.strip_prefix("0x");
            let text = format!("{}:{}:{}.{}", part("domain")?, part("bus")?, part("slot")?, part("function")?);
            Some(("pci".to_owned(), text))
        }
        "drive" => {
            let bus = child(device, "target")?.attribute("bus")?.to_owned();
            let numbers = ["controller", "bus", "target", "unit"].map(|name| part(name).unwrap_or("0"));
            Some((bus, numbers.join(":")))
        }
        "usb" => Some(("usb".to_owned(), format!("{}:{}", part("bus")?, part("port")?))),
        _ => None,
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tagged_devices_are_found_by_their_aliases() {
        let devices = json!({
            "interfaces": [
                {"name": "plain", "masquerade": {}},
                {"name": "lan", "bridge": {}, "tag": "backup"},
                {"name": "lost", "bridge": {}, "tag": "gone"},
            ],
            "disks": [
                {"name": "root", "disk": {"bus": "virtio"}, "tag": "os", "serial": "s-1"},
                {"name": "data", "disk": {"bus": "scsi"}, "tag": "db"},
            ],
            "hostDevices": [
                {"name": "nic", "deviceName": "v.org/nic", "tag": "fast"},
                {"name": "stick", "deviceName": "v.org/stick", "tag": "key"},
            ],
            "gpus": [{"name": "g", "deviceName": "v.org/g", "tag": "compute"}],
        });
        let spec = json!({"domain": {"devices": devices}});
        let vmi: VirtualMachineInstance =
            serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap();
        let pci = |bus: u32| format!("<address type='pci' domain='0x0000' bus='0x0{bus}' slot='0x00' function='0x0'/>");
        // The address of the node's own device is in its source.
        let host = |name: &str, address: &str| {
            format!("<hostdev><source><address bus='1'/></source><alias name='ua-{name}'/>{address}</hostdev>")
        };
        let definition = format!(
            "<domain><devices>\
             <interface><mac address='02:00:00:00:00:01'/><alias name='ua-plain'/>{}</interface>\
             <interface><mac address='02:00:00:00:00:02'/><alias name='ua-lan'/>{}</interface>\
             <disk><target dev='vda' bus='virtio'/><alias name='ua-root'/>{}</disk>\
             <disk><target dev='sda' bus='scsi'/><alias name='ua-data'/>\
             <address type='drive' controller='0' bus='0' target='0' unit='1'/></disk>{}{}{}</devices></domain>",
            pci(1),
            pci(2),
            pci(3),
            host("hostdevice-nic", &pci(4)),
            host("usb-host-stick", "<address type='usb' bus='0' port='1'/>"),
            host("gpu-g", &pci(5)),
        );
        let found = tagged_devices(&vmi, &definition);
        let rows: Vec<[&str; 6]> = found
            .iter()
            .map(|device| {
                let TaggedDevice { kind, bus, address, mac, serial, tags: [tag] } = device;
                [*kind, bus, address, mac, serial, tag]
            })
            .collect();
        let expected = [
            ["nic", "pci", "0000:02:00.0", "02:00:00:00:00:02", "", "backup"],
            ["disk", "pci", "0000:03:00.0", "", "s-1", "os"],
            ["disk", "scsi", "0:0:0:1", "", "", "db"],
            ["hostdev", "pci", "0000:04:00.0", "", "", "fast"],
            ["hostdev", "usb", "0:1", "", "", "key"],
            ["hostdev", "pci", "0000:05:00.0", "", "", "compute"],
        ];
        assert_eq!(rows, expected);
        assert!(tagged_devices(&vmi, "<domain").is_empty());
    }
}
