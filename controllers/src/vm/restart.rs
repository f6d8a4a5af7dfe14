//! Whether the template has changed since the machine was started.
//!
//! The machine carries a hash of the template it was started from, with instance type and preference applied. Where it
//! may be placed is left out of that: a running machine takes a change of it over (see [`super::live`]), unless the
//! cluster's rollout strategy leaves all changes to the next start. Any other difference asks for a restart.

use std::collections::BTreeMap;

use api::{
    Condition, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceSpec,
    constants::{annotation, condition},
};
use k8s_openapi::{
    api::core::v1::{Affinity, Toleration},
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

/// Annotation of a machine: hash of the template specification it was started from.
pub(super) const TEMPLATE_HASH: &str = "ferrovirt.io/started-from";
/// Annotation of a machine: hash of the whole template it was started from, as written, with labels and annotations.
pub(super) const TEMPLATE_WRITTEN: &str = "ferrovirt.io/template";
/// Bytes of a hash that are kept.
const HASH_BYTES: usize = 12;

/// Where a machine may be placed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Placement {
    node_selector: BTreeMap<String, String>,
    affinity: Option<Affinity>,
    tolerations: Vec<Toleration>,
}

impl Placement {
    fn take(spec: &mut VirtualMachineInstanceSpec) -> Self {
        Self {
            node_selector: std::mem::take(&mut spec.node_selector),
            affinity: spec.affinity.take(),
            tolerations: std::mem::take(&mut spec.tolerations),
        }
    }

    fn is_of(&self, spec: &VirtualMachineInstanceSpec) -> bool {
        self.node_selector == spec.node_selector
            && self.affinity == spec.affinity
            && self.tolerations == spec.tolerations
    }

    /// Gives a machine this placement.
    pub(super) fn put(&self, spec: &mut VirtualMachineInstanceSpec) {
        spec.node_selector.clone_from(&self.node_selector);
        spec.affinity.clone_from(&self.affinity);
        spec.tolerations.clone_from(&self.tolerations);
    }
}

/// What the machine of a VM is to be, as far as it is compared with the one there is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Template {
    /// Hash of all but the placement.
    pub(super) hash: String,
    /// Where it may be placed.
    pub(super) placement: Placement,
}

impl Template {
    /// Of a template's specification with instance type and preference applied.
    pub(super) fn of(mut spec: VirtualMachineInstanceSpec) -> Option<Self> {
        let placement = Placement::take(&mut spec);
        Some(Self { hash: hash(&spec)?, placement })
    }

    /// True when the machine was started from this, whatever its placement. Machines that were not started by us count
    /// as such.
    pub(super) fn started(&self, instance: &VirtualMachineInstance) -> bool {
        annotation_of(instance, TEMPLATE_HASH).is_none_or(|started| started == self.hash)
    }
}

/// Hash of a template, or of its specification.
pub(super) fn hash(template: &impl Serialize) -> Option<String> {
    let json = serde_json::to_vec(template).ok()?;
    Some(Sha256::digest(&json).iter().take(HASH_BYTES).map(|byte| format!("{byte:02x}")).collect())
}

fn annotation_of<'a>(instance: &'a VirtualMachineInstance, key: &str) -> Option<&'a str> {
    instance.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// True when the machine was started from the VM's template as it is written now.
pub(super) fn is_as_written(vm: &VirtualMachine, instance: &VirtualMachineInstance) -> bool {
    let written = hash(&vm.spec.template);
    written.is_some() && annotation_of(instance, TEMPLATE_WRITTEN) == written.as_deref()
}

/// The generation of the VM that its machine reflects. A change outside the template is reflected at once.
pub(super) fn observed_generation(vm: &VirtualMachine, instance: &VirtualMachineInstance) -> Option<i64> {
    let known = annotation_of(instance, annotation::VM_GENERATION)?.parse().ok()?;
    if is_as_written(vm, instance) { vm.metadata.generation } else { Some(known) }
}

/// The condition that asks for a restart. Nothing is asked for while it cannot be told what the template says.
pub(super) fn condition(
    template: Option<&Template>,
    instance: Option<&VirtualMachineInstance>,
    live: bool,
    now: &Time,
) -> Option<Condition> {
    let instance = instance.filter(|instance| !instance.is_final() && !instance.is_deleting())?;
    let current = |template: &Template| {
        template.started(instance)
            && (live || annotation_of(instance, TEMPLATE_HASH).is_none() || template.placement.is_of(&instance.spec))
    };
    if template.is_none_or(current) {
        return None;
    }
    let message = "a non-live-updatable field was changed in the template spec";
    Some(Condition::new(condition::RESTART_REQUIRED, true, "", message, now))
}
