//! Settings for development and tests.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings for development and tests.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeveloperConfiguration {
    /// Enable the profiler endpoints.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub cluster_profiler: bool,
    /// vCPUs per requested host CPU; default: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_allocation_ratio: Option<i32>,
    /// Disabled feature gates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disabled_feature_gates: Vec<String>,
    /// Limits of image checks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_verification: Option<DiskVerification>,
    /// Enabled feature gates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub feature_gates: Vec<String>,
    /// Verbosity by component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_verbosity: Option<LogVerbosity>,
    /// Guest memory per requested memory in percent; default: 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_overcommit: Option<i32>,
    /// TSC frequency in Hz that all nodes support.
    #[serde(rename = "minimumClusterTSCFrequency", skip_serializing_if = "Option::is_none")]
    pub minimum_cluster_tsc_frequency: Option<i64>,
    /// Bytes left free on a claim; default: 131072.
    #[serde(rename = "minimumReservePVCBytes", skip_serializing_if = "Option::is_none")]
    pub minimum_reserve_pvc_bytes: Option<u64>,
    /// Node labels required by all VMIs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selectors: BTreeMap<String, String>,
    /// Percentage by which a claim may be too small for its disk; default: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc_tolerate_less_space_up_to_percent: Option<i32>,
    /// Run VMIs without KVM.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub use_emulation: bool,
}

/// Limits of image checks.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskVerification {
    /// Memory limit of the check.
    pub memory_limit: Quantity,
}

/// Verbosity by component, 0 to 9; default: 2.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LogVerbosity {
    /// virt-handler's verbosity by node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_verbosity: BTreeMap<String, u64>,
    /// virt-api.
    #[serde(rename = "virtAPI", skip_serializing_if = "Option::is_none")]
    pub virt_api: Option<u64>,
    /// virt-controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_controller: Option<u64>,
    /// virt-handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_handler: Option<u64>,
    /// virt-launcher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_launcher: Option<u64>,
    /// No effect, since there is no operator; admission warns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_operator: Option<u64>,
    /// Synchronization service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_synchronization_controller: Option<u64>,
}
