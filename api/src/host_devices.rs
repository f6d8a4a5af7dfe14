//! Host devices for VMIs: names, selectors, and the environment variables that pass them to a container.
//!
//! virt-handler offers the devices to kubelet as resources and sets environment variables of the container to the assigned
//! devices. Other device plugins may do the same. Both sides use the definitions here.

use crate::kubevirt::network::{PciHostDevice, PermittedHostDevices, UsbHostDevice, UsbSelector};

/// Prefix of the variable with the addresses of PCI devices, such as `0000:3b:00.0`, separated by commas.
pub const PCI_VARIABLE: &str = "PCI_RESOURCE_";
/// Prefix of the variable with bus and number of USB devices, such as `1:4`, separated by commas.
pub const USB_VARIABLE: &str = "USB_RESOURCE_";

/// Maximum length of a resource name for kubelet, including prefix and slash, and of its parts.
const PREFIX_MAX: usize = 253;
const NAME_MAX: usize = 63;
/// Prefix of virt-handler's own resources. Devices of the configuration must not use it.
const OWN_PREFIX: &str = "devices.kubevirt.io/";

/// Returns the name of the variable for a resource: upper case, with `_` for slashes and dots. Hyphens stay.
#[must_use]
pub fn variable(prefix: &str, resource: &str) -> String {
    format!("{prefix}{}", resource.to_uppercase().replace(['/', '.'], "_"))
}

/// Returns true if kubelet accepts this resource name from a device plugin: `domain/name`, outside of Kubernetes' own domain
/// and of virt-handler's own resources.
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
        // Quotas would count this resource as a request.
        && !prefix.starts_with("requests.")
}

/// Parses a 16-bit hexadecimal number, with or without `0x`.
fn id(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let plain = (1..=4).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
}

impl PciHostDevice {
    /// Returns the selected vendor and product, or `None` if the selector is invalid.
    #[must_use]
    pub fn ids(&self) -> Option<(u16, u16)> {
        let (vendor, product) = self.pci_vendor_selector.split_once(':')?;
        Some((id(vendor)?, id(product)?))
    }
}

impl UsbSelector {
    /// Returns the selected vendor and product, or `None` if the selector is invalid.
    #[must_use]
    pub fn ids(&self) -> Option<(u16, u16)> {
        Some((id(&self.vendor)?, id(&self.product)?))
    }
}

impl UsbHostDevice {
    /// Returns vendor and product of each device of a set, or `None` if a selector is invalid or there is none.
    #[must_use]
    pub fn ids(&self) -> Option<Vec<(u16, u16)>> {
        let ids: Vec<_> = self.selectors.iter().map(UsbSelector::ids).collect::<Option<_>>()?;
        (!ids.is_empty()).then_some(ids)
    }
}

impl PermittedHostDevices {
    /// Returns true if VMIs may request a resource. Mediated devices are not supported yet.
    #[must_use]
    pub fn permits(&self, resource: &str) -> bool {
        self.pci_host_devices.iter().any(|device| device.resource_name == resource)
            || self.usb.iter().any(|device| device.resource_name == resource)
    }

    /// Returns true for a resource of mediated devices.
    #[must_use]
    pub fn is_mediated(&self, resource: &str) -> bool {
        self.mediated_devices.iter().any(|device| device.resource_name == resource)
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
