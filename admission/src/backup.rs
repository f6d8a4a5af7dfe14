//! Backups and their trackers: rules. Most rules on them are in their definitions and hold without a webhook.

use api::backup::{VirtualMachineBackup, VirtualMachineBackupTracker};

use crate::{
    causes::Causes,
    neighbours::{Needs, Neighbours, Wanted},
    resource,
    review::AdmissionReview,
    webhook::{Context, Stop},
};

const GROUP: &str = "backup.kubevirt.io";
const VERSION: &str = "v1alpha1";

/// Answers `/virtualmachinebackups-validate`.
pub fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    if !is_new(context, "virtualmachinebackups")? {
        return Ok(context.allowed());
    }
    let backup: VirtualMachineBackup = context.object()?;
    let namespace = context.request.namespace.as_deref().unwrap_or_default();
    let causes = causes(&backup, namespace, context.neighbours)?;
    Ok(context.verdict(&resource::or_unsupported("VirtualMachineBackup", causes), vec![]))
}

/// Answers `/virtualmachinebackuptrackers-validate`.
pub fn validate_tracker(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    if !is_new(context, "virtualmachinebackuptrackers")? {
        return Ok(context.allowed());
    }
    let _: VirtualMachineBackupTracker = context.object()?;
    Ok(context.verdict(&resource::or_unsupported("VirtualMachineBackupTracker", Causes::new()), vec![]))
}

/// Whether an object is made, and may be; there are no rules on a changed one.
fn is_new(context: &Context<'_>, plural: &str) -> Result<bool, Stop> {
    resource::expect(context.request, GROUP, plural)?;
    if context.is_create() && !context.config.enabled("IncrementalBackup") {
        return Err(Stop::refused(400, "IncrementalBackup feature gate not enabled"));
    }
    Ok(context.is_create())
}

/// What is wrong with a new backup: one at a time for each source.
pub fn causes(backup: &VirtualMachineBackup, namespace: &str, neighbours: &Neighbours) -> Result<Causes, Needs> {
    let mut causes = Causes::new();
    resource::duration("spec.ttlDuration", backup.spec.ttl_duration.as_ref(), &mut causes);
    let wanted = Wanted::list(GROUP, VERSION, "virtualmachinebackups", Some(namespace), "");
    for other in neighbours.list_as::<VirtualMachineBackup>(&wanted)? {
        let name = other.metadata.name.clone().unwrap_or_default();
        if other.metadata.name == backup.metadata.name {
            causes.invalid("metadata.name", format!("VirtualMachineBackup \"{name}\" already exists"));
            break;
        }
        let done = other.status.is_some_and(|status| status.is_done());
        if other.spec.source == backup.spec.source && !done {
            causes.invalid("spec.source", format!("VirtualMachineBackup \"{name}\" in progress for source"));
            break;
        }
    }
    Ok(causes)
}
