//! Instance types and preferences: their own rules, and their application to VMs.
//!
//! ```text
//! VM, mutated:   matcher ── infer ──> name and kind ──> preference ──> preferred defaults
//! VM, validated: matcher ──> specs that exist ──> applied to a copy of the template
//! ```

mod infer;
mod matcher;
mod specs;

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

pub(crate) use specs::{validate_instancetype, validate_preference};

use crate::{
    context::{Context, FieldErrors, Interrupt, LookupError, LookupResult, Lookups, ObjectQuery},
    defaults::{self, DefaultNetworkError},
};

/// Instance type and preference of a VM, as far as they exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chosen {
    /// The instance type.
    pub instancetype: Option<VirtualMachineInstancetypeSpec>,
    /// The preference.
    pub preference: Option<VirtualMachinePreferenceSpec>,
}

impl Chosen {
    /// Looks up the objects that a VM names. Missing or unreadable objects are left out: the VM is accepted and cannot start
    /// until they exist.
    pub(crate) fn read(vm: &VirtualMachine, namespace: &str, lookups: &Lookups) -> Result<Self, LookupError> {
        let query = |role: Role| source(vm, role)?.ok().map(|source| source_query(&source, namespace));
        let (instancetype, preference) = (query(Role::Instancetype), query(Role::Preference));
        // Both at once: each round of lookups takes time.
        lookups.require(instancetype.iter().chain(&preference))?;
        Ok(Self {
            instancetype: object(instancetype.as_ref(), lookups)?
                .and_then(|object| revision::instancetype(object).ok()),
            preference: object(preference.as_ref(), lookups)?.and_then(|object| revision::preference(object).ok()),
        })
    }

    /// Applies both to a copy of a VM's template.
    pub(crate) fn apply(
        &self,
        spec: &mut VirtualMachineInstanceSpec,
        metadata: &mut ObjectMeta,
    ) -> Result<(), FieldErrors> {
        let (instancetype, preference) = (self.instancetype.as_ref(), self.preference.as_ref());
        let mut errors = FieldErrors::new();
        if let Some(message) = topology::spread_error(instancetype, preference) {
            errors.invalid("instancetype.spec.cpu.guest", message);
            return Err(errors);
        }
        apply(expand::TEMPLATE, instancetype, preference, spec, metadata).map_err(|conflicts| {
            for path in conflicts.paths() {
                errors.invalid(path, format!("VM field(s) {path} conflicts with selected instance type"));
            }
            errors
        })
    }

    /// Returns the requirements of the preference that the template does not meet. `spec` has everything applied.
    pub(crate) fn requirement_errors(&self, spec: &VirtualMachineInstanceSpec) -> FieldErrors {
        let mut errors = FieldErrors::new();
        if let Err(unmet) = requirements::check(self.instancetype.as_ref(), self.preference.as_ref(), spec) {
            let message = format!("failure checking preference requirements: {unmet}");
            errors.not_found(unmet.paths.join(", "), message);
        }
        errors
    }
}

/// Returns the query for a source.
fn source_query(source: &Source, namespace: &str) -> ObjectQuery {
    match source {
        Source::Revision(name) => ObjectQuery::get("apps", "v1", "controllerrevisions", Some(namespace), name),
        Source::Object(kind, name) => {
            let namespace = (!kind.is_cluster_wide()).then_some(namespace);
            ObjectQuery::get(GROUP, VERSION, kind.plural(), namespace, name)
        }
    }
}

/// Returns the object of a query; for a ControllerRevision, the object in it.
fn object<'a>(query: Option<&ObjectQuery>, lookups: &'a Lookups) -> Result<Option<&'a Value>, LookupError> {
    let Some(query) = query else { return Ok(None) };
    let LookupResult::Object(Some(object)) = lookups.result(query)? else { return Ok(None) };
    Ok(if query.group == GROUP { Some(object) } else { object.get("data") })
}

/// Returns the namespace of the object of a request.
pub(crate) fn namespace<'a>(context: &'a Context<'_>, vm: &'a VirtualMachine) -> &'a str {
    let namespace = context.request.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    namespace.or(vm.metadata.namespace.as_deref()).unwrap_or_default()
}

/// Looks up the objects that the VM of a request names.
pub(crate) fn chosen(context: &Context<'_>, vm: &VirtualMachine) -> Result<Chosen, LookupError> {
    Chosen::read(vm, namespace(context, vm), context.lookups)
}

/// Validates and completes the matchers of a VM, and sets the defaults of its preference.
pub(crate) fn set_defaults(context: &Context<'_>, vm: &mut VirtualMachine) -> Result<(), Interrupt> {
    if vm.spec.instancetype.is_none() && vm.spec.preference.is_none() {
        return Ok(());
    }
    if let Some(old) = context.old_object::<VirtualMachine>()? {
        matcher::check_update(vm, &old)?;
    }
    matcher::check(vm)?;
    let namespace = namespace(context, vm).to_owned();
    infer::infer(vm, &namespace, context.lookups)?;
    let chosen = Chosen::read(vm, &namespace, context.lookups)?;
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
    let Some(storage_class) =
        preference.volumes.as_ref().and_then(|volumes| volumes.preferred_storage_class_name.as_ref())
    else {
        return;
    };
    for template in &mut vm.spec.data_volume_templates {
        if let Some(claim) = &mut template.spec.pvc {
            claim.storage_class_name.get_or_insert_with(|| storage_class.clone());
        }
        if let Some(storage) = &mut template.spec.storage {
            storage.storage_class_name.get_or_insert_with(|| storage_class.clone());
        }
    }
}

/// Returns a VM with its instance type and preference written into its template, see [`expand`].
pub fn expanded(
    vm: &VirtualMachine,
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    preference: Option<&VirtualMachinePreferenceSpec>,
    config: &ClusterConfig,
) -> Result<VirtualMachine, ExpandError<DefaultNetworkError>> {
    let attach = |spec: &mut VirtualMachineInstanceSpec| defaults::attach(spec, config);
    let complete = |spec: &mut VirtualMachineInstanceSpec| defaults::spec(spec, config);
    expand::expand(vm, instancetype, preference, &attach, &complete)
}

#[cfg(test)]
mod tests;
