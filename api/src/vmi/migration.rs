//! The state of a live migration.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationState {
    /// True if an abort is requested.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub abort_requested: bool,
    /// Status of the abort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub abort_status: Option<String>,
    /// True if the migration has ended.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub completed: bool,
    /// End time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_timestamp: Option<Time>,
    /// True if the migration failed.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub failed: bool,
    /// Reason of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Effective settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_configuration: Option<MigrationConfigurationOptions>,
    /// `pod` or `migration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_network_type: Option<String>,
    /// Matching migration policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_policy_name: Option<String>,
    /// UID of the migration object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_uid: Option<String>,
    /// `PreCopy`, `PostCopy` or `Paused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Source node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_node: Option<String>,
    /// Claim with persistent state on the source.
    #[serde(rename = "sourcePersistentStatePVCName", skip_serializing_if = "Option::is_none")]
    pub source_persistent_state_pvc_name: Option<String>,
    /// Source pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_pod: Option<String>,
    /// State of the source side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_state: Option<VirtualMachineInstanceMigrationSourceState>,
    /// Start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timestamp: Option<Time>,
    /// Pod that attaches hotplugged volumes on the target.
    #[serde(rename = "targetAttachmentPodUID", skip_serializing_if = "Option::is_none")]
    pub target_attachment_pod_uid: Option<String>,
    /// Host CPUs on the target for VMIs with dedicated CPUs.
    #[serde(rename = "targetCPUSet", default, skip_serializing_if = "Vec::is_empty")]
    pub target_cpu_set: Vec<i32>,
    /// Ports of the target and their purpose.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub target_direct_migration_node_ports: BTreeMap<String, i32>,
    /// Overhead of the target pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_memory_overhead: Option<Quantity>,
    /// Target node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_node: Option<String>,
    /// Address of virt-handler on the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_node_address: Option<String>,
    /// True if the domain exists on the target.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub target_node_domain_detected: bool,
    /// Time at which the domain ran on the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_node_domain_ready_timestamp: Option<Time>,
    /// Host topology of the target, JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_node_topology: Option<String>,
    /// Claim with persistent state on the target.
    #[serde(rename = "targetPersistentStatePVCName", skip_serializing_if = "Option::is_none")]
    pub target_persistent_state_pvc_name: Option<String>,
    /// Target pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_pod: Option<String>,
    /// State of the target side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_state: Option<VirtualMachineInstanceMigrationTargetState>,
}

/// Settings of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigrationConfigurationOptions {
    /// Throttle the guest so that the migration converges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_auto_converge: Option<bool>,
    /// Switch to post-copy before all memory is copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_post_copy: Option<bool>,
    /// Pause the guest or switch to post-copy if the migration exceeds its time limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_workload_disruption: Option<bool>,
    /// Bytes per second; 0 means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_per_migration: Option<Quantity>,
    /// Seconds per GiB after which the migration is aborted.
    #[serde(rename = "completionTimeoutPerGiB", skip_serializing_if = "Option::is_none")]
    pub completion_timeout_per_gib: Option<i64>,
    /// Transfer memory without encryption.
    #[serde(rename = "disableTLS", skip_serializing_if = "Option::is_none")]
    pub disable_tls: Option<bool>,
    /// Experimental settings, which may change or be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experimental: Option<ExperimentalMigrationOptions>,
    /// Use the source's SELinux level on the target.
    #[serde(rename = "matchSELinuxLevelOnMigration", skip_serializing_if = "Option::is_none")]
    pub match_selinux_level_on_migration: Option<bool>,
    /// Maximum downtime at switchover in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// NetworkAttachmentDefinition of the migration network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Taint of nodes that are being drained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_drain_taint_key: Option<String>,
    /// Maximum number of concurrent migrations in the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel_migrations_per_cluster: Option<u32>,
    /// Maximum number of concurrent outbound migrations per node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel_outbound_migrations_per_node: Option<u32>,
    /// Seconds without progress after which the migration is aborted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_timeout: Option<i64>,
    /// Permit migrations that libvirt considers unsafe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unsafe_migration_override: Option<bool>,
    /// Time limit in seconds for detaching utility volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utility_volumes_timeout: Option<i64>,
}

impl MigrationConfigurationOptions {
    /// Returns true if a migration that exceeds its time limit switches to post-copy. Without a value, workload disruption is
    /// allowed as post-copy is.
    #[must_use]
    pub fn switches_to_post_copy(&self) -> bool {
        self.allow_post_copy == Some(true) && self.allow_workload_disruption != Some(false)
    }
}

/// Experimental migration settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExperimentalMigrationOptions {
    /// `none` or `zstd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// Steps of the downtime limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_tuning: Option<DowntimeTuningOptions>,
    /// Detection of stalled migrations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_detector: Option<StallDetectorOptions>,
}

/// Steps of the downtime limit.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DowntimeTuningOptions {
    /// Seconds between steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cooldown_seconds: Option<i32>,
    /// First value in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_ms: Option<i64>,
    /// Copy iteration after which the steps begin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_after_iteration: Option<i64>,
    /// Number of steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<i32>,
}

/// Detection of stalled migrations.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StallDetectorOptions {
    /// Factor for the completion timeout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_timeout_factor: Option<Quantity>,
    /// Weight of the latest transfer rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ewma_alpha: Option<Quantity>,
    /// Decay of the patience window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience_window_decay_factor: Option<Quantity>,
    /// Ratio of transfer rate to dirty rate above which pre-copy is considered possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precopy_possible_factor: Option<Quantity>,
    /// Switch over at a local minimum of remaining data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub search_local_minima: Option<bool>,
    /// Change in percent that counts as progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_margin: Option<i64>,
    /// Seconds without progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_progress_timeout: Option<i64>,
    /// Time limit of the switchover in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub switchover_timeout: Option<i64>,
}

/// Source side of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationSourceState {
    /// Name of the domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_name: Option<String>,
    /// Namespace of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_namespace: Option<String>,
    /// UID of the migration object.
    #[serde(rename = "migrationUID", skip_serializing_if = "Option::is_none")]
    pub migration_uid: Option<String>,
    /// Name of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Node labels that the target must match.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selectors: BTreeMap<String, String>,
    /// Claim with persistent state.
    #[serde(rename = "persistentStatePVCName", skip_serializing_if = "Option::is_none")]
    pub persistent_state_pvc_name: Option<String>,
    /// Name of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// SELinux context of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selinux_context: Option<String>,
    /// Address of the synchronization service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync_address: Option<String>,
    /// UID of the VMI.
    #[serde(rename = "virtualMachineInstanceUID", skip_serializing_if = "Option::is_none")]
    pub virtual_machine_instance_uid: Option<String>,
}

/// Target side of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationTargetState {
    /// Pod that attaches hotplugged volumes.
    #[serde(rename = "attachmentPodUID", skip_serializing_if = "Option::is_none")]
    pub attachment_pod_uid: Option<String>,
    /// Host CPUs for VMIs with dedicated CPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpu_set: Vec<i32>,
    /// Ports and their purpose.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub direct_migration_node_ports: BTreeMap<String, i32>,
    /// True if the domain exists.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub domain_detected: bool,
    /// Name of the domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_name: Option<String>,
    /// Namespace of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_namespace: Option<String>,
    /// Time at which the domain ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_ready_timestamp: Option<Time>,
    /// UID of the migration object.
    #[serde(rename = "migrationUID", skip_serializing_if = "Option::is_none")]
    pub migration_uid: Option<String>,
    /// Name of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Address of virt-handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_address: Option<String>,
    /// Host topology, JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_topology: Option<String>,
    /// Claim with persistent state.
    #[serde(rename = "persistentStatePVCName", skip_serializing_if = "Option::is_none")]
    pub persistent_state_pvc_name: Option<String>,
    /// Name of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// SELinux context of the launcher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selinux_context: Option<String>,
    /// Address of the synchronization service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync_address: Option<String>,
    /// UID of the VMI.
    #[serde(rename = "virtualMachineInstanceUID", skip_serializing_if = "Option::is_none")]
    pub virtual_machine_instance_uid: Option<String>,
}
