//! Switches for development and tests.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Switches for development and tests.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeveloperConfiguration {
    /// Offer the profiler endpoints.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub cluster_profiler: bool,
    /// Virtual CPUs per requested host CPU; 10 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_allocation_ratio: Option<i32>,
    /// Feature gates turned off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disabled_feature_gates: Vec<String>,
    /// Bounds of image checks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_verification: Option<DiskVerification>,
    /// Feature gates turned on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub feature_gates: Vec<String>,
    /// Verbosity by component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_verbosity: Option<LogVerbosity>,
    /// Guest memory per requested memory in percent; 100 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_overcommit: Option<i32>,
    /// TSC frequency in Hz all nodes offer.
    #[serde(rename = "minimumClusterTSCFrequency", skip_serializing_if = "Option::is_none")]
    pub minimum_cluster_tsc_frequency: Option<i64>,
    /// Bytes left free on a claim; 131072 when unset.
    #[serde(rename = "minimumReservePVCBytes", skip_serializing_if = "Option::is_none")]
    pub minimum_reserve_pvc_bytes: Option<u64>,
    /// Node labels every machine asks for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selectors: BTreeMap<String, String>,
    /// Percent of missing space accepted on a claim; 10 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc_tolerate_less_space_up_to_percent: Option<i32>,
    /// Run machines without KVM.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub use_emulation: bool,
}

/// Bounds of image checks.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskVerification {
    /// Memory the check may use.
    pub memory_limit: Quantity,
}

/// Verbosity by component, 0 to 9; 2 when unset.
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
    /// There is no operator; without effect, and warned about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_operator: Option<u64>,
    /// Synchronization service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_synchronization_controller: Option<u64>,
}
