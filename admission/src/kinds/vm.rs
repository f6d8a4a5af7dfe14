//! VMs: defaults and rules.

use api::{
    FeatureGate, RunStrategy, VirtualMachine, VirtualMachineInstanceSpec, VirtualMachineSpec,
    config::{ClusterConfig, RolloutStrategy},
    constants::{annotation, finalizer},
    vmi::firmware::Firmware,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::{
    data_source, data_volume, host_disk,
    instancetype::{self, Chosen},
    volume_requests,
};
use crate::{
    context::{Context, Decision, FieldErrors, Generated, Interrupt, accepted, semantic},
    defaults::{self, DefaultNetworkError, is_empty, trace},
    rules::{
        self,
        unsupported::{self, migrations::DECENTRALIZED},
    },
};

/// Run strategies that are supported.
const RUN_STRATEGIES: [&str; 5] = ["Always", "Halted", "Manual", "Once", "RerunOnFailure"];

/// The metadata of a stored VM.
#[derive(Deserialize)]
struct Metadata {
    metadata: ObjectMeta,
}

/// Serves `/virtualmachines-mutate`.
pub(crate) fn mutate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    context.patched::<VirtualMachine>(|vm| {
        if vm.metadata.deletion_timestamp.is_none() {
            if context.is_create() {
                add_finalizer(&mut vm.metadata);
            }
            if let Some(spec) = &vm.spec.template.spec {
                rules::resources::validate_amounts("spec.template.spec", spec).into_result()?;
            }
            instancetype::set_defaults(context, vm)?;
            let namespace = instancetype::namespace(context, vm).to_owned();
            data_source::set_architecture(vm, &namespace, context.lookups)?;
            set_defaults(vm, context.config, context.is_create(), context.generated());
        }
        match context.old_object::<Metadata>()? {
            None => trace::of_new(&mut vm.metadata, context.trace, false),
            Some(old) => trace::keep(&mut vm.metadata, &old.metadata),
        }
        Ok(vec![])
    })
}

/// Serves `/virtualmachines-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let mut vm: VirtualMachine = context.object()?;
    if vm.metadata.deletion_timestamp.is_some() {
        return Ok(context.allowed());
    }
    if is_empty(vm.metadata.namespace.as_ref()) {
        vm.metadata.namespace.clone_from(&context.request.namespace);
    }
    let old = old(context)?;
    if old.is_none() {
        let installation = context.trusted.namespace();
        let errors = rules::metadata::validate_namespace(&vm.metadata, context.namespace(), installation);
        if !errors.is_empty() {
            return Ok(context.decide(errors, vec![]));
        }
    }
    let chosen = instancetype::chosen(context, &vm)?;
    let mut warnings = warnings(&vm, old.as_ref(), &chosen, context.is_component());
    if old.as_ref().is_none_or(|old| old.spec.data_volume_templates != vm.spec.data_volume_templates) {
        warnings.extend(data_volume::warnings_of_templates(&vm.spec, context.namespace(), context.lookups)?);
    }
    let mut errors = field_errors(&vm, old.as_ref(), &chosen, context.config, context.is_component())
        .map_err(|error| Interrupt::failed(400, error.to_string()))?;
    if errors.is_empty() {
        errors = volume_requests::field_errors(&vm, old.as_ref(), context.config, context.lookups)?;
    }
    let former = old.as_ref().map(|old| &old.spec.template);
    if context.is_component() && is_restored(&vm, old.as_ref()) {
        host_disk::reject_restored("spec.template", &vm.spec.template, former, &mut errors);
    }
    host_disk::validate_right(context, "spec.template", &vm.spec.template, former, &mut errors)?;
    Ok(context.decide(errors, warnings))
}

/// Returns true if a restore makes or changes the VM.
fn is_restored(vm: &VirtualMachine, old: Option<&VirtualMachine>) -> bool {
    let restore = |vm: &VirtualMachine| vm.metadata.annotations.as_ref()?.get(annotation::LAST_RESTORE).cloned();
    restore(vm).is_some_and(|id| Some(id) != old.and_then(restore))
}

/// Returns the stored VM; `None` on creation.
pub(crate) fn old(context: &Context<'_>) -> Result<Option<VirtualMachine>, Interrupt> {
    context.old_object().map_err(|_| {
        let mut errors = FieldErrors::new();
        errors.unexpected("Could not fetch old vm");
        Interrupt::Denied(errors)
    })
}

/// Adds the finalizer of a new VM. virt-controller adds it to those that were created without this webhook.
fn add_finalizer(metadata: &mut ObjectMeta) {
    let finalizers = metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|name| name == finalizer::VM) {
        finalizers.push(finalizer::VM.to_owned());
    }
}

/// Sets the defaults of a VM. Other defaults are set on its VMI, so that the template stays as the user wrote it.
pub fn set_defaults(vm: &mut VirtualMachine, config: &ClusterConfig, created: bool, generated: &Generated) {
    let template = &mut vm.spec.template;
    let Some(spec) = &mut template.spec else { return };
    if created {
        defaults::observed_version(&mut vm.metadata);
        // Guests identify their hardware by these values, so they must not change between starts.
        let firmware = spec.domain.firmware.get_or_insert_with(Firmware::default);
        if is_empty(firmware.uuid.as_ref()) {
            firmware.uuid = Some(generated.uuid.clone());
        }
        if is_empty(firmware.serial.as_ref()) {
            firmware.serial = Some(generated.serial.clone());
        }
    }
    defaults::platform(spec, config);
    if created {
        defaults::pci_topology(spec, &mut template.metadata);
    }
}

/// Returns warnings about deprecated fields, and for users about a new template that no guest can use.
fn warnings(vm: &VirtualMachine, old: Option<&VirtualMachine>, chosen: &Chosen, is_component: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    if vm.spec.running.is_some() {
        warnings.push("spec.running is deprecated, please use spec.runStrategy instead.".to_owned());
    }
    let template = &vm.spec.template;
    if let Some(spec) = template.spec.as_ref().filter(|_| !is_component)
        && old.is_none_or(|old| old.spec.template != *template)
    {
        let mut spec = spec.clone();
        // Conflicts with the instance type are errors. A missing one may appear later.
        let is_known = vm.spec.instancetype.is_none() || chosen.instancetype.is_some();
        if is_known && chosen.apply(&mut spec, &mut template.metadata.clone()).is_ok() {
            without_zero_memory(chosen, &mut spec);
            warnings.extend(rules::resources::memory_warning("spec.template.spec", &spec));
        }
        warnings.extend(rules::cloud_init::warnings("spec.template.spec", &spec));
    }
    warnings
}

/// Returns the errors of a new or changed VM. The template is validated with its defaults set. Fails if the cluster's
/// default network is not allowed.
pub fn field_errors(
    vm: &VirtualMachine,
    old: Option<&VirtualMachine>,
    chosen: &Chosen,
    config: &ClusterConfig,
    is_component: bool,
) -> Result<FieldErrors, DefaultNetworkError> {
    let mut errors = FieldErrors::new();
    let template = &vm.spec.template;
    let Some(spec) = &template.spec else {
        errors.required("spec.template", "missing virtual machine template.");
        return Ok(errors);
    };
    let mut spec = spec.clone();
    if let Err(conflicts) = chosen.apply(&mut spec, &mut template.metadata.clone()) {
        return Ok(conflicts);
    }
    defaults::spec(&mut spec, config)?;
    errors.extend(chosen.requirement_errors(&spec));
    if !errors.is_empty() {
        return Ok(errors);
    }
    without_zero_memory(chosen, &mut spec);
    if old.is_none() {
        // As in the reference, bindings are checked only if no gate has an error. VMIs report both.
        errors.extend(rules::discontinued_gates(&spec, config));
        if errors.is_empty() {
            errors.extend(rules::discontinued(&spec, "spec", config));
        }
        if !errors.is_empty() {
            return Ok(errors);
        }
    }
    errors.extend(spec_errors("spec", &vm.spec, &spec, config, is_component));
    // A VM with a device that is no longer permitted can still be stopped.
    if old.is_none_or(|old| changes_devices(vm, old)) {
        errors.extend(rules::devices::validate_permitted("spec.template.spec", &spec, config));
    }
    if !errors.is_empty() {
        return Ok(errors);
    }
    if old.is_none_or(|old| old.spec.data_volume_templates != vm.spec.data_volume_templates) {
        let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
        errors.extend(rules::data_volumes::validate_namespaces("spec", &vm.spec, namespace));
    }
    if let Some(old) = old.filter(|_| errors.is_empty()) {
        errors.extend(in_progress_errors(vm, old));
    }
    Ok(errors.or_else(|errors| {
        let mut missing = FieldErrors::new();
        unsupported::spec("spec.template.spec", &spec, config, &mut missing);
        missing.extend(unsupported::vm("spec", &vm.spec));
        rules::metadata::validate_supported("spec.template.metadata", &template.metadata, &mut missing);
        // Comparing specs is expensive, so it comes last.
        if !missing.is_empty() && old.is_none_or(|old| changes_spec_or_starts(vm, old)) {
            errors.extend(missing);
        }
    }))
}

/// Removes guest memory of 0. Clients create instance types that set only CPUs and leave memory at 0. That is an error of the
/// VMI, reported when it is created, and for a VM a warning.
fn without_zero_memory(chosen: &Chosen, spec: &mut VirtualMachineInstanceSpec) {
    if let (Some(instancetype), Some(memory)) = (&chosen.instancetype, &mut spec.domain.memory)
        && defaults::is_zero(&instancetype.memory.guest)
    {
        memory.guest = None;
    }
}

/// Returns true if a change starts the VM or changes its spec otherwise. Unsupported fields that were stored earlier are
/// reported when the VMI is created and do not prevent that the VM is stopped or labelled.
fn changes_spec_or_starts(vm: &VirtualMachine, old: &VirtualMachine) -> bool {
    let strategy = vm.spec.effective_run_strategy();
    let starts = strategy != RunStrategy::Halted && strategy != old.spec.effective_run_strategy();
    let rest = |vm: &VirtualMachine| VirtualMachineSpec { run_strategy: None, running: None, ..vm.spec.clone() };
    starts || !semantic::equal(&rest(vm), &rest(old))
}

/// Returns true if a change can add host devices.
fn changes_devices(vm: &VirtualMachine, old: &VirtualMachine) -> bool {
    let devices = |vm: &VirtualMachine| {
        let devices = vm.spec.template.spec.as_ref().map(|spec| spec.domain.devices.clone()).unwrap_or_default();
        (devices.gpus, devices.host_devices)
    };
    devices(vm) != devices(old) || vm.spec.instancetype != old.spec.instancetype
}

/// Returns the errors of the VM spec at `root`, of a VM or of the template of a pool. `vmi_spec` is the spec of its VMI
/// template with defaults.
pub(crate) fn spec_errors(
    root: &str,
    spec: &VirtualMachineSpec,
    vmi_spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    is_component: bool,
) -> FieldErrors {
    let metadata = format!("{root}.template.metadata");
    let mut errors = rules::metadata::validate(&metadata, &spec.template.metadata, config, is_component);
    errors.extend(rules::grace::validate_annotations(&metadata, &spec.template.metadata, vmi_spec, config));
    let template = format!("{root}.template.spec");
    errors.extend(rules::validate_spec(&template, vmi_spec, config));
    errors.extend(rules::data_volumes::validate(root, spec));
    errors.extend(validate_run_strategy(root, spec, config));
    if config.vm_rollout_strategy == RolloutStrategy::LiveUpdate {
        errors.extend(rules::live_update::validate(&template, vmi_spec));
    }
    errors
}

fn validate_run_strategy(root: &str, spec: &VirtualMachineSpec, config: &ClusterConfig) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let running = format_args!("{root}.running");
    let strategy = format_args!("{root}.runStrategy");
    match (&spec.running, &spec.run_strategy) {
        (Some(_), Some(_)) => errors.invalid(
            running,
            "Running and RunStrategy are mutually exclusive. Note that Running is deprecated, please use RunStrategy instead",
        ),
        (None, None) => errors.invalid(running, "RunStrategy must be specified"),
        (None, Some(RunStrategy::WaitAsReceiver)) if !config.enabled(FeatureGate::DecentralizedLiveMigration) => errors.invalid(
            strategy,
            "Invalid RunStrategy (WaitAsReceiver), DecentralizedLiveMigration feature gate is not enabled in kubevirt resource",
        ),
        (None, Some(RunStrategy::WaitAsReceiver)) => {
            let message = format!("{strategy} WaitAsReceiver is not supported yet: {DECENTRALIZED}");
            errors.not_supported(strategy, message);
        }
        (None, Some(RunStrategy::Other(name))) => {
            errors.invalid(strategy, format!("Invalid RunStrategy ({name}), {}", accepted(&RUN_STRATEGIES)));
        }
        _ => {}
    }
    errors
}

/// Returns the first change that a snapshot or restore in progress forbids.
pub(crate) fn in_progress_errors(vm: &VirtualMachine, old: &VirtualMachine) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let Some(status) = &vm.status else { return errors };
    let (new, old) = (&vm.spec, &old.spec);
    let named = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    let (snapshot, restore) = (named(&status.snapshot_in_progress), named(&status.restore_in_progress));
    let volumes = |spec: &VirtualMachineSpec| spec.template.spec.as_ref().map(|spec| spec.volumes.clone());
    if let Some(snapshot) = &snapshot
        && volumes(new) != volumes(old)
    {
        let message = format!("Cannot update vm disks or volumes until snapshot \"{snapshot}\" completes");
        errors.not_supported("spec", message);
    } else if let Some(snapshot) = &snapshot
        && (new.running, &new.run_strategy) != (old.running, &old.run_strategy)
    {
        let message = format!("Cannot update vm running state until snapshot \"{snapshot}\" completes");
        errors.not_supported("spec", message);
    } else if let Some(restore) = restore
        && !semantic::equal(new, old)
        && new.effective_run_strategy() != old.effective_run_strategy()
    {
        errors.not_supported("spec", format!("Cannot update VM runStrategy until restore \"{restore}\" completes"));
    }
    errors
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vm(strategy: &str, devices: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v", "namespace": "n"},
            "spec": {"runStrategy": strategy, "template": {"spec": {
                "domain": {"memory": {"guest": "128Mi"}, "devices": devices},
            }}},
        }))
        .unwrap()
    }

    #[test]
    fn a_stored_device_that_is_no_longer_permitted_is_kept_but_none_is_added() {
        let config = ClusterConfig {
            permitted_host_devices: serde_json::from_value(json!({})).unwrap(),
            ..ClusterConfig::default()
        };
        let gpu = |name: &str| json!({"gpus": [{"name": "g", "deviceName": name}]});
        let refused = |vm: &VirtualMachine, old: Option<&VirtualMachine>| {
            let errors = field_errors(vm, old, &Chosen::default(), &config, false).unwrap();
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
        };
        let old = vm("Always", gpu("v.org/a"));
        let field = "spec.template.spec.domain.devices.gpus[0].deviceName";
        assert_eq!(refused(&old, None), [field]);
        assert_eq!(refused(&vm("Halted", gpu("v.org/a")), Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&vm("Always", gpu("v.org/b")), Some(&old)), [field]);
        assert_eq!(refused(&vm("Always", json!({})), Some(&old)), Vec::<String>::new());
    }

    #[test]
    fn stored_vm_with_unsupported_fields_can_be_stopped_and_labelled_but_not_started() {
        let config = ClusterConfig { feature_gates: vec!["Sidecar".to_owned()], ..ClusterConfig::default() };
        let refused = |vm: &VirtualMachine, old: Option<&VirtualMachine>| {
            let errors = field_errors(vm, old, &Chosen::default(), &config, false).unwrap();
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
        };
        let display = || json!({"gpus": [{"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}}]});
        let (running, halted) = (vm("Always", display()), vm("Halted", display()));
        let field = "spec.template.spec.domain.devices.gpus[0].virtualGPUOptions.display";
        assert_eq!(refused(&running, None), [field]);
        let mut labelled = running.clone();
        labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        for (new, old) in [(&halted, &running), (&labelled, &running), (&halted, &halted)] {
            assert_eq!(refused(new, Some(old)), Vec::<String>::new());
        }
        assert_eq!(refused(&running, Some(&halted)), [field]);
        assert_eq!(refused(&halted, Some(&vm("Halted", json!({})))), [field]);
        let mut placed = vm("Always", json!({}));
        let key = "hooks.kubevirt.io/hookSidecars".to_owned();
        placed.spec.template.metadata.annotations = Some([(key, "[]".to_owned())].into());
        assert_eq!(refused(&placed, None), ["spec.template.metadata.annotations"]);
        assert_eq!(refused(&placed, Some(&placed)), Vec::<String>::new());
        let mut other = halted.clone();
        other.spec.template.spec.as_mut().unwrap().domain.devices.rng = Some(api::vmi::devices::Rng::default());
        assert_eq!(refused(&other, Some(&halted)), [field]);
    }
}
