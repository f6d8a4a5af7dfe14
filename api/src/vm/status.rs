//! The observed state of a VM.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;
use crate::enums::HibernationPhase;
use crate::enums::PrintableStatus;
use crate::enums::RunStrategy;
use crate::enums::StateChangeAction;
use crate::enums::VmOperation;
use crate::vmi::disks::Disk;
use crate::vmi::status::ChangedBlockTrackingStatus;
use crate::vmi::status::StorageMigratedVolumeInfo;
use crate::vmi::volumes::DataVolumeSource;
use crate::vmi::volumes::PersistentVolumeClaimVolumeSource;

/// Observed state of a VM.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStatus {
    /// State of changed-block tracking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed_block_tracking: Option<Box<ChangedBlockTrackingStatus>>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// True if the VMI exists.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub created: bool,
    /// Generation of the VM's spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_generation: Option<i64>,
    /// Hibernation of the guest. KubeVirt has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernation: Option<Box<VirtualMachineHibernation>>,
    /// Instance type in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instancetype_ref: Option<InstancetypeStatusRef>,
    /// First address of the running VMI. KubeVirt has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip_address: Option<String>,
    /// Requested memory dump.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_dump_request: Option<Box<VirtualMachineMemoryDumpRequest>>,
    /// Node of the running VMI. KubeVirt has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Generation from which the running VMI was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The operation that needs the VM's data to hold still. KubeVirt has no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation: Option<OperationLease>,
    /// Preference in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference_ref: Option<InstancetypeStatusRef>,
    /// Human-readable status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub printable_status: Option<PrintableStatus>,
    /// True if the VMI is ready.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub ready: bool,
    /// Restore that locks the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_in_progress: Option<String>,
    /// Last observed run strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_strategy: Option<RunStrategy>,
    /// Snapshot that locks the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_in_progress: Option<String>,
    /// Failed starts and the time of the next attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_failure: Option<VirtualMachineStartFailure>,
    /// Requested starts and stops, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub state_change_requests: Vec<VirtualMachineStateChangeRequest>,
    /// Requested volume hotplugs, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_requests: Vec<VirtualMachineVolumeRequest>,
    /// Support of snapshots by volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_snapshot_statuses: Vec<VolumeSnapshotStatus>,
    /// Volumes being updated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_update_state: Option<VolumeUpdateState>,
}

/// An operation that needs the data of a VM to hold still, and the object that requests it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OperationLease {
    /// Name of the object.
    pub name: String,
    /// `Snapshot`, `Restore`, `MemoryDump`, `VolumeMigration`, `Backup`, `Export` or `Hibernation`.
    pub operation: VmOperation,
    /// Time at which the operation began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// UID of the object; that of the VM for an operation without an object of its own.
    pub uid: String,
}

/// Hibernation of a guest: its memory in a claim.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineHibernation {
    /// Name of the claim; empty until one is made.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub claim_name: String,
    /// Name of the file in the claim.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file_name: String,
    /// The VMI whose memory is saved. A resume starts it as it was, whatever the template says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<SavedInstance>,
    /// Why the last save or resume failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// True if the claim was made for this hibernation and is deleted after it.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub owns_claim: bool,
    /// Phase.
    pub phase: HibernationPhase,
    /// Time of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

/// A VMI whose memory is saved.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedInstance {
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// UIDs of the claims of the guest, by name. It is not resumed with others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub claims: BTreeMap<String, String>,
    /// Node on which the guest ran. A resume prefers it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// ControllerRevision of the VM from which the VMI was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
    /// Spec of the VMI.
    #[schemars(schema_with = "crate::hibernation::any_object")]
    pub spec: serde_json::Value,
}

/// An instance type or preference in use.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstancetypeStatusRef {
    /// ControllerRevision with the copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_revision_ref: Option<ControllerRevisionRef>,
    /// Volume whose labels contain the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume: Option<String>,
    /// `Reject` or `Ignore`, for a volume without these labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume_failure_policy: Option<String>,
    /// Kind of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A ControllerRevision.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ControllerRevisionRef {
    /// Name of the revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A requested memory dump.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineMemoryDumpRequest {
    /// Name of the claim.
    pub claim_name: String,
    /// End time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_timestamp: Option<Time>,
    /// File on the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_name: Option<String>,
    /// Human-readable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Phase of the dump.
    pub phase: String,
    /// True if the claim is to be detached.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub remove: bool,
    /// Start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timestamp: Option<Time>,
}

/// Failed starts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStartFailure {
    /// Number of consecutive failures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consecutive_fail_count: Option<i32>,
    /// UID of the last VMI that failed.
    #[serde(rename = "lastFailedVMIUID", skip_serializing_if = "Option::is_none")]
    pub last_failed_vmi_uid: Option<String>,
    /// Time of the next attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_timestamp: Option<Time>,
}

/// A requested change of state.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStateChangeRequest {
    /// `Start` or `Stop`.
    pub action: StateChangeAction,
    /// Parameters, such as `paused`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub data: BTreeMap<String, String>,
    /// UID of the VMI that it applies to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// A requested volume hotplug; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineVolumeRequest {
    /// Volume to add.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub add_volume_options: Option<AddVolumeOptions>,
    /// Volume to remove.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remove_volume_options: Option<RemoveVolumeOptions>,
}

/// A volume to add.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AddVolumeOptions {
    /// The disk.
    pub disk: Disk,
    /// `All` to validate only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dry_run: Vec<String>,
    /// Name of disk and volume.
    pub name: String,
    /// The volume.
    pub volume_source: HotplugVolumeSource,
}

/// Source of a hotplugged volume; one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HotplugVolumeSource {
    /// Claim populated by a DataVolume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_volume: Option<DataVolumeSource>,
    /// Claim used as disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimVolumeSource>,
}

/// A volume to remove.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoveVolumeOptions {
    /// `All` to validate only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dry_run: Vec<String>,
    /// Name of the volume.
    pub name: String,
}

/// Support of snapshots for a volume.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotStatus {
    /// True if snapshots are supported.
    pub enabled: bool,
    /// Name of the volume.
    pub name: String,
    /// CamelCase reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Volumes being updated.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeUpdateState {
    /// Volumes being migrated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_migration_state: Option<VolumeMigrationState>,
}

/// Volumes being migrated.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMigrationState {
    /// Volumes being migrated to other claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub migrated_volumes: Vec<StorageMigratedVolumeInfo>,
}
