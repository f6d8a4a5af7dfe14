//! Parses the XML of a domain, active or rendered, to what can be compared and reported. Pure. Missing parts are empty.

use std::path::PathBuf;

use protocol::DiskTarget;
use roxmltree::Node;

use crate::storage::{Backend, DiskSource, ImageFormat};

/// Longest domain XML that is parsed.
pub(super) const XML_LIMIT: usize = 4 * 1024 * 1024;
/// Prefix of the aliases of devices that have a name in the VMI's spec.
const ALIAS: &str = "ua-";
/// Further prefixes of the aliases of host devices.
const HOST_DEVICES: [&str; 3] = ["hostdevice-", "usb-host-", "gpu-"];

/// Configuration of a domain. Devices without a name in the VMI's spec are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DomainConfig {
    /// libvirt's number of this run of the domain.
    pub(crate) id: Option<u32>,
    /// Machine type with its version.
    pub(crate) machine_type: String,
    /// Runs without hardware virtualization.
    pub(crate) software_emulation: bool,
    pub(crate) acpi: bool,
    /// The guest agent's channel is connected.
    pub(crate) guest_agent_connected: bool,
    /// Plugged vCPUs.
    pub(crate) vcpus: Option<u32>,
    /// vCPUs to which the domain can grow.
    pub(crate) most_vcpus: Option<u32>,
    /// Sockets, cores and threads.
    pub(crate) topology: Option<[u32; 3]>,
    /// Memory in bytes, without that of the memory device.
    pub(crate) memory: Option<u64>,
    /// Memory in bytes to which the domain can grow.
    pub(crate) most_memory: Option<u64>,
    /// Size in bytes of the huge pages that back it.
    pub(crate) page_size: Option<u64>,
    pub(crate) memory_device: Option<MemoryDevice>,
    /// Number of its I/O threads.
    pub(crate) io_threads: u32,
    /// Disks and drives.
    pub(crate) disks: Vec<DiskConfig>,
    /// Network interfaces.
    pub(crate) interfaces: Vec<InterfaceConfig>,
    /// Other devices.
    pub(crate) devices: Vec<DeviceConfig>,
}

/// A device of type virtio-mem: memory that the guest gets and gives back in blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryDevice {
    /// Its largest size in bytes.
    pub(crate) size: u64,
    /// The size in bytes that the guest is to use.
    pub(crate) requested: u64,
    /// The size in bytes that the guest uses.
    pub(crate) current: u64,
    /// Its element.
    pub(crate) xml: String,
    /// Range of the element with the requested size in `xml`.
    pub(crate) requested_at: std::ops::Range<usize>,
}

/// A disk or drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskConfig {
    /// Name in the VMI's spec.
    pub(crate) name: String,
    /// `disk`, `cdrom` or `lun`.
    pub(crate) device: String,
    pub(crate) bus: String,
    /// Device name: vda, sda, ...
    pub(crate) target: String,
    /// Image or device; `None` for an empty drive.
    pub(crate) source: Option<DiskSource>,
    /// The disk is a part of its image or device, of the size that it had before it was moved there.
    pub(crate) is_slice: bool,
    /// The guest cannot write.
    pub(crate) readonly: bool,
    /// Other domains may write, too.
    pub(crate) shareable: bool,
    /// Serial number.
    pub(crate) serial: Option<String>,
    pub(crate) boot_order: Option<u32>,
    /// Number of the I/O thread that serves it.
    pub(crate) io_thread: Option<u32>,
    /// Its element.
    pub(crate) xml: String,
    /// Range in `xml` of the element with the address; empty if it has none.
    pub(crate) address_at: std::ops::Range<usize>,
    /// Range in `xml` of the attribute with the I/O thread, and of the space before it; empty if it has none.
    pub(crate) io_thread_at: std::ops::Range<usize>,
    /// The same for the attribute with the mode of discards.
    pub(crate) discard_at: std::ops::Range<usize>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct InterfaceConfig {
    /// Name in the VMI's spec.
    pub(crate) name: String,
    /// MAC address; `None` if libvirt chooses it.
    pub(crate) mac: Option<String>,
    pub(crate) model: String,
    pub(crate) queues: u32,
    pub(crate) link_up: bool,
    pub(crate) boot_order: Option<u32>,
    /// Its element.
    pub(crate) xml: String,
    /// Range in `xml` of the element with the state of the link, or where it belongs.
    pub(crate) link_at: std::ops::Range<usize>,
}

/// Another device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceConfig {
    /// Element: `hostdev`, `input`, `watchdog`, `sound`.
    pub(crate) element: String,
    /// Name in the VMI's spec.
    pub(crate) name: String,
}

impl DomainConfig {
    /// Returns the memory in bytes that the guest is to have.
    pub(crate) fn memory_requested(&self) -> Option<u64> {
        Some(self.memory?.saturating_add(self.memory_device.as_ref().map_or(0, |device| device.requested)))
    }

    /// Returns the names of its network interfaces.
    pub(crate) fn nics(&self) -> Vec<String> {
        self.interfaces.iter().map(|interface| interface.name.clone()).collect()
    }

    /// Returns the queues of its network interfaces.
    pub(crate) fn nic_queues(&self) -> Vec<u32> {
        self.interfaces.iter().map(|interface| interface.queues).collect()
    }

    /// Returns the device names of disks by volume. Empty drives have no volume.
    pub(crate) fn disk_targets(&self) -> Vec<DiskTarget> {
        let target = |disk: &DiskConfig| DiskTarget { volume: disk.name.clone(), target: disk.target.clone(), size: 0 };
        self.disks.iter().filter(|disk| disk.source.is_some()).map(target).collect()
    }
}

/// Parses a domain's XML.
pub(crate) fn parse(xml: &str) -> DomainConfig {
    let Some(document) = (xml.len() <= XML_LIMIT).then(|| roxmltree::Document::parse(xml).ok()).flatten() else {
        return DomainConfig::default();
    };
    let root = document.root_element();
    let topology = child(root, "cpu").and_then(|cpu| child(cpu, "topology"));
    let mut config = DomainConfig {
        id: root.attribute("id").and_then(|id| id.parse().ok()),
        machine_type: child(root, "os")
            .and_then(|os| child(os, "type")?.attribute("machine"))
            .unwrap_or_default()
            .to_owned(),
        software_emulation: root.attribute("type") == Some("qemu"),
        acpi: child(root, "features").is_some_and(|features| child(features, "acpi").is_some()),
        vcpus: child(root, "vcpu").and_then(|vcpu| vcpu.attribute("current").or(vcpu.text())?.trim().parse().ok()),
        most_vcpus: child(root, "vcpu").and_then(|vcpu| vcpu.text()?.trim().parse().ok()),
        topology: topology.and_then(|topology| {
            let count = |name| topology.attribute(name)?.parse().ok();
            Some([count("sockets")?, count("cores")?, count("threads")?])
        }),
        memory: child(root, "memory").and_then(bytes),
        most_memory: child(root, "maxMemory").and_then(bytes),
        page_size: child(root, "memoryBacking")
            .and_then(|backing| child(child(backing, "hugepages")?, "page"))
            .and_then(|page| in_bytes(page.attribute("size")?, page.attribute("unit"))),
        io_threads: child(root, "iothreads").and_then(|count| count.text()?.trim().parse().ok()).unwrap_or(0),
        ..DomainConfig::default()
    };
    for device in child(root, "devices").into_iter().flat_map(|devices| devices.children()) {
        match device.tag_name().name() {
            "disk" => config.disks.extend(disk(device)),
            "interface" => config.interfaces.extend(interface(device)),
            "memory" => config.memory_device = memory_device(device).or(config.memory_device),
            "channel" => config.guest_agent_connected |= is_connected_guest_agent(device),
            element => config.devices.extend(name(device).map(|name| {
                let of_host = HOST_DEVICES.iter().find_map(|prefix| name.strip_prefix(prefix));
                DeviceConfig { element: element.to_owned(), name: of_host.unwrap_or(&name).to_owned() }
            })),
        }
    }
    // libvirt counts the largest size of the device.
    if let (Some(memory), Some(device)) = (&mut config.memory, &config.memory_device) {
        *memory = memory.saturating_sub(device.size);
    }
    config
}

fn memory_device(device: Node<'_, '_>) -> Option<MemoryDevice> {
    let target = (device.attribute("model") == Some("virtio-mem")).then(|| child(device, "target")).flatten()?;
    let (whole, requested) = (device.range(), child(target, "requested")?);
    let at = requested.range();
    Some(MemoryDevice {
        size: child(target, "size").and_then(bytes)?,
        requested: bytes(requested)?,
        current: child(target, "current").and_then(bytes).unwrap_or(0),
        xml: device.document().input_text().get(whole.clone()).unwrap_or_default().to_owned(),
        requested_at: at.start.saturating_sub(whole.start)..at.end.saturating_sub(whole.start),
    })
}

/// Returns the device's name in the VMI's spec. libvirt ignores an alias with other characters than these and chooses its own.
fn name(device: Node<'_, '_>) -> Option<String> {
    let name = child(device, "alias")?.attribute("name")?.strip_prefix(ALIAS)?;
    let is_kept = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    is_kept.then(|| name.to_owned())
}

fn boot_order(device: Node<'_, '_>) -> Option<u32> {
    child(device, "boot")?.attribute("order")?.parse().ok()
}

fn bytes(memory: Node<'_, '_>) -> Option<u64> {
    in_bytes(memory.text()?, memory.attribute("unit"))
}

/// Parses an amount of memory. libvirt's default unit is KiB.
fn in_bytes(number: &str, unit: Option<&str>) -> Option<u64> {
    let number: u64 = number.trim().parse().ok()?;
    let unit = match unit.unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KiB" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(unit)
}

fn is_connected_guest_agent(channel: Node<'_, '_>) -> bool {
    child(channel, "target").is_some_and(|target| {
        target.attribute("name") == Some("org.qemu.guest_agent.0") && target.attribute("state") == Some("connected")
    })
}

fn disk(device: Node<'_, '_>) -> Option<DiskConfig> {
    let text = |node: Option<Node<'_, '_>>, name: &str| -> String {
        node.and_then(|node| node.attribute(name)).unwrap_or_default().to_owned()
    };
    let target = child(device, "target");
    let whole = device.range();
    let within = |at: std::ops::Range<usize>| at.start.saturating_sub(whole.start)..at.end.saturating_sub(whole.start);
    let driver_attribute = |name: &str| child(device, "driver").and_then(|driver| driver.attribute_node(name));
    let io_thread = driver_attribute("iothread");
    Some(DiskConfig {
        name: name(device)?,
        device: device.attribute("device").unwrap_or("disk").to_owned(),
        bus: text(target, "bus"),
        target: target?.attribute("dev")?.to_owned(),
        source: source(device),
        is_slice: child(device, "source").is_some_and(|source| child(source, "slices").is_some()),
        readonly: child(device, "readonly").is_some(),
        shareable: child(device, "shareable").is_some(),
        serial: child(device, "serial").and_then(|serial| serial.text()).map(str::to_owned),
        boot_order: boot_order(device),
        io_thread: io_thread.and_then(|thread| thread.value().parse().ok()),
        xml: device.document().input_text().get(whole.clone()).unwrap_or_default().to_owned(),
        address_at: child(device, "address").map(|address| within(address.range())).unwrap_or_default(),
        io_thread_at: io_thread.map(|thread| within(with_space(thread.range()))).unwrap_or_default(),
        discard_at: driver_attribute("discard").map(|mode| within(with_space(mode.range()))).unwrap_or_default(),
    })
}

/// Returns the range of an attribute and of the space before it.
fn with_space(attribute: std::ops::Range<usize>) -> std::ops::Range<usize> {
    attribute.start.saturating_sub(1)..attribute.end
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn format(node: Option<Node<'_, '_>>) -> ImageFormat {
    match node.and_then(|node| node.attribute("type")) {
        Some("qcow2") => ImageFormat::Qcow2,
        _ => ImageFormat::Raw,
    }
}

fn file_or_device(source: Node<'_, '_>) -> Option<PathBuf> {
    source.attribute("file").or_else(|| source.attribute("dev")).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn source(device: Node<'_, '_>) -> Option<DiskSource> {
    let source = child(device, "source")?;
    let path = file_or_device(source)?;
    let driver = child(device, "driver");
    let backend = if source.has_attribute("dev") {
        Backend::Block { path }
    } else {
        Backend::File { path, format: format(driver) }
    };
    let backing = child(device, "backingStore").and_then(|backing| {
        let path = file_or_device(child(backing, "source")?)?;
        Some((path, format(child(backing, "format"))))
    });
    let direct_io = driver.and_then(|driver| driver.attribute("cache")) == Some("none");
    Some(DiskSource { backing, ..DiskSource::new(backend, direct_io) })
}

fn interface(device: Node<'_, '_>) -> Option<InterfaceConfig> {
    let attribute = |element: &str, name: &str| child(device, element)?.attribute(name).map(str::to_owned);
    let whole = device.range();
    let xml = device.document().input_text().get(whole.clone()).unwrap_or_default();
    let link = child(device, "link").map(|link| link.range());
    let link = link.map(|link| link.start.saturating_sub(whole.start)..link.end.saturating_sub(whole.start));
    let end = xml.rfind("</").unwrap_or(xml.len());
    Some(InterfaceConfig {
        name: name(device)?,
        mac: attribute("mac", "address").map(|mac| mac.to_ascii_lowercase()),
        model: attribute("model", "type").unwrap_or_default(),
        queues: attribute("driver", "queues").and_then(|queues| queues.parse().ok()).unwrap_or(1),
        link_up: attribute("link", "state").as_deref() != Some("down"),
        boot_order: boot_order(device),
        xml: xml.to_owned(),
        link_at: link.unwrap_or(end..end),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_active_domain_is_parsed() {
        let config = parse(include_str!("recorded/active.xml"));
        assert_eq!(config.machine_type, "pc-q35-10.0");
        assert!(config.acpi && config.guest_agent_connected && !config.software_emulation);
        assert_eq!((config.vcpus, config.topology, config.memory), (Some(1), Some([1, 1, 1]), Some(128 << 20)));
        let targets: Vec<(String, String)> =
            config.disk_targets().into_iter().map(|disk| (disk.volume, disk.target)).collect();
        assert_eq!(targets, [("root".into(), "vda".into()), ("ci".into(), "vdb".into())]);
        let root = config.disks[0].source.clone().unwrap();
        let file = Backend::File { path: "/eph/root/disk.qcow2".into(), format: ImageFormat::Qcow2 };
        assert_eq!((root.backend, root.direct_io), (file, true));
        assert_eq!(root.backing, Some(("/images/disk.img".into(), ImageFormat::Raw)));
        assert_eq!(config.interfaces[0].mac.as_deref(), Some("02:00:00:00:00:01"));
        assert!(config.interfaces[0].link_up && config.devices.is_empty());
    }

    #[test]
    fn rendered_domains_are_parsed() {
        let config = parse(include_str!("recorded/full.xml"));
        assert_eq!((config.vcpus, config.topology), (Some(4), Some([2, 2, 1])));
        let disks: Vec<(&str, &str, &str, bool)> = config
            .disks
            .iter()
            .map(|disk| (disk.name.as_str(), disk.device.as_str(), disk.bus.as_str(), disk.source.is_some()))
            .collect();
        let expected = [
            ("root", "disk", "virtio", true),
            ("ci", "cdrom", "sata", true),
            ("data", "lun", "scsi", true),
            ("drive", "cdrom", "sata", false),
        ];
        assert_eq!(disks, expected);
        assert!(config.disks[1].readonly && config.disks[2].shareable);
        assert_eq!((config.disks[0].serial.as_deref(), config.disks[0].boot_order), (Some("root"), Some(1)));
        let devices: Vec<(&str, &str)> =
            config.devices.iter().map(|device| (device.element.as_str(), device.name.as_str())).collect();
        assert_eq!(devices, [("input", "t"), ("input", "v"), ("watchdog", "dog"), ("sound", "snd")]);
        assert_eq!(config.nic_queues()[0], 4);
        let plain = parse(include_str!("recorded/plain-emulated.xml"));
        assert!(plain.software_emulation);
        assert_eq!(plain.nic_queues(), [1]);
    }

    #[test]
    fn text_that_is_no_domain_is_an_empty_configuration() {
        for text in ["", "<domain", "<domain/>"] {
            assert_eq!(parse(text), DomainConfig::default(), "{text}");
        }
    }

    #[test]
    fn memory_has_libvirts_units() {
        for (text, bytes) in [
            ("<memory unit='KiB'>4</memory>", Some(4096)),
            ("<memory>4</memory>", Some(4096)),
            ("<memory unit='b'>4</memory>", Some(4)),
            ("<memory unit='GiB'>1</memory>", Some(1 << 30)),
            ("<memory unit='parsec'>1</memory>", None),
        ] {
            assert_eq!(parse(&format!("<domain>{text}</domain>")).memory, bytes, "{text}");
        }
    }
}
