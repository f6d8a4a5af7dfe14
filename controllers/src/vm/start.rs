//! The VMI that a VM is started as.

use admission::context::Generated;
use api::{
    StartStrategy, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    constants::{annotation, finalizer},
    traceparent::TraceParent,
    vmi::{devices::Input, status::VirtualMachineInstanceStatus},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use super::{
    Observed,
    chosen::{ApplyError, Chosen},
    hibernation, memory_dump,
    restart::Template,
    revision,
};
use crate::{
    owned_vmis::{firmware_uuid, template_labels},
    runtime::Kind,
};

/// The error of a VM that cannot be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StartError {
    /// The template has no spec.
    #[error("spec.template.spec is missing")]
    NoSpec,
    /// Instance type or preference cannot be applied.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The VMI whose memory is saved cannot be read.
    #[error("the VMI whose memory is saved is not readable: {0}")]
    Saved(String),
}

/// Returns the VMI of a VM. `trace`: the trace of its start, if it is that of its VM.
pub(super) fn instance(
    vm: &VirtualMachine,
    chosen: &Chosen,
    config: &ClusterConfig,
    paused: bool,
    trace: Option<TraceParent>,
) -> Result<VirtualMachineInstance, StartError> {
    let name = vm.metadata.name.clone().unwrap_or_default();
    let template = &vm.spec.template;
    let mut spec = template.spec.clone().ok_or(StartError::NoSpec)?;
    if paused {
        spec.start_strategy = Some(StartStrategy::Paused);
    }
    let firmware = spec.domain.firmware.get_or_insert_default();
    if firmware.uuid.as_ref().is_none_or(String::is_empty) {
        // Derived from the name, so that the guest sees the same hardware at each start.
        firmware.uuid = Some(firmware_uuid(&name));
    }
    let mut annotations = template.metadata.annotations.clone().unwrap_or_default();
    // That of a template is the user's.
    annotations.remove(annotation::TRACEPARENT);
    if let Some(trace) = trace {
        annotations.insert(annotation::TRACEPARENT.to_owned(), trace.to_string());
    }
    annotations.insert(annotation::VM_GENERATION.to_owned(), vm.metadata.generation.unwrap_or(0).to_string());
    if let Some(skip) = skip_backup_hooks(vm) {
        annotations.insert(annotation::SKIP_BACKUP_HOOKS.to_owned(), skip.clone());
    }
    let mut vmi = VirtualMachineInstance {
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
    memory_dump::leave_out(vm, &mut vmi.spec);
    chosen.prepare(&mut vmi, config)?;
    attach(&mut vmi.spec);
    chosen.apply(vm, &mut vmi)?;
    complete_inputs(&mut vmi.spec.domain.devices.inputs);
    hibernation::resume(vm, &mut vmi, paused).map_err(StartError::Saved)?;
    Ok(vmi)
}

/// Returns the present template, and the groups of it that the VMI has in effect. `None`: it cannot be expanded.
pub(super) fn template(observed: &Observed, chosen: &Chosen) -> Option<Template> {
    let mut template = Template::of(observed, chosen.expand(&observed.vm)?);
    if let Some(vmi) = observed.instance.as_deref() {
        let paused = vmi.spec.start_strategy == Some(StartStrategy::Paused);
        template.find_in_effect(observed, vmi, || defaulted_spec(observed, chosen, paused));
    }
    Some(template)
}

/// Returns the spec that a start now would give the VMI, with the defaults of admission. `None`: the VM cannot be started.
pub(super) fn defaulted_spec(observed: &Observed, chosen: &Chosen, paused: bool) -> Option<VirtualMachineInstanceSpec> {
    let mut spec = instance(&observed.vm, chosen, &observed.config, paused, None).ok()?.spec;
    // The UUID of the firmware is set already.
    let generated = Generated { now: Time(observed.now), uuid: String::new(), serial: String::new() };
    admission::kinds::vmi::default_spec(&mut spec, &observed.config, &generated).ok()?;
    Some(spec)
}

/// Returns the annotation about backup hooks of a VM or of its template.
pub(super) fn skip_backup_hooks(vm: &VirtualMachine) -> Option<&String> {
    fn of(metadata: &ObjectMeta) -> Option<&String> {
        metadata.annotations.as_ref()?.get(annotation::SKIP_BACKUP_HOOKS)
    }
    of(&vm.metadata).or_else(|| of(&vm.spec.template.metadata))
}

/// Adds the devices that a VMI gets without naming them.
fn attach(spec: &mut VirtualMachineInstanceSpec) {
    admission::defaults::disks(spec);
    let devices = &mut spec.domain.devices;
    if devices.autoattach_input_device == Some(true) && devices.inputs.is_empty() {
        devices.inputs.push(Input { name: "default-0".to_owned(), ..Input::default() });
    }
}

/// Completes input devices after preferences were applied.
fn complete_inputs(inputs: &mut [Input]) {
    for input in inputs {
        input.bus.get_or_insert_with(|| "usb".to_owned());
        if input.type_.is_empty() {
            input.type_ = "tablet".to_owned();
        }
    }
}
