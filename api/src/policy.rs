//! MigrationPolicy: settings of migrations for groups of machines.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::migration::ExperimentalMigrationOptions;

/// API group of migration policies.
pub const GROUP: &str = "migrations.kubevirt.io";

/// Settings that take the place of the cluster's for the machines selected. Where several policies match, the one that
/// matches by most labels holds.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "migrations.kubevirt.io",
    version = "v1alpha1",
    kind = "MigrationPolicy",
    plural = "migrationpolicies",
    singular = "migrationpolicy",
    derive = "Default",
    derive = "PartialEq",
    doc = "Settings of migrations for the machines it selects.",
    status = "MigrationPolicyStatus"
)]
#[serde(rename_all = "camelCase")]
pub struct MigrationPolicySpec {
    /// Slow the guest down so that copying catches up; the cluster's setting when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_auto_converge: Option<bool>,
    /// Switch over before all memory is copied; the cluster's setting when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_post_copy: Option<bool>,
    /// Pause the guest or switch over early when copying takes too long; the cluster's setting when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_workload_disruption: Option<bool>,
    /// Bytes per second, 0 for no limit; the cluster's setting when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_per_migration: Option<Quantity>,
    /// Seconds per GiB after which a migration is stopped; the cluster's setting when unset.
    #[serde(rename = "completionTimeoutPerGiB", skip_serializing_if = "Option::is_none")]
    pub completion_timeout_per_gib: Option<i64>,
    /// Settings that may change or go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experimental: Option<ExperimentalMigrationOptions>,
    /// Longest stop at switch-over in milliseconds, 1 to 2000000; the cluster's setting when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// Machines the policy is for.
    pub selectors: Selectors,
}

/// Which machines a policy is for: those that match both.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Selectors {
    /// Labels the machine's namespace must carry; any namespace when empty.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub namespace_selector: BTreeMap<String, String>,
    /// Labels the machine must carry; any machine when empty.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub virtual_machine_instance_selector: BTreeMap<String, String>,
}

/// Empty: nothing is observed of a policy.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct MigrationPolicyStatus {}
