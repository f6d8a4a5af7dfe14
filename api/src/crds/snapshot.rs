//! CRDs of snapshot.kubevirt.io: snapshots, their contents, and restores.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::json;

use super::{
    CONDITION, CrdError, Definition, Rule, embedded_metadata,
    kubevirt::{VM_SPEC, VM_STATUS, VMI_SPEC},
};
use crate::snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore};

/// Old version of the group's kinds, which is still served.
const OLD: &str = "v1alpha1";

/// Path of the VM in a snapshot content.
const SOURCE_VM: &str = "spec.source.virtualMachine";

const SNAPSHOT_STATUS: &[Rule] = &[
    ("indications", || json!({"x-kubernetes-list-type": "set"})),
    ("snapshotVolumes.excludedVolumes", || json!({"x-kubernetes-list-type": "set"})),
    ("snapshotVolumes.includedVolumes", || json!({"x-kubernetes-list-type": "set"})),
];

const CONTENT_SPEC: &[Rule] = &[
    ("source.virtualMachine.metadata", embedded_metadata),
    ("volumeBackups[].persistentVolumeClaim.metadata", || json!({"x-kubernetes-preserve-unknown-fields": true})),
];

const RESTORE_SPEC: &[Rule] = &[(
    "targetReadinessPolicy",
    || json!({"default": "WaitGracePeriod", "enum": ["StopTarget", "WaitGracePeriod", "FailImmediate", "WaitEventually"]}),
)];

const RESTORE_STATUS: &[Rule] = &[("deletedDataVolumes", || json!({"x-kubernetes-list-type": "set"}))];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachineSnapshot::crd())?
            .rules("status", CONDITION)?
            .rules("status", SNAPSHOT_STATUS)?
            .older_version(OLD, None)
            .without_conversion()
            .finish()?,
        Definition::new(&VirtualMachineSnapshotContent::crd())?
            .rules("spec", CONTENT_SPEC)?
            .rules(&format!("{SOURCE_VM}.spec"), VM_SPEC)?
            .rules(&format!("{SOURCE_VM}.spec.template.spec"), VMI_SPEC)?
            .rules(&format!("{SOURCE_VM}.status"), CONDITION)?
            .rules(&format!("{SOURCE_VM}.status"), VM_STATUS)?
            .undescribed(SOURCE_VM)?
            .undescribed("spec.volumeBackups[].persistentVolumeClaim.spec")?
            .older_version(OLD, None)
            .without_conversion()
            .finish()?,
        Definition::new(&VirtualMachineRestore::crd())?
            .rules("spec", RESTORE_SPEC)?
            .rules("status", CONDITION)?
            .rules("status", RESTORE_STATUS)?
            .older_version(OLD, None)
            .without_conversion()
            .finish()?,
    ])
}
