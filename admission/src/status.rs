//! Writes of the status subresource.

use api::{VirtualMachine, VirtualMachineInstanceMigration, VirtualMachineInstanceReplicaSet};

use crate::{
    causes::Causes,
    review::AdmissionReview,
    vm, volume_requests,
    webhook::{Context, Stop},
};

/// The webhook that checks. Status writes of VMs are checked against what a snapshot or restore in progress forbids.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let kind = context.request.object.get("kind").and_then(serde_json::Value::as_str).unwrap_or_default();
    if kind.is_empty() {
        let mut causes = Causes::new();
        causes.shape("could not determine object kind");
        return Err(causes.into());
    }
    match context.request.resource.resource.as_str() {
        "virtualmachines" => {}
        "virtualmachineinstancereplicasets" => {
            context.object::<VirtualMachineInstanceReplicaSet>()?;
            return Ok(context.allowed());
        }
        "virtualmachineinstancemigrations" => {
            context.object::<VirtualMachineInstanceMigration>()?;
            return Ok(context.allowed());
        }
        _ => return Ok(context.allowed()),
    }
    let vm: VirtualMachine = context.object()?;
    let causes = volume_requests::causes(&vm, context.config, context.neighbours)?;
    if !causes.is_empty() {
        return Ok(context.verdict(&causes, vec![]));
    }
    let causes = match vm::old(context)? {
        Some(old) => vm::in_progress_causes(&vm, &old),
        None => Causes::new(),
    };
    Ok(context.verdict(&causes, vec![]))
}
