//! Hotplug requests in the status of a VM.

use std::collections::BTreeSet;

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    constants::{GROUP, VERSION},
    vm::status::{AddVolumeOptions, VirtualMachineVolumeRequest},
    vmi::volumes::Volume,
};

use crate::{
    context::{FieldErrors, Interrupt, LookupResult, Lookups, ObjectQuery, semantic},
    rules::{self, hotplug},
};

const FIELD: &str = "Status.volumeRequests";
const ROOT: &str = "spec.template.spec";

/// Returns the hotplug requests of a VM.
fn requests_of(vm: &VirtualMachine) -> &[VirtualMachineVolumeRequest] {
    vm.status.as_ref().map(|status| status.volume_requests.as_slice()).unwrap_or_default()
}

/// Returns the errors of the hotplug requests of a new or changed VM, with regard to its running VMI.
pub(crate) fn field_errors(
    vm: &VirtualMachine,
    old: Option<&VirtualMachine>,
    config: &ClusterConfig,
    lookups: &Lookups,
) -> Result<FieldErrors, Interrupt> {
    let mut errors = FieldErrors::new();
    let requests = requests_of(vm);
    let Some(template) = vm.spec.template.spec.as_ref().filter(|_| !requests.is_empty()) else { return Ok(errors) };
    // A VMI that is not ready, or is being deleted, gets its disks from the template.
    let ready = vm.status.as_ref().is_some_and(|status| status.ready);
    let vmi = if ready { running(vm, lookups)?.filter(|vmi| !vmi.is_deleting()) } else { None };
    validate_requests(requests, template, vmi.as_ref(), &mut errors);
    if !errors.is_empty() {
        return Ok(errors);
    }
    errors.extend(rules::validate_spec(ROOT, &applied(template, requests), config));
    if !errors.is_empty() {
        return Ok(errors);
    }
    if let Some(vmi) = vmi {
        errors.extend(rules::validate_spec(ROOT, &applied(&vmi.spec, requests), config));
        let migrating = vmi
            .status
            .as_ref()
            .and_then(|status| status.migration_state.as_ref())
            .is_some_and(|state| !state.completed);
        if errors.is_empty() && migrating {
            errors.not_supported("spec", "Cannot handle volume requests while VMI migration is in progress");
        }
    }
    // Stored requests must not block other changes of the VM.
    if errors.is_empty() && old.is_none_or(|old| requests_of(old) != requests) {
        errors.not_supported(FIELD, "volume requests are not supported yet: hot-plug");
    }
    Ok(errors)
}

fn running(vm: &VirtualMachine, lookups: &Lookups) -> Result<Option<VirtualMachineInstance>, Interrupt> {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    let query = ObjectQuery::get(GROUP, VERSION, "virtualmachineinstances", vm.metadata.namespace.as_deref(), name);
    if let LookupResult::Failed { message, .. } = lookups.result(&query)? {
        return Err(Interrupt::failed(400, message.clone()));
    }
    Ok(lookups.get_as(&query)?)
}

fn validate_requests(
    requests: &[VirtualMachineVolumeRequest],
    template: &VirtualMachineInstanceSpec,
    vmi: Option<&VirtualMachineInstance>,
    errors: &mut FieldErrors,
) {
    let (mut added, mut removed) = (BTreeSet::new(), BTreeSet::new());
    for request in requests {
        let message = match (&request.add_volume_options, &request.remove_volume_options) {
            (Some(_), Some(_)) => {
                "VolumeRequests require either addVolumeOptions or removeVolumeOptions to be set, not both".to_owned()
            }
            (None, None) => {
                "VolumeRequests require one of either addVolumeOptions or removeVolumeOptions to be set".to_owned()
            }
            (Some(add), None) if !added.insert(&add.name) => {
                format!("AddVolume request for [{}] aleady exists", add.name)
            }
            (None, Some(remove)) if !removed.insert(&remove.name) => {
                format!("RemoveVolume request for [{}] aleady exists", remove.name)
            }
            (Some(add), None) => {
                hotplug::validate_hotplugged_disk("AddVolume request", &add.name, Some(&add.disk), FIELD, errors);
                if !errors.is_empty() {
                    return;
                }
                let differs = |spec: &VirtualMachineInstanceSpec| {
                    let requested = volume(add);
                    spec.volumes.iter().any(|known| known.name == add.name && !semantic::equal(known, &requested))
                };
                let conflict = format!(
                    "AddVolume request for [{}] conflicts with an existing volume of the same name on",
                    add.name
                );
                if differs(template) {
                    format!("{conflict} the vmi template.")
                } else if vmi.is_some_and(|vmi| differs(&vmi.spec)) {
                    format!("{conflict} currently running vmi")
                } else {
                    continue;
                }
            }
            (None, Some(_)) => continue,
        };
        errors.invalid(FIELD, message);
        return;
    }
}

fn volume(add: &AddVolumeOptions) -> Volume {
    let source = &add.volume_source;
    Volume {
        name: add.name.clone(),
        data_volume: source
            .data_volume
            .clone()
            .map(|source| api::vmi::volumes::DataVolumeSource { hotpluggable: true, ..source }),
        persistent_volume_claim: source
            .persistent_volume_claim
            .clone()
            .map(|source| api::vmi::volumes::PersistentVolumeClaimVolumeSource { hotpluggable: true, ..source }),
        ..Volume::default()
    }
}

/// Returns the spec after all requests.
fn applied(spec: &VirtualMachineInstanceSpec, requests: &[VirtualMachineVolumeRequest]) -> VirtualMachineInstanceSpec {
    let mut spec = spec.clone();
    for request in requests {
        if let Some(add) = &request.add_volume_options
            && !spec.volumes.iter().any(|volume| volume.name == add.name)
        {
            let mut disk = add.disk.clone();
            disk.name.clone_from(&add.name);
            spec.volumes.push(volume(add));
            spec.domain.devices.disks.push(disk);
        }
        if let Some(remove) = &request.remove_volume_options {
            spec.volumes.retain(|volume| volume.name != remove.name);
            spec.domain.devices.disks.retain(|disk| disk.name != remove.name);
        }
    }
    spec
}
