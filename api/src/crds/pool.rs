//! CRD of pools.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{CONDITION, CrdError, Definition, Rule, embedded_metadata, kubevirt};
use crate::VirtualMachinePool;

const STATE_PRESERVATION: fn() -> Value = || json!({"enum": ["Disabled", "Offline", "Online"]});
const SORT_POLICY: fn() -> Value =
    || json!({"enum": ["AscendingOrder", "DescendingOrder", "Newest", "Oldest", "Random"]});

const SPEC: &[Rule] = &[
    ("autohealing.startUpFailureThreshold", || json!({"minimum": 1})),
    ("replicas", || json!({"minimum": 0})),
    ("scaleInStrategy.opportunistic.statePreservation", STATE_PRESERVATION),
    ("scaleInStrategy.proactive.selectionPolicy.sortPolicy", SORT_POLICY),
    ("scaleInStrategy.proactive.statePreservation", STATE_PRESERVATION),
    ("updateStrategy.proactive.selectionPolicy.sortPolicy", SORT_POLICY),
    ("virtualMachineTemplate.metadata", embedded_metadata),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachinePool::crd())?
            .rules("spec", SPEC)?
            .rules("spec.virtualMachineTemplate.spec", kubevirt::VM_SPEC)?
            .rules("spec.virtualMachineTemplate.spec.template.spec", kubevirt::VMI_SPEC)?
            .rules("status", CONDITION)?
            .undescribed("spec.virtualMachineTemplate.spec")?
            .older_version("v1alpha1", None)
            .finish()?,
    ])
}
