//! Checks that defaults of VMI specs are idempotent and that every cause has a message.
//!
//! Input: a spec as JSON.

use admission::{causes::Causes, defaults, instancetype::Chosen, replica_set, rules, unsupported, vm, vmi};
use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet, VirtualMachineInstanceSpec,
    config::ClusterConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

fn check_messages(causes: &Causes) {
    for cause in causes.as_slice() {
        assert!(!cause.message.is_empty(), "a cause without a message at {}", cause.field);
    }
}

/// Returns true if the input was a spec.
pub fn check(input: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(input) else { return false };
    let Ok(spec) = serde_json::from_value::<VirtualMachineInstanceSpec>(value.clone()) else { return false };
    let config = ClusterConfig::default();
    let fresh = defaults::Fresh {
        now: Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
        uuid: "11111111-1111-4111-8111-111111111111".to_owned(),
        serial: "22222222-2222-4222-8222-222222222222".to_owned(),
    };

    check_messages(&rules::spec("spec", &spec, &config));
    check_messages(&rules::discontinued(&spec, "spec", &config));
    let mut causes = Causes::new();
    unsupported::spec("spec", &spec, &mut causes);
    check_messages(&causes);

    let complete = |spec: &mut VirtualMachineInstanceSpec| {
        if defaults::spec(spec, &config).is_ok() {
            defaults::machine::set(spec, &config, &fresh);
        }
    };
    let mut once = spec.clone();
    complete(&mut once);
    let mut twice = once.clone();
    complete(&mut twice);
    let (once_wire, twice) = (serde_json::to_value(&once), serde_json::to_value(&twice));
    assert_eq!(once_wire.ok(), twice.ok(), "defaults change again");
    check_messages(&rules::spec("spec", &once, &config));

    let vmi_object: VirtualMachineInstance = VirtualMachineInstance { spec: once, ..Default::default() };
    check_messages(&vmi::create_causes(&vmi_object, &config, false));
    let template = json!({"metadata": {"labels": {"app": "a"}}, "spec": value});
    if let Ok(vm) = serde_json::from_value::<VirtualMachine>(
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {}, "spec": {"running": true, "template": template}}),
    ) {
        let mut completed = vm.clone();
        vm::set_defaults(&mut completed, &config, true, &fresh);
        if let Ok(causes) = vm::causes(&completed, None, &Chosen::default(), &config, false) {
            check_messages(&causes);
        }
        if let Ok(causes) = vm::causes(&completed, Some(&vm), &Chosen::default(), &config, false) {
            check_messages(&causes);
        }
    }
    if let Ok(set) = serde_json::from_value::<VirtualMachineInstanceReplicaSet>(
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet", "metadata": {},
            "spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template}}),
    ) {
        check_messages(&replica_set::causes(&set, None, &config, false));
    }
    true
}
