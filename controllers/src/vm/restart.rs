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

use serde_json::{Map, Value};

use super::{
    Observed, SyncError, hotplug,
    hotplug::Storage,
    nics::{self, Nics},
    resize::{self, Size},
    revision,
};
use crate::{
    resources::start_revisions::{Group, SpecDigests, TemplateDigests},
    volume_migration::{self, Step},
};

/// Largest number of fields in a message.
const MAX_FIELDS: usize = 4;

/// Fields that select the node of a VMI.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Placement {
    node_selector: BTreeMap<String, String>,
    affinity: Option<Box<Affinity>>,
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
    /// Fields of the spec in which the VMI differs from a start now, of the groups that require a restart.
    differing: Vec<String>,
}

impl Template {
    /// Returns the template of a VM whose spec with instance type and preference applied is `expanded`.
    pub(super) fn of(observed: &Observed, expanded: VirtualMachineInstanceSpec) -> Self {
        let (placement, storage, size) = (Placement::of(&expanded), Storage::of(&expanded), Size::of(&expanded));
        let nics = Nics::of(&expanded);
        let copies = [&observed.instancetype, &observed.preference].map(|lookup| lookup.copy_name(&observed.vm));
        let mut digests = TemplateDigests::of(&observed.vm.spec.template, copies, None);
        // Nothing else is compared with a start from a template that users wrote alike.
        let started = observed.instance.as_deref().and_then(|vmi| started(observed, vmi));
        if started.is_some_and(|started| !started.is_written_alike(&digests)) {
            digests.expanded = Some(SpecDigests::of(expanded));
        }
        Self { digests, placement, storage, size, nics, in_effect: Vec::new(), differing: Vec::new() }
    }

    /// Finds changed groups of which the VMI has the values already: a client that writes an object back writes into the template
    /// what the platform has filled in. `spec` returns the spec of a start.
    pub(super) fn find_in_effect(
        &mut self,
        observed: &Observed,
        vmi: &VirtualMachineInstance,
        spec: impl FnOnce() -> Option<VirtualMachineInstanceSpec>,
    ) {
        let started = started(observed, vmi);
        if self.lacks_only_followed(started) {
            return;
        }
        let Some(spec) = spec() else { return };
        let fields = differing_fields(&spec, &vmi.spec);
        let different = SpecDigests::of(spec).differences(&SpecDigests::of(vmi.spec.clone()));
        let changes = self.changes(started);
        self.in_effect = changes.iter().copied().filter(|group| !different.contains(group)).collect();
        let requires =
            |group: &Group| changes.contains(group) && !self.is_followed(*group) && different.contains(group);
        self.differing = fields.into_iter().filter(|field| requires(&group_of(field))).collect();
    }

    /// Returns the groups that differ from the start. None differ if the start is not known, or if no user changed anything:
    /// the record may hold what a former version of this program made of the same template.
    fn changes(&self, started: Option<&TemplateDigests>) -> Vec<Group> {
        let started = started.filter(|started| !started.is_written_alike(&self.digests));
        let present = self.digests.expanded.as_ref();
        let started = started.and_then(|started| started.expanded.as_ref());
        started.zip(present).map(|(started, present)| started.differences(present)).unwrap_or_default()
    }

    /// Returns the fields of placement and size in which a VMI differs.
    fn unplaced(&self, spec: &VirtualMachineInstanceSpec) -> Vec<&'static str> {
        let (wanted, present) = (&self.placement, Placement::of(spec));
        let placement = [
            ("nodeSelector", wanted.node_selector != present.node_selector),
            ("affinity", wanted.affinity != present.affinity),
            ("tolerations", wanted.tolerations != present.tolerations),
        ];
        let fields = placement.into_iter().chain(self.size.differences(spec));
        fields.filter_map(|(field, differs)| differs.then_some(field)).collect()
    }

    /// Returns what has to become of the interfaces.
    pub(super) fn nics(&self, started: Option<&TemplateDigests>, vmi: &VirtualMachineInstance) -> nics::Changes {
        nics::compare(&self.nics, vmi, started.is_none_or(|started| started.is_written_alike(&self.digests)))
    }

    /// Returns true if a VMI that was started from `started` lacks no change but those that it follows.
    pub(super) fn is_current(&self, started: Option<&TemplateDigests>, vmi: &VirtualMachineInstance) -> bool {
        self.nics(started, vmi).restart.is_none() && self.lacks_only_followed(started)
    }

    /// Returns true if a running VMI takes over changes of a group.
    fn is_followed(&self, group: Group) -> bool {
        match group {
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
        }
    }

    fn lacks_only_followed(&self, started: Option<&TemplateDigests>) -> bool {
        self.changes(started).iter().all(|group| self.is_followed(*group) || self.in_effect.contains(group))
    }
}

/// Fields of the groups, more specific ones first. All others belong to the rest.
const FIELDS: &[(&str, Group)] = &[
    ("nodeSelector", Group::Placement),
    ("affinity", Group::Placement),
    ("tolerations", Group::Placement),
    ("domain.cpu.sockets", Group::Sockets),
    ("domain.cpu.maxSockets", Group::MaxSockets),
    ("domain.cpu", Group::Cpu),
    ("domain.memory.guest", Group::Guest),
    ("domain.memory.maxGuest", Group::MaxGuest),
    ("domain.memory", Group::Memory),
    ("domain.resources.requests.cpu", Group::CpuResources),
    ("domain.resources.limits.cpu", Group::CpuResources),
    ("domain.resources.requests.memory", Group::MemoryResources),
    ("domain.resources.limits.memory", Group::MemoryResources),
    ("networks", Group::Networks),
    ("domain.devices.interfaces", Group::Networks),
    ("volumes", Group::Volumes),
    ("domain.devices.disks", Group::Volumes),
    ("domain.devices.filesystems", Group::Volumes),
];

fn group_of(field: &str) -> Group {
    let is_in = |of: &str| field.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    FIELDS.iter().find(|(of, _)| is_in(of)).map_or(Group::Rest, |(_, group)| *group)
}

/// Returns the fields in which two specs differ. Lists are compared as a whole.
fn differing_fields(left: &VirtualMachineInstanceSpec, right: &VirtualMachineInstanceSpec) -> Vec<String> {
    fn collect(path: &str, left: &Value, right: &Value, fields: &mut Vec<String>) {
        let empty = Map::new();
        let (left, right) = match (left, right) {
            (left, right) if left == right => return,
            (Value::Object(left), Value::Object(right)) => (left, right),
            // Requests, CPU and such are absent as a whole, too.
            (Value::Object(left), Value::Null) => (left, &empty),
            (Value::Null, Value::Object(right)) => (&empty, right),
            _ => return fields.push(path.to_owned()),
        };
        let before = fields.len();
        for name in left.keys().chain(right.keys().filter(|name| !left.contains_key(*name))) {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            let of = |object: &Map<String, Value>| object.get(name).cloned().unwrap_or_default();
            collect(&path, &of(left), &of(right), fields);
        }
        if fields.len() == before {
            fields.push(path.to_owned());
        }
    }
    let mut fields = Vec::new();
    let json = |spec| serde_json::to_value(spec).unwrap_or_default();
    collect("", &json(left), &json(right), &mut fields);
    fields
}

/// Names fields of the template in a message.
fn named(message: &str, fields: &[&str]) -> String {
    let mut named: Vec<String> =
        fields.iter().take(MAX_FIELDS).map(|field| format!("spec.template.spec.{field}")).collect();
    if fields.len() > MAX_FIELDS {
        named.push(format!("{} more", fields.len() - MAX_FIELDS));
    }
    if named.is_empty() { message.to_owned() } else { format!("{message}: {}", named.join(", ")) }
}

/// Returns the template from which the VMI was started. `None`: no record of the start is known.
pub(super) fn started<'a>(observed: &'a Observed, vmi: &VirtualMachineInstance) -> Option<&'a TemplateDigests> {
    let name = vmi.status.as_ref()?.virtual_machine_revision_name.as_deref()?;
    let record = observed.starts.iter().find(|record| record.metadata.name.as_deref() == Some(name))?;
    record.template.as_ref()
}

/// Returns the generation of the VM that its VMI reflects. Changes outside the template are reflected at once.
pub(super) fn observed_generation(
    observed: &Observed,
    vmi: &VirtualMachineInstance,
    template: Option<&Template>,
) -> Option<i64> {
    let vm = &*observed.vm;
    let named = || observed.named_start.as_ref()?.template.as_ref();
    let is_same = started(observed, vmi).or_else(named).is_some_and(|started| match template {
        Some(template) => started.is_same(&template.digests),
        None => started.is_same(&TemplateDigests::of(&vm.spec.template, [None, None], None)),
    });
    if is_same {
        return vm.metadata.generation;
    }
    let annotated: Option<i64> =
        vmi.metadata.annotations.as_ref().and_then(|all| all.get(annotation::VM_GENERATION)?.parse().ok());
    annotated.or_else(|| revision::generation(vmi.status.as_ref()?.virtual_machine_revision_name.as_deref()?))
}

/// Returns true if changes are applied to running VMIs.
pub(super) fn is_live(observed: &Observed) -> bool {
    observed.config.vm_rollout_strategy == RolloutStrategy::LiveUpdate
}

/// Decides about the claims of the VMI.
pub(super) fn volume_step(observed: &Observed, instance: &VirtualMachineInstance, template: &Template) -> Step {
    volume_migration::decide(&volume_migration::Observed {
        vmi: instance,
        template: template.storage.volumes(),
        migrates: is_live(observed) && volume_migration::is_wanted(&observed.vm.spec),
        claims: &observed.claims,
        data_volumes: &observed.destinations,
        in_migration: observed.is_migrated || instance.is_handed_off(),
    })
}

/// Returns the condition that requires a restart. There is none while the template cannot be expanded.
pub(super) fn condition(
    observed: &Observed,
    template: Option<&Template>,
    vmi: Option<&VirtualMachineInstance>,
    now: &Time,
) -> Option<Condition> {
    let is_live = is_live(observed);
    let vmi = vmi.filter(|vmi| !vmi.is_final() && !vmi.is_deleting())?;
    let template = template?;
    let started = started(observed, vmi)?;
    // A live update changes the placement and the size of the VMI, so that they are compared with the VMI itself.
    let unplaced = if is_live { Vec::new() } else { template.unplaced(&vmi.spec) };
    // Hot-pluggable volumes are compared with the VMI, which follows them.
    let storage = &template.storage;
    let is_plugged = if hotplug::is_on(&observed.config) {
        storage.is_plugged_as_written(vmi)
    } else {
        storage.has_same_hotpluggable_volumes(vmi)
    };
    let mut fields: Vec<&str> = template.differing.iter().map(String::as_str).chain(unplaced.iter().copied()).collect();
    if !is_plugged && !fields.iter().any(|field| group_of(field) == Group::Volumes) {
        fields.push("volumes");
    }
    let required = |message: &str| Some(Condition::new(condition::RESTART_REQUIRED, true, "", message, now));
    let generic = "a non-live-updatable field was changed in the template spec";
    if !template.lacks_only_followed(Some(started)) || !unplaced.is_empty() || !is_plugged {
        return required(&named(generic, &fields));
    }
    let step = volume_step(observed, vmi, template);
    if let Step::Restart(reason) = &step {
        return required(reason);
    }
    let moves = is_live && volume_migration::is_wanted(&observed.vm.spec);
    if !moves && step == Step::Same && !volume_migration::has_same_claims(storage.volumes(), vmi) {
        return required(&named(generic, &["volumes"]));
    }
    if let Some(reason) = template.nics(Some(started), vmi).restart {
        return required(&format!("{generic}: {reason}"));
    }
    if is_live { required(&resize::decide(&observed.config, &template.size, vmi).restart()?) } else { None }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_differ_are_named_with_their_group() {
        let spec = |change: &Value| {
            let mut spec = json!({"domain": {"cpu": {"cores": 1}, "devices": {}}, "nodeSelector": {"a": "b"}});
            json_patch::merge(&mut spec, change);
            serde_json::from_value(spec).unwrap()
        };
        for (change, expected) in [
            (json!({}), vec![]),
            (json!({"hostname": "h"}), vec![("hostname", Group::Rest)]),
            (json!({"nodeSelector": {"a": "c"}}), vec![("nodeSelector.a", Group::Placement)]),
            (
                json!({"domain": {"cpu": {"cores": 2, "maxSockets": 4, "sockets": 2}}}),
                vec![
                    ("domain.cpu.cores", Group::Cpu),
                    ("domain.cpu.maxSockets", Group::MaxSockets),
                    ("domain.cpu.sockets", Group::Sockets),
                ],
            ),
            (json!({"domain": {"cpu": null}}), vec![("domain.cpu.cores", Group::Cpu)]),
            (json!({"domain": {"memory": {"guest": "1Gi"}}}), vec![("domain.memory.guest", Group::Guest)]),
            (
                json!({"domain": {"resources": {"requests": {"memory": "1Gi", "x": "1"}}}}),
                vec![
                    ("domain.resources.requests.memory", Group::MemoryResources),
                    ("domain.resources.requests.x", Group::Rest),
                ],
            ),
            (
                json!({"domain": {"firmware": {"bootloader": {"efi": {}}}}}),
                vec![("domain.firmware.bootloader.efi", Group::Rest)],
            ),
            (
                json!({"networks": [{"name": "a"}], "volumes": [{"name": "a"}]}),
                vec![("networks", Group::Networks), ("volumes", Group::Volumes)],
            ),
        ] {
            let mut found = differing_fields(&spec(&json!({})), &spec(&change));
            found.sort();
            let found: Vec<_> = found.iter().map(|field| (field.as_str(), group_of(field))).collect();
            assert_eq!(found, expected, "{change}");
        }
    }

    #[test]
    fn messages_name_some_fields() {
        assert_eq!(named("changed", &[]), "changed");
        assert_eq!(named("changed", &["hostname"]), "changed: spec.template.spec.hostname");
        let many = named("changed", &["a", "b", "c", "d", "e", "f"]);
        assert!(many.ends_with("spec.template.spec.d, 2 more"), "{many}");
    }
}
