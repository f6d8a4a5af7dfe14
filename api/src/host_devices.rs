//! Devices of the host that the cluster's configuration hands to machines: how they are named and selected, and where
//! a container finds what it was given.
//!
//! virt-handler offers the devices to kubelet as resources and says in the environment of the container which ones it
//! got; other device plugins may do the same. Both sides of that agree on what is here.

use crate::kubevirt::network::{PciHostDevice, PermittedHostDevices, UsbHostDevice, UsbSelector};

/// Beginning of the variable that holds the addresses of PCI devices, such as `0000:3b:00.0`, separated by commas.
pub const PCI_VARIABLE: &str = "PCI_RESOURCE_";
/// Beginning of the variable that holds bus and number of USB devices, such as `1:4`, separated by commas.
pub const USB_VARIABLE: &str = "USB_RESOURCE_";

/// Longest name that kubelet takes, prefix and slash included, and of its parts.
const PREFIX_MAX: usize = 253;
const NAME_MAX: usize = 63;
/// Beginning of the names of virt-handler's own resources, which no device of the configuration may take.
const OWN_PREFIX: &str = "devices.kubevirt.io/";

/// Name of the variable for a resource: capitals, and `_` for what separates words. Dashes stay.
#[must_use]
pub fn variable(prefix: &str, resource: &str) -> String {
    format!("{prefix}{}", resource.to_uppercase().replace(['/', '.'], "_"))
}

/// Whether kubelet takes a resource of this name from a device plugin: `domain/name`, outside of Kubernetes' own
/// domain, and none that virt-handler offers for every machine.
#[must_use]
pub fn is_resource_name(text: &str) -> bool {
    let Some((prefix, name)) = text.split_once('/') else { return false };
    let is_label = |label: &str| {
        let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        edge(label.bytes().next())
            && edge(label.bytes().last())
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let is_name = edge(name.bytes().next())
        && edge(name.bytes().last())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    prefix.len() <= PREFIX_MAX
        && name.len() <= NAME_MAX
        && prefix.split('.').all(is_label)
        && is_name
        && !text.starts_with(OWN_PREFIX)
        && prefix != "kubernetes.io"
        && !prefix.ends_with(".kubernetes.io")
        // Such a resource would be counted as a request of quotas.
        && !prefix.starts_with("requests.")
}

/// A number of 16 bits in hexadecimal, with or without `0x`.
fn id(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let plain = (1..=4).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
}

impl PciHostDevice {
    /// Vendor and product that are selected; nothing if that is not what the selector says.
    #[must_use]
    pub fn ids(&self) -> Option<(u16, u16)> {
        let (vendor, product) = self.pci_vendor_selector.split_once(':')?;
        Some((id(vendor)?, id(product)?))
    }
}

impl UsbSelector {
    /// Vendor and product that are selected; nothing if that is not what the selector says.
    #[must_use]
    pub fn ids(&self) -> Option<(u16, u16)> {
        Some((id(&self.vendor)?, id(&self.product)?))
    }
}

impl UsbHostDevice {
    /// Vendor and product of each device of a set; nothing if a selector says something else, or there is none.
    #[must_use]
    pub fn ids(&self) -> Option<Vec<(u16, u16)>> {
        let ids: Vec<_> = self.selectors.iter().map(UsbSelector::ids).collect::<Option<_>>()?;
        (!ids.is_empty()).then_some(ids)
    }
}

impl PermittedHostDevices {
    /// Whether machines may ask for a resource.
    #[must_use]
    pub fn permits(&self, resource: &str) -> bool {
        self.pci_host_devices.iter().any(|device| device.resource_name == resource)
            || self.mediated_devices.iter().any(|device| device.resource_name == resource)
            || self.usb.iter().any(|device| device.resource_name == resource)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_named_after_their_resource() {
        assert_eq!(variable(PCI_VARIABLE, "nvidia.com/GP102GL_Tesla-P40"), "PCI_RESOURCE_NVIDIA_COM_GP102GL_TESLA-P40");
        assert_eq!(variable(USB_VARIABLE, "kubevirt.io/storage"), "USB_RESOURCE_KUBEVIRT_IO_STORAGE");
    }

    #[test]
    fn resources_are_named_as_kubelet_takes_them() {
        for good in ["nvidia.com/TU104GL_Tesla_T4", "intel.com/qat", "a/b", "kubevirt.io/storage"] {
            assert!(is_resource_name(good), "{good}");
        }
        let long = format!("a.b/{}", "x".repeat(64));
        for bad in [
            "",
            "gpu",
            "/gpu",
            "nvidia.com/",
            "nvidia.com/a/b",
            "nvidia.com/a b",
            "nvidia.com/../x",
            "NVIDIA.com/x",
            "-a/x",
            "kubernetes.io/x",
            "node.kubernetes.io/x",
            "requests.example.org/x",
            "devices.kubevirt.io/kvm",
            long.as_str(),
        ] {
            assert!(!is_resource_name(bad), "{bad}");
        }
    }

    #[test]
    fn selectors_are_two_numbers() {
        let pci = |text: &str| PciHostDevice { pci_vendor_selector: text.into(), ..PciHostDevice::default() }.ids();
        assert_eq!(pci("10DE:1eb8"), Some((0x10de, 0x1eb8)));
        assert_eq!(pci("8086:a"), Some((0x8086, 0xa)));
        for bad in ["", ":", "10de", "10de:", "10de:*", "10de:1eb8:0", "+10:1", "10de:11eb8", "nvidia:t4"] {
            assert_eq!(pci(bad), None, "{bad}");
        }
        let usb = |pairs: &[(&str, &str)]| {
            let selector =
                |(vendor, product): &(&str, &str)| UsbSelector { vendor: (*vendor).into(), product: (*product).into() };
            UsbHostDevice { selectors: pairs.iter().map(selector).collect(), ..UsbHostDevice::default() }.ids()
        };
        assert_eq!(usb(&[("46f4", "0001"), ("0x46f4", "2")]), Some(vec![(0x46f4, 1), (0x46f4, 2)]));
        assert_eq!(usb(&[]), None);
        assert_eq!(usb(&[("46f4", "0001"), ("46f4", "disk")]), None);
    }
}
