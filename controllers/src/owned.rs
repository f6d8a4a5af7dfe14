//! Machines that a VM or a replica set owns: what both do with them.

use api::{VirtualMachineInstance, constants::event};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};

use crate::runtime::{Effect, Kind, Note};

/// Gives a machine other owners, if it is still as it was seen.
pub(crate) fn set_owners(instance: &VirtualMachineInstance, owners: &Value) -> Effect {
    let metadata = &instance.metadata;
    let patch = json!({"metadata": {"uid": metadata.uid, "ownerReferences": owners}});
    Effect::merge(Kind::Instance, metadata, patch)
}

/// Deletes a machine that its owner wants no more; `owner` is told.
pub(crate) fn stop_machine(instance: &VirtualMachineInstance, owner: impl Fn() -> ObjectReference) -> Effect {
    let uid = instance.metadata.uid.as_deref().unwrap_or_default();
    let name = instance.metadata.name.as_deref().unwrap_or_default();
    Effect::delete(Kind::Instance, &instance.metadata)
        .on_success(Note::normal(
            owner(),
            event::SUCCESSFUL_DELETE,
            format!("Stopped the virtual machine by deleting the virtual machine instance {uid}"),
        ))
        .on_failure(Note::warning(
            owner(),
            event::FAILED_DELETE,
            format!("Error deleting virtual machine instance {name}: {{error}}"),
        ))
}
