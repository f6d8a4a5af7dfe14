//! Restores of VMs: rules.

use api::{
    VirtualMachine,
    cdi::{annotation, label},
    persistent_state,
    snapshot::{
        VirtualMachineSnapshot,
        content::VirtualMachineSnapshotContent,
        restore::{VirtualMachineRestore, VirtualMachineRestoreSpec},
    },
};

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, LookupError, Lookups, ObjectQuery, Operation},
    kinds::{
        checks,
        snapshot::{self, GROUP},
    },
    rules::patches,
};

const VERSION: &str = "v1beta1";
const PATCHES: &str = "spec.patches";

/// Prefixes of annotations and labels by which restores and Ferrovirt decide.
const OWN: [&str; 2] = ["ferrovirt.io/", "restore.kubevirt.io/"];
/// Labels by which the claims of DataVolumes and those with the state of VMs are found.
const LABELS: [&str; 3] = [label::OWNED_BY, persistent_state::LABEL, persistent_state::MIGRATION_LABEL];

/// Serves `/virtualmachinerestores-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let request = context.request;
    checks::expect_resource(request, GROUP, "virtualmachinerestores")?;
    let errors = match request.operation {
        Operation::Create => {
            if !context.config.enabled(snapshot::GATE) {
                return Err(Interrupt::failed(400, "Snapshot/Restore feature gate not enabled"));
            }
            let restore: VirtualMachineRestore = context.object()?;
            let namespace = request.namespace.as_deref().unwrap_or_default();
            field_errors(&restore.spec, namespace, context.lookups)?
        }
        Operation::Update => checks::validate_immutable(context, |restore: &VirtualMachineRestore| &restore.spec)?,
        _ => return Err(checks::unexpected_operation(request)),
    };
    Ok(context.decide(errors, vec![]))
}

/// Returns the errors of a new restore.
pub(crate) fn field_errors(
    spec: &VirtualMachineRestoreSpec,
    namespace: &str,
    lookups: &Lookups,
) -> Result<FieldErrors, Interrupt> {
    let mut errors = FieldErrors::new();
    snapshot::validate_vm_reference("spec.target", &spec.target, &mut errors);
    let names_a_vm = errors.is_empty();
    validate_patches(&spec.patches, &mut errors);
    if names_a_vm {
        validate_target(spec, namespace, lookups, &mut errors)?;
    }
    validate_overrides(spec, &mut errors);
    validate_policies(spec, &mut errors);
    validate_in_progress(spec, namespace, lookups, &mut errors)?;
    Ok(errors)
}

fn validate_patches(patches: &[String], errors: &mut FieldErrors) {
    for error in patches.iter().filter_map(|patch| patches::parse(patch).err()) {
        errors.invalid(PATCHES, error.to_string());
    }
}

/// Rejects to restore a VM with backend storage to another VM.
fn validate_target(
    spec: &VirtualMachineRestoreSpec,
    namespace: &str,
    lookups: &Lookups,
    errors: &mut FieldErrors,
) -> Result<(), Interrupt> {
    let named = &spec.virtual_machine_snapshot_name;
    let snapshot = ObjectQuery::get(GROUP, VERSION, "virtualmachinesnapshots", Some(namespace), named);
    let vm = ObjectQuery::get(api::constants::GROUP, "v1", "virtualmachines", Some(namespace), &spec.target.name);
    lookups.require([&snapshot, &vm, &restores(namespace)])?;
    // A restore waits for a snapshot that does not exist yet.
    let Some(snapshot) = lookups.get_as::<VirtualMachineSnapshot>(&snapshot)? else { return Ok(()) };
    let status = snapshot.status.unwrap_or_default();
    let vm = lookups.get_as::<VirtualMachine>(&vm)?;
    if vm.is_some_and(|vm| vm.metadata.uid.is_some() && vm.metadata.uid == status.source_uid) {
        return Ok(());
    }
    let Some(name) = status.virtual_machine_snapshot_content_name else {
        return Err(Interrupt::failed(400, "snapshot content name is nil in vmSnapshot status"));
    };
    let plural = "virtualmachinesnapshotcontents";
    let content = ObjectQuery::get(GROUP, VERSION, plural, Some(namespace), &name);
    let Some(content) = lookups.get_as::<VirtualMachineSnapshotContent>(&content)? else {
        return Err(Interrupt::failed(400, format!("{plural}.{GROUP} \"{name}\" not found")));
    };
    let Some(source) = content.spec.source.virtual_machine else {
        return Err(Interrupt::failed(400, "unexpected snapshot source"));
    };
    // A preference can ask for it as well, which the template does not show.
    let has_claim =
        content.spec.volume_backups.iter().any(|backup| backup.volume_name.starts_with(persistent_state::PREFIX));
    let template = source.spec.and_then(|spec| spec.template.spec);
    if has_claim || template.is_some_and(|spec| persistent_state::is_kept(&spec)) {
        errors.invalid(
            "spec",
            "Restore to a different VM is not supported when snapshotted VM has backend storage (persistent TPM or EFI)",
        );
    }
    Ok(())
}

fn validate_overrides(spec: &VirtualMachineRestoreSpec, errors: &mut FieldErrors) {
    for (index, change) in spec.volume_restore_overrides.iter().enumerate() {
        let path = format!("spec.volumeRestoreOverrides[{index}]");
        let is_set = |text: Option<&String>| text.is_some_and(|text| !text.is_empty());
        if !is_set(change.volume_name.as_ref()) {
            errors.required(format!("{path}.volumeName"), "must provide a volume name");
        }
        if !is_set(change.restore_name.as_ref()) && change.labels.is_empty() && change.annotations.is_empty() {
            errors.required(&path, "must provide at least one overriden field");
        }
        // Controllers decide by them about the content of claims.
        for key in change.annotations.keys().chain(change.labels.keys()) {
            let key = key.as_str();
            let is_own = OWN.iter().any(|prefix| key.starts_with(prefix));
            if is_own || annotation::RESERVED.contains(&key) || LABELS.contains(&key) {
                errors.invalid(&path, format!("{key} is set by controllers only"));
            }
        }
    }
}

fn validate_policies(spec: &VirtualMachineRestoreSpec, errors: &mut FieldErrors) {
    if let Some(policy) = &spec.volume_restore_policy
        && !["InPlace", "RandomizeNames", "PrefixTargetName"].contains(&policy.as_str())
    {
        errors.invalid("spec.volumeRestorePolicy", format!("volume restore policy \"{policy}\" doesn't exist"));
    }
    if let Some(policy) = &spec.volume_ownership_policy
        && !["Vm", "None"].contains(&policy.as_str())
    {
        errors.invalid("spec.volumeOwnershipPolicy", format!("volume ownership policy \"{policy}\" doesn't exist"));
    }
}

fn restores(namespace: &str) -> ObjectQuery {
    ObjectQuery::unfinished(GROUP, VERSION, "virtualmachinerestores", namespace)
}

/// Rejects a second restore of the same VM.
fn validate_in_progress(
    spec: &VirtualMachineRestoreSpec,
    namespace: &str,
    lookups: &Lookups,
    errors: &mut FieldErrors,
) -> Result<(), LookupError> {
    for other in lookups.list_as::<VirtualMachineRestore>(&restores(namespace))? {
        // One that has failed holds nothing back.
        if other.spec.target == spec.target && !other.is_final() {
            let name = other.metadata.name.unwrap_or_default();
            errors.invalid("spec.target", format!("VirtualMachineRestore \"{name}\" in progress"));
        }
    }
    Ok(())
}
