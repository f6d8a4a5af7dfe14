//! Whether the template has changed since the machine was started.
//!
//! The machine carries a hash of the template it was started from, with instance type and preference applied. No change is applied to a running machine yet, so
//! that any difference asks for a restart.

use api::{
    Condition, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    constants::{annotation, condition},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use sha2::{Digest, Sha256};

/// Annotation of a machine: hash of the template specification it was started from.
pub(super) const TEMPLATE_HASH: &str = "ferrovirt.io/started-from";
/// Bytes of the hash that are kept.
const HASH_BYTES: usize = 12;

/// Hash of a template's specification.
pub(super) fn template_hash(spec: &VirtualMachineInstanceSpec) -> Option<String> {
    let json = serde_json::to_vec(spec).ok()?;
    Some(Sha256::digest(&json).iter().take(HASH_BYTES).map(|byte| format!("{byte:02x}")).collect())
}

/// True when the machine runs what the template says, whose hash is `template`. Machines that were not started by us
/// count as such, and all while it cannot be told what the template says.
pub(super) fn is_current(template: Option<&str>, instance: &VirtualMachineInstance) -> bool {
    let started = instance.metadata.annotations.as_ref().and_then(|annotations| annotations.get(TEMPLATE_HASH));
    started.zip(template).is_none_or(|(started, template)| started == template)
}

/// The generation of the VM that its machine reflects.
pub(super) fn observed_generation(
    vm: &VirtualMachine,
    template: Option<&str>,
    instance: &VirtualMachineInstance,
) -> Option<i64> {
    let annotations = instance.metadata.annotations.as_ref();
    let started_at = annotations.and_then(|annotations| annotations.get(annotation::VM_GENERATION))?;
    // A change outside the template is reflected at once.
    if is_current(template, instance) { vm.metadata.generation } else { started_at.parse().ok() }
}

/// The condition that asks for a restart.
pub(super) fn condition(
    template: Option<&str>,
    instance: Option<&VirtualMachineInstance>,
    now: &Time,
) -> Option<Condition> {
    let instance = instance.filter(|instance| !instance.is_final() && !instance.is_deleting())?;
    if is_current(template, instance) {
        return None;
    }
    let message = "a non-live-updatable field was changed in the template spec";
    Some(Condition::new(condition::RESTART_REQUIRED, true, "", message, now))
}
