//! VirtualMachineInstancePreset: hardware that machines get when they are made, chosen by label.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::domain::DomainSpec;

/// Hardware for machines that say nothing of their own.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "kubevirt.io",
    version = "v1",
    kind = "VirtualMachineInstancePreset",
    plural = "virtualmachineinstancepresets",
    singular = "virtualmachineinstancepreset",
    shortname = "vmipreset",
    shortname = "vmipresets",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "Hardware that matching machines get when they are made. Deprecated: instance types and preferences took its place."
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstancePresetSpec {
    /// What machines get. Taken over, each as a whole and only where the machine has none: `resources.requests`, `cpu`,
    /// `firmware`, the clock's base, `clock.timer`, `features`, `devices.watchdog` and `ioThreadsPolicy`. Required by
    /// admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<DomainSpec>,
    /// Labels of the machines meant; an empty selector means all machines of the namespace.
    pub selector: LabelSelector,
}
