//! Records of starts: a ControllerRevision with the spec from which the VM was started last.

use api::{VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec, constants::event};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use serde_json::json;

use super::{Observed, chosen::Chosen, lookup::Lookup};
use crate::{
    resources::start_revisions::{EXPANDED, LABEL, SPEC, StartRevision},
    runtime::{Decision, Effect, Event, Kind},
};

/// Returns the name of the record of a start at the present generation.
pub(super) fn name(vm: &VirtualMachine) -> String {
    let uid = vm.metadata.uid.as_deref().unwrap_or_default();
    format!("revision-start-vm-{uid}-{}", vm.metadata.generation.unwrap_or(0))
}

/// Records the start of a VM and deletes the records of former starts.
pub(super) fn keep(observed: &Observed, chosen: &Chosen, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let vm = &*observed.vm;
    let name = name(vm);
    let expanded = if chosen.is_empty() { None } else { chosen.expand(vm) };
    // Former versions recorded no expanded template. Their record of the same generation would hide every later change.
    let is_complete = |record: &StartRevision| {
        expanded.is_none() || record.template.as_ref().is_some_and(|template| template.expanded.is_some())
    };
    let is_present =
        |record: &StartRevision| record.metadata.name.as_deref() == Some(name.as_str()) && is_complete(record);
    for former in observed.starts.iter().filter(|record| !is_present(record)) {
        decision.push(Effect::delete(Kind::ControllerRevision, &former.metadata));
    }
    if observed.starts.iter().any(|record| is_present(record)) {
        return Ok(());
    }
    let mut spec = vm.spec.clone();
    // The copies in use, even if the objects change later.
    let copy = |lookup: &Lookup| lookup.copy_name(vm);
    if let Some(matcher) = &mut spec.instancetype {
        matcher.revision_name = copy(&observed.instancetype).or(matcher.revision_name.take());
    }
    if let Some(matcher) = &mut spec.preference {
        matcher.revision_name = copy(&observed.preference).or(matcher.revision_name.take());
    }
    let recorded = VirtualMachine { spec, ..vm.clone() };
    decision.push(create(&recorded, &name, expanded.as_ref())?);
    Ok(())
}

/// Replaces the record of a VMI whose VM is expanded: the VMI runs the expanded template.
pub(super) fn replace_expanded(
    expanded: &VirtualMachine,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let name = format!("{}-expanded", name(expanded));
    decision.push(create(expanded, &name, None)?);
    let patch = json!({"status": {"virtualMachineRevisionName": name}});
    decision.push(Effect::merge(Kind::Instance, &vmi.metadata, patch));
    Ok(())
}

fn create(
    vm: &VirtualMachine,
    name: &str,
    expanded: Option<&VirtualMachineInstanceSpec>,
) -> Result<Effect, serde_json::Error> {
    let mut data = json!({SPEC: serde_json::to_value(&vm.spec)?});
    if let Some(expanded) = expanded {
        data[EXPANDED] = serde_json::to_value(expanded)?;
    }
    let record = ControllerRevision {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: vm.metadata.namespace.clone(),
            labels: Some([(LABEL.to_owned(), String::new())].into()),
            owner_references: Some(vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(data)),
        revision: vm.metadata.generation.unwrap_or(0),
    };
    let event = Event::warning(
        Kind::VirtualMachine.reference(&vm.metadata),
        event::FAILED_CREATE,
        "Error creating virtual machine instance: {error}",
    );
    // The name identifies the content, so an existing object, such as one of another installation, serves as well.
    let effect = Effect::create(Kind::ControllerRevision, vm.metadata.namespace.as_deref(), &record)?;
    Ok(effect.or_existing().on_failure(event))
}
