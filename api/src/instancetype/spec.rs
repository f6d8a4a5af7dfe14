//! Instance types: size classes of machines.

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

/// What a size class demands of a machine. A machine that sets the same itself conflicts with the class.
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
    doc = "A size class of machines, for the VMs of its namespace."
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstancetypeSpec {
    /// Annotations put on the machine.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Virtual CPUs.
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
    /// How disks share IO threads (`shared`, `auto`, `supplementalPool`); none when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_threads_policy: Option<String>,
    /// Memory encryption of the guest. Deprecated: a preference is the place for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_security: Option<LaunchSecurity>,
    /// Guest memory.
    pub memory: MemoryInstancetype,
    /// Labels a node must carry to run the machine.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Scheduler that places the launcher pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
}

/// What a size class for all namespaces demands of a machine.
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
    doc = "A size class of machines, for the VMs of all namespaces."
)]
#[serde(transparent)]
pub struct VirtualMachineClusterInstancetypeSpec(pub VirtualMachineInstancetypeSpec);

impl Deref for VirtualMachineClusterInstancetypeSpec {
    type Target = VirtualMachineInstancetypeSpec;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Virtual CPUs of a size class.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuInstancetype {
    /// Pin each virtual CPU to a host CPU of its own; false when unset.
    #[serde(rename = "dedicatedCPUPlacement", skip_serializing_if = "Option::is_none")]
    pub dedicated_cpu_placement: Option<bool>,
    /// Number of virtual CPUs. A preference says how they spread over sockets, cores and threads; sockets otherwise.
    pub guest: u32,
    /// Give the emulator thread a host CPU of its own; false when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolate_emulator_thread: Option<bool>,
    /// Most sockets the machine can grow to while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sockets: Option<u32>,
    /// CPU model: a libvirt model name, `host-model` or `host-passthrough`; the cluster's when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// NUMA topology shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<Numa>,
    /// Real-time scheduling of the virtual CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realtime: Option<Realtime>,
}

/// Guest memory of a size class.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryInstancetype {
    /// Memory the guest sees.
    pub guest: Quantity,
    /// Back the guest by huge pages. Excludes `overcommitPercent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<Hugepages>,
    /// Most memory the machine can grow to while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_guest: Option<Quantity>,
    /// Per cent of the guest's memory that the launcher pod does not request; 0 when unset.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overcommit_percent: i32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &i32) -> bool {
    *value == 0
}
