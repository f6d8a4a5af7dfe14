//! VirtualMachineClone: a copy of a VM, or of a snapshot of a VM.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// A request to clone a VM.
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
    doc = "A request to clone a VM, or a snapshot of a VM.",
    status = "VirtualMachineCloneStatus",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"SourceVirtualMachine","type":"string","jsonPath":".spec.source.name"}"#,
    printcolumn = r#"{"name":"TargetVirtualMachine","type":"string","jsonPath":".spec.target.name"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneSpec {
    /// Annotations that are copied to the target; default: all. A filter is a key; a trailing `*` matches all keys with that
    /// prefix, a leading `!` excludes keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub annotation_filters: Vec<String>,
    /// Labels that are copied to the target; default: all. The filter syntax is that of annotations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub label_filters: Vec<String>,
    /// MAC addresses of the target by interface name; other interfaces get generated ones.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub new_mac_addresses: BTreeMap<String, String>,
    /// SMBIOS serial of the target; default: a generated one.
    #[serde(rename = "newSMBiosSerial", skip_serializing_if = "Option::is_none")]
    pub new_smbios_serial: Option<String>,
    /// JSON patches, each one operation as text, applied to the target before its creation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<String>,
    /// Source of the clone: a VirtualMachine (`kubevirt.io`) or VirtualMachineSnapshot (`snapshot.kubevirt.io`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(required)]
    pub source: Option<TypedLocalObjectReference>,
    /// The VM to create; default: a VM with a generated name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<TypedLocalObjectReference>,
    /// Labels and annotations that are copied from the source's template.
    #[serde(default)]
    pub template: VirtualMachineCloneTemplateFilters,
    /// Naming of the target's claims: `RandomizeNames` (default) or `PrefixTargetName`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_name_policy: Option<String>,
}

/// Labels and annotations that are copied from a template.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneTemplateFilters {
    /// Annotations to copy; default: all. The filter syntax is that of the VM's annotations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub annotation_filters: Vec<String>,
    /// Labels to copy; default: all. The filter syntax is that of the VM's labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub label_filters: Vec<String>,
}

/// Observed state of a clone.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Creation time of the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// `SnapshotInProgress`, `CreatingTargetVM`, `RestoreInProgress`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Restore that creates the target, while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_name: Option<String>,
    /// Snapshot of the source, while it is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_name: Option<String>,
    /// Name of the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_name: Option<String>,
}
