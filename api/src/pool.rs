//! VirtualMachinePool: a set of VMs created from one template.

use k8s_openapi::{
    api::core::v1::NodeSelectorRequirement,
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, VirtualMachineSpec};

/// API group of pools.
pub const GROUP: &str = "pool.kubevirt.io";
/// Group and stored version of pools.
pub const API_VERSION: &str = "pool.kubevirt.io/v1beta1";

/// A set of VMs created from one template.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "pool.kubevirt.io",
    version = "v1beta1",
    kind = "VirtualMachinePool",
    plural = "virtualmachinepools",
    singular = "virtualmachinepool",
    shortname = "vmpool",
    shortname = "vmpools",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "A set of VMs created from one template.",
    status = "VirtualMachinePoolStatus",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.labelSelector"
    ),
    printcolumn = r#"{"name":"Desired","type":"integer","description":"Number of desired VirtualMachines","jsonPath":".spec.replicas"}"#,
    printcolumn = r#"{"name":"Current","type":"integer","description":"Number of managed and not final or deleted VirtualMachines","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"Ready","type":"integer","description":"Number of managed VirtualMachines which are ready to receive traffic","jsonPath":".status.readyReplicas"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolSpec {
    /// Replacement of VMs that fail to start; default: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autohealing: Option<VirtualMachinePoolAutohealingStrategy>,
    /// Maximum number of unavailable VMs during an update: a number, or a percentage such as `25%`; default: `100%`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_unavailable: Option<IntOrString>,
    /// Names to which the index of the VM is appended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name_generation: Option<VirtualMachinePoolNameGeneration>,
    /// Stop creating, changing and deleting VMs.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub paused: bool,
    /// Number of VMs; default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Selection of VMs to delete and preservation of their state; default: `proactive`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_in_strategy: Option<VirtualMachinePoolScaleInStrategy>,
    /// Labels of the VMs; must match those of the template and is immutable.
    pub selector: LabelSelector,
    /// Application of template changes to VMs; default: `proactive`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<VirtualMachinePoolUpdateStrategy>,
    /// Template of the VMs.
    pub virtual_machine_template: VirtualMachineTemplateSpec,
}

/// Template of the VMs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineTemplateSpec {
    /// Labels and annotations of the VM.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Spec of the VM. Required by admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<VirtualMachineSpec>,
}

/// Replacement of VMs that fail to start.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolAutohealingStrategy {
    /// Minimum time of failing, a duration such as `10m`; default: five minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_failing_to_start_duration: Option<String>,
    /// Number of consecutive failed starts before the VM is replaced, at least 1; default: 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_up_failure_threshold: Option<u32>,
}

/// Names to which the index of the VM is appended.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolNameGeneration {
    /// Append it to names of ConfigMaps in the template; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub append_index_to_config_map_refs: Option<bool>,
    /// Append it to names of Secrets in the template; default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub append_index_to_secret_refs: Option<bool>,
}

/// Selection of VMs to delete; at most one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolScaleInStrategy {
    /// The pool deletes nothing. VMs that others delete are not replaced while there are more than wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opportunistic: Option<VirtualMachinePoolOpportunisticScaleInStrategy>,
    /// The pool stops and deletes VMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proactive: Option<VirtualMachinePoolProactiveScaleInStrategy>,
    /// The pool deletes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmanaged: Option<VirtualMachinePoolUnmanagedStrategy>,
}

/// Scale-in by VMs that others delete.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolOpportunisticScaleInStrategy {
    /// Preserved state of a deleted VM: `Disabled` (nothing, default), `Offline` or `Online` (its DataVolumes and claims).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_preservation: Option<String>,
}

/// Scale-in by the pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolProactiveScaleInStrategy {
    /// Order in which VMs are deleted; default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selection_policy: Option<VirtualMachinePoolSelectionPolicy>,
    /// Preserved state of a deleted VM: `Disabled` (nothing, default), `Offline` or `Online` (its DataVolumes and claims).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_preservation: Option<String>,
}

/// Application of template changes to VMs; at most one member is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolUpdateStrategy {
    /// VMs are changed, and running VMIs keep their spec until the next start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opportunistic: Option<VirtualMachineOpportunisticUpdateStrategy>,
    /// VMs are changed and restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proactive: Option<VirtualMachinePoolProactiveUpdateStrategy>,
    /// VMs are not changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmanaged: Option<VirtualMachinePoolUnmanagedStrategy>,
}

/// Marker for updates at the next start.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct VirtualMachineOpportunisticUpdateStrategy {}

/// Updates with a restart.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolProactiveUpdateStrategy {
    /// Order in which VMs are updated; default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selection_policy: Option<VirtualMachinePoolSelectionPolicy>,
}

/// Marker for no changes to VMs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct VirtualMachinePoolUnmanagedStrategy {}

/// Selection and order of VMs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolSelectionPolicy {
    /// VMs that can be selected; default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selectors: Option<VirtualMachinePoolSelectors>,
    /// Order of the VMs: `AscendingOrder`, `DescendingOrder`, `Newest`, `Oldest` or `Random` (default).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sort_policy: Option<String>,
}

/// VMs that match all members that are set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolSelectors {
    /// Labels of the VM and of its template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
    /// Node selector of the VM's template.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_selector_requirement_matcher: Vec<NodeSelectorRequirement>,
}

/// Observed state of a pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Selector as text, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<String>,
    /// Number of ready VMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Number of VMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
}
