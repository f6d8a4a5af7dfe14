//! Differences between a running VMI and its VM's template.
//!
//! The record of the start (see [`super::revision`]) holds the template at that time, with instance type and preference
//! applied. It is compared by group. A running VMI takes over a changed placement (see [`super::live`]), sockets and memory (see
//! [`super::resize`]) unless the cluster's rollout strategy leaves all changes to the next start, hot-pluggable volumes
//! (see [`super::hotplug`]), interfaces (see [`super::nics`]), and other claims if their data shall move (see
//! [`crate::volume_migration`]). A change of any other group requires a restart, unless a start would give the VMI what it has.

use std::collections::BTreeMap;

use api::{
    Condition, VirtualMachineInstance, VirtualMachineInstanceSpec,
    config::RolloutStrategy,
    constants::{annotation, condition},
};
use k8s_openapi::{
    api::core::v1::{Affinity, Toleration},
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::{
    Observed, SyncError, hotplug,
    hotplug::Storage,
    nics::{self, Nics},
    resize::{self, Size},
};
use crate::{
    resources::start_revisions::{Group, SpecDigests, TemplateDigests},
    volume_migration::{self, Step},
};

/// Fields that select the node of a VMI.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Placement {
    node_selector: BTreeMap<String, String>,
    affinity: Option<Affinity>,
    tolerations: Vec<Toleration>,
}

impl Placement {
    fn of(spec: &VirtualMachineInstanceSpec) -> Self {
        Self {
            node_selector: spec.node_selector.clone(),
            affinity: spec.affinity.clone(),
            tolerations: spec.tolerations.clone(),
        }
    }

    /// Returns the error of a placement that changes during a migration, whose target was chosen by the former one.
    pub(super) fn refused_while_migrating(&self, spec: &VirtualMachineInstanceSpec) -> Option<SyncError> {
        if self.node_selector != spec.node_selector || self.affinity != spec.affinity {
            let message = "Error encountered while handling node affinity change request: \
                           Node affinity should not be changed during VMI migration";
            return Some(SyncError::new("AffinityChangeError", message));
        }
        let message = "Error encountered while handling tolerations change request: \
                       tolerations should not be changed during VMI migration";
        (self.tolerations != spec.tolerations).then(|| SyncError::new("TolerationsChangeError", message))
    }

    /// Writes the placement into a spec.
    pub(super) fn put(&self, spec: &mut VirtualMachineInstanceSpec) {
        spec.node_selector.clone_from(&self.node_selector);
        spec.affinity.clone_from(&self.affinity);
        spec.tolerations.clone_from(&self.tolerations);
    }
}

/// The present template of a VM, as it is compared with the template at the start.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Template {
    digests: TemplateDigests,
    pub(super) placement: Placement,
    pub(super) storage: Storage,
    pub(super) size: Size,
    pub(super) nics: Nics,
    /// Groups of which the running VMI has what a start now would give it, if anything requires a restart otherwise.
    in_effect: Vec<Group>,
}

impl Template {
    /// Returns the template of a VM whose spec with instance type and preference applied is `expanded`.
    pub(super) fn of(observed: &Observed<'_>, expanded: VirtualMachineInstanceSpec) -> Self {
        let (placement, storage, size) = (Placement::of(&expanded), Storage::of(&expanded), Size::of(&expanded));
        let nics = Nics::of(&expanded);
        let copies = [&observed.instancetype, &observed.preference].map(|lookup| lookup.copy_name(observed.vm));
        let digests = TemplateDigests::of(&observed.vm.spec.template, copies, Some(expanded));
        Self { digests, placement, storage, size, nics, in_effect: Vec::new() }
    }

    /// Finds changed groups of which the VMI has the values already: a client that writes an object back writes into the template
    /// what the platform has filled in. `spec` returns the spec of a start.
    pub(super) fn find_in_effect(
        &mut self,
        observed: &Observed<'_>,
        vmi: &VirtualMachineInstance,
        spec: impl FnOnce() -> Option<VirtualMachineInstanceSpec>,
    ) {
        let started = started(observed, vmi);
        if self.lacks_only_followed(started) {
            return;
        }
        let Some(wanted) = spec().map(SpecDigests::of) else { return };
        let different = wanted.differences(&SpecDigests::of(vmi.spec.clone()));
        self.in_effect = self.changes(started).into_iter().filter(|group| !different.contains(group)).collect();
    }

    /// Returns the groups that differ from the start. None differ if the start is not known, or if no user changed anything:
    /// the record may hold what a former version of this program made of the same template.
    fn changes(&self, started: Option<&TemplateDigests>) -> Vec<Group> {
        let started = started.filter(|started| !started.is_written_alike(&self.digests));
        let present = self.digests.expanded.as_ref();
        let started = started.and_then(|started| started.expanded.as_ref());
        started.zip(present).map(|(started, present)| started.differences(present)).unwrap_or_default()
    }

    /// Returns what has to become of the interfaces.
    pub(super) fn nics(&self, started: Option<&TemplateDigests>, vmi: &VirtualMachineInstance) -> nics::Changes {
        nics::compare(&self.nics, vmi, started.is_none_or(|started| started.is_written_alike(&self.digests)))
    }

    /// Returns true if a VMI that was started from `started` lacks no change but those that it follows.
    pub(super) fn is_current(&self, started: Option<&TemplateDigests>, vmi: &VirtualMachineInstance) -> bool {
        self.nics(started, vmi).restart.is_none() && self.lacks_only_followed(started)
    }

    fn lacks_only_followed(&self, started: Option<&TemplateDigests>) -> bool {
        let is_followed = |group: &Group| match group {
            // Claims are compared with the VMI itself, which can have moved.
            Group::Placement | Group::Networks | Group::Claims => true,
            // A size that is no longer named is that of the next start.
            Group::Sockets => self.size.sockets.is_some(),
            Group::Guest => self.size.guest.is_some(),
            Group::MaxSockets
            | Group::Cpu
            | Group::CpuResources
            | Group::MaxGuest
            | Group::Memory
            | Group::MemoryResources
            | Group::Volumes
            | Group::Rest => false,
        };
        self.changes(started).iter().all(|group| is_followed(group) || self.in_effect.contains(group))
    }
}

/// Returns the template from which the VMI was started. `None`: no record of the start is known.
pub(super) fn started<'a>(observed: &'a Observed<'_>, vmi: &VirtualMachineInstance) -> Option<&'a TemplateDigests> {
    let name = vmi.status.as_ref()?.virtual_machine_revision_name.as_deref()?;
    let record = observed.starts.iter().find(|record| record.metadata.name.as_deref() == Some(name))?;
    record.template.as_ref()
}

/// Returns the generation of the VM that its VMI reflects. Changes outside the template are reflected at once.
pub(super) fn observed_generation(
    observed: &Observed<'_>,
    vmi: &VirtualMachineInstance,
    template: Option<&Template>,
) -> Option<i64> {
    let vm = observed.vm;
    let known = vmi.metadata.annotations.as_ref()?.get(annotation::VM_GENERATION)?.parse().ok()?;
    let Some(started) = started(observed, vmi) else { return Some(known) };
    let is_same = match template {
        Some(template) => started.is_same(&template.digests),
        None => started.is_same(&TemplateDigests::of(&vm.spec.template, [None, None], None)),
    };
    if is_same { vm.metadata.generation } else { Some(known) }
}

/// Returns true if changes are applied to running VMIs.
pub(super) fn is_live(observed: &Observed<'_>) -> bool {
    observed.config.vm_rollout_strategy == RolloutStrategy::LiveUpdate
}

/// Decides about the claims of the VMI.
pub(super) fn volume_step(observed: &Observed<'_>, instance: &VirtualMachineInstance, template: &Template) -> Step {
    volume_migration::decide(&volume_migration::Observed {
        vmi: instance,
        template: template.storage.volumes(),
        migrates: is_live(observed) && volume_migration::is_wanted(&observed.vm.spec),
        claims: observed.claims,
        in_migration: observed.is_migrated || instance.is_handed_off(),
    })
}

/// Returns the condition that requires a restart. There is none while the template cannot be expanded.
pub(super) fn condition(
    observed: &Observed<'_>,
    template: Option<&Template>,
    vmi: Option<&VirtualMachineInstance>,
    now: &Time,
) -> Option<Condition> {
    let is_live = is_live(observed);
    let vmi = vmi.filter(|vmi| !vmi.is_final() && !vmi.is_deleting())?;
    let template = template?;
    let started = started(observed, vmi)?;
    // A live update changes the placement and the size of the VMI, so that they are compared with the VMI itself.
    let is_placed = is_live || (template.placement == Placement::of(&vmi.spec) && template.size.is_of(&vmi.spec));
    // Hot-pluggable volumes are compared with the VMI, which follows them.
    let storage = &template.storage;
    let is_plugged = if hotplug::is_on(observed.config) {
        storage.is_plugged_as_written(vmi)
    } else {
        storage.has_same_hotpluggable_volumes(vmi)
    };
    let required = |message: &str| Some(Condition::new(condition::RESTART_REQUIRED, true, "", message, now));
    let generic = "a non-live-updatable field was changed in the template spec";
    if !template.lacks_only_followed(Some(started)) || !is_placed || !is_plugged {
        return required(generic);
    }
    let step = volume_step(observed, vmi, template);
    if let Step::Restart(reason) = &step {
        return required(reason);
    }
    let moves = is_live && volume_migration::is_wanted(&observed.vm.spec);
    if !moves && step == Step::Same && !volume_migration::has_same_claims(storage.volumes(), vmi) {
        return required(generic);
    }
    if let Some(reason) = template.nics(Some(started), vmi).restart {
        return required(&format!("{generic}: {reason}"));
    }
    if is_live { required(&resize::decide(observed.config, &template.size, vmi).restart()?) } else { None }
}
