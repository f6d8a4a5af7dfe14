//! Plugin: an extension that changes domains and runs hooks on nodes.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An extension of the cluster.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "plugin.kubevirt.io",
    version = "v1alpha1",
    kind = "Plugin",
    plural = "plugins",
    singular = "plugin",
    derive = "Default",
    derive = "PartialEq",
    doc = "An extension that changes domains and runs hooks on nodes.",
    status = "PluginStatus"
)]
#[serde(rename_all = "camelCase")]
pub struct PluginSpec {
    /// CEL expression that selects the VMIs of the plugin; default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// Changes to the domain, in this order; plugins are ordered by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domain_hooks: Vec<DomainHook>,
    /// Effect of a failing hook on the VMI: `Fail` (default) or `Ignore`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_strategy: Option<String>,
    /// MutatingAdmissionPolicies that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mutating_admission_policies: Vec<AdmissionReference>,
    /// MutatingWebhookConfigurations that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mutating_admission_webhooks: Vec<AdmissionReference>,
    /// Calls to a program on the node during the lifecycle of VMIs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_hooks: Vec<NodeHook>,
    /// ValidatingAdmissionPolicies that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validating_admission_policies: Vec<AdmissionReference>,
    /// ValidatingWebhookConfigurations that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validating_admission_webhooks: Vec<AdmissionReference>,
}

/// A change to the domain by an expression or by a sidecar of the launcher.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DomainHook {
    /// Change by an expression. Excludes `sidecar`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cel: Option<CelDomainHook>,
    /// CEL expression in addition to the plugin's condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// `Fail` or `Ignore`; default: that of the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_strategy: Option<String>,
    /// Change by a sidecar. Excludes `cel`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sidecar: Option<SidecarDomainHook>,
    /// Time limit of the hook, such as `10s`; default: 30 seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

/// A change to the domain by an expression.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CelDomainHook {
    /// CEL expression whose value is merged into the domain.
    pub expression: String,
}

/// A change to the domain by a sidecar.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SidecarDomainHook {
    /// Socket of the sidecar, below `/var/run/kubevirt-plugin/` and the name of the plugin.
    pub socket_path: String,
}

/// A call to a program on the node.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeHook {
    /// CEL expression in addition to the plugin's condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// `Fail` or `Ignore`; default: that of the plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_strategy: Option<String>,
    /// Hook points: `Pre` or `Post`, followed by `VMStart`, `VMStop`, `MigrationSource` or `MigrationTarget`.
    pub permitted_hooks: Vec<String>,
    /// Socket of the program on the node.
    pub socket: String,
    /// Time limit of the call, such as `10s`; default: 30 seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

/// An admission object that belongs to a plugin.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionReference {
    /// Name of the object.
    pub name: String,
}

/// Observed state of a plugin; empty.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct PluginStatus {}
