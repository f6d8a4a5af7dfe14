//! The observed state of a VMI.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;
use crate::enums::SavedMemoryPhase;
use crate::enums::VmiPhase;
use crate::vmi::cpu::CpuTopology;
use crate::vmi::domain::Machine;
use crate::vmi::memory::MemoryStatus;
use crate::vmi::migration::VirtualMachineInstanceMigrationState;

/// Observed state of a VMI.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceStatus {
    /// Context id of the VSOCK device.
    #[serde(rename = "VSOCKCID", skip_serializing_if = "Option::is_none")]
    pub vsock_cid: Option<u32>,
    /// UIDs of launcher pods and their nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub active_pods: BTreeMap<String, String>,
    /// State of changed-block tracking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed_block_tracking: Option<Box<ChangedBlockTrackingStatus>>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Current CPU topology.
    #[serde(rename = "currentCPUTopology", skip_serializing_if = "Option::is_none")]
    pub current_cpu_topology: Option<CpuTopology>,
    /// Node that the VMI must leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evacuation_node_name: Option<String>,
    /// `frozen` while guest file systems are frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fs_freeze_status: Option<String>,
    /// Operating system, as reported by the guest agent.
    #[serde(rename = "guestOSInfo", default)]
    pub guest_os_info: VirtualMachineInstanceGuestOsInfo,
    /// Memory that is saved to a claim, or restored from one. KubeVirt has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernation: Option<SavedMemory>,
    /// Interfaces, as reported by hypervisor, pod and guest agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<VirtualMachineInstanceNetworkInterface>,
    /// Checksums of kernel and initrd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_boot_status: Option<KernelBootStatus>,
    /// Image of the launcher container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launcher_container_image_version: Option<String>,
    /// Resolved machine type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// Guest memory at boot, current and requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStatus>,
    /// Volumes being migrated to other claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub migrated_volumes: Vec<StorageMigratedVolumeInfo>,
    /// `BlockMigration` if disks must be copied, else `LiveMigration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_method: Option<String>,
    /// State of the latest migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_state: Option<Box<VirtualMachineInstanceMigrationState>>,
    /// `Unix` if migrations use virt-handler's proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_transport: Option<String>,
    /// Node the VMI runs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Lifecycle phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<VmiPhase>,
    /// Start time of each phase.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phase_transition_timestamps: Vec<VirtualMachineInstancePhaseTransitionTimestamp>,
    /// Quality-of-service class of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qos_class: Option<String>,
    /// Short reason of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// UID of QEMU; 0 is root.
    #[serde(default)]
    pub runtime_user: u64,
    /// SELinux context of the launcher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selinux_context: Option<String>,
    /// Requirements on the node's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology_hints: Option<TopologyHints>,
    /// ControllerRevision of the VM from which the VMI was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_revision_name: Option<String>,
    /// State of each volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_status: Vec<VolumeStatus>,
}

/// Memory of a guest in a claim, which the VMI has as a volume for memory dumps.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedMemory {
    /// Name of the claim and of its volume.
    pub claim_name: String,
    /// Name of the file in the claim.
    pub file_name: String,
    /// Why the memory was not saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// State.
    pub phase: SavedMemoryPhase,
    /// Node on which the guest ran when its memory was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_node: Option<String>,
}

/// State of changed-block tracking.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChangedBlockTrackingStatus {
    /// The current or latest backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_status: Option<VirtualMachineInstanceBackupStatus>,
    /// `Enabled`, `Disabled`, `Initializing` or an intermediate state.
    pub state: String,
}

/// A backup of a running VMI.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceBackupStatus {
    /// Human-readable outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_msg: Option<String>,
    /// Name of the backup object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_name: Option<String>,
    /// Checkpoint created by the backup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_name: Option<String>,
    /// True if the backup has ended.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub completed: bool,
    /// End time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_timestamp: Option<Time>,
    /// True if the backup failed.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub failed: bool,
    /// Result of freezing the guest's file systems.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quiesce_status: Option<String>,
    /// Start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timestamp: Option<Time>,
    /// Volumes in the backup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VirtualMachineInstanceBackupVolumeInfo>,
}

/// A volume in a backup.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceBackupVolumeInfo {
    /// Name of the volume.
    pub volume_name: String,
}

/// Operating system, as reported by the guest agent.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceGuestOsInfo {
    /// Identifier of the system, such as `debian`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Kernel release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_release: Option<String>,
    /// Kernel build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_version: Option<String>,
    /// Hardware name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Name of the system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Human-readable name and version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pretty_name: Option<String>,
    /// Version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Version identifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_id: Option<String>,
}

/// Observed state of an interface.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceNetworkInterface {
    /// Sources of the data: `domain`, `guest-agent`, `multus-status`, separated by commas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub info_source: Option<String>,
    /// Name in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface_name: Option<String>,
    /// First address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip_address: Option<String>,
    /// All addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_addresses: Vec<String>,
    /// `up` or `down`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_state: Option<String>,
    /// MAC address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Name of the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Name in the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_interface_name: Option<String>,
    /// Number of queue pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_count: Option<i32>,
}

/// Checksums of boot files.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelBootStatus {
    /// The initrd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initrd_info: Option<InitrdInfo>,
    /// The kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_info: Option<KernelInfo>,
}

/// Checksum of the initrd.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InitrdInfo {
    /// CRC-32 of the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u32>,
}

/// Checksum of the kernel.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelInfo {
    /// CRC-32 of the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u32>,
}

/// Start time of a phase.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstancePhaseTransitionTimestamp {
    /// The phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<VmiPhase>,
    /// Start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase_transition_timestamp: Option<Time>,
}

/// Requirements on the node's clock.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyHints {
    /// Required TSC frequency in Hz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tsc_frequency: Option<i64>,
}

/// State of one volume.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStatus {
    /// State of a container disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_disk_volume: Option<ContainerDiskInfo>,
    /// Pod that attaches the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_volume: Option<HotplugVolumeStatus>,
    /// State of a memory dump.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_dump_volume: Option<Box<DomainMemoryDumpInfo>>,
    /// Human-readable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Name of the volume.
    pub name: String,
    /// State of the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim_info: Option<PersistentVolumeClaimInfo>,
    /// Phase of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// CamelCase reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
    /// Device in the guest, such as `vda`.
    pub target: String,
}

/// State of a container disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDiskInfo {
    /// CRC-32 of the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u32>,
}

/// Pod that attaches a volume.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HotplugVolumeStatus {
    /// Name of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attach_pod_name: Option<String>,
    /// UID of the pod.
    #[serde(rename = "attachPodUID", skip_serializing_if = "Option::is_none")]
    pub attach_pod_uid: Option<String>,
}

/// A memory dump.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DomainMemoryDumpInfo {
    /// Name of the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_name: Option<String>,
    /// End time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_timestamp: Option<Time>,
    /// Start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timestamp: Option<Time>,
    /// File on the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_file_name: Option<String>,
}

/// A volume that is migrated between claims.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageMigratedVolumeInfo {
    /// The target claim.
    #[serde(rename = "destinationPVCInfo", skip_serializing_if = "Option::is_none")]
    pub destination_pvc_info: Option<PersistentVolumeClaimInfo>,
    /// The source claim.
    #[serde(rename = "sourcePVCInfo", skip_serializing_if = "Option::is_none")]
    pub source_pvc_info: Option<PersistentVolumeClaimInfo>,
    /// Name of the volume.
    pub volume_name: String,
}

/// Amounts of resources by name. A `BTreeMap` has room for eleven, and claims have one.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(from = "BTreeMap<String, Quantity>", into = "BTreeMap<String, Quantity>")]
pub struct Amounts(Box<[(String, Quantity)]>);

impl Amounts {
    /// Returns the amount of a resource.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Quantity> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, amount)| amount)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<BTreeMap<String, Quantity>> for Amounts {
    fn from(amounts: BTreeMap<String, Quantity>) -> Self {
        Self(amounts.into_iter().collect())
    }
}

impl From<Amounts> for BTreeMap<String, Quantity> {
    fn from(amounts: Amounts) -> Self {
        amounts.0.into_vec().into_iter().collect()
    }
}

/// State of a claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaimInfo {
    /// Access modes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub access_modes: Vec<String>,
    /// Actual size.
    #[serde(default, skip_serializing_if = "Amounts::is_empty")]
    #[schemars(with = "BTreeMap<String, Quantity>")]
    pub capacity: Amounts,
    /// Name of the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_name: Option<String>,
    /// Fraction of the size used by the file system, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem_overhead: Option<String>,
    /// True if all blocks are allocated in advance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preallocated: Option<bool>,
    /// Requested size.
    #[serde(default, skip_serializing_if = "Amounts::is_empty")]
    #[schemars(with = "BTreeMap<String, Quantity>")]
    pub requests: Amounts,
    /// `Block` or `Filesystem`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_mode: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn amounts_are_a_map_on_the_wire() {
        let written = json!({"capacity": {"storage": "2Gi", "x": "1"}, "requests": {"storage": "1Gi"}});
        let info: PersistentVolumeClaimInfo = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(info.capacity.get("storage"), Some(&Quantity("2Gi".to_owned())));
        assert_eq!(info.requests.get("x"), None);
        assert_eq!(serde_json::to_value(info).unwrap(), written);
        assert_eq!(serde_json::to_value(PersistentVolumeClaimInfo::default()).unwrap(), json!({}));
    }
}
