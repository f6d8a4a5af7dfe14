//! Writes of the status subresource.

use api::{VirtualMachine, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet};

use crate::{
    causes::Causes,
    read,
    review::AdmissionReview,
    vm, volume_requests,
    webhook::{Context, Stop},
};

/// The webhook that checks. Status writes of VMs are checked against what a snapshot or restore in progress forbids.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let object = &context.request.object;
    let kind = object.get("kind").and_then(serde_json::Value::as_str).unwrap_or_default();
    if kind.is_empty() {
        let mut causes = Causes::new();
        causes.shape("could not determine object kind");
        return Err(causes.into());
    }
    match context.request.resource.resource.as_str() {
        "virtualmachines" => {}
        "virtualmachineinstancereplicasets" => {
            read::with_status::<VirtualMachineInstanceReplicaSet>(object)?;
            return Ok(context.allowed());
        }
        "virtualmachineinstancemigrations" => {
            read::with_status::<VirtualMachineInstanceMigration>(object)?;
            return Ok(context.allowed());
        }
        _ => return Ok(context.allowed()),
    }
    let vm: VirtualMachine = read::with_status(object)?;
    let old = vm::old(context)?;
    let causes = volume_requests::causes(&vm, old.as_ref(), context.config, context.neighbours)?;
    if !causes.is_empty() {
        return Ok(context.verdict(&causes, vec![]));
    }
    let causes = old.map_or_else(Causes::new, |old| vm::in_progress_causes(&vm, &old));
    Ok(context.verdict(&causes, vec![]))
}
