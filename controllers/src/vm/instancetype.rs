//! The references of a VM to instance type and preference: copies, expansion.
//!
//! With policy [`ReferencePolicy::Reference`] the VM keeps its references, and a ControllerRevision holds a copy of each object
//! as it was when the VM named it first. With [`ReferencePolicy::Expand`] and [`ReferencePolicy::ExpandAll`] both are written
//! into the VM, which names nothing any more.
//!
//! ```text
//!            reference                                expand
//! VM names ─────────────> copy kept, named in status    │
//!    └──────────────────────────────────────────────────┴────> VM that names nothing
//! ```

use std::time::Duration;

use admission::kinds::instancetype::expanded;
use api::{
    VirtualMachine, VirtualMachineInstance,
    config::ReferencePolicy,
    constants::event,
    instancetype::{
        matcher::{Matcher, Role, status_ref},
        revision,
    },
    vm::status::{ControllerRevisionRef, InstancetypeStatusRef},
};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};

use super::{Observed, SyncError, chosen::Chosen, lookup::Lookup, restart, revision as start_record, start};
use crate::{
    resources::instancetypes::CachedInstancetype,
    runtime::{Decision, Effect, Event, Kind},
};

/// Wait until the name of a copy that is taken is tried again. No watch reports that it is free.
const TAKEN_RETRY: Duration = Duration::from_secs(60);

/// Returns the error about a copy whose name is taken.
fn taken(name: &str) -> String {
    format!("found existing ControllerRevision with unexpected data: {name}")
}

/// The state of a VM's references.
pub(super) enum Settled {
    /// They are up to date, or will be after the effects.
    Kept,
    /// The VM is being changed. The next reconcile continues.
    Expanding,
}

/// Stores copies of instance type and preference, or writes them into the VM.
pub(super) fn settle(
    observed: &Observed,
    owned: Option<&VirtualMachineInstance>,
    chosen: &Chosen,
    decision: &mut Decision,
) -> Result<Result<Settled, SyncError>, serde_json::Error> {
    let vm = &*observed.vm;
    let names_something = vm.spec.instancetype.is_some() || vm.spec.preference.is_some();
    let has_copies = Role::ALL
        .into_iter()
        .any(|role| status_ref(vm, role).is_some_and(|known| known.controller_revision_ref.is_some()));
    let expands = match observed.config.reference_policy {
        ReferencePolicy::Reference => false,
        ReferencePolicy::Expand => !has_copies,
        ReferencePolicy::ExpandAll => true,
    };
    if names_something && expands {
        return expand_vm(observed, owned, chosen, decision);
    }
    let lookups = [(Role::Instancetype, &observed.instancetype), (Role::Preference, &observed.preference)];
    if let Some(name) = lookups.iter().find_map(|(role, lookup)| lookup.taken_name(*role)) {
        decision.wake(TAKEN_RETRY);
        return Ok(Err(SyncError::new(event::FAILED_CREATE, taken(name))));
    }
    let mut wanted = vm.clone();
    for (role, lookup) in lookups {
        let kept = keep(observed, role, lookup, decision)?;
        match role {
            _ if kept.as_ref() == status_ref(vm, role) => {}
            Role::Instancetype => wanted.status.get_or_insert_default().instancetype_ref = kept,
            Role::Preference => wanted.status.get_or_insert_default().preference_ref = kept,
        }
    }
    decision.effects.extend(Effect::change(Kind::VirtualMachine, vm, &wanted, Some("status"))?);
    Ok(Ok(Settled::Kept))
}

/// Returns the status of one reference of the VM, and creates the copy that it names.
fn keep(
    observed: &Observed,
    role: Role,
    lookup: &Lookup,
    decision: &mut Decision,
) -> Result<Option<InstancetypeStatusRef>, serde_json::Error> {
    let vm = &*observed.vm;
    let Some(matcher) = Matcher::of(vm, role) else { return Ok(None) };
    let mut kept = matcher.status(status_ref(vm, role));
    if let Lookup::Object(object, copy) = lookup {
        let name = revision::name(vm.metadata.name.as_deref().unwrap_or_default(), &object.metadata);
        if copy.is_none() {
            if decision.must_wait(observed.failure.as_ref(), event::FAILED_CREATE, observed.now) {
                return Ok(status_ref(vm, role).cloned());
            }
            let copy = copy_of(vm, &name, object)?;
            let effect = Effect::create(Kind::ControllerRevision, vm.metadata.namespace.as_deref(), &copy)?;
            // A copy would be in the cache by its labels, so an existing object is something else.
            decision.push(effect.unless_exists(taken(&name)).on_failure(Event::warning(
                Kind::VirtualMachine.reference(&vm.metadata),
                event::FAILED_CREATE,
                "error encountered while storing instancetype.kubevirt.io controllerRevisions: {error}",
            )));
        }
        kept.controller_revision_ref = Some(ControllerRevisionRef { name: Some(name) });
    }
    Ok(Some(kept))
}

fn copy_of(
    vm: &VirtualMachine,
    name: &str,
    object: &CachedInstancetype,
) -> Result<ControllerRevision, serde_json::Error> {
    Ok(ControllerRevision {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: vm.metadata.namespace.clone(),
            labels: Some(revision::labels(object.kind, &object.metadata)),
            owner_references: Some(vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(serde_json::from_str(&object.object)?)),
        revision: 0,
    })
}

fn expand_vm(
    observed: &Observed,
    owned: Option<&VirtualMachineInstance>,
    chosen: &Chosen,
    decision: &mut Decision,
) -> Result<Result<Settled, SyncError>, serde_json::Error> {
    let vm = &*observed.vm;
    let (class, preference) = (chosen.instancetype.as_ref(), chosen.preference.as_ref());
    let wanted = match expanded(vm, class, preference, &observed.config) {
        Ok(wanted) => wanted,
        Err(error) => return Ok(Err(SyncError::new(event::FAILED_CREATE, error.to_string()))),
    };
    // The VMI runs the present template as much as before.
    let template = start::template(observed, chosen);
    if let Some(vmi) = owned
        && let Some(started) = restart::started(observed, vmi)
        && template.is_some_and(|template| template.is_current(Some(started), vmi))
    {
        start_record::replace_expanded(&wanted, vmi, decision)?;
    }
    decision.effects.extend(Effect::change(Kind::VirtualMachine, vm, &wanted, None)?);
    decision.effects.extend(Effect::change(Kind::VirtualMachine, vm, &wanted, Some("status"))?);
    for lookup in [&observed.instancetype, &observed.preference] {
        if observed.config.reference_policy == ReferencePolicy::ExpandAll
            && let Lookup::Revision(revision) = lookup
            && api::owner::is_controlled_by(&revision.metadata, vm)
        {
            decision.push(Effect::delete(Kind::ControllerRevision, &revision.metadata));
        }
    }
    Ok(Ok(Settled::Expanding))
}
