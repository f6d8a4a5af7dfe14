//! Backups and backup trackers: rules. Most of their rules are in the CRDs.

use api::{
    FeatureGate,
    backup::{VirtualMachineBackup, VirtualMachineBackupTracker},
};

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, LookupError, Lookups, ObjectQuery},
    kinds::checks,
};

const GROUP: &str = "backup.kubevirt.io";
const VERSION: &str = "v1alpha1";

/// Serves `/virtualmachinebackups-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    if !is_new(context, "virtualmachinebackups")? {
        return Ok(context.allowed());
    }
    let backup: VirtualMachineBackup = context.object()?;
    let namespace = context.request.namespace.as_deref().unwrap_or_default();
    let errors = field_errors(&backup, namespace, context.lookups)?;
    Ok(context.decide(checks::or_unsupported("VirtualMachineBackup", errors), vec![]))
}

/// Serves `/virtualmachinebackuptrackers-validate`.
pub(crate) fn validate_tracker(context: &Context<'_>) -> Result<Decision, Interrupt> {
    if !is_new(context, "virtualmachinebackuptrackers")? {
        return Ok(context.allowed());
    }
    let _: VirtualMachineBackupTracker = context.object()?;
    Ok(context.decide(checks::or_unsupported("VirtualMachineBackupTracker", FieldErrors::new()), vec![]))
}

/// Returns true if an object is created, and fails if its feature gate is off. Changes have no rules.
fn is_new(context: &Context<'_>, plural: &str) -> Result<bool, Interrupt> {
    checks::expect_resource(context.request, GROUP, plural)?;
    if context.is_create() && !context.config.enabled(FeatureGate::IncrementalBackup) {
        return Err(Interrupt::failed(400, "IncrementalBackup feature gate not enabled"));
    }
    Ok(context.is_create())
}

/// Returns the errors of a new backup. Each source has at most one backup in progress.
pub(crate) fn field_errors(
    backup: &VirtualMachineBackup,
    namespace: &str,
    lookups: &Lookups,
) -> Result<FieldErrors, LookupError> {
    let mut errors = FieldErrors::new();
    checks::validate_duration("spec.ttlDuration", backup.spec.ttl_duration.as_ref(), &mut errors);
    let query = ObjectQuery::list(GROUP, VERSION, "virtualmachinebackups", Some(namespace), "");
    for other in lookups.list_as::<VirtualMachineBackup>(&query)? {
        let name = other.metadata.name.clone().unwrap_or_default();
        if other.metadata.name == backup.metadata.name {
            errors.invalid("metadata.name", format!("VirtualMachineBackup \"{name}\" already exists"));
            break;
        }
        let done = other.status.is_some_and(|status| status.is_done());
        if other.spec.source == backup.spec.source && !done {
            errors.invalid("spec.source", format!("VirtualMachineBackup \"{name}\" in progress for source"));
            break;
        }
    }
    Ok(errors)
}
