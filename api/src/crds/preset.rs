//! CRD of presets.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

use super::{CrdError, Definition, OLD, Rule, kubevirt};
use crate::VirtualMachineInstancePreset;

const V1_WARNING: &str = "kubevirt.io/v1 VirtualMachineInstancePresets is now deprecated and will be removed in v2.";
const OLD_WARNING: &str =
    "kubevirt.io/v1alpha3 VirtualMachineInstancePresets is now deprecated and will be removed in v2.";

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    let domain: Vec<Rule> =
        kubevirt::VMI_SPEC.iter().filter(|(path, _)| path.starts_with("domain.")).copied().collect();
    Ok(vec![
        Definition::new(&VirtualMachineInstancePreset::crd())?
            .rules("spec", &domain)?
            .undescribed("spec.domain")?
            .spec_optional()
            .deprecated_version(OLD, OLD_WARNING)
            .deprecate("v1", V1_WARNING)
            .stored_in(OLD)
            .finish()?,
    ])
}
