//! Snapshots of VMs: rules.

use api::snapshot::{VirtualMachineSnapshot, VirtualMachineSnapshotSpec};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;

use crate::{
    causes::Causes,
    resource,
    review::{AdmissionReview, Operation},
    webhook::{Context, Stop},
};

/// API group of snapshots and restores.
pub const GROUP: &str = "snapshot.kubevirt.io";
/// Gate of snapshots, restores and clones.
pub(crate) const GATE: &str = "Snapshot";

/// Answers `/virtualmachinesnapshots-validate`.
pub fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let request = context.request;
    resource::expect(request, GROUP, "virtualmachinesnapshots")?;
    let causes = match request.operation {
        Operation::Create => {
            if !context.config.enabled(GATE) {
                return Err(Stop::refused(400, "snapshot feature gate not enabled"));
            }
            let snapshot: VirtualMachineSnapshot = context.object()?;
            resource::or_unsupported("VirtualMachineSnapshot", causes(&snapshot.spec))
        }
        Operation::Update => resource::immutable(context, |snapshot: &VirtualMachineSnapshot| &snapshot.spec)?,
        _ => return Err(resource::unexpected_operation(request)),
    };
    Ok(context.verdict(&causes, vec![]))
}

/// What is wrong with a new snapshot.
pub fn causes(spec: &VirtualMachineSnapshotSpec) -> Causes {
    let mut causes = Causes::new();
    machine("spec.source", &spec.source, &mut causes);
    resource::duration("spec.failureDeadline", spec.failure_deadline.as_ref(), &mut causes);
    causes
}

/// Checks that a reference at `path` is one to a VM. Stops at the first thing wrong: without a group the kind says
/// nothing.
pub(crate) fn machine(path: &str, reference: &TypedLocalObjectReference, causes: &mut Causes) {
    match reference.api_group.as_deref() {
        None => causes.not_found(format!("{path}.apiGroup"), "missing apiGroup"),
        Some(api::constants::GROUP) if reference.kind == "VirtualMachine" => {}
        Some(api::constants::GROUP) => causes.invalid(format!("{path}.kind"), "invalid kind"),
        Some(_) => causes.invalid(format!("{path}.apiGroup"), "invalid apiGroup"),
    }
}
