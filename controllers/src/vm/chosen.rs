//! The specs of instance type and preference of a VM, and their application to its template and VMI.

use admission::defaults::DefaultNetworkError;
use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    constants::annotation,
    instancetype::{
        Conflicts, VirtualMachineInstancetypeSpec, VirtualMachinePreferenceSpec, apply, expand,
        matcher::{MatchedKind, Matcher, Role, status_ref},
        revision,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    Observed, SyncError,
    lookup::{Lookup, not_found},
};

/// The specs of what a VM names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Chosen {
    pub(super) instancetype: Option<VirtualMachineInstancetypeSpec>,
    pub(super) preference: Option<VirtualMachinePreferenceSpec>,
}

/// The error of an instance type or preference that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ApplyError {
    /// Default devices cannot be added.
    #[error(transparent)]
    Defaults(#[from] DefaultNetworkError),
    /// The VMI sets fields of the instance type.
    #[error("Failed to apply instancetype: VMI conflicts with instancetype spec in fields: [{0}]")]
    Conflict(Conflicts),
}

/// Parses the instance type and preference of a VM.
pub(super) fn chosen(observed: &Observed) -> Result<Chosen, SyncError> {
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

impl Chosen {
    /// Returns true if the VM names neither instance type nor preference.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
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
            admission::defaults::attach(&mut vmi.spec, config)?;
        }
        Ok(())
    }

    /// Applies both to a new VMI of the VM.
    pub(super) fn apply(&self, vm: &VirtualMachine, vmi: &mut VirtualMachineInstance) -> Result<(), ApplyError> {
        let (spec, metadata) = (&mut vmi.spec, &mut vmi.metadata);
        apply("spec", self.instancetype.as_ref(), self.preference.as_ref(), spec, metadata)
            .map_err(ApplyError::Conflict)?;
        for role in Role::ALL {
            let Some(matcher) = Matcher::of(vm, role) else { continue };
            let Ok(kind) = matcher.matched_kind(role, status_ref(vm, role)) else { continue };
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
