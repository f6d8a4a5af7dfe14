//! Instance types: CPU, memory and other resources of a VMI.

use std::{collections::BTreeMap, ops::Deref};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::{
    cpu::{Numa, Realtime},
    devices::{Gpu, HostDevice},
    domain::DiskIoThreads,
    memory::Hugepages,
    security::LaunchSecurity,
};

/// Resources of an instance type. A VM that sets the same field has a conflict.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "instancetype.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineInstancetype",
    plural = "virtualmachineinstancetypes",
    singular = "virtualmachineinstancetype",
    shortname = "vminstancetype",
    shortname = "vminstancetypes",
    shortname = "vmf",
    shortname = "vmfs",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "An instance type: CPU, memory and other resources of VMs in its namespace."
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstancetypeSpec {
    /// Annotations added to the VMI.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// vCPUs.
    pub cpu: CpuInstancetype,
    /// GPUs of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// PCI, USB or mediated devices of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_devices: Vec<HostDevice>,
    /// Pool of IO threads for disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_threads: Option<DiskIoThreads>,
    /// How disks share IO threads (`shared`, `auto`, `supplementalPool`); default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_threads_policy: Option<String>,
    /// Memory encryption of the guest. Deprecated: set it in a preference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_security: Option<LaunchSecurity>,
    /// Guest memory.
    pub memory: MemoryInstancetype,
    /// Labels that the node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Scheduler that places the launcher pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
}

/// Resources of a cluster-wide instance type.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "instancetype.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineClusterInstancetype",
    plural = "virtualmachineclusterinstancetypes",
    singular = "virtualmachineclusterinstancetype",
    shortname = "vmclusterinstancetype",
    shortname = "vmclusterinstancetypes",
    shortname = "vmcf",
    shortname = "vmcfs",
    derive = "Default",
    derive = "PartialEq",
    doc = "An instance type: CPU, memory and other resources of VMs in all namespaces."
)]
#[serde(transparent)]
pub struct VirtualMachineClusterInstancetypeSpec(pub VirtualMachineInstancetypeSpec);

impl Deref for VirtualMachineClusterInstancetypeSpec {
    type Target = VirtualMachineInstancetypeSpec;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// vCPUs of an instance type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuInstancetype {
    /// Pin each vCPU to a dedicated host CPU; default: false.
    #[serde(rename = "dedicatedCPUPlacement", skip_serializing_if = "Option::is_none")]
    pub dedicated_cpu_placement: Option<bool>,
    /// Number of vCPUs. The preference determines sockets, cores and threads; default: sockets.
    pub guest: u32,
    /// Run the emulator thread on a dedicated host CPU; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolate_emulator_thread: Option<bool>,
    /// Maximum number of sockets for CPU hotplug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sockets: Option<u32>,
    /// CPU model: a libvirt model name, `host-model` or `host-passthrough`; default: that of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// NUMA topology shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<Numa>,
    /// Real-time scheduling of the vCPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realtime: Option<Realtime>,
}

/// Guest memory of an instance type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryInstancetype {
    /// Guest memory.
    pub guest: Quantity,
    /// Back the guest by huge pages. Excludes `overcommitPercent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<Hugepages>,
    /// Maximum guest memory for memory hotplug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_guest: Option<Quantity>,
    /// Percentage of the guest memory that the launcher pod does not request; default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overcommit_percent: i32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &i32) -> bool {
    *value == 0
}
