//! Guest memory.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Guest memory.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// Guest memory; default: the memory request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<Quantity>,
    /// Back the guest by huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<Hugepages>,
    /// Maximum guest memory for memory hotplug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_guest: Option<Quantity>,
    /// Memory reserved in addition to the guest's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_overhead: Option<ReservedOverhead>,
}

/// Huge pages.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hugepages {
    /// Page size, `2Mi` or `1Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_size: Option<String>,
}

/// Memory reserved in addition to the guest's.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReservedOverhead {
    /// Amount added to the pod's request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub added_overhead: Option<Quantity>,
    /// Locking of QEMU's memory: `Required` or `NotRequired`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_lock: Option<String>,
}

/// Guest memory.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryStatus {
    /// Memory at boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_at_boot: Option<Quantity>,
    /// Current memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_current: Option<Quantity>,
    /// Requested memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_requested: Option<Quantity>,
    /// Memory reserved in addition to the guest's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_overhead: Option<Quantity>,
}
