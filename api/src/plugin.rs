//! Plugin: an extension that changes domains and follows the life of machines on their nodes.

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
    doc = "An extension that changes domains and follows the life of machines on their nodes.",
    status = "PluginStatus"
)]
#[serde(rename_all = "camelCase")]
pub struct PluginSpec {
    /// CEL expression that says of a machine whether the plugin concerns it; it concerns all when empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// Changes to the domain, made in this order; plugins take turns by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domain_hooks: Vec<DomainHook>,
    /// What a failing hook does to the machine: `Fail` (the default) or `Ignore`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_strategy: Option<String>,
    /// MutatingAdmissionPolicies that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mutating_admission_policies: Vec<AdmissionReference>,
    /// MutatingWebhookConfigurations that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mutating_admission_webhooks: Vec<AdmissionReference>,
    /// Calls to a program on the node as machines come and go.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_hooks: Vec<NodeHook>,
    /// ValidatingAdmissionPolicies that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validating_admission_policies: Vec<AdmissionReference>,
    /// ValidatingWebhookConfigurations that belong to the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validating_admission_webhooks: Vec<AdmissionReference>,
}

/// A change to the domain, by an expression or by a sidecar of the launcher.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DomainHook {
    /// Change by an expression. Excludes `sidecar`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cel: Option<CelDomainHook>,
    /// CEL expression that narrows the plugin's condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// `Fail` or `Ignore`; the plugin's when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_strategy: Option<String>,
    /// Change by a sidecar. Excludes `cel`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sidecar: Option<SidecarDomainHook>,
    /// How long the hook may take, such as `10s`; 30 seconds when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

/// A change to the domain by an expression.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CelDomainHook {
    /// CEL expression whose value is laid over the domain.
    pub expression: String,
}

/// A change to the domain by a sidecar.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SidecarDomainHook {
    /// Socket of the sidecar, below `/var/run/kubevirt-plugin/` and the plugin's name.
    pub socket_path: String,
}

/// A call to a program on the node.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeHook {
    /// CEL expression that narrows the plugin's condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// `Fail` or `Ignore`; the plugin's when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_strategy: Option<String>,
    /// When to call: before or after (`Pre`, `Post`) `VMStart`, `VMStop`, `MigrationSource` or `MigrationTarget`.
    pub permitted_hooks: Vec<String>,
    /// Socket of the program on the node.
    pub socket: String,
    /// How long the call may take, such as `10s`; 30 seconds when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

/// An admission object that belongs to a plugin.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionReference {
    /// Name of it.
    pub name: String,
}

/// What is observed of a plugin: nothing yet.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct PluginStatus {}
