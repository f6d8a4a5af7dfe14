//! Answer of `usage`: counters of a domain. Ferrovirt's own; two answers make rates.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Counters of a domain since its start on this node.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DomainUsage {
    /// Time at which the counters were read.
    pub timestamp: MicroTime,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// CPU time in nanoseconds, with that of the emulation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_nanoseconds: Option<u64>,
    /// Memory.
    #[serde(default)]
    pub memory: MemoryUsage,
    /// Disks of the VMI's spec.
    #[serde(default)]
    pub disks: Vec<DiskUsage>,
    /// Interfaces of the VMI's spec.
    #[serde(default)]
    pub interfaces: Vec<InterfaceUsage>,
}

/// Memory in bytes. The guest's part needs its balloon driver.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryUsage {
    /// Memory assigned to the domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_bytes: Option<u64>,
    /// Memory that the guest sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    /// Memory that the guest can give up without swapping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usable_bytes: Option<u64>,
    /// Resident memory of the domain's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
}

/// Counters of a disk.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DiskUsage {
    /// Name in the spec.
    pub name: String,
    /// Bytes read.
    pub read_bytes: u64,
    /// Reads.
    pub read_requests: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Writes.
    pub write_requests: u64,
}

/// Counters of an interface.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InterfaceUsage {
    /// Name in the spec.
    pub name: String,
    /// Bytes received.
    pub receive_bytes: u64,
    /// Packets received.
    pub receive_packets: u64,
    /// Bytes sent.
    pub transmit_bytes: u64,
    /// Packets sent.
    pub transmit_packets: u64,
}
