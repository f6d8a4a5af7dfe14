mod infer;
mod specs;

use serde_json::json;

use super::*;
use crate::{context::Lookups, registry::handle};

const CLASS: &str = "virtualmachineclusterinstancetypes";
const PREFERENCE: &str = "virtualmachineclusterpreferences";

/// Returns the response in a cluster with the objects in `known`.
fn review(
    path: &str,
    group: &str,
    plural: &str,
    object: &Value,
    old: Option<&Value>,
    known: &[(ObjectQuery, Value)],
) -> Value {
    let body = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "kind": {"group": group, "version": "v1", "kind": "Any"},
            "resource": {"group": group, "version": "v1", "resource": plural},
            "namespace": "d", "operation": if old.is_some() { "UPDATE" } else { "CREATE" },
            "userInfo": {"username": "jane"}, "object": object, "oldObject": old,
        },
    });
    let mut lookups = Lookups::new();
    for _ in 0..crate::context::lookups::MAX_ROUNDS {
        match handle(path, body.to_string().as_bytes(), &ClusterConfig::default(), "kubevirt", &lookups) {
            Ok(evaluation) => return serde_json::to_value(evaluation.review).unwrap()["response"].clone(),
            Err(queries) => {
                for query in queries {
                    let object = known.iter().find(|(key, _)| *key == query).map(|(_, object)| object.clone());
                    lookups.insert(query, LookupResult::Object(object));
                }
            }
        }
    }
    panic!("too many rounds of lookups");
}

fn vm(spec: Value) -> Value {
    let mut vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v", "namespace": "d"},
        "spec": {"runStrategy": "Always", "template": {"spec": {"domain": {"devices": {}}}}},
    });
    json_patch::merge(&mut vm["spec"], &spec);
    vm
}

fn object(kind: &str, spec: Value) -> Value {
    json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": kind, "metadata": {"name": "c"}, "spec": spec})
}

fn class(spec: Value) -> (ObjectQuery, Value) {
    let mut whole = json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}});
    json_patch::merge(&mut whole, &spec);
    (ObjectQuery::get(GROUP, VERSION, CLASS, None, "c"), object("VirtualMachineClusterInstancetype", whole))
}

fn preference(spec: Value) -> (ObjectQuery, Value) {
    (ObjectQuery::get(GROUP, VERSION, PREFERENCE, None, "p"), object("VirtualMachineClusterPreference", spec))
}

fn validated(spec: Value, known: &[(ObjectQuery, Value)]) -> Value {
    review("/virtualmachines-validate", "kubevirt.io", "virtualmachines", &vm(spec), None, known)
}

/// Returns reasons, messages and fields of a denial.
fn field_errors(response: &Value) -> Vec<(String, String, String)> {
    let text = |error: &Value, key: &str| error[key].as_str().unwrap_or_default().to_owned();
    let errors = response.pointer("/status/details/causes").and_then(Value::as_array).cloned().unwrap_or_default();
    errors.iter().map(|error| (text(error, "reason"), text(error, "message"), text(error, "field"))).collect()
}

#[test]
fn vm_is_validated_with_its_instance_type_and_preference() {
    let names = json!({"instancetype": {"name": "c"}, "preference": {"name": "p"}});
    let response = validated(names.clone(), &[class(json!({})), preference(json!({}))]);
    assert_eq!(response["allowed"], true, "{response}");
    // A missing object prevents the start, not the write of the VM.
    assert_eq!(validated(names.clone(), &[])["allowed"], true);
    assert_eq!(validated(json!({"instancetype": {"name": "c", "kind": "Pod"}}), &[])["allowed"], true);
    // Fields of the instance type are validated as if they were the VM's.
    let gpu = json!({"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}});
    let response = validated(names, &[class(json!({"gpus": [gpu]}))]);
    assert_eq!(field_errors(&response)[0].2, "spec.template.spec.domain.devices.gpus[0].virtualGPUOptions.display");
}

#[test]
fn instance_type_with_memory_0_is_no_error_of_the_vm() {
    let named = json!({"instancetype": {"name": "c"}});
    let response = validated(named, &[class(json!({"memory": {"guest": "0"}}))]);
    assert_eq!(response["allowed"], true, "{response}");
}

#[test]
fn each_conflict_names_its_field() {
    let spec = json!({
        "instancetype": {"name": "c"},
        "template": {"spec": {"domain": {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}}}},
    });
    let of = |path: &str| {
        let message = format!("VM field(s) {path} conflicts with selected instance type");
        ("FieldValueInvalid".to_owned(), message, path.to_owned())
    };
    assert_eq!(
        field_errors(&validated(spec, &[class(json!({}))])),
        [of("spec.template.spec.domain.cpu.cores"), of("spec.template.spec.domain.memory.guest")]
    );
}

#[test]
fn spread_that_does_not_divide_is_refused() {
    let names = json!({"instancetype": {"name": "c"}, "preference": {"name": "p"}});
    let spread = preference(json!({"cpu": {"preferredCPUTopology": "spread"}}));
    let response = validated(names, &[class(json!({"cpu": {"guest": 3}})), spread]);
    let errors = field_errors(&response);
    assert_eq!(errors.len(), 1);
    let (kind, message, field) = &errors[0];
    assert_eq!((kind.as_str(), field.as_str()), ("FieldValueInvalid", "instancetype.spec.cpu.guest"));
    assert!(message.starts_with("3 vCPUs provided by the instance type are not divisible"), "{message}");
}

#[test]
fn requirements_of_a_preference_are_checked() {
    let needs = preference(json!({"requirements": {"cpu": {"guest": 4}}}));
    let names = json!({"instancetype": {"name": "c"}, "preference": {"name": "p"}});
    let message = "failure checking preference requirements: insufficient CPU resources of 2 vCPU provided by instance type, preference requires 4 vCPU";
    assert_eq!(
        field_errors(&validated(names, &[class(json!({})), needs.clone()])),
        [("FieldValueNotFound".to_owned(), message.to_owned(), "spec.instancetype".to_owned())]
    );
    let cores = |count: u32| {
        json!({"preference": {"name": "p"}, "template": {"spec": {"domain": {
            "cpu": {"sockets": count, "cores": 1, "threads": 1}, "memory": {"guest": "1Gi"},
        }}}})
    };
    assert_eq!(
        field_errors(&validated(cores(2), std::slice::from_ref(&needs)))[0].2,
        "spec.template.spec.domain.cpu.sockets"
    );
    assert_eq!(validated(cores(4), &[needs])["allowed"], true);
}

#[test]
fn stored_revision_takes_precedence() {
    let copy = ObjectQuery::get("apps", "v1", "controllerrevisions", Some("d"), "r");
    let held = json!({"kind": "ControllerRevision", "data": class(json!({})).1});
    let mut vmi = vm(json!({
        "instancetype": {"name": "c"}, "template": {"spec": {"domain": {"memory": {"guest": "2Gi"}}}},
    }));
    vmi["status"] = json!({"instancetypeRef": {"name": "c", "controllerRevisionRef": {"name": "r"}}});
    let response = review("/virtualmachines-validate", "kubevirt.io", "virtualmachines", &vmi, None, &[(copy, held)]);
    assert_eq!(field_errors(&response)[0].2, "spec.template.spec.domain.memory.guest");
}

/// Returns the VM after the mutating webhook, or the message of its refusal.
fn mutated(vm: &Value, old: Option<&Value>, known: &[(ObjectQuery, Value)]) -> Result<Value, Value> {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let response = review("/virtualmachines-mutate", "kubevirt.io", "virtualmachines", vm, old, known);
    if response["allowed"] != true {
        return Err(response["status"].clone());
    }
    let mut vm = vm.clone();
    if let Some(patch) = response["patch"].as_str() {
        let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap();
        json_patch::patch(&mut vm, &patch).unwrap();
    }
    Ok(vm)
}

#[test]
fn matchers_have_to_be_resolvable() {
    for (role, matcher, message, field) in [
        (
            "instancetype",
            json!({"kind": ""}),
            "Either Name or InferFromVolume should be provided within the InstancetypeMatcher",
            "spec.instancetype",
        ),
        (
            "preference",
            json!({"kind": ""}),
            "Either Name or InferFromVolume should be provided within the PreferenceMatcher",
            "spec.preference",
        ),
        (
            "instancetype",
            json!({"name": "a", "inferFromVolume": "v"}),
            "Name already set, should be cleared before setting inferFromVolume",
            "spec.instancetype.name",
        ),
        (
            "preference",
            json!({"kind": "a", "inferFromVolume": "v"}),
            "Kind already set, should be cleared before setting inferFromVolume",
            "spec.preference.kind",
        ),
        (
            "instancetype",
            json!({"name": "a", "inferFromVolumeFailurePolicy": "Maybe"}),
            "Invalid value 'Maybe' for InferFromVolumeFailurePolicy",
            "spec.instancetype.inferFromVolumeFailurePolicy",
        ),
    ] {
        let status = mutated(&vm(json!({role: matcher})), None, &[]).unwrap_err();
        let error = &status["details"]["causes"][0];
        assert_eq!((&error["message"], &error["field"]), (&json!(message), &json!(field)));
    }
}

#[test]
fn only_the_first_invalid_matcher_is_reported() {
    let both = |matcher: Value| vm(json!({"instancetype": matcher, "preference": matcher}));
    let fields = |status: Value| {
        let errors = status["details"]["causes"].as_array().unwrap().clone();
        errors.iter().map(|error| error["field"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let status = mutated(&both(json!({"name": "a", "kind": "b", "inferFromVolume": "v"})), None, &[]).unwrap_err();
    assert_eq!(fields(status), ["spec.instancetype.name", "spec.instancetype.kind"]);
    let named = |name: &str| both(json!({"name": name, "revisionName": "r"}));
    let status = mutated(&named("b"), Some(&named("a")), &[]).unwrap_err();
    assert_eq!(fields(status), ["spec.instancetype.revisionName"]);
}

#[test]
fn changed_name_needs_a_changed_revision() {
    let named = |name: &str, revision: &str| vm(json!({"instancetype": {"name": name, "revisionName": revision}}));
    assert!(mutated(&named("b", "r2"), Some(&named("a", "r1")), &[]).is_ok());
    assert!(mutated(&named("a", "r1"), Some(&named("a", "r1")), &[]).is_ok());
    let status = mutated(&named("b", "r1"), Some(&named("a", "r1")), &[]).unwrap_err();
    assert_eq!(status["details"]["causes"][0]["field"], "spec.instancetype.revisionName");
    assert_eq!(status["message"], "the Matcher Name has been updated without updating the RevisionName");
}

#[test]
fn preference_sets_its_defaults() {
    let known = [preference(json!({
        "machine": {"preferredMachineType": "pc-q35-8.2"}, "preferredArchitecture": "arm64",
        "volumes": {"preferredStorageClassName": "fast"},
    }))];
    let spec = json!({
        "preference": {"name": "p"},
        "dataVolumeTemplates": [
            {"metadata": {"name": "a"}, "spec": {"storage": {}}},
            {"metadata": {"name": "b"}, "spec": {"pvc": {"storageClassName": "slow"}}},
        ],
    });
    let vm = mutated(&vm(spec), None, &known).unwrap();
    let template = &vm["spec"]["template"]["spec"];
    assert_eq!(
        (&template["architecture"], &template["domain"]["machine"]["type"]),
        (&json!("arm64"), &json!("pc-q35-8.2"))
    );
    assert_eq!(vm["spec"]["dataVolumeTemplates"][0]["spec"]["storage"]["storageClassName"], "fast");
    assert_eq!(vm["spec"]["dataVolumeTemplates"][1]["spec"]["pvc"]["storageClassName"], "slow");
}

#[test]
fn expanded_vm_has_the_defaults_of_a_vmi() {
    let class: VirtualMachineInstancetypeSpec =
        serde_json::from_value(json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}})).unwrap();
    let vm: VirtualMachine = serde_json::from_value(vm(json!({
        "instancetype": {"name": "c"}, "template": {"spec": {"volumes": [{"name": "cd", "containerDisk": {"image": "a:b"}}]}},
    })))
    .unwrap();
    let expanded = serde_json::to_value(expanded(&vm, Some(&class), None, &ClusterConfig::default()).unwrap()).unwrap();
    let template = &expanded["spec"]["template"]["spec"];
    assert_eq!(template["domain"]["cpu"], json!({"sockets": 2, "cores": 1, "threads": 1}));
    assert_eq!(template["domain"]["devices"]["disks"], json!([{"name": "cd"}]));
    assert_eq!(template["networks"], json!([{"name": "default", "pod": {}}]));
    assert_eq!(template["architecture"], "amd64");
    assert_eq!(expanded["spec"].get("instancetype"), None);
}
