//! The cluster configuration.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::enums::EvictionStrategy;
use crate::kubevirt::developer::DeveloperConfiguration;
use crate::kubevirt::migrations::MigrationConfiguration;
use crate::kubevirt::network::NetworkConfiguration;
use crate::kubevirt::network::PermittedHostDevices;
use crate::kubevirt::network::ResourceRequirementsWithoutClaims;

/// Cluster configuration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtConfiguration {
    /// Factor for the memory overhead, a decimal number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub additional_guest_memory_overhead_ratio: Option<String>,
    /// Client settings of virt-api.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_configuration: Option<ReloadableComponentConfiguration>,
    /// Settings by CPU architecture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture_configuration: Option<ArchConfiguration>,
    /// Namespaces whose VMIs get a CPU limit automatically.
    #[serde(rename = "autoCPULimitNamespaceLabelSelector", skip_serializing_if = "Option::is_none")]
    pub auto_cpu_limit_namespace_label_selector: Option<LabelSelector>,
    /// VMs with changed-block tracking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed_block_tracking_label_selectors: Option<ChangedBlockTrackingSelectors>,
    /// The set of common instance types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub common_instancetypes_deployment: Option<CommonInstancetypesDeployment>,
    /// Memory encryption.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confidential_compute: Option<ConfidentialComputeConfiguration>,
    /// Client settings of virt-controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_configuration: Option<ReloadableComponentConfiguration>,
    /// Default CPU model; default: `host-model`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// Default CPU request per vCPU; default: 100m.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_request: Option<Quantity>,
    /// Runtime class of launcher pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_runtime_class: Option<String>,
    /// Switches for development and tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub developer_configuration: Option<DeveloperConfiguration>,
    /// Allowed machine types, as globs; replaces the per-architecture list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub emulated_machines: Vec<String>,
    /// Default eviction strategy of VMIs; default: `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_strategy: Option<EvictionStrategy>,
    /// Client settings of virt-handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handler_configuration: Option<ReloadableComponentConfiguration>,
    /// Hypervisor in use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hypervisors: Vec<HypervisorConfiguration>,
    /// Pull policy of launcher images; default: `IfNotPresent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Instance type settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instancetype: Option<InstancetypeConfiguration>,
    /// Kernel same-page merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm_configuration: Option<KsmConfiguration>,
    /// Limits of hotplug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live_update_configuration: Option<LiveUpdateConfiguration>,
    /// Default machine type; replaces the per-architecture one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_type: Option<String>,
    /// Mediated devices created on nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mediated_devices_configuration: Option<MediatedDevicesConfiguration>,
    /// Interval of balloon statistics in seconds; 0 disables them; default: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_balloon_stats_period: Option<u32>,
    /// Migration settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrations: Option<MigrationConfiguration>,
    /// Oldest supported CPU model; deprecated.
    #[serde(rename = "minCPUModel", skip_serializing_if = "Option::is_none")]
    pub min_cpu_model: Option<String>,
    /// Network settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfiguration>,
    /// CPU models that are never offered.
    #[serde(rename = "obsoleteCPUModels", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub obsolete_cpu_models: BTreeMap<String, bool>,
    /// Directory of OVMF images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ovmf_path: Option<String>,
    /// Host devices VMIs may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permitted_host_devices: Option<PermittedHostDevices>,
    /// SCSI persistent reservations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_reservation_configuration: Option<PersistentReservationConfiguration>,
    /// `AggregateToDefault` or `Manual`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_aggregation_strategy: Option<String>,
    /// Seccomp profile of launcher pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp_configuration: Option<SeccompConfiguration>,
    /// SELinux type of launcher pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selinux_launcher_type: Option<String>,
    /// SMBIOS system strings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smbios: Option<SmbiosConfiguration>,
    /// Resources of auxiliary containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub support_container_resources: Vec<SupportContainerResources>,
    /// Supported guest agent versions, as patterns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub supported_guest_agent_versions: Vec<String>,
    /// Lowest TLS version and ciphers of servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_configuration: Option<TlsConfiguration>,
    /// The template service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_template_deployment: Option<VirtTemplateDeployment>,
    /// Maximum number of VMIs per node; default: 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_instances_per_node: Option<i32>,
    /// Defaults of all VMIs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_options: Option<VirtualMachineOptions>,
    /// `LiveUpdate` applies changes while a VM runs, `Stage` at the next start; default: `LiveUpdate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_rollout_strategy: Option<String>,
    /// Storage class of persistent TPM and EFI state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_state_storage_class: Option<String>,
    /// Client settings of the webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook_configuration: Option<ReloadableComponentConfiguration>,
}

/// Settings of a component.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReloadableComponentConfiguration {
    /// API client settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rest_client: Option<RestClientConfiguration>,
}

/// API client settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestClientConfiguration {
    /// Rate limit of requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter: Option<RateLimiter>,
}

/// Rate limit of requests.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimiter {
    /// Token bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_bucket_rate_limiter: Option<TokenBucketRateLimiter>,
}

/// Token bucket.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenBucketRateLimiter {
    /// Maximum burst of requests.
    pub burst: i32,
    /// Requests per second.
    pub qps: f64,
}

/// Settings by CPU architecture.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchConfiguration {
    /// For amd64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amd64: Option<ArchSpecificConfiguration>,
    /// For arm64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arm64: Option<ArchSpecificConfiguration>,
    /// Default architecture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_architecture: Option<String>,
    /// Ignored; no longer supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ppc64le: Option<ArchSpecificConfiguration>,
    /// For s390x.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s390x: Option<ArchSpecificConfiguration>,
}

/// Settings of one architecture.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchSpecificConfiguration {
    /// Allowed machine types, as globs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub emulated_machines: Vec<String>,
    /// Default machine type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_type: Option<String>,
    /// Directory of OVMF images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ovmf_path: Option<String>,
}

/// VMs with changed-block tracking.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChangedBlockTrackingSelectors {
    /// Selects by namespace labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_label_selector: Option<LabelSelector>,
    /// Selects by VM labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_label_selector: Option<LabelSelector>,
}

/// The set of common instance types.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CommonInstancetypesDeployment {
    /// Install the component; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Memory encryption.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfidentialComputeConfiguration {
    /// Intel TDX.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tdx: Option<TdxConfiguration>,
}

/// Intel TDX.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TdxConfiguration {
    /// Attestation of TDX guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attestation: Option<TdxAttestationConfiguration>,
}

/// Attestation of TDX guests.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TdxAttestationConfiguration {
    /// Require attestation of every guest; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforced: Option<bool>,
    /// Socket of the quote generation service on nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qgs_socket_path: Option<String>,
}

/// Hypervisor in use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HypervisorConfiguration {
    /// `kvm` or `hyperv-direct`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Instance type settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstancetypeConfiguration {
    /// `reference`, `expand` or `expandAll`; default: `reference`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_policy: Option<String>,
}

/// Kernel same-page merging.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KsmConfiguration {
    /// Nodes with kernel same-page merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_label_selector: Option<LabelSelector>,
}

/// Limits of hotplug.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LiveUpdateConfiguration {
    /// Maximum number of sockets of a VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cpu_sockets: Option<u32>,
    /// Maximum memory of a VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_guest: Option<Quantity>,
    /// Default maxima as a multiple of the values at start; default: 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hotplug_ratio: Option<u32>,
}

/// Mediated devices created on nodes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MediatedDevicesConfiguration {
    /// Configure mediated devices on nodes; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Types to create.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mediated_device_types: Vec<String>,
    /// Old name of `mediatedDeviceTypes`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mediated_devices_types: Vec<String>,
    /// Types by node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_mediated_device_types: Vec<NodeMediatedDeviceTypesConfig>,
}

/// Types by node.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMediatedDeviceTypesConfig {
    /// Types to create.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mediated_device_types: Vec<String>,
    /// Old name of `mediatedDeviceTypes`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mediated_devices_types: Vec<String>,
    /// Labels of the nodes.
    pub node_selector: BTreeMap<String, String>,
}

/// SCSI persistent reservations.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentReservationConfiguration {
    /// Permit persistent reservations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Seccomp profile of launcher pods.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SeccompConfiguration {
    /// The profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_instance_profile: Option<VirtualMachineInstanceProfile>,
}

/// The profile.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceProfile {
    /// A profile other than that of the runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_profile: Option<CustomProfile>,
}

/// A profile; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomProfile {
    /// File below the kubelet's seccomp directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub localhost_profile: Option<String>,
    /// The default profile of the container runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_default_profile: Option<bool>,
}

/// SMBIOS system strings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SmbiosConfiguration {
    /// Family; default: `KubeVirt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// Manufacturer; default: `KubeVirt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manufacturer: Option<String>,
    /// Product; default: `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product: Option<String>,
    /// Stock keeping unit shown in SMBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
    /// Version shown in SMBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Resources of an auxiliary container.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SupportContainerResources {
    /// Requests and limits.
    pub resources: ResourceRequirementsWithoutClaims,
    /// Kind of container.
    pub type_: String,
}

/// TLS of servers.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TlsConfiguration {
    /// Cipher names, for TLS 1.2.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ciphers: Vec<String>,
    /// `VersionTLS10` to `VersionTLS13`; 1.2 is the lowest served.
    #[serde(rename = "minTLSVersion", skip_serializing_if = "Option::is_none")]
    pub min_tls_version: Option<String>,
}

/// The template service.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtTemplateDeployment {
    /// Install the component; default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Defaults of all VMIs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineOptions {
    /// Disables free page reporting if present.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_free_page_reporting: Option<DisableFreePageReporting>,
    /// Disables logging of serial consoles if present.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_serial_console_log: Option<DisableSerialConsoleLog>,
}

/// Marker that disables free page reporting.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DisableFreePageReporting {}

/// Marker that disables logging of serial consoles.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct DisableSerialConsoleLog {}
