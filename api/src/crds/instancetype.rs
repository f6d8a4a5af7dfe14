//! CRDs of instancetype.kubevirt.io: instance types and preferences.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::json;

use super::{CrdError, Definition, Rule};
use crate::instancetype::{
    VirtualMachineClusterInstancetype, VirtualMachineClusterPreference, VirtualMachineInstancetype,
    VirtualMachinePreference,
};

const INSTANCETYPE_SPEC: &[Rule] = &[("memory.overcommitPercent", || json!({"minimum": 0, "maximum": 100}))];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    let instancetype = |crd: &CustomResourceDefinition| {
        Definition::new(crd)?.rules("spec", INSTANCETYPE_SPEC)?.without_conversion().finish()
    };
    let preference = |crd: &CustomResourceDefinition| Definition::new(crd)?.without_conversion().finish();
    Ok(vec![
        instancetype(&VirtualMachineInstancetype::crd())?,
        instancetype(&VirtualMachineClusterInstancetype::crd())?,
        preference(&VirtualMachinePreference::crd())?,
        preference(&VirtualMachineClusterPreference::crd())?,
    ])
}
