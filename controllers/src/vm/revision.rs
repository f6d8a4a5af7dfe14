//! Records of starts: a ControllerRevision with the spec from which the VM was started last.
//!
//! A VMI without DataVolumes of templates is created before its record, so that the start does not wait for it. If the record is refused
//! or this program ends before, the next reconcile makes up for it.

use std::sync::Arc;

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    constants::{annotation, event},
};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use serde_json::json;

use super::{Observed, SyncError, blocked, chosen::Chosen, lookup::Lookup};
use crate::{
    resources::start_revisions::{EXPANDED, LABEL, SPEC, StartRevision},
    runtime::{Decision, Effect, Event, Kind},
};

/// End of the name of a record with an expanded VM.
const OF_EXPANDED: &str = "-expanded";

/// Returns the name of the record of a start at the present generation.
pub(super) fn name(vm: &VirtualMachine) -> String {
    format!("{}{}", beginning(vm), vm.metadata.generation.unwrap_or(0))
}

/// Returns the beginning of the names of a VM's records.
fn beginning(vm: &VirtualMachine) -> String {
    format!("revision-start-vm-{}-", vm.metadata.uid.as_deref().unwrap_or_default())
}

/// Returns the generation in the name of a record.
pub(super) fn generation(name: &str) -> Option<i64> {
    name.strip_suffix(OF_EXPANDED).unwrap_or(name).rsplit_once('-')?.1.parse().ok()
}

/// Records the start of a VM and deletes the records of former starts.
pub(super) fn keep(observed: &Observed, chosen: &Chosen, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let vm = &*observed.vm;
    let name = name(vm);
    let expanded = expanded(vm, chosen);
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
    decision.push(create(&recorded(observed), &name, expanded.as_ref())?);
    Ok(())
}

/// Returns the VM as its record holds it: with the copies in use, even if the objects change later.
fn recorded(observed: &Observed) -> VirtualMachine {
    let vm = &*observed.vm;
    let mut spec = vm.spec.clone();
    let copy = |lookup: &Lookup| lookup.copy_name(vm);
    if let Some(matcher) = &mut spec.instancetype {
        matcher.revision_name = copy(&observed.instancetype).or(matcher.revision_name.take());
    }
    if let Some(matcher) = &mut spec.preference {
        matcher.revision_name = copy(&observed.preference).or(matcher.revision_name.take());
    }
    VirtualMachine { spec, ..vm.clone() }
}

/// Returns the name of the record of a VMI's start, if the record does not exist: it was refused, or this program ended before.
fn missing<'a>(observed: &Observed, vmi: &'a VirtualMachineInstance) -> Option<&'a str> {
    if vmi.is_final() || vmi.is_deleting() {
        return None;
    }
    let named = vmi.status.as_ref()?.virtual_machine_revision_name.as_deref()?;
    let is_named = |record: &Arc<StartRevision>| record.metadata.name.as_deref() == Some(named);
    // An adopted VMI was started by another VM.
    Some(named).filter(|named| named.starts_with(&beginning(&observed.vm)) && !observed.starts.iter().any(is_named))
}

/// Returns the error of a record that was refused after its VMI was created.
pub(super) fn refused(observed: &Observed, vmi: &VirtualMachineInstance) -> Option<SyncError> {
    missing(observed, vmi).and_then(|_| blocked(observed, event::FAILED_CREATE, "Failure while recording the start"))
}

/// Records the start of a VMI that has no record.
pub(super) fn make_up(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    chosen: Option<&Chosen>,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let vm = &*observed.vm;
    let Some(missing) = missing(observed, vmi) else { return Ok(()) };
    if decision.must_wait(&observed.failures, event::FAILED_CREATE, observed.now) {
        return Ok(());
    }
    let record = match chosen.filter(|_| missing == name(vm)) {
        Some(chosen) => create(&recorded(observed), missing, expanded(vm, chosen).as_ref())?,
        // The VM has changed since. The VMI has what its template was, with defaults.
        None => create(&started_as(vm, vmi), missing, None)?,
    };
    decision.push(record);
    Ok(())
}

/// Returns the VM with the spec of its VMI as its template.
fn started_as(vm: &VirtualMachine, vmi: &VirtualMachineInstance) -> VirtualMachine {
    let mut vm = vm.clone();
    vm.metadata.generation =
        vmi.metadata.annotations.as_ref().and_then(|all| all.get(annotation::VM_GENERATION)?.parse().ok());
    (vm.spec.instancetype, vm.spec.preference) = (None, None);
    vm.spec.template.spec = Some(vmi.spec.clone());
    vm
}

/// Returns the template with instance type and preference applied, for a VM that names one of them.
fn expanded(vm: &VirtualMachine, chosen: &Chosen) -> Option<VirtualMachineInstanceSpec> {
    if chosen.is_empty() { None } else { chosen.expand(vm) }
}

/// Replaces the record of a VMI whose VM is expanded: the VMI runs the expanded template.
pub(super) fn replace_expanded(
    expanded: &VirtualMachine,
    vmi: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let name = format!("{}{OF_EXPANDED}", name(expanded));
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
