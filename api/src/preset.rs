//! VirtualMachineInstancePreset: settings for new VMIs that match a label selector.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vmi::domain::DomainSpec;

/// Settings for VMIs that do not set them.
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
    doc = "Settings for new VMIs that match a label selector. Deprecated: use instance types and preferences."
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstancePresetSpec {
    /// Settings. These are copied as a whole if the VMI does not set them: `resources.requests`, `cpu`, `firmware`, the clock's
    /// base, `clock.timer`, `features`, `devices.watchdog` and `ioThreadsPolicy`. Required by admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<DomainSpec>,
    /// Labels of the VMIs; an empty selector matches all VMIs of the namespace.
    pub selector: LabelSelector,
}
