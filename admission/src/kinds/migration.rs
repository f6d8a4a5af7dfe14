//! Migrations: defaults and rules.

use api::{
    FeatureGate, VirtualMachineInstance, VirtualMachineInstanceMigration,
    constants::{self, component, condition, finalizer, label, reason},
    names::label_value,
};

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, ObjectQuery, names, request, semantic},
    rules::unsupported::migrations,
};

const PLURAL: &str = "virtualmachineinstancemigrations";
/// Remedy for a VMI whose interface of the pod network cannot migrate, after the text that clients match.
const MASQUERADE: &str = "; to make the VM migratable, give its interface the binding masquerade and restart it";

/// Serves `/migration-mutate-create`: sets the label by which other migrations of the VMI are found, and the finalizer.
pub(crate) fn mutate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    context.patched::<VirtualMachineInstanceMigration>(|migration| {
        let vmi = migration.spec.vmi_name.clone().unwrap_or_default();
        migration.metadata.labels.get_or_insert_default().insert(label::VMI_NAME.to_owned(), label_value(&vmi));
        let finalizers = migration.metadata.finalizers.get_or_insert_default();
        if !finalizers.iter().any(|name| name == finalizer::MIGRATION) {
            finalizers.push(finalizer::MIGRATION.to_owned());
        }
        Ok(vec![])
    })
}

/// Serves `/migration-validate-create`. Only the first error is returned.
pub(crate) fn validate_create(context: &Context<'_>) -> Result<Decision, Interrupt> {
    is_migration(context)?;
    let migration: VirtualMachineInstanceMigration = context.object()?;
    let spec = &migration.spec;
    let mut errors = FieldErrors::new();

    let Some(name) = spec.vmi_name.as_deref().filter(|name| !name.is_empty()) else {
        errors.required("spec.vmiName", "vmiName is missing");
        return Err(errors.into());
    };
    let controller = component::CONTROLLER_SERVICE_ACCOUNT;
    let by_controller = context.trusted.is(&context.request.user_info, controller);
    if spec.priority.is_some() && !by_controller {
        errors.forbidden(
            "spec.migrationPriority",
            "Migration priority queue, only virt-controller is allowed to set priority field",
        );
        return Err(errors.into());
    }

    check_vmi_can_migrate(context, &migration, name)?;

    let decentralized = spec.send_to.is_some() || spec.receive.is_some();
    if decentralized && !context.config.enabled(FeatureGate::DecentralizedLiveMigration) {
        errors.not_supported("", "DecentralizedLiveMigration feature gate is not enabled in kubevirt resource");
        return Err(errors.into());
    }
    if let (Some(source), Some(target)) = (&spec.send_to, &spec.receive)
        && source.migration_id != target.migration_id
    {
        let message = format!(
            "sendTo migrationID {} does not match receive migrationID {}",
            source.migration_id, target.migration_id
        );
        errors.invalid("", message);
        return Err(errors.into());
    }
    Ok(context.decide(migrations::migration(spec), vec![]))
}

/// Fails if the VMI cannot migrate now, or if it has another migration in progress.
fn check_vmi_can_migrate(
    context: &Context<'_>,
    migration: &VirtualMachineInstanceMigration,
    name: &str,
) -> Result<(), Interrupt> {
    let namespace = context.request.namespace.as_deref().or(migration.metadata.namespace.as_deref());
    let query = |plural, name: &str| ObjectQuery::get(constants::GROUP, constants::VERSION, plural, namespace, name);
    let vmi = query("virtualmachineinstances", name);
    // No object has a label with an invalid value.
    let value = label_value(name);
    let labelled = names::label_value_errors(&value).is_empty().then(|| {
        let labels = format!("{}={value}", label::VMI_NAME);
        ObjectQuery::list(constants::GROUP, constants::VERSION, PLURAL, namespace, &labels)
    });
    context.lookups.require([&vmi].into_iter().chain(&labelled))?;

    let Some(found) = context.lookups.get_as::<VirtualMachineInstance>(&vmi)? else {
        let namespace = namespace.unwrap_or_default();
        return Err(Interrupt::failed(400, format!("the VMI \"{namespace}/{name}\" does not exist")));
    };
    let status = found.status.unwrap_or_default();
    if status.phase.is_some_and(|phase| phase.is_final()) {
        return Err(Interrupt::failed(400, "Cannot migrate VMI in finalized state."));
    }
    let decentralized = migration.spec.send_to.is_some() || migration.spec.receive.is_some();
    for condition in status.conditions {
        let why = condition.reason.unwrap_or_default();
        // Migrations between clusters copy the disks, too.
        let tolerated = decentralized && why == reason::DISKS_NOT_LIVE_MIGRATABLE;
        if condition.type_ == condition::LIVE_MIGRATABLE && condition.status == "False" && !tolerated {
            let message = condition.message.unwrap_or_default();
            let remedy = if why == reason::INTERFACE_NOT_LIVE_MIGRATABLE { MASQUERADE } else { "" };
            let message = format!("Cannot migrate VMI, Reason: {why}, Message: {message}{remedy}");
            return Err(Interrupt::failed(400, message));
        }
    }
    let Some(labelled) = labelled else { return Ok(()) };
    let others = context.lookups.list_as::<VirtualMachineInstanceMigration>(&labelled)?;
    match others.iter().find(|other| !other.is_final()) {
        None => Ok(()),
        Some(other) => {
            let uid = other.metadata.uid.as_deref().unwrap_or_default();
            Err(Interrupt::failed(
                400,
                format!(
                    "in-flight migration detected. Active migration job ({uid}) is currently already in progress for VMI {name}."
                ),
            ))
        }
    }
}

/// Serves `/migration-validate-update`. Only the first error is returned.
pub(crate) fn validate_update(context: &Context<'_>) -> Result<Decision, Interrupt> {
    is_migration(context)?;
    let new: VirtualMachineInstanceMigration = context.object()?;
    let Some(old) = context.old_object::<VirtualMachineInstanceMigration>()? else { return Ok(context.allowed()) };
    Ok(context.decide(update_errors(&new, &old), vec![]))
}

/// Returns the errors of a changed migration.
pub(crate) fn update_errors(
    new: &VirtualMachineInstanceMigration,
    old: &VirtualMachineInstanceMigration,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if !semantic::equal(&new.spec, &old.spec) {
        errors.not_supported("", "update of Migration object's spec is restricted");
        return errors;
    }
    let of = |migration: &VirtualMachineInstanceMigration| migration.metadata.labels.clone();
    let Some(label) = of(old).and_then(|labels| labels.get(label::VMI_NAME).cloned()) else { return errors };
    if !new.is_final() {
        match of(new) {
            None => errors.not_supported("", "selector label can't be removed from an in-flight migration"),
            Some(labels) if labels.get(label::VMI_NAME) != Some(&label) => {
                errors.not_supported("", "selector label can't be modified on an in-flight migration");
            }
            Some(_) => {}
        }
    }
    errors
}

/// Fails a request for another resource, with the message of these webhooks.
fn is_migration(context: &Context<'_>) -> Result<(), Interrupt> {
    let resource = &context.request.resource;
    if resource.group == constants::GROUP && resource.resource == PLURAL && request::is_served(resource) {
        return Ok(());
    }
    let (group, version) = (constants::GROUP, constants::VERSION);
    Err(Interrupt::failed(400, format!("expect resource to be '{group}/{version}, Resource={PLURAL}'")))
}
