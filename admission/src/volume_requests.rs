//! Hot-plugs asked for in the status of a VM.

use std::collections::BTreeSet;

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    constants::{GROUP, VERSION},
    vm::status::{AddVolumeOptions, VirtualMachineVolumeRequest},
    vmi::volumes::Volume,
};

use crate::{
    causes::Causes,
    neighbours::{Neighbours, Outcome, Wanted},
    rules::{self, hotplug},
    semantic,
    webhook::Stop,
};

const FIELD: &str = "Status.volumeRequests";
const ROOT: &str = "spec.template.spec";

/// The hot-plugs that a VM asks for.
fn requests_of(vm: &VirtualMachine) -> &[VirtualMachineVolumeRequest] {
    vm.status.as_ref().map(|status| status.volume_requests.as_slice()).unwrap_or_default()
}

/// What is wrong with the hot-plugs asked for; `old` is there when the VM is changed. The running machine is looked at, too.
pub(crate) fn causes(
    vm: &VirtualMachine,
    old: Option<&VirtualMachine>,
    config: &ClusterConfig,
    neighbours: &Neighbours,
) -> Result<Causes, Stop> {
    let mut causes = Causes::new();
    let requests = requests_of(vm);
    let Some(template) = vm.spec.template.spec.as_ref().filter(|_| !requests.is_empty()) else { return Ok(causes) };
    // A machine that is not up yet, or about to go, gets its disks from the template.
    let ready = vm.status.as_ref().is_some_and(|status| status.ready);
    let machine = if ready { running(vm, neighbours)?.filter(|machine| !machine.is_deleting()) } else { None };
    each(requests, template, machine.as_ref(), &mut causes);
    if !causes.is_empty() {
        return Ok(causes);
    }
    causes.extend(rules::spec(ROOT, &applied(template, requests), config));
    if !causes.is_empty() {
        return Ok(causes);
    }
    if let Some(machine) = machine {
        causes.extend(rules::spec(ROOT, &applied(&machine.spec, requests), config));
        let migrating = machine
            .status
            .as_ref()
            .and_then(|status| status.migration_state.as_ref())
            .is_some_and(|state| !state.completed);
        if causes.is_empty() && migrating {
            causes.not_supported("spec", "Cannot handle volume requests while VMI migration is in progress");
        }
    }
    // Those from before must not hold up what else is written of the VM.
    if causes.is_empty() && old.is_none_or(|old| requests_of(old) != requests) {
        causes.not_supported(FIELD, "volume requests are not supported yet: hot-plug");
    }
    Ok(causes)
}

fn running(vm: &VirtualMachine, neighbours: &Neighbours) -> Result<Option<VirtualMachineInstance>, Stop> {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    let wanted = Wanted::get(GROUP, VERSION, "virtualmachineinstances", vm.metadata.namespace.as_deref(), name);
    if let Outcome::Failed { message, .. } = neighbours.outcome(&wanted)? {
        return Err(Stop::refused(400, message.clone()));
    }
    Ok(neighbours.get_as(&wanted)?)
}

fn each(
    requests: &[VirtualMachineVolumeRequest],
    template: &VirtualMachineInstanceSpec,
    machine: Option<&VirtualMachineInstance>,
    causes: &mut Causes,
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
                hotplug::configuration("AddVolume request", &add.name, Some(&add.disk), FIELD, causes);
                if !causes.is_empty() {
                    return;
                }
                let differs = |spec: &VirtualMachineInstanceSpec| {
                    let wanted = volume(add);
                    spec.volumes.iter().any(|known| known.name == add.name && !semantic::equal(known, &wanted))
                };
                let conflict = format!(
                    "AddVolume request for [{}] conflicts with an existing volume of the same name on",
                    add.name
                );
                if differs(template) {
                    format!("{conflict} the vmi template.")
                } else if machine.is_some_and(|machine| differs(&machine.spec)) {
                    format!("{conflict} currently running vmi")
                } else {
                    continue;
                }
            }
            (None, Some(_)) => continue,
        };
        causes.invalid(FIELD, message);
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

/// The spec as it is after all requests.
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
