//! Interfaces and the networks they connect to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One network interface.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Interface {
    /// ACPI index that fixes the interface's name in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acpi_index: Option<i32>,
    /// Binding by a registered plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binding: Option<PluginBinding>,
    /// Position in the boot order, counted from 1; devices without one come last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u64>,
    /// Bridge between the guest and the pod's interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bridge: Option<InterfaceBridge>,
    /// Additional options in DHCP answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp_options: Option<Box<DhcpOptions>>,
    /// MAC address; default: a generated one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_address: Option<String>,
    /// No longer supported; rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub macvtap: Option<DeprecatedInterfaceMacvtap>,
    /// NAT between the guest and the pod's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<InterfaceMasquerade>,
    /// Model of the network card: `virtio` (default), `e1000`, `e1000e`, `igb`, `rtl8139`, `ne2k_pci` or `pcnet`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Name of the network that it connects to.
    pub name: String,
    /// No longer supported; rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passt: Option<DeprecatedInterfacePasst>,
    /// User-mode networking with passt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passt_binding: Option<InterfacePasstBinding>,
    /// PCI address in the guest, `dddd:bb:ss.f`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<String>,
    /// Port ranges forwarded to the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_ranges: Vec<PortRange>,
    /// Ports forwarded to the guest; default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<Port>,
    /// No longer supported; rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slirp: Option<DeprecatedInterfaceSlirp>,
    /// SR-IOV virtual function passed to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sriov: Option<InterfaceSriov>,
    /// Link state: `up` (default), `down` or `absent` (unplugs the interface).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Role of the device, passed to the guest in cloud-init metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// A registered network binding.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PluginBinding {
    /// Name in the cluster configuration.
    pub name: String,
}

/// Marker for the bridge binding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct InterfaceBridge {}

/// Marker for the masquerade binding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct InterfaceMasquerade {}

/// Marker for SR-IOV.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct InterfaceSriov {}

/// Marker for the passt binding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct InterfacePasstBinding {}

/// Marker for the removed macvtap binding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DeprecatedInterfaceMacvtap {}

/// Marker for the removed passt plugin.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DeprecatedInterfacePasst {}

/// Marker for the removed slirp binding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DeprecatedInterfaceSlirp {}

/// Additional DHCP options.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DhcpOptions {
    /// Option 67, name of the boot file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_file_name: Option<String>,
    /// Option 42, addresses of NTP servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ntp_servers: Vec<String>,
    /// Options 224 to 254 with text values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub private_options: Vec<DhcpPrivateOptions>,
    /// Option 66, name of the TFTP server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tftp_server_name: Option<String>,
}

/// One site-specific DHCP option.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DhcpPrivateOptions {
    /// Number, 224 to 254.
    pub option: i32,
    /// Text value.
    pub value: String,
}

/// One forwarded port.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    /// Name, unique among the ports of the interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Port number, 1 to 65535.
    pub port: i32,
    /// `TCP` (default) or `UDP`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// A range of ports.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortRange {
    /// Last port.
    pub end: i32,
    /// `TCP` (default) or `UDP`.
    pub protocol: String,
    /// First port.
    pub start: i32,
}

/// One network; exactly one source is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// Network of a NetworkAttachmentDefinition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multus: Option<MultusNetwork>,
    /// Name that an interface refers to.
    pub name: String,
    /// The pod's own network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodNetwork>,
    /// Network device of a resource claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claim: Option<ClaimRequest>,
}

/// Network of a NetworkAttachmentDefinition.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MultusNetwork {
    /// Replaces the pod network.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub default_: bool,
    /// Name of the definition, optionally `namespace/name`.
    pub network_name: String,
}

/// The pod's own network.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodNetwork {
    /// IPv6 subnet of the masquerade bridge; default: `fd10:0:2::/120`.
    #[serde(rename = "vmIPv6NetworkCIDR", skip_serializing_if = "Option::is_none")]
    pub vm_ipv6_network_cidr: Option<String>,
    /// Subnet of the masquerade bridge; default: `10.0.2.0/24`.
    #[serde(rename = "vmNetworkCIDR", skip_serializing_if = "Option::is_none")]
    pub vm_network_cidr: Option<String>,
}

/// A request inside a resource claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRequest {
    /// Entry of `resourceClaims`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_name: Option<String>,
    /// Request inside the resource claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_name: Option<String>,
}
