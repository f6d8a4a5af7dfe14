//! Virtual hardware without the parts that have their own modules.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::clock::Clock;
use crate::vmi::cpu::Cpu;
use crate::vmi::devices::Devices;
use crate::vmi::features::Features;
use crate::vmi::firmware::Firmware;
use crate::vmi::memory::Memory;
use crate::vmi::security::LaunchSecurity;

/// Virtual hardware of a VMI.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DomainSpec {
    /// SMBIOS chassis strings shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chassis: Option<Box<Chassis>>,
    /// Clock base and timers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<Box<Clock>>,
    /// vCPU model, topology and features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    /// Disks, interfaces and other devices.
    pub devices: Devices,
    /// Hypervisor features of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<Features>,
    /// Boot firmware and its identifiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
    /// Pool of IO threads for disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_threads: Option<DiskIoThreads>,
    /// How disks share IO threads (`shared`, `auto`, `supplementalPool`); default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_threads_policy: Option<String>,
    /// Memory encryption of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_security: Option<LaunchSecurity>,
    /// Machine type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// Guest memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// `Reboot` restarts the guest in place, `Terminate` ends the VMI when the guest reboots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reboot_policy: Option<String>,
    /// Requests and limits of the launcher pod.
    #[serde(default)]
    pub resources: ResourceRequirements,
}

impl DomainSpec {
    /// Returns true if the guest sees the NUMA nodes of its host CPUs.
    #[must_use]
    pub fn maps_numa(&self) -> bool {
        let numa = self.cpu.as_ref().and_then(|cpu| cpu.numa.as_ref());
        numa.is_some_and(|numa| numa.guest_mapping_passthrough.is_some())
    }

    /// Returns true if the memory of QEMU may be locked.
    #[must_use]
    pub fn locks_memory(&self) -> bool {
        let overhead = self.memory.as_ref().and_then(|memory| memory.reserved_overhead.as_ref());
        overhead.is_some_and(|overhead| overhead.mem_lock.as_deref() == Some("Required"))
    }
}

/// SMBIOS type 3 strings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Chassis {
    /// Asset tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asset: Option<String>,
    /// Manufacturer shown in SMBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manufacturer: Option<String>,
    /// Serial number shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Stock keeping unit shown in SMBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
    /// Version shown in SMBIOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Pool of IO threads.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskIoThreads {
    /// Number of threads for policy `supplementalPool`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supplemental_pool_thread_count: Option<u32>,
}

/// Machine type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    /// Machine type of libvirt; default on amd64: `q35`.
    #[serde(default)]
    pub type_: String,
}

/// Requests and limits of the launcher pod.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceRequirements {
    /// Limits of the pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, Quantity>,
    /// Omit the overhead from the pod's memory request.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub overcommit_guest_overhead: bool,
    /// Requests of the pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Quantity>,
}
