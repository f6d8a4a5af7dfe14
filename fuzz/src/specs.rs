//! Checks that defaults of VMI specs are idempotent and that every error has a message.
//!
//! Input: a spec as JSON.

use admission::{
    FieldErrors, Generated, defaults,
    kinds::{instancetype::Chosen, replica_set, vm, vmi},
    rules::{self, unsupported},
};
use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet, VirtualMachineInstanceSpec,
    config::ClusterConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

fn check_messages(errors: &FieldErrors) {
    for error in errors.as_slice() {
        assert!(!error.message.is_empty(), "an error without a message at {}", error.field);
    }
}

/// Returns true if the input was a spec.
pub fn check(input: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(input) else { return false };
    let Ok(spec) = serde_json::from_value::<VirtualMachineInstanceSpec>(value.clone()) else { return false };
    let config = ClusterConfig::default();
    let generated = Generated {
        now: Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
        uuid: "11111111-1111-4111-8111-111111111111".to_owned(),
        serial: "22222222-2222-4222-8222-222222222222".to_owned(),
    };

    check_messages(&rules::validate_spec("spec", &spec, &config));
    check_messages(&rules::discontinued(&spec, "spec", &config));
    let mut errors = FieldErrors::new();
    unsupported::spec("spec", &spec, &config, &mut errors);
    check_messages(&errors);

    let complete = |spec: &mut VirtualMachineInstanceSpec| {
        if defaults::spec(spec, &config).is_ok() {
            defaults::vmi::set(spec, &config, &generated);
        }
    };
    let mut once = spec.clone();
    complete(&mut once);
    let mut twice = once.clone();
    complete(&mut twice);
    let (once_wire, twice) = (serde_json::to_value(&once), serde_json::to_value(&twice));
    assert_eq!(once_wire.ok(), twice.ok(), "defaults change again");
    check_messages(&rules::validate_spec("spec", &once, &config));

    let vmi_object: VirtualMachineInstance = VirtualMachineInstance { spec: once, ..Default::default() };
    check_messages(&vmi::create_errors(&vmi_object, &config, false));
    let template = json!({"metadata": {"labels": {"app": "a"}}, "spec": value});
    if let Ok(vm) = serde_json::from_value::<VirtualMachine>(
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {}, "spec": {"running": true, "template": template}}),
    ) {
        let mut completed = vm.clone();
        vm::set_defaults(&mut completed, &config, true, &generated);
        if let Ok(errors) = vm::field_errors(&completed, None, &Chosen::default(), &config, false) {
            check_messages(&errors);
        }
        if let Ok(errors) = vm::field_errors(&completed, Some(&vm), &Chosen::default(), &config, false) {
            check_messages(&errors);
        }
    }
    if let Ok(set) = serde_json::from_value::<VirtualMachineInstanceReplicaSet>(
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet", "metadata": {},
            "spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template}}),
    ) {
        check_messages(&replica_set::field_errors(&set, None, &config, false));
    }
    true
}
