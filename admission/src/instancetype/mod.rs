//! Instance types and preferences: their own rules, and their part in the rules of the VMs that name them.
//!
//! ```text
//! VM, mutated:   matcher ── infer ──> name and kind ──> preference ──> defaults that it prefers
//! VM, validated: matcher ──> specs, as far as they can be found ──> a copy of the template with them applied
//! ```

mod infer;
mod kinds;
mod matcher;

use api::{
    VirtualMachine, VirtualMachineInstanceSpec,
    config::ClusterConfig,
    instancetype::{
        GROUP, VERSION, VirtualMachineInstancetypeSpec, VirtualMachinePreferenceSpec, apply,
        expand::{self, ExpandError},
        matcher::{Role, Source, source},
        requirements, revision, topology,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

pub(crate) use kinds::{validate_instancetype, validate_preference};

use crate::{
    causes::Causes,
    defaults,
    neighbours::{Needs, Neighbours, Outcome, Wanted},
    webhook::{Context, Stop},
};

/// What a VM names, as far as it was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chosen {
    /// Its instance type.
    pub instancetype: Option<VirtualMachineInstancetypeSpec>,
    /// Its preference.
    pub preference: Option<VirtualMachinePreferenceSpec>,
}

impl Chosen {
    /// Reads what a VM names. What cannot be found or read is left out: the VM is let through, and cannot be started
    /// until it is there.
    pub(crate) fn read(vm: &VirtualMachine, namespace: &str, neighbours: &Neighbours) -> Result<Self, Needs> {
        let wanted = |role: Role| source(vm, role)?.ok().map(|source| wanted(&source, namespace));
        let (instancetype, preference) = (wanted(Role::Instancetype), wanted(Role::Preference));
        // Both at once: each round of reading takes time.
        neighbours.need(instancetype.iter().chain(&preference))?;
        Ok(Self {
            instancetype: object(instancetype.as_ref(), neighbours)?
                .and_then(|object| revision::instancetype(object).ok()),
            preference: object(preference.as_ref(), neighbours)?.and_then(|object| revision::preference(object).ok()),
        })
    }

    /// Applies it to a copy of a VM's template.
    pub(crate) fn apply(&self, spec: &mut VirtualMachineInstanceSpec, metadata: &mut ObjectMeta) -> Result<(), Causes> {
        let (instancetype, preference) = (self.instancetype.as_ref(), self.preference.as_ref());
        let mut causes = Causes::new();
        if let Some(message) = topology::spread_error(instancetype, preference) {
            causes.invalid("instancetype.spec.cpu.guest", message);
            return Err(causes);
        }
        apply(expand::TEMPLATE, instancetype, preference, spec, metadata).map_err(|conflicts| {
            for path in conflicts.paths() {
                causes.invalid(path, format!("VM field(s) {path} conflicts with selected instance type"));
            }
            causes
        })
    }

    /// What the preference requires and the VM does not have. `spec` is the template with everything applied.
    pub(crate) fn requirement_causes(&self, spec: &VirtualMachineInstanceSpec) -> Causes {
        let mut causes = Causes::new();
        if let Err(unmet) = requirements::check(self.instancetype.as_ref(), self.preference.as_ref(), spec) {
            let message = format!("failure checking preference requirements: {unmet}");
            causes.not_found(unmet.paths.join(", "), message);
        }
        causes
    }
}

/// Where a source is read.
fn wanted(source: &Source, namespace: &str) -> Wanted {
    match source {
        Source::Revision(name) => Wanted::get("apps", "v1", "controllerrevisions", Some(namespace), name),
        Source::Object(kind, name) => {
            let namespace = (!kind.is_cluster_wide()).then_some(namespace);
            Wanted::get(GROUP, VERSION, kind.plural(), namespace, name)
        }
    }
}

/// The object itself, out of its copy if that is what was read.
fn object<'a>(wanted: Option<&Wanted>, neighbours: &'a Neighbours) -> Result<Option<&'a Value>, Needs> {
    let Some(wanted) = wanted else { return Ok(None) };
    let Outcome::Object(Some(object)) = neighbours.outcome(wanted)? else { return Ok(None) };
    Ok(if wanted.group == GROUP { Some(object) } else { object.get("data") })
}

/// The namespace of the object of a request.
pub(crate) fn namespace<'a>(context: &'a Context<'_>, vm: &'a VirtualMachine) -> &'a str {
    let given = context.request.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    given.or(vm.metadata.namespace.as_deref()).unwrap_or_default()
}

/// What the VM of a request names.
pub(crate) fn chosen(context: &Context<'_>, vm: &VirtualMachine) -> Result<Chosen, Needs> {
    Chosen::read(vm, namespace(context, vm), context.neighbours)
}

/// Checks and completes the matchers of a VM, and sets the defaults that only its preference knows.
pub(crate) fn set_defaults(context: &Context<'_>, vm: &mut VirtualMachine) -> Result<(), Stop> {
    if vm.spec.instancetype.is_none() && vm.spec.preference.is_none() {
        return Ok(());
    }
    if let Some(old) = context.old_object::<VirtualMachine>()? {
        matcher::check_update(vm, &old)?;
    }
    matcher::check(vm)?;
    let namespace = namespace(context, vm).to_owned();
    infer::infer(vm, &namespace, context.neighbours)?;
    let chosen = Chosen::read(vm, &namespace, context.neighbours)?;
    if let Some(preference) = &chosen.preference {
        prefer(preference, vm);
    }
    Ok(())
}

fn prefer(preference: &VirtualMachinePreferenceSpec, vm: &mut VirtualMachine) {
    let is_empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
    if let Some(spec) = &mut vm.spec.template.spec {
        if is_empty(&spec.architecture) && preference.preferred_architecture.is_some() {
            spec.architecture.clone_from(&preference.preferred_architecture);
        }
        if let Some(type_) = preference.machine.as_ref().and_then(|machine| machine.preferred_machine_type.as_ref()) {
            let machine = spec.domain.machine.get_or_insert_default();
            if machine.type_.is_empty() {
                machine.type_.clone_from(type_);
            }
        }
    }
    let Some(class) = preference.volumes.as_ref().and_then(|volumes| volumes.preferred_storage_class_name.as_ref())
    else {
        return;
    };
    for template in &mut vm.spec.data_volume_templates {
        if let Some(claim) = &mut template.spec.pvc {
            claim.storage_class_name.get_or_insert_with(|| class.clone());
        }
        if let Some(storage) = &mut template.spec.storage {
            storage.storage_class_name.get_or_insert_with(|| class.clone());
        }
    }
}

/// A VM with its instance type and preference written into its template, see [`expand`].
pub fn expanded(
    vm: &VirtualMachine,
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    preference: Option<&VirtualMachinePreferenceSpec>,
    config: &ClusterConfig,
) -> Result<VirtualMachine, ExpandError> {
    let attach = |spec: &mut VirtualMachineInstanceSpec| defaults::attach(spec, config);
    let complete = |spec: &mut VirtualMachineInstanceSpec| defaults::spec(spec, config);
    expand::expand(vm, instancetype, preference, &attach, &complete)
}

#[cfg(test)]
mod tests;
