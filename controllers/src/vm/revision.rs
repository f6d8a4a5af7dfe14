//! What a VM was started from, kept for whoever compares: a ControllerRevision for each VM that has been started.

use api::{VirtualMachine, constants::event};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use serde_json::json;

use super::{Observed, instancetype::Lookup};
use crate::runtime::{Decision, Effect, Kind, Note};

/// Label of these revisions.
pub const LABEL: &str = "ferrovirt.io/start-revision";

/// Name of what a VM is started from at its present generation.
pub(super) fn name(vm: &VirtualMachine) -> String {
    let uid = vm.metadata.uid.as_deref().unwrap_or_default();
    format!("revision-start-vm-{uid}-{}", vm.metadata.generation.unwrap_or(0))
}

/// Keeps what the VM is started from now, in place of what it was started from before.
pub(super) fn keep(observed: &Observed<'_>, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let vm = observed.vm;
    let name = name(vm);
    let is_present = |revision: &ObjectMeta| revision.name.as_deref() == Some(name.as_str());
    for former in observed.starts.iter().filter(|revision| !is_present(&revision.metadata)) {
        decision.push(Effect::delete(Kind::ControllerRevision, &former.metadata));
    }
    if observed.starts.iter().any(|revision| is_present(&revision.metadata)) {
        return Ok(());
    }
    let note = Note::warning(
        Kind::VirtualMachine.reference(&vm.metadata),
        event::FAILED_CREATE,
        "Error creating virtual machine instance: {error}",
    );
    // The name says what it holds: one that is there already, from another installation, say, is as good.
    let effect =
        Effect::create(Kind::ControllerRevision, vm.metadata.namespace.as_deref(), &revision(observed, &name)?)?;
    decision.push(effect.or_existing().on_failure(note));
    Ok(())
}

fn revision(observed: &Observed<'_>, name: &str) -> Result<ControllerRevision, serde_json::Error> {
    let vm = observed.vm;
    let mut spec = vm.spec.clone();
    // Instance type and preference as they are now, whatever becomes of the objects.
    let copy = |lookup: &Lookup| lookup.copy_name(vm);
    if let Some(matcher) = &mut spec.instancetype {
        matcher.revision_name = copy(&observed.instancetype).or(matcher.revision_name.take());
    }
    if let Some(matcher) = &mut spec.preference {
        matcher.revision_name = copy(&observed.preference).or(matcher.revision_name.take());
    }
    Ok(ControllerRevision {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: vm.metadata.namespace.clone(),
            labels: Some([(LABEL.to_owned(), String::new())].into()),
            owner_references: Some(vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(json!({"spec": serde_json::to_value(spec)?}))),
        revision: vm.metadata.generation.unwrap_or(0),
    })
}
