//! CRDs of clone.kubevirt.io: clones of VMs.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::json;

use super::{CONDITION, CrdError, Definition, Rule};
use crate::clone::VirtualMachineClone;

const SPEC: &[Rule] = &[("volumeNamePolicy", || json!({"enum": ["RandomizeNames", "PrefixTargetName"]}))];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachineClone::crd())?
            .rules("spec", SPEC)?
            .rules("status", CONDITION)?
            .older_version("v1alpha1", None)
            .finish()?,
    ])
}
