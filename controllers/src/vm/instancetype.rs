//! The instance type and preference of a VM: lookup, copies, expansion.
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

use std::{sync::Arc, time::Duration};

use admission::kinds::instancetype::expanded;
use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::{ClusterConfig, ReferencePolicy},
    constants::{annotation, event},
    instancetype::{
        VirtualMachineInstancetypeSpec, VirtualMachinePreferenceSpec, apply, expand,
        matcher::{MatchedKind, Matcher, Role, Source, source, status_ref},
        revision,
    },
    vm::status::{ControllerRevisionRef, InstancetypeStatusRef},
};
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use serde_json::Value;

use super::{
    Observed, SyncError,
    restart::{self, Template},
    revision as start_record,
};
use crate::{
    resources::instancetypes::{CachedInstancetype, InstancetypeRevision},
    runtime::{Decision, Effect, Event, Kind},
};

/// Wait until the name of a copy that is taken is tried again. No watch reports that it is free.
const TAKEN_RETRY: Duration = Duration::from_secs(60);

/// The instance type or preference of a VM, as found in the caches.
#[derive(Clone, Debug, Default)]
pub(super) enum Lookup {
    /// The VM names nothing.
    #[default]
    Unnamed,
    /// A stored copy.
    Revision(Arc<InstancetypeRevision>),
    /// The object, and its stored copy, if any.
    Object(Arc<CachedInstancetype>, Option<Arc<InstancetypeRevision>>),
    /// It does not exist, with the message.
    Missing(String),
}

/// The specs of what a VM names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Chosen {
    instancetype: Option<VirtualMachineInstancetypeSpec>,
    preference: Option<VirtualMachinePreferenceSpec>,
}

/// The error of an instance type or preference that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ApplyError {
    /// Default devices cannot be added.
    #[error("{0}")]
    Defaults(String),
    /// The VMI sets fields of the instance type.
    #[error("Failed to apply instancetype: VMI conflicts with instancetype spec in fields: [{0}]")]
    Conflict(String),
}

/// Looks up the instance type or preference of a VM.
pub(super) fn look_up(
    vm: &VirtualMachine,
    role: Role,
    revision_named: impl Fn(&str) -> Option<Arc<InstancetypeRevision>>,
    object_named: impl Fn(MatchedKind, &str) -> Option<Arc<CachedInstancetype>>,
) -> Lookup {
    match source(vm, role) {
        None => Lookup::Unnamed,
        Some(Err(error)) => Lookup::Missing(error.to_string()),
        Some(Ok(Source::Revision(name))) => match revision_named(&name) {
            Some(revision) => Lookup::Revision(revision),
            None => Lookup::Missing(format!("controllerrevisions.apps \"{name}\" not found")),
        },
        Some(Ok(Source::Object(kind, name))) => match object_named(kind, &name) {
            Some(object) => {
                let vm_name = vm.metadata.name.as_deref().unwrap_or_default();
                let kept = revision_named(&revision::name(vm_name, &object.metadata));
                Lookup::Object(object, kept)
            }
            None => Lookup::Missing(format!("{}.{} \"{name}\" not found", kind.plural(), api::instancetype::GROUP)),
        },
    }
}

impl Lookup {
    /// The object, whole; `None` when the VM names none.
    fn object(&self, role: Role) -> Result<Option<Value>, SyncError> {
        let (json, of) = match self {
            Self::Unnamed => return Ok(None),
            Self::Missing(message) => return Err(not_found(role, message.clone())),
            Self::Revision(revision) => (&revision.object, &revision.metadata),
            Self::Object(object, _) => (&object.object, &object.metadata),
        };
        serde_json::from_str(json).map(Some).map_err(|error| {
            not_found(role, format!("cannot read {}: {error}", of.name.as_deref().unwrap_or_default()))
        })
    }

    /// Returns the name of the copy from which the VM is started.
    pub(super) fn copy_name(&self, vm: &VirtualMachine) -> Option<String> {
        match self {
            Self::Unnamed | Self::Missing(_) => None,
            Self::Revision(revision) => revision.metadata.name.clone(),
            Self::Object(object, _) => {
                Some(revision::name(vm.metadata.name.as_deref().unwrap_or_default(), &object.metadata))
            }
        }
    }

    /// Returns the name of an object that has the name of the copy but another content.
    fn taken_name(&self, role: Role) -> Option<&str> {
        let Self::Object(object, Some(copy)) = self else { return None };
        let read = |json: &str| serde_json::from_str::<Value>(json).unwrap_or_default();
        if revision::is_copy_of(&read(&copy.object), &read(&object.object), role) {
            None
        } else {
            copy.metadata.name.as_deref()
        }
    }

    fn name(&self) -> &str {
        let metadata = match self {
            Self::Unnamed | Self::Missing(_) => return "",
            Self::Revision(revision) => &revision.metadata,
            Self::Object(object, _) => &object.metadata,
        };
        metadata.name.as_deref().unwrap_or_default()
    }
}

/// Returns the error about a copy whose name is taken.
fn taken(name: &str) -> String {
    format!("found existing ControllerRevision with unexpected data: {name}")
}

fn not_found(role: Role, message: String) -> SyncError {
    let reason = match role {
        Role::Instancetype => "FailedFindInstancetype",
        Role::Preference => "FailedFindPreference",
    };
    SyncError::new(reason, message)
}

/// Parses the instance type and preference of a VM.
pub(super) fn chosen(observed: &Observed<'_>) -> Result<Chosen, SyncError> {
    let unreadable = |role: Role, lookup: &Lookup, error: revision::ContentError| {
        not_found(role, format!("cannot use {}: {error}", lookup.name()))
    };
    let (class, preference) = (&observed.instancetype, &observed.preference);
    let instancetype = class.object(Role::Instancetype)?;
    let instancetype = instancetype.map(|object| revision::instancetype(&object)).transpose();
    let preferred = preference.object(Role::Preference)?;
    let preferred = preferred.map(|object| revision::preference(&object)).transpose();
    Ok(Chosen {
        instancetype: instancetype.map_err(|error| unreadable(Role::Instancetype, class, error))?,
        preference: preferred.map_err(|error| unreadable(Role::Preference, preference, error))?,
    })
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
    observed: &Observed<'_>,
    owned: Option<&VirtualMachineInstance>,
    chosen: &Chosen,
    decision: &mut Decision,
) -> Result<Result<Settled, SyncError>, serde_json::Error> {
    let vm = observed.vm;
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
    observed: &Observed<'_>,
    role: Role,
    lookup: &Lookup,
    decision: &mut Decision,
) -> Result<Option<InstancetypeStatusRef>, serde_json::Error> {
    let vm = observed.vm;
    let Some(matcher) = Matcher::of(vm, role) else { return Ok(None) };
    let mut kept = matcher.status(status_ref(vm, role));
    if let Lookup::Object(object, copy) = lookup {
        let name = revision::name(vm.metadata.name.as_deref().unwrap_or_default(), &object.metadata);
        if copy.is_none() {
            let failure = observed.failure.filter(|failure| failure.reason == event::FAILED_CREATE);
            if let Some(failure) = failure.filter(|failure| failure.blocks(observed.now)) {
                decision.wake(failure.remaining(observed.now));
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
    observed: &Observed<'_>,
    owned: Option<&VirtualMachineInstance>,
    chosen: &Chosen,
    decision: &mut Decision,
) -> Result<Result<Settled, SyncError>, serde_json::Error> {
    let vm = observed.vm;
    let (class, preference) = (chosen.instancetype.as_ref(), chosen.preference.as_ref());
    let wanted = match expanded(vm, class, preference, observed.config) {
        Ok(wanted) => wanted,
        Err(error) => return Ok(Err(SyncError::new(event::FAILED_CREATE, error.to_string()))),
    };
    // The VMI runs the present template as much as before.
    let template = chosen.template(observed);
    if let Some(vmi) = owned
        && let Some(started) = restart::started(observed, vmi)
        && template.is_some_and(|template| template.is_current(Some(started)))
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

impl Chosen {
    /// Returns true if the VM names neither instance type nor preference.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the present template. `None`: it cannot be expanded.
    pub(super) fn template(&self, observed: &Observed<'_>) -> Option<Template> {
        Some(Template::of(observed, self.expand(observed.vm)?))
    }

    /// Returns the spec of the template with instance type and preference applied. `None`: they cannot be applied.
    pub(super) fn expand(&self, vm: &VirtualMachine) -> Option<VirtualMachineInstanceSpec> {
        let mut spec = vm.spec.template.spec.clone()?;
        if !self.is_empty() {
            let mut metadata = ObjectMeta::default();
            let (class, preference) = (self.instancetype.as_ref(), self.preference.as_ref());
            apply(expand::TEMPLATE, class, preference, &mut spec, &mut metadata).ok()?;
        }
        Some(spec)
    }

    /// Decides on automatically attached devices of a new VMI, and adds disks and network, so that preferences apply to them.
    pub(super) fn prepare(&self, vmi: &mut VirtualMachineInstance, config: &ClusterConfig) -> Result<(), ApplyError> {
        expand::prepare(self.preference.as_ref(), &mut vmi.spec);
        if self.preference.is_some() {
            admission::defaults::attach(&mut vmi.spec, config)
                .map_err(|error| ApplyError::Defaults(error.to_string()))?;
        }
        Ok(())
    }

    /// Applies both to a new VMI of the VM.
    pub(super) fn apply(&self, vm: &VirtualMachine, vmi: &mut VirtualMachineInstance) -> Result<(), ApplyError> {
        let (spec, metadata) = (&mut vmi.spec, &mut vmi.metadata);
        apply("spec", self.instancetype.as_ref(), self.preference.as_ref(), spec, metadata)
            .map_err(|conflicts| ApplyError::Conflict(conflicts.to_string()))?;
        for role in Role::ALL {
            let Some(matcher) = Matcher::of(vm, role) else { continue };
            let Ok(kind) = role.kind(&matcher.kind) else { continue };
            let key = match kind {
                MatchedKind::Instancetype => annotation::INSTANCETYPE,
                MatchedKind::ClusterInstancetype => annotation::CLUSTER_INSTANCETYPE,
                MatchedKind::Preference => annotation::PREFERENCE,
                MatchedKind::ClusterPreference => annotation::CLUSTER_PREFERENCE,
            };
            metadata.annotations.get_or_insert_default().insert(key.to_owned(), matcher.name);
        }
        Ok(())
    }
}
