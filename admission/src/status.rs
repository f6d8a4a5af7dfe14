//! Writes of the status subresource.

use api::VirtualMachine;

use crate::{
    review::{AdmissionReview, Operation},
    vm,
    webhook::{Context, Stop},
};

/// The webhook that checks. Status writes of VMs are checked against what a snapshot or restore in progress forbids;
/// the API server has checked the shape.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let is_vm = context.request.resource.resource == "virtualmachines";
    if !is_vm || context.request.operation != Operation::Update {
        return Ok(context.allowed());
    }
    let vm: VirtualMachine = context.object()?;
    let Some(old) = context.old_object::<VirtualMachine>()? else { return Ok(context.allowed()) };
    let mut causes = vm::in_progress_causes(&vm, &old);
    causes.extend(vm::volume_request_causes(&vm));
    Ok(context.verdict(&causes, vec![]))
}
