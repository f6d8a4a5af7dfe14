//! Network settings and host devices of the cluster.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Network settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfiguration {
    /// Registered binding plugins by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub binding: BTreeMap<String, InterfaceBindingPlugin>,
    /// Binding of the default interface, `bridge` or `masquerade`; default: `bridge`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_network_interface: Option<String>,
    /// Permit bridge binding on the pod network; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permit_bridge_interface_on_pod_network: Option<bool>,
    /// No effect: no longer supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permit_slirp_interface: Option<bool>,
}

/// A registered binding plugin.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceBindingPlugin {
    /// Resources added to the compute container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_resource_overhead: Option<ResourceRequirementsWithoutClaims>,
    /// Attachment of the domain: `tap`, `managedTap` or `macvtap`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_attachment_type: Option<String>,
    /// Pod information passed to the plugin.
    #[serde(rename = "downwardAPI", skip_serializing_if = "Option::is_none")]
    pub downward_api: Option<String>,
    /// Behaviour during migrations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<InterfaceBindingMigration>,
    /// NetworkAttachmentDefinition of its CNI plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_attachment_definition: Option<String>,
    /// Image of its sidecar.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sidecar_image: Option<String>,
}

/// Requests and limits.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceRequirementsWithoutClaims {
    /// Limits of the pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, Quantity>,
    /// Requests of the pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Quantity>,
}

/// Behaviour during migrations.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceBindingMigration {
    /// `link-refresh` or unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
}

/// Host devices that VMIs may use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PermittedHostDevices {
    /// Mediated devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mediated_devices: Vec<MediatedHostDevice>,
    /// PCI devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pci_host_devices: Vec<PciHostDevice>,
    /// USB devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub usb: Vec<UsbHostDevice>,
}

/// A mediated device type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MediatedHostDevice {
    /// Provided by another device plugin.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub external_resource_provider: bool,
    /// Type name.
    pub mdev_name_selector: String,
    /// Extended resource name.
    pub resource_name: String,
}

/// A PCI device type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PciHostDevice {
    /// Provided by another device plugin.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub external_resource_provider: bool,
    /// `vendor:product` in hexadecimal.
    pub pci_vendor_selector: String,
    /// Extended resource name.
    pub resource_name: String,
}

/// A set of USB devices.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsbHostDevice {
    /// Provided by another device plugin.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub external_resource_provider: bool,
    /// Extended resource name.
    pub resource_name: String,
    /// Devices of the set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub selectors: Vec<UsbSelector>,
}

/// A USB device.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsbSelector {
    /// Product id in hexadecimal.
    pub product: String,
    /// Vendor id in hexadecimal.
    pub vendor: String,
}
