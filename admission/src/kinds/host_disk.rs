//! The right to disks that are files of the node: whoever may create pods with the same directory. virt-controller creates the pod,
//! so that Kubernetes cannot ask for it.

use api::{VirtualMachineInstanceSpec, VirtualMachineInstanceTemplateSpec, vmi::volumes::Volume};
use k8s_openapi::api::authorization::v1::ResourceAttributes;

use crate::context::{Context, FieldErrors, Interrupt, ObjectQuery};

/// Adds an error if the user adds such a disk to the template at `path` and may not create pods.
pub(super) fn validate_right(
    context: &Context<'_>,
    path: &str,
    template: &VirtualMachineInstanceTemplateSpec,
    old: Option<&VirtualMachineInstanceTemplateSpec>,
    errors: &mut FieldErrors,
) -> Result<(), Interrupt> {
    let Some(spec) = &template.spec else { return Ok(()) };
    validate_right_of(context, &format!("{path}.spec"), spec, old.and_then(|old| old.spec.as_ref()), errors)
}

/// Adds an error if a restore adds such a disk: users write its patches, and the content of its snapshot, without being asked for
/// the right.
pub(super) fn reject_restored(
    path: &str,
    template: &VirtualMachineInstanceTemplateSpec,
    old: Option<&VirtualMachineInstanceTemplateSpec>,
    errors: &mut FieldErrors,
) {
    let Some(spec) = &template.spec else { return };
    if let Some(disk) = added(spec, old.and_then(|old| old.spec.as_ref())) {
        let message = format!("host disk {} cannot be added by a restore or a clone", disk.name);
        errors.forbidden(format!("{path}.spec.volumes"), message);
    }
}

fn added<'a>(spec: &'a VirtualMachineInstanceSpec, old: Option<&VirtualMachineInstanceSpec>) -> Option<&'a Volume> {
    let is_old = |volume: &Volume| old.is_some_and(|old| old.volumes.contains(volume));
    spec.volumes.iter().find(|volume| volume.host_disk.is_some() && !is_old(volume))
}

/// Adds the same error for the spec of a VMI.
pub(super) fn validate_right_of(
    context: &Context<'_>,
    path: &str,
    spec: &VirtualMachineInstanceSpec,
    old: Option<&VirtualMachineInstanceSpec>,
    errors: &mut FieldErrors,
) -> Result<(), Interrupt> {
    let Some(added) = added(spec, old) else { return Ok(()) };
    // A component creates what a user was asked for.
    if !errors.is_empty() || context.is_component() {
        return Ok(());
    }
    let namespace = context.namespace();
    let right = ResourceAttributes {
        verb: Some("create".to_owned()),
        version: Some("v1".to_owned()),
        resource: Some("pods".to_owned()),
        namespace: Some(namespace.to_owned()),
        ..ResourceAttributes::default()
    };
    if !context.lookups.is_allowed(&ObjectQuery::access(&context.request.user_info, right))? {
        let message = format!(
            "host disk {} needs the right to create pods in namespace {namespace}: its pod uses a directory of the node",
            added.name
        );
        errors.forbidden(format!("{path}.volumes"), message);
    }
    Ok(())
}
