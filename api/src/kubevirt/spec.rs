//! The KubeVirt object: the installation and its configuration.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Affinity;
use k8s_openapi::api::core::v1::LocalObjectReference;
use k8s_openapi::api::core::v1::Toleration;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kubevirt::configuration::KubeVirtConfiguration;

/// The installation and its configuration.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "kubevirt.io",
    version = "v1",
    kind = "KubeVirt",
    plural = "kubevirts",
    singular = "kubevirt",
    shortname = "kv",
    shortname = "kvs",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "The installation and its configuration; one object per cluster.",
    status = "crate::kubevirt::status::KubeVirtStatus",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtSpec {
    /// Rotation of certificates.
    #[serde(default)]
    pub certificate_rotate_strategy: KubeVirtCertificateRotateStrategy,
    /// Cluster configuration, followed live.
    #[serde(default)]
    pub configuration: KubeVirtConfiguration,
    /// Changes to the installed components; use the chart's values instead.
    #[serde(default)]
    pub customize_components: CustomizeComponents,
    /// Pull policy of component images; use the chart's values instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Secrets for component images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Registry of component images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_registry: Option<String>,
    /// Tag of component images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_tag: Option<String>,
    /// No effect: the chart places virt-api and virt-controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infra: Option<ComponentConfig>,
    /// Service account of the monitoring system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor_account: Option<String>,
    /// Namespace of the monitoring system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor_namespace: Option<String>,
    /// Component label of installed objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product_component: Option<String>,
    /// Product label of installed objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product_name: Option<String>,
    /// Version label of installed objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub product_version: Option<String>,
    /// Namespace of service monitors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_monitor_namespace: Option<String>,
    /// Port of the synchronization service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synchronization_port: Option<String>,
    /// Fate of workloads when this object is deleted. Not set: the deletion is refused while VMIs exist.
    /// BlockUninstallIfWorkloadsExist: it is refused while VMIs, VMs or replica sets exist. RemoveWorkloads: they are removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uninstall_strategy: Option<String>,
    /// Updates of launchers of running VMIs.
    #[serde(default)]
    pub workload_update_strategy: KubeVirtWorkloadUpdateStrategy,
    /// Nodes for VMIs that start, by `nodePlacement`. The chart places virt-handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workloads: Option<ComponentConfig>,
}

/// Rotation of certificates.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtCertificateRotateStrategy {
    /// Certificates of the installation's own CA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub self_signed: Option<KubeVirtSelfSignConfiguration>,
}

/// Certificates of the installation's own CA.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtSelfSignConfiguration {
    /// The CA certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<CertConfig>,
    /// Old name: overlap of the old and the new CA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_overlap_interval: Option<String>,
    /// Old name: validity of the CA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_rotate_interval: Option<String>,
    /// Old name: validity of server and client certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_rotate_interval: Option<String>,
    /// Server and client certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<CertConfig>,
}

/// Rotation of a certificate.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertConfig {
    /// Validity, such as `24h`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
    /// Time before expiry at which it is renewed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renew_before: Option<String>,
}

/// Changes to the installed components.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomizeComponents {
    /// Command line flags by component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flags: Option<Flags>,
    /// Patches of installed objects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<CustomizeComponentsPatch>,
}

/// Command line flags.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Flags {
    /// Of virt-api.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub api: BTreeMap<String, String>,
    /// Of virt-controller.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub controller: BTreeMap<String, String>,
    /// Of virt-handler.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub handler: BTreeMap<String, String>,
}

/// A patch of an installed object.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomizeComponentsPatch {
    /// The patch.
    pub patch: String,
    /// Name of the object.
    pub resource_name: String,
    /// Kind of the object.
    pub resource_type: String,
    /// Patch format: `strategic`, `merge` or `json`.
    pub type_: String,
}

/// Placement of a component.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ComponentConfig {
    /// Node placement of its pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_placement: Option<NodePlacement>,
    /// Number of pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u8>,
}

/// Node placement of pods.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePlacement {
    /// Affinity of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerated taints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
}

/// Updates of launchers of running VMIs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtWorkloadUpdateStrategy {
    /// Time between batches; default: 1 minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_eviction_interval: Option<String>,
    /// Number of VMIs evicted in a batch; default: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_eviction_size: Option<i32>,
    /// `LiveMigrate` and `Evict`, in order of preference; none if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workload_update_methods: Vec<String>,
}
