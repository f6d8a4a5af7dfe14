//! Host devices that the configuration permits for VMIs.
//!
//! The reference accepts any text for them, and its virt-handler ignores invalid entries.

use std::collections::BTreeSet;

use api::{host_devices::is_resource_name, kubevirt::network::PermittedHostDevices};

use super::CONFIGURATION;
use crate::context::FieldErrors;

/// Rejects entries that virt-handler cannot offer to kubelet.
pub(super) fn field_errors(permitted: &PermittedHostDevices, errors: &mut FieldErrors) {
    let root = format!("{CONFIGURATION}.permittedHostDevices");
    let mut names = BTreeSet::new();
    for (index, device) in permitted.pci_host_devices.iter().enumerate() {
        let field = format!("{root}.pciHostDevices[{index}]");
        validate_resource_name(&field, &device.resource_name, errors);
        names.insert(device.resource_name.as_str());
        if !device.external_resource_provider && device.ids().is_none() {
            let selector = &device.pci_vendor_selector;
            errors.invalid(
                format!("{field}.pciVendorSelector"),
                format!("\"{selector}\" is not a vendor and a product, such as 10DE:1EB8"),
            );
        }
    }
    for (index, device) in permitted.usb.iter().enumerate() {
        let field = format!("{root}.usb[{index}]");
        validate_resource_name(&field, &device.resource_name, errors);
        if !names.insert(&device.resource_name) {
            let name = &device.resource_name;
            errors.duplicate(
                format!("{field}.resourceName"),
                format!("resource {name} is already used for other devices"),
            );
        }
        if !device.external_resource_provider && device.ids().is_none() {
            errors.invalid(
                format!("{field}.selectors"),
                "must have at least one selector, each with a hexadecimal vendor and product",
            );
        }
    }
}

fn validate_resource_name(field: &str, name: &str, errors: &mut FieldErrors) {
    if !is_resource_name(name) {
        errors.invalid(
            format!("{field}.resourceName"),
            format!("\"{name}\" is not a resource that a device plugin can offer, such as example.com/device"),
        );
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::context::FieldErrors;

    #[test]
    fn devices_that_no_node_can_offer_are_refused() {
        let stick = json!([{"vendor": "46f4", "product": "0001"}]);
        let pci = |selector: &str, resource: &str| json!({"pciVendorSelector": selector, "resourceName": resource});
        let usb = |selectors: &serde_json::Value| json!({"resourceName": "v.org/stick", "selectors": selectors});
        for (permitted, refused) in [
            (json!({}), vec![]),
            (
                json!({"pciHostDevices": [pci("10DE:1EB8", "nvidia.com/T4"), pci("10de:1e04", "nvidia.com/T4")], "usb": [usb(&stick)]}),
                vec![],
            ),
            (
                json!({"pciHostDevices": [{"pciVendorSelector": "any", "resourceName": "v.org/x", "externalResourceProvider": true}]}),
                vec![],
            ),
            (
                json!({"pciHostDevices": [pci("10de:*", "v.org/x"), pci("1:2", "kubernetes.io/x")]}),
                vec!["pciHostDevices[0].pciVendorSelector", "pciHostDevices[1].resourceName"],
            ),
            (
                json!({"usb": [usb(&stick), usb(&stick), {"resourceName": "stick", "selectors": []}]}),
                vec!["usb[1].resourceName", "usb[2].resourceName", "usb[2].selectors"],
            ),
            (
                json!({"pciHostDevices": [pci("1:2", "v.org/stick")], "usb": [usb(&json!([{"vendor": "x", "product": "1"}]))]}),
                vec!["usb[0].resourceName", "usb[0].selectors"],
            ),
        ] {
            let mut errors = FieldErrors::new();
            super::field_errors(&serde_json::from_value(permitted.clone()).unwrap(), &mut errors);
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            let refused: Vec<String> =
                refused.iter().map(|field| format!("spec.configuration.permittedHostDevices.{field}")).collect();
            assert_eq!(fields, refused, "{permitted}");
        }
    }
}
