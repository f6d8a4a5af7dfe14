//! The spec of a VM.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cdi::data_volume::DataVolumeTemplateSpec;
use crate::enums::RunStrategy;
use crate::vmi::spec::VirtualMachineInstanceTemplateSpec;

/// Run strategy and template of a VM.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "kubevirt.io",
    version = "v1",
    kind = "VirtualMachine",
    plural = "virtualmachines",
    singular = "virtualmachine",
    shortname = "vm",
    shortname = "vms",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A virtual machine and its run strategy.",
    status = "crate::vm::status::VirtualMachineStatus",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Status","type":"string","description":"Human Readable Status","jsonPath":".status.printableStatus"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#,
    printcolumn = r#"{"name":"NodeName","type":"string","jsonPath":".status.nodeName","priority":1}"#,
    printcolumn = r#"{"name":"IP","type":"string","jsonPath":".status.ipAddress","priority":1}"#,
    printcolumn = r#"{"name":"RunStrategy","type":"string","jsonPath":".spec.runStrategy","priority":1}"#,
    printcolumn = r#"{"name":"RestartRequired","type":"string","jsonPath":".status.conditions[?(@.type=='RestartRequired')].status","priority":1}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    /// DataVolumes created for the VM and deleted with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_volume_templates: Vec<DataVolumeTemplateSpec>,
    /// Instance type with CPU and memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instancetype: Option<InstancetypeMatcher>,
    /// Preference with defaults for the guest operating system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceMatcher>,
    /// Run strategy: `Always`, `Halted`, `Manual`, `RerunOnFailure`, `Once` or `WaitAsReceiver`. Excludes `running`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_strategy: Option<RunStrategy>,
    /// Old form: true stands for `Always`, false for `Halted`. Excludes `runStrategy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<bool>,
    /// Template of the VMI.
    pub template: VirtualMachineInstanceTemplateSpec,
    /// Application of changed volumes: `Replacement` or `Migration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update_volumes_strategy: Option<String>,
}

/// Reference to an instance type.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstancetypeMatcher {
    /// Volume whose labels contain the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume: Option<String>,
    /// `Reject` or `Ignore`, for a volume without these labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume_failure_policy: Option<String>,
    /// Kind; default: the cluster-wide one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name of the instance type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// ControllerRevision with the copy in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
}

/// Reference to a preference.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PreferenceMatcher {
    /// Volume whose labels contain the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume: Option<String>,
    /// `Reject` or `Ignore`, for a volume without these labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume_failure_policy: Option<String>,
    /// Kind; default: the cluster-wide one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name of the preference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// ControllerRevision with the copy in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
}
