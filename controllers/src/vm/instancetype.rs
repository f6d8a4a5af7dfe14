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
        matcher::{MatchedKind, Matcher, Role, status_ref},
        revision,
    },
    vm::status::{ControllerRevisionRef, InstancetypeStatusRef, VirtualMachineStatus},
};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};

use super::{Observed, SyncError, chosen::Chosen, lookup::Lookup, restart, revision as start_record, start};
use crate::{
    resources::instancetype_revisions::InstancetypeRevision,
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
    /// They are up to date after the effects, once the status of the VM says so.
    Kept(Box<References>),
    /// The VM is being changed. The next reconcile continues.
    Expanding,
}

/// The status of the references of a VM. It waits for a write of the status that has other causes as well.
#[derive(Default)]
pub(super) struct References {
    instancetype: Option<InstancetypeStatusRef>,
    preference: Option<InstancetypeStatusRef>,
    /// Deletions of copies that the present status names.
    replaced: Vec<Effect>,
}

impl References {
    /// Writes the references into a status.
    pub(super) fn put(&self, status: &mut VirtualMachineStatus) {
        status.instancetype_ref.clone_from(&self.instancetype);
        status.preference_ref.clone_from(&self.preference);
    }

    /// Returns the deletions of the copies that a status with these references names no longer.
    pub(super) fn into_deletions(self) -> Vec<Effect> {
        self.replaced
    }
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
    if let Some(name) = lookups.iter().find_map(|(role, lookup)| lookup.taken_name(vm, *role)) {
        decision.wake(TAKEN_RETRY);
        return Ok(Err(SyncError::new(event::FAILED_CREATE, taken(name))));
    }
    let mut references = References::default();
    for (role, lookup) in lookups {
        let kept = keep(observed, role, lookup, decision)?;
        if let Lookup::Revision(copy) = lookup
            && let Some(kept) = kept.as_ref().and_then(|kept| kept.controller_revision_ref.as_ref())
            && kept.name != copy.metadata.name
        {
            references.replaced.push(Effect::delete(Kind::ControllerRevision, &copy.metadata));
        }
        match role {
            Role::Instancetype => references.instancetype = kept,
            Role::Preference => references.preference = kept,
        }
    }
    Ok(Ok(Settled::Kept(Box::new(references))))
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
    let left = lookup.left(vm);
    let (copy, context) = match lookup {
        Lookup::Object(object, copy) => {
            let name = revision::name(vm.metadata.name.as_deref().unwrap_or_default(), &object.metadata);
            let is_missing = copy.is_none() || left.is_some();
            let missing = is_missing.then(|| copy_of(vm, object.kind, &object.metadata, &object.object));
            kept.controller_revision_ref = Some(ControllerRevisionRef { name: Some(name) });
            (missing.transpose()?, "storing")
        }
        Lookup::Revision(copy) if matcher.revision_name.is_empty() => (upgraded(vm, copy)?, "upgrading"),
        Lookup::Revision(_) | Lookup::Unnamed | Lookup::Missing(_) => (None, ""),
    };
    let Some(copy) = copy else { return Ok(Some(kept)) };
    if decision.must_wait(&observed.failures, event::FAILED_CREATE, observed.now) {
        return Ok(status_ref(vm, role).cloned());
    }
    let name = copy.metadata.name.clone().unwrap_or_default();
    let effect = Effect::create(Kind::ControllerRevision, vm.metadata.namespace.as_deref(), &copy)?;
    let effect = match lookup {
        // A copy would be in the cache by its labels, so an existing object is something else.
        Lookup::Object(..) if left.is_none() => effect.unless_exists(taken(&name)),
        // The copy of a former VM may need time to go: no refusal, so that the name is tried again soon.
        Lookup::Object(..) => effect,
        _ => effect.or_existing(),
    };
    let deletion = left.map(|left| Effect::delete(Kind::ControllerRevision, left).refused_as(event::FAILED_CREATE));
    decision.effects.extend(deletion);
    decision.push(effect.on_failure(Event::warning(
        Kind::VirtualMachine.reference(&vm.metadata),
        event::FAILED_CREATE,
        format!("error encountered while {context} instancetype.kubevirt.io controllerRevisions: {{error}}"),
    )));
    kept.controller_revision_ref = Some(ControllerRevisionRef { name: Some(name) });
    Ok(Some(kept))
}

/// Returns the copy that replaces one in a former API version, if the VM owns it. An unreadable one is reported elsewhere.
fn upgraded(vm: &VirtualMachine, copy: &InstancetypeRevision) -> Result<Option<ControllerRevision>, serde_json::Error> {
    let Some(origin) = copy.former.as_ref().filter(|_| api::owner::is_controlled_by(&copy.metadata, vm)) else {
        return Ok(None);
    };
    let object = revision::upgraded(&serde_json::from_str(&copy.object)?, origin.kind, &origin.metadata);
    let renewed = object.ok().map(|object| copy_of(vm, origin.kind, &origin.metadata, &object.to_string()));
    // One that lacks only the label of its version has the name already.
    Ok(renewed.transpose()?.filter(|renewed| renewed.metadata.name != copy.metadata.name))
}

/// Returns the copy of an object, which is `object` as JSON.
fn copy_of(
    vm: &VirtualMachine,
    kind: MatchedKind,
    metadata: &ObjectMeta,
    object: &str,
) -> Result<ControllerRevision, serde_json::Error> {
    Ok(ControllerRevision {
        metadata: ObjectMeta {
            name: Some(revision::name(vm.metadata.name.as_deref().unwrap_or_default(), metadata)),
            namespace: vm.metadata.namespace.clone(),
            labels: Some(revision::labels(kind, metadata)),
            owner_references: Some(vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(serde_json::from_str(object)?)),
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
