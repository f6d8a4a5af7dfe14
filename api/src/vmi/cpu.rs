//! vCPUs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// vCPU model, topology and features.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cpu {
    /// Cores per socket; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Pin each vCPU to a dedicated host CPU.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub dedicated_cpu_placement: bool,
    /// Feature flags added to or removed from the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<CpuFeature>,
    /// Run the emulator thread on a dedicated host CPU.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub isolate_emulator_thread: bool,
    /// Maximum number of sockets for CPU hotplug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sockets: Option<u32>,
    /// CPU model: a libvirt model name, `host-model` or `host-passthrough`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// NUMA topology shown to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<Numa>,
    /// Real-time scheduling of the vCPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realtime: Option<Realtime>,
    /// Sockets; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u32>,
    /// Threads per core; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
}

/// One CPU flag.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuFeature {
    /// Name of the feature in libvirt.
    pub name: String,
    /// `force`, `require` (default), `optional`, `disable` or `forbid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

/// NUMA topology shown to the guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Numa {
    /// Mirror the host NUMA nodes of the pinned CPUs and huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_mapping_passthrough: Option<NumaGuestMappingPassthrough>,
}

/// Marker for mirroring the host topology.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct NumaGuestMappingPassthrough {}

/// Real-time scheduling.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Realtime {
    /// Range list of vCPUs with real-time priority; default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
}

/// Sockets, cores and threads.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuTopology {
    /// Cores per socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Sockets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u32>,
    /// Threads per core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
}
