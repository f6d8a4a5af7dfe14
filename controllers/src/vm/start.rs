//! The machine that a VM is started as.

use api::{
    StartStrategy, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    constants::{annotation, finalizer},
    vmi::{devices::Input, status::VirtualMachineInstanceStatus},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use uuid::Uuid;

use super::{
    instancetype::Chosen,
    restart::{self, TEMPLATE_HASH, TEMPLATE_WRITTEN},
    revision,
};
use crate::{owned::template_labels, runtime::Kind};

/// Namespace of the firmware UUIDs made from VM names.
const FIRMWARE_NAMESPACE: Uuid = Uuid::from_u128(0x6a1a_24a1_4061_4607_8bf4_a396_3d0c_5895);

/// The machine, or why the VM cannot be started by this version.
pub(super) fn instance(
    vm: &VirtualMachine,
    chosen: &Chosen,
    config: &ClusterConfig,
    paused: bool,
) -> Result<VirtualMachineInstance, String> {
    if !vm.spec.data_volume_templates.is_empty() {
        return Err("dataVolumeTemplates are not supported".to_owned());
    }
    let name = vm.metadata.name.clone().unwrap_or_default();
    let template = &vm.spec.template;
    let mut spec = template.spec.clone().ok_or_else(|| "spec.template.spec is missing".to_owned())?;
    if paused {
        spec.start_strategy = Some(StartStrategy::Paused);
    }
    let firmware = spec.domain.firmware.get_or_insert_default();
    if firmware.uuid.as_ref().is_none_or(String::is_empty) {
        // From the name, so that guests see the same machine at each start.
        firmware.uuid = Some(Uuid::new_v5(&FIRMWARE_NAMESPACE, name.as_bytes()).to_string());
    }
    let mut annotations = template.metadata.annotations.clone().unwrap_or_default();
    annotations.insert(annotation::VM_GENERATION.to_owned(), vm.metadata.generation.unwrap_or(0).to_string());
    if let Some(wanted) = chosen.template(vm) {
        annotations.insert(TEMPLATE_HASH.to_owned(), wanted.hash);
    }
    if let Some(hash) = restart::hash(template) {
        annotations.insert(TEMPLATE_WRITTEN.to_owned(), hash);
    }
    if let Some(skip) = skip_backup_hooks(vm) {
        annotations.insert(annotation::SKIP_BACKUP_HOOKS.to_owned(), skip.clone());
    }
    let mut machine = VirtualMachineInstance {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: vm.metadata.namespace.clone(),
            labels: template_labels(&template.metadata),
            annotations: Some(annotations),
            owner_references: Some(vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            finalizers: Some(vec![finalizer::VM.to_owned()]),
            ..ObjectMeta::default()
        },
        spec,
        status: Some(VirtualMachineInstanceStatus {
            virtual_machine_revision_name: Some(revision::name(vm)),
            ..VirtualMachineInstanceStatus::default()
        }),
    };
    chosen.prepare(&mut machine, config)?;
    attach(&mut machine.spec);
    chosen.apply(vm, &mut machine)?;
    complete_inputs(&mut machine.spec.domain.devices.inputs);
    Ok(machine)
}

/// What a VM says about backup hooks: itself, else in its template.
pub(super) fn skip_backup_hooks(vm: &VirtualMachine) -> Option<&String> {
    fn said(metadata: &ObjectMeta) -> Option<&String> {
        metadata.annotations.as_ref()?.get(annotation::SKIP_BACKUP_HOOKS)
    }
    said(&vm.metadata).or_else(|| said(&vm.spec.template.metadata))
}

/// Adds the devices that a machine gets without naming them.
fn attach(spec: &mut VirtualMachineInstanceSpec) {
    admission::defaults::disks(spec);
    let devices = &mut spec.domain.devices;
    if devices.autoattach_input_device == Some(true) && devices.inputs.is_empty() {
        devices.inputs.push(Input { name: "default-0".to_owned(), ..Input::default() });
    }
}

/// What a preference has left open of an input device.
fn complete_inputs(inputs: &mut [Input]) {
    for input in inputs {
        input.bus.get_or_insert_with(|| "usb".to_owned());
        if input.type_.is_empty() {
            input.type_ = "tablet".to_owned();
        }
    }
}
