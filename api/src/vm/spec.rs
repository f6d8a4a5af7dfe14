//! The spec of a VM.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::enums::RunStrategy;
use crate::vm::data_volume::DataVolumeTemplateSpec;
use crate::vmi::spec::VirtualMachineInstanceTemplateSpec;

/// A machine that may run or not, with the template it runs by.
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
    doc = "A virtual machine with its run strategy, whether it runs or not.",
    status = "crate::vm::status::VirtualMachineStatus",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Status","type":"string","description":"Human Readable Status","jsonPath":".status.printableStatus"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    /// DataVolumes made for the machine and deleted with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_volume_templates: Vec<DataVolumeTemplateSpec>,
    /// Size class that fills in CPU and memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instancetype: Option<InstancetypeMatcher>,
    /// Defaults the guest system works best with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceMatcher>,
    /// When the machine runs: `Always`, `Halted`, `Manual`, `RerunOnFailure`, `Once` or `WaitAsReceiver`. Excludes `running`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_strategy: Option<RunStrategy>,
    /// Old form: true is `Always`, false is `Halted`. Excludes `runStrategy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<bool>,
    /// Template of the machine.
    pub template: VirtualMachineInstanceTemplateSpec,
    /// How changed volumes are taken over: `Replacement` or `Migration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update_volumes_strategy: Option<String>,
}

/// A size class.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstancetypeMatcher {
    /// Volume whose labels name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume: Option<String>,
    /// `Reject` or `Ignore` when the volume names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume_failure_policy: Option<String>,
    /// Kind; the cluster-wide one when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name of the size class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// ControllerRevision that holds the copy in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
}

/// A set of preferred defaults.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PreferenceMatcher {
    /// Volume whose labels name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume: Option<String>,
    /// `Reject` or `Ignore` when the volume names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infer_from_volume_failure_policy: Option<String>,
    /// Kind; the cluster-wide one when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name of the preference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// ControllerRevision that holds the copy in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision_name: Option<String>,
}
