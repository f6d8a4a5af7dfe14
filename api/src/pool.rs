//! VirtualMachinePool: a number of VMs made from one template.

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

/// A number of VMs made from one template.
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
    doc = "A number of VMs made from one template.",
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
    /// When a VM that does not come up is replaced; never when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autohealing: Option<VirtualMachinePoolAutohealingStrategy>,
    /// How many VMs may be away at a time while a change is rolled out: a number, or a percentage such as `25%`; `100%`
    /// when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_unavailable: Option<IntOrString>,
    /// What gets the number of the VM appended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name_generation: Option<VirtualMachinePoolNameGeneration>,
    /// Stop creating, changing and deleting VMs.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub paused: bool,
    /// How many VMs to keep; 1 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Which VMs go when there are too many, and what is kept of them; `proactive` when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_in_strategy: Option<VirtualMachinePoolScaleInStrategy>,
    /// Labels of the VMs counted; must match the template's and never changes.
    pub selector: LabelSelector,
    /// How a changed template reaches the VMs; `proactive` when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<VirtualMachinePoolUpdateStrategy>,
    /// Template of the VMs.
    pub virtual_machine_template: VirtualMachineTemplateSpec,
}

/// Template VMs are made from.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineTemplateSpec {
    /// Labels and annotations put on the VM.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// Spec of the VM. Required by admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<VirtualMachineSpec>,
}

/// When a VM that does not come up is replaced.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolAutohealingStrategy {
    /// How long a VM must have failed to come up, a duration such as `10m`; five minutes when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_failing_to_start_duration: Option<String>,
    /// Failed starts in a row after which the VM is replaced, at least 1; 3 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_up_failure_threshold: Option<u32>,
}

/// What gets the number of the VM appended.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolNameGeneration {
    /// Names of the config maps the template refers to; off when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub append_index_to_config_map_refs: Option<bool>,
    /// Names of the secrets the template refers to; off when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub append_index_to_secret_refs: Option<bool>,
}

/// Which VMs go when there are too many; at most one is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolScaleInStrategy {
    /// Those that somebody else deletes are not made again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opportunistic: Option<VirtualMachinePoolOpportunisticScaleInStrategy>,
    /// The pool shuts VMs down and deletes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proactive: Option<VirtualMachinePoolProactiveScaleInStrategy>,
    /// The pool deletes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmanaged: Option<VirtualMachinePoolUnmanagedStrategy>,
}

/// Scaling in by what others delete.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolOpportunisticScaleInStrategy {
    /// What is kept of a VM that goes: `Disabled` (nothing, the default), `Offline` (its claims) or `Online` (claims and
    /// memory).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_preservation: Option<String>,
}

/// Scaling in by the pool itself.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolProactiveScaleInStrategy {
    /// Which VMs go first; any when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selection_policy: Option<VirtualMachinePoolSelectionPolicy>,
    /// What is kept of a VM that goes: `Disabled` (nothing, the default), `Offline` (its claims) or `Online` (claims and
    /// memory).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_preservation: Option<String>,
}

/// How a changed template reaches the VMs; at most one is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolUpdateStrategy {
    /// VMs are changed, their running machines are left to their next start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opportunistic: Option<VirtualMachineOpportunisticUpdateStrategy>,
    /// VMs are changed and their machines restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proactive: Option<VirtualMachinePoolProactiveUpdateStrategy>,
    /// VMs are not changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmanaged: Option<VirtualMachinePoolUnmanagedStrategy>,
}

/// Marker for updates at the next start.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct VirtualMachineOpportunisticUpdateStrategy {}

/// Updates by restart.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolProactiveUpdateStrategy {
    /// Which VMs come first; any when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selection_policy: Option<VirtualMachinePoolSelectionPolicy>,
}

/// Marker for leaving the VMs alone.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct VirtualMachinePoolUnmanagedStrategy {}

/// Which VMs come first.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolSelectionPolicy {
    /// VMs that come before all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selectors: Option<VirtualMachinePoolSelectors>,
    /// Order among the rest: `AscendingOrder`, `DescendingOrder`, `Newest`, `Oldest` or `Random` (the default).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sort_policy: Option<String>,
}

/// VMs that match all that is set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolSelectors {
    /// Labels of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<LabelSelector>,
    /// Labels of the node its machine runs on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_selector_requirement_matcher: Vec<NodeSelectorRequirement>,
}

/// What is observed of a pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachinePoolStatus {
    /// Conditions, one entry a type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Selector as text, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<String>,
    /// VMs that are ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// VMs that exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
}
