//! Restores of VMs: rules.

use api::{
    VirtualMachine, VirtualMachineInstanceSpec,
    snapshot::{
        VirtualMachineSnapshot,
        content::VirtualMachineSnapshotContent,
        restore::{VirtualMachineRestore, VirtualMachineRestoreSpec},
    },
};

use crate::{
    causes::Causes,
    neighbours::{Needs, Neighbours, Wanted},
    resource,
    review::{AdmissionReview, Operation},
    snapshot::{self, GROUP},
    webhook::{Context, Stop},
};

const VERSION: &str = "v1beta1";
const PATCHES: &str = "spec.patches";

/// Where a patch may change the VM.
const PATCHED: [&str; 3] = ["\"/spec/", "\"/metadata/labels/", "\"/metadata/annotations/"];

/// Answers `/virtualmachinerestores-validate`.
pub fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let request = context.request;
    resource::expect(request, GROUP, "virtualmachinerestores")?;
    let causes = match request.operation {
        Operation::Create => {
            if !context.config.enabled(snapshot::GATE) {
                return Err(Stop::refused(400, "Snapshot/Restore feature gate not enabled"));
            }
            let restore: VirtualMachineRestore = context.object()?;
            let namespace = request.namespace.as_deref().unwrap_or_default();
            let causes = causes(&restore.spec, namespace, context.neighbours)?;
            resource::or_unsupported("VirtualMachineRestore", causes)
        }
        Operation::Update => resource::immutable(context, |restore: &VirtualMachineRestore| &restore.spec)?,
        _ => return Err(resource::unexpected_operation(request)),
    };
    Ok(context.verdict(&causes, vec![]))
}

/// What is wrong with a new restore.
pub fn causes(spec: &VirtualMachineRestoreSpec, namespace: &str, neighbours: &Neighbours) -> Result<Causes, Stop> {
    let mut causes = Causes::new();
    snapshot::machine("spec.target", &spec.target, &mut causes);
    let names_a_vm = causes.is_empty();
    patches(&spec.patches, &mut causes);
    if names_a_vm {
        target(spec, namespace, neighbours, &mut causes)?;
    }
    overrides(spec, &mut causes);
    words(spec, &mut causes);
    in_progress(spec, namespace, neighbours, &mut causes)?;
    Ok(causes)
}

/// Each patch is looked at as text: `{"op": "add", "path": "/spec/x", "value": "y"}`, one colon between commas.
fn patches(patches: &[String], causes: &mut Causes) {
    for fragment in patches.iter().flat_map(|patch| patch.trim_matches(['{', '}']).split(',')) {
        let parts: Vec<&str> = fragment.split(':').map(str::trim).collect();
        let [key, value] = parts[..] else {
            let message = "patch format is not valid - one \":\" expected in a single key-value json patch";
            causes.invalid(PATCHES, format!("{message}: {fragment}"));
            continue;
        };
        if key == "\"path\"" && !PATCHED.iter().any(|prefix| value.starts_with(prefix)) {
            causes.invalid(PATCHES, format!("patching is valid only for elements under /spec/ only: {fragment}"));
        }
    }
}

/// A VM with state of its own can be put back only to itself.
fn target(
    spec: &VirtualMachineRestoreSpec,
    namespace: &str,
    neighbours: &Neighbours,
    causes: &mut Causes,
) -> Result<(), Stop> {
    let named = &spec.virtual_machine_snapshot_name;
    let snapshot = Wanted::get(GROUP, VERSION, "virtualmachinesnapshots", Some(namespace), named);
    let vm = Wanted::get(api::constants::GROUP, "v1", "virtualmachines", Some(namespace), &spec.target.name);
    neighbours.need([&snapshot, &vm, &restores(namespace)])?;
    // The snapshot may come later: the restore waits for it.
    let Some(snapshot) = neighbours.get_as::<VirtualMachineSnapshot>(&snapshot)? else { return Ok(()) };
    let status = snapshot.status.unwrap_or_default();
    let vm = neighbours.get_as::<VirtualMachine>(&vm)?;
    if vm.is_some_and(|vm| vm.metadata.uid.is_some() && vm.metadata.uid == status.source_uid) {
        return Ok(());
    }
    let Some(name) = status.virtual_machine_snapshot_content_name else {
        return Err(Stop::refused(400, "snapshot content name is nil in vmSnapshot status"));
    };
    let plural = "virtualmachinesnapshotcontents";
    let content = Wanted::get(GROUP, VERSION, plural, Some(namespace), &name);
    let Some(content) = neighbours.get_as::<VirtualMachineSnapshotContent>(&content)? else {
        return Err(Stop::refused(400, format!("{plural}.{GROUP} \"{name}\" not found")));
    };
    let Some(source) = content.spec.source.virtual_machine else {
        return Err(Stop::refused(400, "unexpected snapshot source"));
    };
    if source.spec.and_then(|spec| spec.template.spec).is_some_and(|spec| has_state(&spec)) {
        causes.invalid(
            "spec",
            "Restore to a different VM is not supported when snapshotted VM has backend storage (persistent TPM or EFI)",
        );
    }
    Ok(())
}

/// Whether a machine keeps state that is not in its volumes.
fn has_state(spec: &VirtualMachineInstanceSpec) -> bool {
    let tpm = spec.domain.devices.tpm.as_ref();
    let efi = spec.domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref()?.efi.as_ref());
    tpm.is_some_and(|tpm| tpm.enabled.unwrap_or(true) && tpm.persistent == Some(true))
        || efi.is_some_and(|efi| efi.persistent == Some(true))
}

fn overrides(spec: &VirtualMachineRestoreSpec, causes: &mut Causes) {
    for (index, change) in spec.volume_restore_overrides.iter().enumerate() {
        let path = format!("spec.volumeRestoreOverrides[{index}]");
        let is_set = |text: Option<&String>| text.is_some_and(|text| !text.is_empty());
        if !is_set(change.volume_name.as_ref()) {
            causes.required(format!("{path}.volumeName"), "must provide a volume name");
        }
        if !is_set(change.restore_name.as_ref()) && change.labels.is_empty() && change.annotations.is_empty() {
            causes.required(path, "must provide at least one overriden field");
        }
    }
}

fn words(spec: &VirtualMachineRestoreSpec, causes: &mut Causes) {
    if let Some(policy) = &spec.volume_restore_policy
        && !["InPlace", "RandomizeNames", "PrefixTargetName"].contains(&policy.as_str())
    {
        causes.invalid("spec.volumeRestorePolicy", format!("volume restore policy \"{policy}\" doesn't exist"));
    }
    if let Some(policy) = &spec.volume_ownership_policy
        && !["Vm", "None"].contains(&policy.as_str())
    {
        causes.invalid("spec.volumeOwnershipPolicy", format!("volume ownership policy \"{policy}\" doesn't exist"));
    }
}

fn restores(namespace: &str) -> Wanted {
    Wanted::list(GROUP, VERSION, "virtualmachinerestores", Some(namespace), "")
}

/// One restore at a time for each VM.
fn in_progress(
    spec: &VirtualMachineRestoreSpec,
    namespace: &str,
    neighbours: &Neighbours,
    causes: &mut Causes,
) -> Result<(), Needs> {
    for other in neighbours.list_as::<VirtualMachineRestore>(&restores(namespace))? {
        let complete = other.status.is_some_and(|status| status.complete == Some(true));
        if other.spec.target == spec.target && !complete {
            let name = other.metadata.name.unwrap_or_default();
            causes.invalid("spec.target", format!("VirtualMachineRestore \"{name}\" in progress"));
        }
    }
    Ok(())
}
