//! Migrations: defaults and rules.

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration,
    constants::{self, component, condition, finalizer, label, reason},
};

use crate::{
    causes::Causes,
    names,
    neighbours::Wanted,
    review::AdmissionReview,
    semantic, unsupported,
    webhook::{self, Context, Stop},
};

const PLURAL: &str = "virtualmachineinstancemigrations";

/// The webhook that sets defaults: the label other migrations of the machine are found by, and the finalizer.
pub(crate) fn mutate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    context.patched::<VirtualMachineInstanceMigration>(|migration| {
        let machine = migration.spec.vmi_name.clone().unwrap_or_default();
        migration.metadata.labels.get_or_insert_default().insert(label::VMI_NAME.to_owned(), machine);
        let finalizers = migration.metadata.finalizers.get_or_insert_default();
        if !finalizers.iter().any(|name| name == finalizer::MIGRATION) {
            finalizers.push(finalizer::MIGRATION.to_owned());
        }
        Ok(vec![])
    })
}

/// The webhook that checks a new migration. The first rule broken answers.
pub(crate) fn validate_create(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    is_migration(context)?;
    let migration: VirtualMachineInstanceMigration = context.object()?;
    let spec = &migration.spec;
    let mut causes = Causes::new();

    let Some(name) = spec.vmi_name.as_deref().filter(|name| !name.is_empty()) else {
        causes.required("spec.vmiName", "vmiName is missing");
        return Err(causes.into());
    };
    let controller = component::CONTROLLER_SERVICE_ACCOUNT;
    let by_controller = context.trusted.is(&context.request.user_info, controller);
    if spec.priority.is_some() && !by_controller {
        causes.forbidden(
            "spec.migrationPriority",
            "Migration priority queue, only virt-controller is allowed to set priority field",
        );
        return Err(causes.into());
    }

    machine_can_move(context, &migration, name)?;

    let decentralized = spec.send_to.is_some() || spec.receive.is_some();
    if decentralized && !context.config.enabled("DecentralizedLiveMigration") {
        causes.not_supported("", "DecentralizedLiveMigration feature gate is not enabled in kubevirt resource");
        return Err(causes.into());
    }
    if let (Some(source), Some(target)) = (&spec.send_to, &spec.receive)
        && source.migration_id != target.migration_id
    {
        let message = format!(
            "sendTo migrationID {} does not match receive migrationID {}",
            source.migration_id, target.migration_id
        );
        causes.invalid("", message);
        return Err(causes.into());
    }
    Ok(context.verdict(&unsupported::kind("VirtualMachineInstanceMigration"), vec![]))
}

/// What stands against moving the machine now: it itself, or another migration of it.
fn machine_can_move(
    context: &Context<'_>,
    migration: &VirtualMachineInstanceMigration,
    name: &str,
) -> Result<(), Stop> {
    let namespace = context.request.namespace.as_deref().or(migration.metadata.namespace.as_deref());
    let wanted = |plural, name: &str| Wanted::get(constants::GROUP, constants::VERSION, plural, namespace, name);
    let machine = wanted("virtualmachineinstances", name);
    // Nothing carries a label value that is none.
    let labelled = names::label_value_errors(name).is_empty().then(|| {
        let labels = format!("{}={name}", label::VMI_NAME);
        Wanted::list(constants::GROUP, constants::VERSION, PLURAL, namespace, &labels)
    });
    context.neighbours.need([&machine].into_iter().chain(&labelled))?;

    let Some(found) = context.neighbours.get_as::<VirtualMachineInstance>(&machine)? else {
        let namespace = namespace.unwrap_or_default();
        return Err(Stop::refused(400, format!("the VMI \"{namespace}/{name}\" does not exist")));
    };
    let status = found.status.unwrap_or_default();
    if status.phase.is_some_and(|phase| phase.is_final()) {
        return Err(Stop::refused(400, "Cannot migrate VMI in finalized state."));
    }
    let decentralized = migration.spec.send_to.is_some() || migration.spec.receive.is_some();
    for condition in status.conditions {
        let why = condition.reason.unwrap_or_default();
        // Moves between clusters copy the disks, too.
        let tolerated = decentralized && why == reason::DISKS_NOT_LIVE_MIGRATABLE;
        if condition.type_ == condition::LIVE_MIGRATABLE && condition.status == "False" && !tolerated {
            let message = condition.message.unwrap_or_default();
            return Err(Stop::refused(400, format!("Cannot migrate VMI, Reason: {why}, Message: {message}")));
        }
    }
    let Some(labelled) = labelled else { return Ok(()) };
    let others = context.neighbours.list_as::<VirtualMachineInstanceMigration>(&labelled)?;
    match others.iter().find(|other| !other.is_final()) {
        None => Ok(()),
        Some(other) => {
            let uid = other.metadata.uid.as_deref().unwrap_or_default();
            Err(Stop::refused(
                400,
                format!(
                    "in-flight migration detected. Active migration job ({uid}) is currently already in progress for VMI {name}."
                ),
            ))
        }
    }
}

/// The webhook that checks the change of a migration. The first rule broken answers.
pub(crate) fn validate_update(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    is_migration(context)?;
    let new: VirtualMachineInstanceMigration = context.object()?;
    let Some(old) = context.old_object::<VirtualMachineInstanceMigration>()? else { return Ok(context.allowed()) };
    Ok(context.verdict(&update_causes(&new, &old), vec![]))
}

/// What is wrong with the change of a migration.
pub fn update_causes(new: &VirtualMachineInstanceMigration, old: &VirtualMachineInstanceMigration) -> Causes {
    let mut causes = Causes::new();
    if !semantic::equal(&new.spec, &old.spec) {
        causes.not_supported("", "update of Migration object's spec is restricted");
        return causes;
    }
    let of = |migration: &VirtualMachineInstanceMigration| migration.metadata.labels.clone();
    let Some(label) = of(old).and_then(|labels| labels.get(label::VMI_NAME).cloned()) else { return causes };
    if !new.is_final() {
        match of(new) {
            None => causes.not_supported("", "selector label can't be removed from an in-flight migration"),
            Some(labels) if labels.get(label::VMI_NAME) != Some(&label) => {
                causes.not_supported("", "selector label can't be modified on an in-flight migration");
            }
            Some(_) => {}
        }
    }
    causes
}

/// Refuses a review of another resource in the words of these webhooks.
fn is_migration(context: &Context<'_>) -> Result<(), Stop> {
    let resource = &context.request.resource;
    if resource.group == constants::GROUP && resource.resource == PLURAL && webhook::is_served(resource) {
        return Ok(());
    }
    let (group, version) = (constants::GROUP, constants::VERSION);
    Err(Stop::refused(400, format!("expect resource to be '{group}/{version}, Resource={PLURAL}'")))
}
