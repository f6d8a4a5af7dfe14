//! Devices of the nodes that the configuration hands to machines.
//!
//! The reference takes any text for them, and its agents leave out what they cannot make sense of.

use std::collections::BTreeSet;

use api::{host_devices::is_resource_name, kubevirt::network::PermittedHostDevices};

use super::CONFIGURATION;
use crate::causes::Causes;

/// What virt-handler could not offer to kubelet.
pub(super) fn causes(permitted: &PermittedHostDevices, causes: &mut Causes) {
    let root = format!("{CONFIGURATION}.permittedHostDevices");
    let mut names = BTreeSet::new();
    for (index, device) in permitted.pci_host_devices.iter().enumerate() {
        let field = format!("{root}.pciHostDevices[{index}]");
        resource_name(&field, &device.resource_name, causes);
        names.insert(device.resource_name.as_str());
        if !device.external_resource_provider && device.ids().is_none() {
            let selector = &device.pci_vendor_selector;
            causes.invalid(
                format!("{field}.pciVendorSelector"),
                format!("\"{selector}\" is not a vendor and a product, such as 10DE:1EB8"),
            );
        }
    }
    for (index, device) in permitted.usb.iter().enumerate() {
        let field = format!("{root}.usb[{index}]");
        resource_name(&field, &device.resource_name, causes);
        if !names.insert(&device.resource_name) {
            let name = &device.resource_name;
            causes.duplicate(
                format!("{field}.resourceName"),
                format!("resource {name} stands for other devices as well"),
            );
        }
        if !device.external_resource_provider && device.ids().is_none() {
            causes.invalid(
                format!("{field}.selectors"),
                "each selector is a vendor and a product in hexadecimal, and there is at least one",
            );
        }
    }
}

fn resource_name(field: &str, name: &str, causes: &mut Causes) {
    if !is_resource_name(name) {
        causes.invalid(
            format!("{field}.resourceName"),
            format!("\"{name}\" is not a resource that a device plugin can offer, such as example.com/device"),
        );
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::causes::Causes;

    #[test]
    fn devices_that_no_node_could_offer_are_refused() {
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
            let mut causes = Causes::new();
            super::causes(&serde_json::from_value(permitted.clone()).unwrap(), &mut causes);
            let fields: Vec<&str> = causes.as_slice().iter().map(|cause| cause.field.as_str()).collect();
            let refused: Vec<String> =
                refused.iter().map(|field| format!("spec.configuration.permittedHostDevices.{field}")).collect();
            assert_eq!(fields, refused, "{permitted}");
        }
    }
}
