//! Options of starting, stopping, pausing and moving machines.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Options of `start`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartOptions {
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Leave the guest paused at its first instruction; false when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
}

/// Options of `stop`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StopOptions {
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Seconds until the guest is forced to stop; the machine's own when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_period: Option<i64>,
}

/// Options of `restart`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RestartOptions {
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// 0 forces the guest to stop at once; other values are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_period_seconds: Option<i64>,
}

/// Options of `pause` and `unpause`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PauseOptions {
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
}

/// Options of `migrate`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrateOptions {
    /// Labels that the node to move to must carry besides those that the VM asks for.
    #[serde(deserialize_with = "super::or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub added_node_selector: BTreeMap<String, String>,
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
}

/// Options of `evacuate/cancel`.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EvacuateCancelOptions {
    /// `All`: check, but change nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Vec<String>>,
    /// Node that the machine is believed to leave; the call fails when it is another one.
    #[serde(deserialize_with = "super::or_default")]
    pub evacuation_node_name: String,
}
