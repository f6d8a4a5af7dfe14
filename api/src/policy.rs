//! MigrationPolicy: migration settings for groups of VMIs.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::migration::ExperimentalMigrationOptions;

/// API group of migration policies.
pub const GROUP: &str = "migrations.kubevirt.io";

/// Settings that override those of the cluster for the selected VMIs. If several policies match, the one with the most
/// matching labels applies.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "migrations.kubevirt.io",
    version = "v1alpha1",
    kind = "MigrationPolicy",
    plural = "migrationpolicies",
    singular = "migrationpolicy",
    derive = "Default",
    derive = "PartialEq",
    doc = "Migration settings for the selected VMIs.",
    status = "MigrationPolicyStatus"
)]
#[serde(rename_all = "camelCase")]
pub struct MigrationPolicySpec {
    /// Throttle the guest so that the migration converges; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_auto_converge: Option<bool>,
    /// Switch to post-copy before all memory is copied; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_post_copy: Option<bool>,
    /// Pause the guest or switch to post-copy if the migration exceeds its time limit; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_workload_disruption: Option<bool>,
    /// Bytes per second, 0 means no limit; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_per_migration: Option<Quantity>,
    /// Seconds per GiB after which a migration is aborted; default: the cluster's setting.
    #[serde(rename = "completionTimeoutPerGiB", skip_serializing_if = "Option::is_none")]
    pub completion_timeout_per_gib: Option<i64>,
    /// Experimental settings, which may change or be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experimental: Option<ExperimentalMigrationOptions>,
    /// Maximum downtime at switchover in milliseconds, 1 to 2000000; default: the cluster's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// VMIs of the policy.
    pub selectors: Selectors,
}

/// Selects the VMIs of a policy. Both selectors must match.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Selectors {
    /// Labels that the VMI's namespace must have; default: any namespace.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub namespace_selector: BTreeMap<String, String>,
    /// Labels that the VMI must have; default: any VMI.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub virtual_machine_instance_selector: BTreeMap<String, String>,
}

/// Observed state of a policy; empty.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct MigrationPolicyStatus {}
