//! The observed state of the installation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// Observed state of the installation.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Architecture of the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_architecture: Option<String>,
    /// Generations of installed objects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub generations: Vec<GenerationStatus>,
    /// Installed configuration, JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_deployment_config: Option<String>,
    /// Identifier of the installed configuration.
    #[serde(rename = "observedDeploymentID", skip_serializing_if = "Option::is_none")]
    pub observed_deployment_id: Option<String>,
    /// Last observed generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Registry of the installed images.
    #[serde(rename = "observedKubeVirtRegistry", skip_serializing_if = "Option::is_none")]
    pub observed_kubevirt_registry: Option<String>,
    /// Installed version.
    #[serde(rename = "observedKubeVirtVersion", skip_serializing_if = "Option::is_none")]
    pub observed_kubevirt_version: Option<String>,
    /// Version of the installer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator_version: Option<String>,
    /// Number of VMIs with an outdated launcher, or with a change that waits for a migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outdated_virtual_machine_instance_workloads: Option<i32>,
    /// Phase of the installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Addresses of the synchronization service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub synchronization_addresses: Vec<String>,
    /// Target configuration, JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_deployment_config: Option<String>,
    /// Identifier of the target configuration.
    #[serde(rename = "targetDeploymentID", skip_serializing_if = "Option::is_none")]
    pub target_deployment_id: Option<String>,
    /// Registry of the target images.
    #[serde(rename = "targetKubeVirtRegistry", skip_serializing_if = "Option::is_none")]
    pub target_kubevirt_registry: Option<String>,
    /// Target version.
    #[serde(rename = "targetKubeVirtVersion", skip_serializing_if = "Option::is_none")]
    pub target_kubevirt_version: Option<String>,
}

/// Generation of an installed object.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GenerationStatus {
    /// API group.
    pub group: String,
    /// Hash of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Last written generation.
    pub last_generation: i64,
    /// Name of the object.
    pub name: String,
    /// Namespace of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Plural resource name.
    pub resource: String,
}
