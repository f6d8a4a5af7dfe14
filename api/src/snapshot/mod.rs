//! VirtualMachineSnapshot: a snapshot of a VM and its volumes.

pub mod content;
pub mod restore;

use std::time::Duration;

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, constants::annotation, duration};

/// API group of snapshots, their contents and restores.
pub const GROUP: &str = "snapshot.kubevirt.io";
/// Time after which an incomplete snapshot fails by default.
const DEADLINE: Duration = Duration::from_secs(300);

/// Phases of a snapshot.
pub mod phase {
    /// The content is being taken.
    pub const IN_PROGRESS: &str = "InProgress";
    /// All volume snapshots are taken.
    pub const SUCCEEDED: &str = "Succeeded";
    /// The snapshot cannot be restored.
    pub const FAILED: &str = "Failed";
    /// The snapshot was deleted before its content was taken.
    pub const DELETING: &str = "Deleting";
}

/// Condition types of snapshots and restores.
pub mod condition {
    /// It can be used.
    pub const READY: &str = "Ready";
    /// It is not final.
    pub const PROGRESSING: &str = "Progressing";
    /// It has failed.
    pub const FAILURE: &str = "Failure";
}

/// A request to snapshot a VM.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "snapshot.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineSnapshot",
    plural = "virtualmachinesnapshots",
    singular = "virtualmachinesnapshot",
    shortname = "vmsnapshot",
    shortname = "vmsnapshots",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A request to snapshot a VM: its spec and the content of its volumes.",
    status = "VirtualMachineSnapshotStatus",
    printcolumn = r#"{"name":"SourceKind","type":"string","jsonPath":".spec.source.kind"}"#,
    printcolumn = r#"{"name":"SourceName","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"ReadyToUse","type":"boolean","jsonPath":".status.readyToUse"}"#,
    printcolumn = r#"{"name":"CreationTime","type":"date","jsonPath":".status.creationTime"}"#,
    printcolumn = r#"{"name":"Error","type":"string","jsonPath":".status.error.message"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotSpec {
    /// Treatment of the content when the snapshot is deleted: `Delete` (default) or `Retain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<String>,
    /// Time after which an incomplete snapshot fails, such as `2m30s`; 0 means no limit; default: 5 minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_deadline: Option<String>,
    /// The VM, in the namespace of the snapshot.
    pub source: TypedLocalObjectReference,
}

impl VirtualMachineSnapshot {
    /// Returns the name of the content.
    pub fn content_name(&self) -> String {
        let known = self.status.as_ref().and_then(|status| status.virtual_machine_snapshot_content_name.clone());
        let uid = self.metadata.uid.as_deref().unwrap_or_default();
        known.unwrap_or_else(|| format!("vmsnapshot-content-{uid}"))
    }

    /// Returns the time within which the content must be taken. `None`: any time.
    pub fn time_limit(&self) -> Option<Duration> {
        let Some(text) = self.spec.failure_deadline.as_deref() else { return Some(DEADLINE) };
        match duration::parse(text.strip_prefix('-').unwrap_or(text)) {
            Ok(Duration::ZERO) => None,
            Ok(_) if text.starts_with('-') => Some(Duration::ZERO),
            Ok(limit) => Some(limit),
            Err(_) => Some(DEADLINE),
        }
    }

    /// Returns true if the content goes with the snapshot.
    pub fn deletes_content(&self) -> bool {
        self.spec.deletion_policy.as_deref().is_none_or(|policy| policy == "Delete")
    }

    /// Returns the names of the volumes that it leaves out.
    pub fn excluded_volumes(&self) -> impl Iterator<Item = &str> {
        let named = self.metadata.annotations.as_ref().and_then(|all| all.get(annotation::EXCLUDED_VOLUMES));
        named.into_iter().flat_map(|names| names.split(',')).map(str::trim).filter(|name| !name.is_empty())
    }

    /// Returns true in this phase.
    pub fn is_in(&self, phase: &str) -> bool {
        self.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase)
    }

    /// Returns true if the VM may be used and changed again.
    pub fn is_final(&self) -> bool {
        self.is_in(phase::SUCCEEDED) || self.is_in(phase::FAILED)
    }
}

/// Observed state of a snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSnapshotStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Time at which all volume snapshots were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
    /// Old form of `sourceIndications`: names only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub indications: Vec<String>,
    /// `InProgress`, `Succeeded`, `Failed`, `Deleting` or `Unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// True if it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// Included and excluded volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_volumes: Option<SnapshotVolumesLists>,
    /// State of the VM at the time of the snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source_indications: Vec<SourceIndication>,
    /// UID of the VM.
    #[serde(rename = "sourceUID", skip_serializing_if = "Option::is_none")]
    pub source_uid: Option<String>,
    /// Name of the snapshot content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_snapshot_content_name: Option<String>,
}

/// Error of a snapshot.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotError {
    /// Human-readable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Time of the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}

/// Included and excluded volumes.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotVolumesLists {
    /// Volumes that could not be snapshotted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded_volumes: Vec<String>,
    /// Volumes in the snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub included_volumes: Vec<String>,
}

/// State of the VM at the time of the snapshot.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceIndication {
    /// CamelCase reason, such as `Online`, `GuestAgent`, `NoGuestAgent`, `QuiesceFailed` or `Paused`.
    pub indication: String,
    /// Human-readable message.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn time_limit_follows_from_the_deadline() {
        let seconds = |count| Some(Duration::from_secs(count));
        for (deadline, limit) in [
            (None, seconds(300)),
            (Some("2m30s"), seconds(150)),
            (Some("0"), None),
            (Some("0s"), None),
            (Some("-0s"), None),
            (Some("-5s"), seconds(0)),
            (Some("soon"), seconds(300)),
        ] {
            let spec = json!({"source": {"kind": "VirtualMachine", "name": "v"}, "failureDeadline": deadline});
            let snapshot = VirtualMachineSnapshot { spec: serde_json::from_value(spec).unwrap(), ..Default::default() };
            assert_eq!(snapshot.time_limit(), limit, "{deadline:?}");
        }
    }
}
