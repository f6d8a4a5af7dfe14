//! VirtualMachineClone: a new VM like an existing one, or like a snapshot of one.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// A request to make a VM like another.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "clone.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachineClone",
    plural = "virtualmachineclones",
    singular = "virtualmachineclone",
    shortname = "vmclone",
    shortname = "vmclones",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A request to make a VM like another one, or like a snapshot of one.",
    status = "VirtualMachineCloneStatus",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"SourceVirtualMachine","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"TargetVirtualMachine","type":"string","jsonPath":".spec.target.name"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneSpec {
    /// Which annotations of the source the target gets; all when empty. A filter is a key, with `*` at its end for all
    /// that begin so, with `!` at its beginning to leave out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub annotation_filters: Vec<String>,
    /// Which labels of the source the target gets; all when empty. Filters as for annotations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub label_filters: Vec<String>,
    /// MAC addresses of the target by interface name; interfaces that are not named get new ones.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub new_mac_addresses: BTreeMap<String, String>,
    /// SMBIOS serial of the target; a new one when unset.
    #[serde(rename = "newSMBiosSerial", skip_serializing_if = "Option::is_none")]
    pub new_smbios_serial: Option<String>,
    /// JSON patches, each one operation as text, applied to the target before it is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<String>,
    /// What to clone: a VirtualMachine (`kubevirt.io`) or VirtualMachineSnapshot (`snapshot.kubevirt.io`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(required)]
    pub source: Option<TypedLocalObjectReference>,
    /// The VM to make; a VM with a random name when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<TypedLocalObjectReference>,
    /// Which labels and annotations of the source's template the target's template gets.
    #[serde(default)]
    pub template: VirtualMachineCloneTemplateFilters,
    /// How claims of the target are named: `RandomizeNames` (the default) or `PrefixTargetName`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_name_policy: Option<String>,
}

/// Which labels and annotations of a template are taken over.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneTemplateFilters {
    /// Which annotations; all when empty. Filters as for the VM's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub annotation_filters: Vec<String>,
    /// Which labels; all when empty. Filters as for the VM's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub label_filters: Vec<String>,
}

/// What is observed of a clone.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneStatus {
    /// Conditions, one entry a type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// When the target was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// `SnapshotInProgress`, `CreatingTargetVM`, `RestoreInProgress`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Restore the target is made by, while it lasts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_name: Option<String>,
    /// Snapshot the target is made from, while it lasts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_name: Option<String>,
    /// Name of the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_name: Option<String>,
}
