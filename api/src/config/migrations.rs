//! Settings of live migrations with their defaults.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{ConfigError, check_quantity, text};
use crate::kubevirt::migrations::MigrationConfiguration;

/// Settings of live migrations. Zero is a value of its own here: it turns time limits and the limit of the bandwidth off.
#[derive(Clone, Debug, PartialEq)]
pub struct Migrations {
    /// Migrations at a time in the cluster.
    pub parallel_per_cluster: u32,
    /// Migrations at a time away from one node.
    pub parallel_outbound_per_node: u32,
    /// Bytes per second of one migration; 0: no limit.
    pub bandwidth: Quantity,
    /// Seconds without progress after which a migration is aborted.
    pub progress_timeout: i64,
    /// Seconds per GB after which a migration is aborted.
    pub completion_timeout_per_gib: i64,
    /// Longest downtime at the switchover in milliseconds.
    pub max_downtime_ms: u64,
    /// Seconds that a migration waits for utility volumes to be detached.
    pub utility_volumes_timeout: i64,
    /// Permit migrations that libvirt considers unsafe.
    pub unsafe_override: bool,
    /// Throttle the guest so that the migration converges.
    pub allow_auto_converge: bool,
    /// Switch to post-copy before all memory is copied.
    pub allow_post_copy: bool,
    /// Pause the guest or switch to post-copy if the migration exceeds its time limit.
    pub allow_workload_disruption: bool,
    /// Transfer memory without encryption. Admission rejects it.
    pub disable_tls: Option<bool>,
    /// Definition of the network for migrations.
    pub network: Option<String>,
    /// Give the target pod the SELinux level of the source; default: true.
    pub match_selinux_level: Option<bool>,
}

impl Default for Migrations {
    fn default() -> Self {
        Self {
            parallel_per_cluster: 5,
            parallel_outbound_per_node: 2,
            bandwidth: Quantity("0Mi".to_owned()),
            progress_timeout: 150,
            completion_timeout_per_gib: 150,
            max_downtime_ms: 900,
            utility_volumes_timeout: 150,
            unsafe_override: false,
            allow_auto_converge: false,
            allow_post_copy: false,
            allow_workload_disruption: false,
            disable_tls: None,
            network: None,
            match_selinux_level: None,
        }
    }
}

impl Migrations {
    /// Reads the settings of a KubeVirt object.
    pub(super) fn read(from: Option<&MigrationConfiguration>) -> Result<Self, ConfigError> {
        let default = Self::default();
        let Some(from) = from else { return Ok(default) };
        if let Some(bandwidth) = &from.bandwidth_per_migration {
            check_quantity("migrations.bandwidthPerMigration", bandwidth)?;
        }
        let allow_post_copy = from.allow_post_copy.unwrap_or(default.allow_post_copy);
        Ok(Self {
            parallel_per_cluster: from.parallel_migrations_per_cluster.unwrap_or(default.parallel_per_cluster),
            parallel_outbound_per_node: from
                .parallel_outbound_migrations_per_node
                .unwrap_or(default.parallel_outbound_per_node),
            bandwidth: from.bandwidth_per_migration.clone().unwrap_or(default.bandwidth),
            progress_timeout: from.progress_timeout.unwrap_or(default.progress_timeout),
            completion_timeout_per_gib: from.completion_timeout_per_gib.unwrap_or(default.completion_timeout_per_gib),
            max_downtime_ms: from.max_downtime_ms.unwrap_or(default.max_downtime_ms),
            utility_volumes_timeout: from.utility_volumes_timeout.unwrap_or(default.utility_volumes_timeout),
            unsafe_override: from.unsafe_migration_override.unwrap_or(default.unsafe_override),
            allow_auto_converge: from.allow_auto_converge.unwrap_or(default.allow_auto_converge),
            allow_post_copy,
            allow_workload_disruption: from.allow_workload_disruption.unwrap_or(allow_post_copy),
            disable_tls: from.disable_tls,
            network: text(from.network.as_ref()),
            match_selinux_level: from.match_selinux_level_on_migration,
        })
    }
}
