//! Writes of the status subresource.

use api::{VirtualMachine, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet};

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, decode},
    kinds::{vm, volume_requests},
};

/// Serves `/status-validate`. A status write of a VM obeys the rules of snapshots and restores in progress.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let object = &context.request.object;
    let kind = object.get("kind").and_then(serde_json::Value::as_str).unwrap_or_default();
    if kind.is_empty() {
        let mut errors = FieldErrors::new();
        errors.schema("could not determine object kind");
        return Err(errors.into());
    }
    match context.request.resource.resource.as_str() {
        "virtualmachines" => {}
        "virtualmachineinstancereplicasets" => {
            decode::with_status::<VirtualMachineInstanceReplicaSet>(object)?;
            return Ok(context.allowed());
        }
        "virtualmachineinstancemigrations" => {
            decode::with_status::<VirtualMachineInstanceMigration>(object)?;
            return Ok(context.allowed());
        }
        _ => return Ok(context.allowed()),
    }
    let vm: VirtualMachine = decode::with_status(object)?;
    let old = vm::old(context)?;
    let errors = volume_requests::field_errors(&vm, old.as_ref(), context.config, context.lookups)?;
    if !errors.is_empty() {
        return Ok(context.decide(errors, vec![]));
    }
    let errors = old.map_or_else(FieldErrors::new, |old| vm::in_progress_errors(&vm, &old));
    Ok(context.decide(errors, vec![]))
}
