//! Whether the template has changed since the machine was started.
//!
//! The machine carries a hash of the template it was started from. No change is applied to a running machine yet, so
//! that any difference asks for a restart.

use api::{
    Condition, VirtualMachine, VirtualMachineInstance,
    constants::{annotation, condition},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use sha2::{Digest, Sha256};

/// Annotation of a machine: hash of the template specification it was started from.
pub(super) const TEMPLATE_HASH: &str = "ferrovirt.io/started-from";
/// Bytes of the hash that are kept.
const HASH_BYTES: usize = 12;

/// Hash of the template's specification.
pub(super) fn template_hash(vm: &VirtualMachine) -> Option<String> {
    let json = serde_json::to_vec(vm.spec.template.spec.as_ref()?).ok()?;
    Some(Sha256::digest(&json).iter().take(HASH_BYTES).map(|byte| format!("{byte:02x}")).collect())
}

/// True when the machine runs what the template says; machines that were not started by us count as such.
pub(super) fn is_current(vm: &VirtualMachine, instance: &VirtualMachineInstance) -> bool {
    let started = instance.metadata.annotations.as_ref().and_then(|annotations| annotations.get(TEMPLATE_HASH));
    started.is_none_or(|started| template_hash(vm).as_ref() == Some(started))
}

/// The generation of the VM that its machine reflects.
pub(super) fn observed_generation(vm: &VirtualMachine, instance: &VirtualMachineInstance) -> Option<i64> {
    let annotations = instance.metadata.annotations.as_ref();
    let started_at = annotations.and_then(|annotations| annotations.get(annotation::VM_GENERATION))?;
    // A change outside the template is reflected at once.
    if is_current(vm, instance) { vm.metadata.generation } else { started_at.parse().ok() }
}

/// The condition that asks for a restart.
pub(super) fn condition(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    now: &Time,
) -> Option<Condition> {
    let instance = instance.filter(|instance| !instance.is_final() && !instance.is_deleting())?;
    if is_current(vm, instance) {
        return None;
    }
    let message = "a non-live-updatable field was changed in the template spec";
    Some(Condition::new(condition::RESTART_REQUIRED, true, "", message, now))
}
