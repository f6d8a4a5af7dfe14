//! VirtualMachineInstanceReplicaSet: a set of identical VMIs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;
use crate::vmi::spec::VirtualMachineInstanceTemplateSpec;

/// A set of identical VMIs.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "kubevirt.io",
    version = "v1",
    kind = "VirtualMachineInstanceReplicaSet",
    plural = "virtualmachineinstancereplicasets",
    singular = "virtualmachineinstancereplicaset",
    shortname = "vmirs",
    shortname = "vmirss",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A set of identical VMIs.",
    status = "VirtualMachineInstanceReplicaSetStatus",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.labelSelector"
    ),
    printcolumn = r#"{"name":"Desired","type":"integer","description":"Number of desired VirtualMachineInstances","jsonPath":".spec.replicas"}"#,
    printcolumn = r#"{"name":"Current","type":"integer","description":"Number of managed and not final or deleted VirtualMachineInstances","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"Ready","type":"integer","description":"Number of managed VirtualMachineInstances which are ready to receive traffic","jsonPath":".status.readyReplicas"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceReplicaSetSpec {
    /// Stop creating and deleting VMIs.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub paused: bool,
    /// Number of VMIs; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Labels of the VMIs; must match those of the template.
    pub selector: LabelSelector,
    /// Template of the VMI.
    pub template: VirtualMachineInstanceTemplateSpec,
}

/// Observed state of a replica set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceReplicaSetStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Selector as text, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<String>,
    /// Number of ready VMIs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Number of VMIs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
}
