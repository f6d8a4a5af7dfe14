//! Snapshots of VMs: rules.

use api::{
    FeatureGate,
    snapshot::{VirtualMachineSnapshot, VirtualMachineSnapshotSpec},
};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, Operation},
    kinds::checks,
};

/// API group of snapshots and restores.
pub(crate) const GROUP: &str = "snapshot.kubevirt.io";
/// Feature gate of snapshots, restores and clones.
pub(crate) const GATE: FeatureGate = FeatureGate::Snapshot;

/// Serves `/virtualmachinesnapshots-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let request = context.request;
    checks::expect_resource(request, GROUP, "virtualmachinesnapshots")?;
    let errors = match request.operation {
        Operation::Create => {
            if !context.config.enabled(GATE) {
                return Err(Interrupt::failed(400, "snapshot feature gate not enabled"));
            }
            let snapshot: VirtualMachineSnapshot = context.object()?;
            field_errors(&snapshot.spec)
        }
        Operation::Update => checks::validate_immutable(context, |snapshot: &VirtualMachineSnapshot| &snapshot.spec)?,
        _ => return Err(checks::unexpected_operation(request)),
    };
    Ok(context.decide(errors, vec![]))
}

/// Returns the errors of a new snapshot.
pub(crate) fn field_errors(spec: &VirtualMachineSnapshotSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    validate_vm_reference("spec.source", &spec.source, &mut errors);
    // A negative one fails at once.
    let deadline = spec.failure_deadline.as_ref().map(|text| text.strip_prefix('-').unwrap_or(text).to_owned());
    checks::validate_duration("spec.failureDeadline", deadline.as_ref(), &mut errors);
    errors
}

/// Validates that the reference at `path` is to a VM; adds only the first error.
pub(crate) fn validate_vm_reference(path: &str, reference: &TypedLocalObjectReference, errors: &mut FieldErrors) {
    match reference.api_group.as_deref() {
        None => errors.not_found(format!("{path}.apiGroup"), "missing apiGroup"),
        Some(api::constants::GROUP) if reference.kind == "VirtualMachine" => {}
        Some(api::constants::GROUP) => errors.invalid(format!("{path}.kind"), "invalid kind"),
        Some(_) => errors.invalid(format!("{path}.apiGroup"), "invalid apiGroup"),
    }
}
