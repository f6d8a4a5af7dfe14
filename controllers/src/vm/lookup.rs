//! The lookup of the instance type or preference that a VM names.

use std::sync::Arc;

use api::{
    VirtualMachine,
    instancetype::{
        matcher::{MatchedKind, Matcher, Role, Source, source, status_ref},
        revision,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::SyncError;
use crate::resources::{
    instancetype_revisions::{InstancetypeRevision, is_left},
    instancetypes::CachedInstancetype,
};

/// The instance type or preference of a VM, as found in the caches.
#[derive(Clone, Debug, Default)]
pub(crate) enum Lookup {
    /// The VM names nothing.
    #[default]
    Unnamed,
    /// A stored copy.
    Revision(Arc<InstancetypeRevision>),
    /// The object, and its stored copy, if any: that of the VM, or of a former VM of its name.
    Object(Arc<CachedInstancetype>, Option<Arc<InstancetypeRevision>>),
    /// It does not exist, with the message.
    Missing(String),
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
            None => match origin(vm, role, &name, object_named) {
                Some(object) => Lookup::Object(object, None),
                None => Lookup::Missing(format!("controllerrevisions.apps \"{name}\" not found")),
            },
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

/// Returns the object from which a missing copy of the VM was made, if it is still the same.
fn origin(
    vm: &VirtualMachine,
    role: Role,
    copy: &str,
    object_named: impl Fn(MatchedKind, &str) -> Option<Arc<CachedInstancetype>>,
) -> Option<Arc<CachedInstancetype>> {
    let matcher = Matcher::of(vm, role).filter(|matcher| matcher.revision_name.is_empty())?;
    let kind = matcher.matched_kind(role, status_ref(vm, role)).ok()?;
    let object = object_named(kind, &matcher.name)?;
    let vm_name = vm.metadata.name.as_deref().unwrap_or_default();
    (revision::name(vm_name, &object.metadata) == copy).then_some(object)
}

impl Lookup {
    /// The object, whole; `None` when the VM names none.
    pub(super) fn object(&self, role: Role) -> Result<Option<Value>, SyncError> {
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
    pub(super) fn taken_name(&self, vm: &VirtualMachine, role: Role) -> Option<&str> {
        let Self::Object(object, Some(copy)) = self else { return None };
        let read = |json: &str| serde_json::from_str::<Value>(json).unwrap_or_default();
        if is_left(&copy.metadata, vm) || revision::is_copy_of(&read(&copy.object), &read(&object.object), role) {
            None
        } else {
            copy.metadata.name.as_deref()
        }
    }

    /// Returns the copy of a former VM that has the name of the copy.
    pub(super) fn left(&self, vm: &VirtualMachine) -> Option<&ObjectMeta> {
        let Self::Object(_, Some(copy)) = self else { return None };
        Some(&copy.metadata).filter(|metadata| is_left(metadata, vm))
    }

    pub(super) fn name(&self) -> &str {
        let metadata = match self {
            Self::Unnamed | Self::Missing(_) => return "",
            Self::Revision(revision) => &revision.metadata,
            Self::Object(object, _) => &object.metadata,
        };
        metadata.name.as_deref().unwrap_or_default()
    }
}

/// Reason of an instance type that cannot be found or used.
const NO_INSTANCETYPE: &str = "FailedFindInstancetype";
/// Reason of a preference that cannot be found or used.
const NO_PREFERENCE: &str = "FailedFindPreference";

/// Returns the error about an instance type or preference that cannot be found or used.
pub(super) fn not_found(role: Role, message: String) -> SyncError {
    let reason = match role {
        Role::Instancetype => NO_INSTANCETYPE,
        Role::Preference => NO_PREFERENCE,
    };
    SyncError::new(reason, message)
}

/// Returns the message of the event about an instance type or preference that prevents the start.
pub(super) fn event_message(error: &SyncError) -> String {
    let context = match error.reason.as_str() {
        NO_INSTANCETYPE => "cannot use the instance type that the VM names",
        NO_PREFERENCE => "cannot use the preference that the VM names",
        _ => "error encountered while storing instancetype.kubevirt.io controllerRevisions",
    };
    format!("{context}: {}", error.message)
}
