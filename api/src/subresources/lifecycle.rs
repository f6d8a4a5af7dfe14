//! Options for starting, stopping, pausing and migrating.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Options of `start`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartOptions {
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Leave the guest paused before its first instruction; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
}

/// Options of `stop`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StopOptions {
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Seconds until the guest is stopped by force; default: the grace period of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_period: Option<i64>,
}

/// Options of `restart`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RestartOptions {
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// 0 stops the guest by force at once; other values are rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_period_seconds: Option<i64>,
}

/// Options of `pause` and `unpause`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PauseOptions {
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
}

/// Options of `migrate`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrateOptions {
    /// Labels required of the target node in addition to the node selector of the VM.
    #[serde(deserialize_with = "super::or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub added_node_selector: BTreeMap<String, String>,
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
}

/// Options of `evacuate/cancel`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EvacuateCancelOptions {
    /// `All`: validate without changing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Expected node of the evacuation; the call fails if it is another one.
    #[serde(deserialize_with = "super::or_default")]
    pub evacuation_node_name: String,
}
