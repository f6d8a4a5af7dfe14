//! Assigns the host devices allocated to the pod to the VMI's devices.
//!
//! A device plugin lists its allocations in the container's environment: the variable of a resource (see
//! [`api::host_devices`]) holds addresses, separated by commas. Each address is used once, even if several variables
//! hold it.

use std::{collections::BTreeMap, ffi::OsString};

use api::{
    VirtualMachineInstance,
    host_devices::{PCI_VARIABLE, USB_VARIABLE, variable},
};

use super::{DomainError, alias, xml::Element};

/// Limit of addresses of one resource.
const MAX_ADDRESSES: usize = 256;
/// Limits of slots of a PCI bus and of functions of a slot.
const SLOTS: u8 = 32;
const FUNCTIONS: u8 = 8;

/// Allocated host devices by environment variable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AllocatedDevices(BTreeMap<String, String>);

impl AllocatedDevices {
    /// Keeps the variables of host devices.
    pub(crate) fn new(environment: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let about = |(name, value): (OsString, OsString)| {
            let name = name.into_string().ok()?;
            let ours = name.starts_with(PCI_VARIABLE) || name.starts_with(USB_VARIABLE);
            // Invalid UTF-8 is no address: it fails when the VMI needs the device.
            ours.then(|| (name, value.to_string_lossy().into_owned()))
        };
        Self(environment.into_iter().filter_map(about).collect())
    }

    /// Reports a VFIO device, for which QEMU locks the guest's memory.
    pub(crate) fn has_pci(&self) -> bool {
        self.0.keys().any(|name| name.starts_with(PCI_VARIABLE))
    }

    /// Reports USB devices of a resource.
    pub(crate) fn has_usb(&self, resource: &str) -> bool {
        self.0.contains_key(&variable(USB_VARIABLE, resource))
    }

    /// Parses the addresses in the variable of a resource.
    fn addresses<T>(
        &self,
        prefix: &str,
        resource: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, DomainError> {
        let name = variable(prefix, resource);
        let Some(value) = self.0.get(&name) else { return Ok(Vec::new()) };
        let value = value.strip_suffix(',').unwrap_or(value);
        if value.is_empty() {
            return Ok(Vec::new());
        }
        let parsed = value.split(',').take(MAX_ADDRESSES + 1).map(parse).collect::<Option<Vec<T>>>();
        parsed.filter(|addresses| addresses.len() <= MAX_ADDRESSES).ok_or(DomainError::HostAddress(name))
    }
}

/// PCI address on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PciAddress {
    domain: u32,
    bus: u8,
    slot: u8,
    function: u8,
}

/// Parses a hexadecimal number with this many digits.
fn hexadecimal(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let plain = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl PciAddress {
    /// Parses `dddd:bb:ss.f`; domains of some controllers have more digits.
    fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (slot, function) = rest.split_once('.')?;
        let byte = |text: &str, digits: usize| u8::try_from(hexadecimal(text, digits..=digits)?).ok();
        Some(Self {
            domain: hexadecimal(domain, 4..=8)?,
            bus: byte(bus, 2)?,
            slot: byte(slot, 2).filter(|slot| *slot < SLOTS)?,
            function: byte(function, 1).filter(|function| *function < FUNCTIONS)?,
        })
    }

    fn element(self, name: &str) -> Element {
        let Self { domain, bus, slot, function } = self;
        let address = Element::new("address")
            .with("type", "pci")
            .with("domain", format!("0x{domain:04x}"))
            .with("bus", format!("0x{bus:02x}"))
            .with("slot", format!("0x{slot:02x}"))
            .with("function", format!("0x{function:x}"));
        // The node's administrator has bound the device to vfio-pci; libvirt has no right to change drivers.
        hostdev("pci", Some("no"), address, name)
    }
}

/// USB address on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UsbAddress {
    bus: u16,
    device: u16,
}

impl UsbAddress {
    /// Parses `bus:device`, both decimal.
    fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| {
            let plain = (1..=3).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| text.parse().ok()).flatten().filter(|number: &u16| *number > 0)
        };
        let (bus, device) = text.split_once(':')?;
        Some(Self { bus: number(bus)?, device: number(device)? })
    }

    fn element(self, name: &str) -> Element {
        let address = Element::new("address").with("bus", self.bus.to_string()).with("device", self.device.to_string());
        hostdev("usb", None, address, name)
    }
}

fn hostdev(kind: &str, managed: Option<&str>, address: Element, name: &str) -> Element {
    Element::new("hostdev")
        .with("mode", "subsystem")
        .with("type", kind)
        .with_some("managed", managed)
        .child(Element::new("source").child(address))
        .child(alias(name))
}

/// A requested device.
struct Wanted<'a> {
    /// `HostDevice` or `GPU`.
    kind: &'static str,
    name: &'a str,
    resource: &'a str,
}

/// Returns the VMI's devices in order, GPUs last.
fn wanted(vmi: &VirtualMachineInstance) -> Result<Vec<Wanted<'_>>, DomainError> {
    let devices = &vmi.spec.domain.devices;
    let hosts = devices.host_devices.iter().map(|device| ("HostDevice", &device.name, &device.device_name));
    let gpus = devices.gpus.iter().map(|gpu| ("GPU", &gpu.name, &gpu.device_name));
    hosts
        .chain(gpus)
        .map(|(kind, name, resource)| match resource.as_deref().filter(|resource| !resource.is_empty()) {
            Some(resource) => Ok(Wanted { kind, name, resource }),
            None => Err(DomainError::Unsupported { field: "spec.resourceClaims", value: name.clone() }),
        })
        .collect()
}

/// Unassigned addresses by resource.
struct Pool<'a, T>(BTreeMap<&'a str, Vec<T>>);

impl<'a, T: Copy + PartialEq> Pool<'a, T> {
    fn new(
        allocated: &AllocatedDevices,
        prefix: &str,
        wanted: &[Wanted<'a>],
        parse: fn(&str) -> Option<T>,
    ) -> Result<Self, DomainError> {
        let mut pool = BTreeMap::new();
        for Wanted { resource, .. } in wanted {
            pool.insert(*resource, allocated.addresses(prefix, resource, parse)?);
        }
        Ok(Self(pool))
    }

    fn left(&self, resource: &str) -> usize {
        self.0.get(resource).map_or(0, Vec::len)
    }

    /// Takes the next address of a resource and removes it from all resources.
    fn pop(&mut self, resource: &str) -> Option<T> {
        let address = *self.0.get(resource)?.first()?;
        for addresses in self.0.values_mut() {
            addresses.retain(|other| *other != address);
        }
        Some(address)
    }
}

/// Renders the VMI's host devices and GPUs.
pub(super) fn host_devices(
    vmi: &VirtualMachineInstance,
    allocated: &AllocatedDevices,
) -> Result<Vec<Element>, DomainError> {
    let wanted = wanted(vmi)?;
    let mut pci = Pool::new(allocated, PCI_VARIABLE, &wanted, PciAddress::parse)?;
    let mut usb = Pool::new(allocated, USB_VARIABLE, &wanted, UsbAddress::parse)?;
    let mut elements = Vec::new();
    for (index, Wanted { kind, name, resource }) in wanted.iter().enumerate() {
        if let Some(address) = pci.pop(resource) {
            let prefix = if *kind == "GPU" { "gpu" } else { "hostdevice" };
            elements.push(address.element(&format!("{prefix}-{name}")));
            continue;
        }
        // A resource may be a set of USB devices: each request gets one set.
        let asking = wanted.iter().skip(index).filter(|other| other.resource == *resource).count();
        let size = if *kind == "GPU" { 0 } else { usb.left(resource).div_ceil(asking.max(1)) };
        let set: Vec<UsbAddress> = (0..size).filter_map(|_| usb.pop(resource)).collect();
        if set.is_empty() {
            return Err(DomainError::NoHostDevice { kind, name: (*name).into(), resource: (*resource).into() });
        }
        elements.extend(set.iter().enumerate().map(|(number, address)| match number {
            0 => address.element(&format!("usb-host-{name}")),
            _ => address.element(&format!("usb-host-{name}-{number}")),
        }));
    }
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn allocated(variables: &[(&str, &str)]) -> AllocatedDevices {
        AllocatedDevices::new(variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
    }

    fn convert(devices: Value, variables: &[(&str, &str)]) -> Result<String, DomainError> {
        let vmi = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vm"},
            "spec": {"domain": {"devices": devices}},
        }))
        .unwrap();
        let elements = host_devices(&vmi, &allocated(variables))?;
        Ok(elements.iter().map(Element::to_xml).collect())
    }

    #[test]
    fn each_device_gets_an_address_of_its_resource_and_a_name() {
        let devices = json!({
            "hostDevices": [
                {"name": "a", "deviceName": "intel.com/qat"}, {"name": "stick", "deviceName": "kubevirt.io/disk"},
                {"name": "b", "deviceName": "intel.com/qat"},
            ],
            "gpus": [{"name": "g", "deviceName": "nvidia.com/T4"}],
        });
        let variables = [
            ("PCI_RESOURCE_INTEL_COM_QAT", "0000:3d:01.0,10000:3d:1f.7,"),
            ("PCI_RESOURCE_NVIDIA_COM_T4", "0000:5e:00.0"),
            ("USB_RESOURCE_KUBEVIRT_IO_DISK", "1:12"),
            ("PATH", "/bin"),
        ];
        let expected = "\
<hostdev mode='subsystem' type='pci' managed='no'>
  <source>
    <address type='pci' domain='0x0000' bus='0x3d' slot='0x01' function='0x0'/>
  </source>
  <alias name='ua-hostdevice-a'/>
</hostdev>
<hostdev mode='subsystem' type='usb'>
  <source>
    <address bus='1' device='12'/>
  </source>
  <alias name='ua-usb-host-stick'/>
</hostdev>
<hostdev mode='subsystem' type='pci' managed='no'>
  <source>
    <address type='pci' domain='0x10000' bus='0x3d' slot='0x1f' function='0x7'/>
  </source>
  <alias name='ua-hostdevice-b'/>
</hostdev>
<hostdev mode='subsystem' type='pci' managed='no'>
  <source>
    <address type='pci' domain='0x0000' bus='0x5e' slot='0x00' function='0x0'/>
  </source>
  <alias name='ua-gpu-g'/>
</hostdev>
";
        assert_eq!(convert(devices, &variables).unwrap(), expected);
    }

    #[test]
    fn a_set_of_usb_devices_is_assigned_together() {
        let keys = |names: &[&str]| {
            let devices: Vec<Value> =
                names.iter().map(|name| json!({"name": name, "deviceName": "k.io/keys"})).collect();
            let xml = convert(json!({"hostDevices": devices}), &[("USB_RESOURCE_K_IO_KEYS", "1:2,1:3,2:4,2:5")]);
            xml.unwrap()
                .lines()
                .filter(|line| line.contains("ua-"))
                .map(|line| line.trim().to_owned())
                .collect::<Vec<_>>()
        };
        let alias = |name: &str| format!("<alias name='ua-usb-host-{name}'/>");
        assert_eq!(keys(&["a", "b"]), [alias("a"), alias("a-1"), alias("b"), alias("b-1")]);
        assert_eq!(keys(&["a"]), [alias("a"), alias("a-1"), alias("a-2"), alias("a-3")]);
    }

    #[test]
    fn an_address_is_used_once() {
        let devices = json!({
            "hostDevices": [{"name": "a", "deviceName": "v.org/x"}],
            "gpus": [{"name": "g", "deviceName": "v.org/y"}],
        });
        let shared = [("PCI_RESOURCE_V_ORG_X", "0000:01:00.0"), ("PCI_RESOURCE_V_ORG_Y", "0000:01:00.0")];
        let error = convert(devices.clone(), &shared).unwrap_err();
        assert_eq!(error, DomainError::NoHostDevice { kind: "GPU", name: "g".into(), resource: "v.org/y".into() });
        let more = [("PCI_RESOURCE_V_ORG_X", "0000:01:00.0"), ("PCI_RESOURCE_V_ORG_Y", "0000:01:00.0,0000:01:00.1")];
        assert!(convert(devices, &more).unwrap().contains("function='0x1'"));
    }

    #[test]
    fn a_vmi_without_its_device_does_not_start() {
        let device = |list: &str| json!({list: [{"name": "d", "deviceName": "v.org/x"}]});
        let missing = |kind| DomainError::NoHostDevice { kind, name: "d".into(), resource: "v.org/x".into() };
        for value in [None, Some(""), Some(",")] {
            let variables: Vec<_> = value.map(|value| ("PCI_RESOURCE_V_ORG_X", value)).into_iter().collect();
            assert_eq!(convert(device("hostDevices"), &variables).unwrap_err(), missing("HostDevice"), "{value:?}");
        }
        // A GPU is no USB device.
        assert_eq!(convert(device("gpus"), &[("USB_RESOURCE_V_ORG_X", "1:2")]).unwrap_err(), missing("GPU"));
        assert!(convert(json!({"gpus": [{"name": "d", "claimName": "c"}]}), &[]).is_err());
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for bad in [
            "0000:00:00",
            "0:00:00.0",
            "0000:00:20.0",
            "0000:00:00.8",
            "0000:0g:00.0",
            "0000:00:00.0 ",
            "+000:00:00.0",
            "0000:00:00.0,,0000:00:01.0",
            "/dev/vfio/1",
            "'/><evil/>",
            "000000000:00:00.0",
            "0000:00:00.00",
        ] {
            let devices = json!({"hostDevices": [{"name": "d", "deviceName": "v.org/x"}]});
            let error = convert(devices, &[("PCI_RESOURCE_V_ORG_X", bad)]).unwrap_err();
            assert_eq!(error, DomainError::HostAddress("PCI_RESOURCE_V_ORG_X".into()), "{bad}");
        }
        for bad in ["1", "1:", "0:1", "1:0", "1:2:3", "a:1", "1:-2", "1:1000", "1:2, 1:3"] {
            let devices = json!({"hostDevices": [{"name": "d", "deviceName": "v.org/x"}]});
            let error = convert(devices, &[("USB_RESOURCE_V_ORG_X", bad)]).unwrap_err();
            assert_eq!(error, DomainError::HostAddress("USB_RESOURCE_V_ORG_X".into()), "{bad}");
        }
        let many = vec!["0000:00:00.0"; MAX_ADDRESSES + 1].join(",");
        assert!(allocated(&[("PCI_RESOURCE_X", &many)]).addresses(PCI_VARIABLE, "x", PciAddress::parse).is_err());
    }

    #[test]
    fn the_environment_shows_pci_and_usb_devices() {
        let pci = allocated(&[("PCI_RESOURCE_V_ORG_X", "")]);
        let usb = allocated(&[("USB_RESOURCE_V_ORG_X", "1:2")]);
        assert!(pci.has_pci() && !usb.has_pci());
        assert!(usb.has_usb("v.org/x") && !usb.has_usb("v.org/y") && !pci.has_usb("v.org/x"));
        assert_eq!(allocated(&[("PATH", "/bin"), ("MDEV_PCI_RESOURCE_X", "u")]), AllocatedDevices::default());
    }
}
