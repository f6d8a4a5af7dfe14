//! The installation.

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
    doc = "The installation and its configuration; one object a cluster.",
    status = "crate::kubevirt::status::KubeVirtStatus",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtSpec {
    /// Life of the certificates.
    #[serde(default)]
    pub certificate_rotate_strategy: KubeVirtCertificateRotateStrategy,
    /// Cluster configuration, followed live.
    #[serde(default)]
    pub configuration: KubeVirtConfiguration,
    /// Changes to the installed components; the chart's values take its place.
    #[serde(default)]
    pub customize_components: CustomizeComponents,
    /// When component images are pulled; the chart's values take its place.
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
    /// Placement of virt-api and virt-controller.
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
    /// Whether removal is refused while machines exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uninstall_strategy: Option<String>,
    /// How running machines get a new launcher.
    #[serde(default)]
    pub workload_update_strategy: KubeVirtWorkloadUpdateStrategy,
    /// Placement of virt-handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workloads: Option<ComponentConfig>,
}

/// Life of the certificates.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtCertificateRotateStrategy {
    /// Certificates of the installation's own authority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub self_signed: Option<KubeVirtSelfSignConfiguration>,
}

/// Certificates of the installation's own authority.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtSelfSignConfiguration {
    /// The authority's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<CertConfig>,
    /// Old name: how long two authorities overlap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_overlap_interval: Option<String>,
    /// Old name: life of the authority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_rotate_interval: Option<String>,
    /// Old name: life of the leaves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_rotate_interval: Option<String>,
    /// The leaves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<CertConfig>,
}

/// Life of a certificate.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertConfig {
    /// How long it is valid, such as `24h`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
    /// How long before its end it is replaced.
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
    /// Where its pods run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_placement: Option<NodePlacement>,
    /// Number of pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u8>,
}

/// Where pods run.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePlacement {
    /// Affinity of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Labels a node must carry.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints accepted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
}

/// How running machines get a new launcher.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtWorkloadUpdateStrategy {
    /// Time between batches; 1 minute when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_eviction_interval: Option<String>,
    /// Machines evicted at once; 10 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_eviction_size: Option<i32>,
    /// `LiveMigrate`, `Evict`; none when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workload_update_methods: Vec<String>,
}
