//! VMs: defaults and rules.

use api::{
    RunStrategy, VirtualMachine, VirtualMachineInstanceSpec, VirtualMachineSpec,
    config::{ClusterConfig, RolloutStrategy},
    constants::annotation,
    vmi::firmware::Firmware,
};

use crate::{
    causes::Causes,
    data_source,
    defaults::{self, Fresh, is_empty},
    instancetype::{self, Chosen},
    review::AdmissionReview,
    rules, semantic, unsupported,
    vmi::has_pcie_hotplug,
    volume_requests,
    webhook::{Context, Stop},
};

/// The webhook that sets defaults.
pub(crate) fn mutate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    context.patched::<VirtualMachine>(|vm| {
        if vm.metadata.deletion_timestamp.is_none() {
            instancetype::set_defaults(context, vm)?;
            let namespace = instancetype::namespace(context, vm).to_owned();
            data_source::set_architecture(vm, &namespace, context.neighbours)?;
            set_defaults(vm, context.config, context.is_create(), context.fresh());
        }
        Ok(vec![])
    })
}

/// The webhook that checks.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let mut vm: VirtualMachine = context.object()?;
    if vm.metadata.deletion_timestamp.is_some() {
        return Ok(context.allowed());
    }
    if is_empty(vm.metadata.namespace.as_ref()) {
        vm.metadata.namespace.clone_from(&context.request.namespace);
    }
    let old = old(context)?;
    let chosen = instancetype::chosen(context, &vm)?;
    let mut causes = causes(&vm, old.as_ref(), &chosen, context.config, context.is_component())
        .map_err(|message| Stop::refused(400, message))?;
    if causes.is_empty() {
        causes = volume_requests::causes(&vm, old.as_ref(), context.config, context.neighbours)?;
    }
    Ok(context.verdict(&causes, warnings(&vm)))
}

/// The stored VM; `None` when it is being made.
pub(crate) fn old(context: &Context<'_>) -> Result<Option<VirtualMachine>, Stop> {
    context.old_object().map_err(|_| {
        let mut causes = Causes::new();
        causes.unexpected("Could not fetch old vm");
        Stop::Causes(causes)
    })
}

/// Sets the defaults of a VM. The template stays sparse otherwise: the machine made from it gets the rest.
pub fn set_defaults(vm: &mut VirtualMachine, config: &ClusterConfig, created: bool, fresh: &Fresh) {
    let template = &mut vm.spec.template;
    let Some(spec) = &mut template.spec else { return };
    if created {
        defaults::observed_version(&mut vm.metadata);
        // A guest that knows its hardware by these must find them the same at each start.
        let firmware = spec.domain.firmware.get_or_insert_with(Firmware::default);
        if is_empty(firmware.uuid.as_ref()) {
            firmware.uuid = Some(fresh.uuid.clone());
        }
        if is_empty(firmware.serial.as_ref()) {
            firmware.serial = Some(fresh.serial.clone());
        }
    }
    defaults::platform(spec, config);
    if created && has_pcie_hotplug(spec) {
        template
            .metadata
            .annotations
            .get_or_insert_default()
            .entry(annotation::PCI_TOPOLOGY_VERSION.to_owned())
            .or_insert_with(|| annotation::PCI_TOPOLOGY_V3.to_owned());
    }
}

/// Sentences shown to whoever writes the VM.
pub fn warnings(vm: &VirtualMachine) -> Vec<String> {
    if vm.spec.running.is_some() {
        vec!["spec.running is deprecated, please use spec.runStrategy instead.".to_owned()]
    } else {
        vec![]
    }
}

/// What is wrong with a VM; `old` is there when it is changed. The template is checked with its defaults set. An error
/// is about the cluster, not the VM.
pub fn causes(
    vm: &VirtualMachine,
    old: Option<&VirtualMachine>,
    chosen: &Chosen,
    config: &ClusterConfig,
    is_component: bool,
) -> Result<Causes, String> {
    let mut causes = Causes::new();
    let template = &vm.spec.template;
    let Some(spec) = &template.spec else {
        causes.required("spec.template", "missing virtual machine template.");
        return Ok(causes);
    };
    let mut spec = spec.clone();
    if let Err(conflicts) = chosen.apply(&mut spec, &mut template.metadata.clone()) {
        return Ok(conflicts);
    }
    defaults::spec(&mut spec, config)?;
    causes.extend(chosen.requirement_causes(&spec));
    if !causes.is_empty() {
        return Ok(causes);
    }
    // Memory that the instance type leaves at 0, as clients do that set its CPUs only, is told when the machine is made:
    // nothing is wrong with what the VM says.
    if let (Some(class), Some(memory)) = (&chosen.instancetype, &mut spec.domain.memory)
        && defaults::is_zero(&class.memory.guest)
    {
        memory.guest = None;
    }
    if old.is_none() {
        causes.extend(rules::discontinued(&spec, "spec", config));
        if !causes.is_empty() {
            return Ok(causes);
        }
    }
    causes.extend(spec_causes("spec", &vm.spec, &spec, config, is_component));
    // What is no longer permitted must not keep a VM from being stopped.
    if old.is_none_or(|old| asks_for_other_devices(vm, old)) {
        causes.extend(rules::devices::not_permitted("spec.template.spec", &spec, config));
    }
    if !causes.is_empty() {
        return Ok(causes);
    }
    if old.is_none_or(|old| old.spec.data_volume_templates != vm.spec.data_volume_templates) {
        let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
        causes.extend(rules::data_volumes::namespaces(&vm.spec, namespace));
    }
    if let Some(old) = old.filter(|_| causes.is_empty()) {
        causes.extend(in_progress_causes(vm, old));
    }
    Ok(causes.or_else(|causes| {
        let mut missing = Causes::new();
        unsupported::spec("spec.template.spec", &spec, &mut missing);
        missing.extend(unsupported::vm("spec", &vm.spec));
        rules::metadata::unsupported("spec.template.metadata", &template.metadata, &mut missing);
        // Specs are compared only where it matters.
        if !missing.is_empty() && old.is_none_or(|old| asks_for_more(vm, old)) {
            causes.extend(missing);
        }
    }))
}

/// Whether a change asks for what was not there. What was let in before is told when its machine is made, and must not
/// keep a VM from being stopped or labelled.
fn asks_for_more(vm: &VirtualMachine, old: &VirtualMachine) -> bool {
    let strategy = vm.spec.effective_run_strategy();
    let starts = strategy != RunStrategy::Halted && strategy != old.spec.effective_run_strategy();
    let rest = |vm: &VirtualMachine| VirtualMachineSpec { run_strategy: None, running: None, ..vm.spec.clone() };
    starts || !semantic::equal(&rest(vm), &rest(old))
}

/// Whether a change may bring devices of the host that the VM did not have.
fn asks_for_other_devices(vm: &VirtualMachine, old: &VirtualMachine) -> bool {
    let devices = |vm: &VirtualMachine| {
        let devices = vm.spec.template.spec.as_ref().map(|spec| spec.domain.devices.clone()).unwrap_or_default();
        (devices.gpus, devices.host_devices)
    };
    devices(vm) != devices(old) || vm.spec.instancetype != old.spec.instancetype
}

/// What is wrong with the spec of a VM at `root`, its own or that in the template of a pool. `machine` is the spec of the
/// machine's template as it is to be checked.
pub(crate) fn spec_causes(
    root: &str,
    spec: &VirtualMachineSpec,
    machine: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    is_component: bool,
) -> Causes {
    let metadata = format!("{root}.template.metadata");
    let mut causes = rules::metadata::causes(&metadata, &spec.template.metadata, config, is_component);
    causes.extend(rules::grace::annotations(&metadata, &spec.template.metadata, machine, config));
    let template = format!("{root}.template.spec");
    causes.extend(rules::spec(&template, machine, config));
    causes.extend(rules::data_volumes::causes(root, spec));
    causes.extend(run_strategy(root, spec, config));
    if config.vm_rollout_strategy == RolloutStrategy::LiveUpdate {
        causes.extend(rules::live_update::causes(&template, machine));
    }
    causes
}

fn run_strategy(root: &str, spec: &VirtualMachineSpec, config: &ClusterConfig) -> Causes {
    let mut causes = Causes::new();
    let running = format_args!("{root}.running");
    let strategy = format_args!("{root}.runStrategy");
    match (&spec.running, &spec.run_strategy) {
        (Some(_), Some(_)) => causes.invalid(
            running,
            "Running and RunStrategy are mutually exclusive. Note that Running is deprecated, please use RunStrategy instead",
        ),
        (None, None) => causes.invalid(running, "RunStrategy must be specified"),
        (None, Some(RunStrategy::WaitAsReceiver)) if !config.enabled("DecentralizedLiveMigration") => causes.invalid(
            strategy,
            "Invalid RunStrategy (WaitAsReceiver), DecentralizedLiveMigration feature gate is not enabled in kubevirt resource",
        ),
        (None, Some(RunStrategy::WaitAsReceiver)) => {
            let message = format!("{strategy} WaitAsReceiver is not supported yet: live migration");
            causes.not_supported(strategy, message);
        }
        (None, Some(RunStrategy::Other(word))) => {
            causes.invalid(strategy, format!("Invalid RunStrategy ({word})"));
        }
        _ => {}
    }
    causes
}

/// What a snapshot or restore in progress forbids to change: the first thing found.
pub fn in_progress_causes(vm: &VirtualMachine, old: &VirtualMachine) -> Causes {
    let mut causes = Causes::new();
    let Some(status) = &vm.status else { return causes };
    let (new, old) = (&vm.spec, &old.spec);
    let named = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    let (snapshot, restore) = (named(&status.snapshot_in_progress), named(&status.restore_in_progress));
    let volumes = |spec: &VirtualMachineSpec| spec.template.spec.as_ref().map(|spec| spec.volumes.clone());
    if let Some(snapshot) = &snapshot
        && volumes(new) != volumes(old)
    {
        let message = format!("Cannot update vm disks or volumes until snapshot \"{snapshot}\" completes");
        causes.not_supported("spec", message);
    } else if let Some(snapshot) = &snapshot
        && (new.running, &new.run_strategy) != (old.running, &old.run_strategy)
    {
        let message = format!("Cannot update vm running state until snapshot \"{snapshot}\" completes");
        causes.not_supported("spec", message);
    } else if let Some(restore) = restore
        && !semantic::equal(new, old)
        && new.effective_run_strategy() != old.effective_run_strategy()
    {
        causes.not_supported("spec", format!("Cannot update VM runStrategy until restore \"{restore}\" completes"));
    }
    causes
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
    fn a_vm_keeps_a_device_that_is_no_longer_permitted_but_gets_no_other() {
        let config = ClusterConfig {
            permitted_host_devices: serde_json::from_value(json!({})).unwrap(),
            ..ClusterConfig::default()
        };
        let gpu = |name: &str| json!({"gpus": [{"name": "g", "deviceName": name}]});
        let refused = |vm: &VirtualMachine, old: Option<&VirtualMachine>| {
            let causes = causes(vm, old, &Chosen::default(), &config, false).unwrap();
            causes.as_slice().iter().map(|cause| cause.field.clone()).collect::<Vec<_>>()
        };
        let old = vm("Always", gpu("v.org/a"));
        let field = "spec.template.spec.domain.devices.gpus[0].deviceName";
        assert_eq!(refused(&old, None), [field]);
        assert_eq!(refused(&vm("Halted", gpu("v.org/a")), Some(&old)), Vec::<String>::new());
        assert_eq!(refused(&vm("Always", gpu("v.org/b")), Some(&old)), [field]);
        assert_eq!(refused(&vm("Always", json!({})), Some(&old)), Vec::<String>::new());
    }

    #[test]
    fn a_vm_from_before_can_be_stopped_and_labelled_but_not_started() {
        let config = ClusterConfig::default();
        let refused = |vm: &VirtualMachine, old: Option<&VirtualMachine>| {
            let causes = causes(vm, old, &Chosen::default(), &config, false).unwrap();
            causes.as_slice().iter().map(|cause| cause.field.clone()).collect::<Vec<_>>()
        };
        let tpm = || json!({"tpm": {"persistent": true}});
        let (running, halted) = (vm("Always", tpm()), vm("Halted", tpm()));
        let field = "spec.template.spec.domain.devices.tpm";
        assert_eq!(refused(&running, None), [field]);
        let mut labelled = running.clone();
        labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        for (new, old) in [(&halted, &running), (&labelled, &running), (&halted, &halted)] {
            assert_eq!(refused(new, Some(old)), Vec::<String>::new());
        }
        assert_eq!(refused(&running, Some(&halted)), [field]);
        assert_eq!(refused(&halted, Some(&vm("Halted", json!({})))), [field]);
        let mut placed = vm("Always", json!({}));
        let key = "kubevirt.io/placePCIDevicesOnRootComplex".to_owned();
        placed.spec.template.metadata.annotations = Some([(key, "true".to_owned())].into());
        assert_eq!(refused(&placed, None), ["spec.template.metadata.annotations"]);
        assert_eq!(refused(&placed, Some(&placed)), Vec::<String>::new());
        let other = vm("Halted", json!({"tpm": {"persistent": true}, "rng": {}}));
        assert_eq!(refused(&other, Some(&halted)), [field]);
    }
}
