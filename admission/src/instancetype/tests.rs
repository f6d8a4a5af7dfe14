use serde_json::json;

use super::*;
use crate::{handle, neighbours::Neighbours};

const CLASS: &str = "virtualmachineclusterinstancetypes";
const PREFERENCE: &str = "virtualmachineclusterpreferences";

/// Answers to what is asked for; of everything else there is nothing.
fn review(
    path: &str,
    group: &str,
    plural: &str,
    object: &Value,
    old: Option<&Value>,
    known: &[(Wanted, Value)],
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
    let mut neighbours = Neighbours::new();
    for _ in 0..crate::neighbours::MAX_ROUNDS {
        match handle(path, body.to_string().as_bytes(), &ClusterConfig::default(), "kubevirt", &neighbours) {
            Ok(review) => return serde_json::to_value(review).unwrap()["response"].clone(),
            Err(wanted) => {
                for wanted in wanted {
                    let object = known.iter().find(|(key, _)| *key == wanted).map(|(_, object)| object.clone());
                    neighbours.insert(wanted, Outcome::Object(object));
                }
            }
        }
    }
    panic!("the rules ask for more and more");
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

fn class(spec: Value) -> (Wanted, Value) {
    let mut whole = json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}});
    json_patch::merge(&mut whole, &spec);
    (Wanted::get(GROUP, VERSION, CLASS, None, "c"), object("VirtualMachineClusterInstancetype", whole))
}

fn preference(spec: Value) -> (Wanted, Value) {
    (Wanted::get(GROUP, VERSION, PREFERENCE, None, "p"), object("VirtualMachineClusterPreference", spec))
}

fn validated(spec: Value, known: &[(Wanted, Value)]) -> Value {
    review("/virtualmachines-validate", "kubevirt.io", "virtualmachines", &vm(spec), None, known)
}

/// Messages and fields of a denial.
fn causes(response: &Value) -> Vec<(String, String, String)> {
    let text = |cause: &Value, key: &str| cause[key].as_str().unwrap_or_default().to_owned();
    let causes = response.pointer("/status/details/causes").and_then(Value::as_array).cloned().unwrap_or_default();
    causes.iter().map(|cause| (text(cause, "reason"), text(cause, "message"), text(cause, "field"))).collect()
}

#[test]
fn vm_is_checked_with_what_it_names() {
    let names = json!({"instancetype": {"name": "c"}, "preference": {"name": "p"}});
    let response = validated(names.clone(), &[class(json!({})), preference(json!({}))]);
    assert_eq!(response["allowed"], true, "{response}");
    // What is missing stops the start, not the writing of the VM.
    assert_eq!(validated(names.clone(), &[])["allowed"], true);
    assert_eq!(validated(json!({"instancetype": {"name": "c", "kind": "Pod"}}), &[])["allowed"], true);
    // What the instance type asks for is refused as if the VM did.
    let response = validated(names, &[class(json!({"cpu": {"dedicatedCPUPlacement": true}}))]);
    assert_eq!(causes(&response)[0].2, "spec.template.spec.domain.cpu.dedicatedCpuPlacement");
}

#[test]
fn memory_that_an_instance_type_leaves_at_0_is_no_fault_of_the_vm() {
    let named = json!({"instancetype": {"name": "c"}});
    let response = validated(named, &[class(json!({"memory": {"guest": "0"}}))]);
    assert_eq!(response["allowed"], true, "{response}");
}

#[test]
fn conflicts_are_named_each_by_its_field() {
    let spec = json!({
        "instancetype": {"name": "c"},
        "template": {"spec": {"domain": {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}}}},
    });
    let of = |path: &str| {
        let message = format!("VM field(s) {path} conflicts with selected instance type");
        ("FieldValueInvalid".to_owned(), message, path.to_owned())
    };
    assert_eq!(
        causes(&validated(spec, &[class(json!({}))])),
        [of("spec.template.spec.domain.cpu.cores"), of("spec.template.spec.domain.memory.guest")]
    );
}

#[test]
fn spread_that_does_not_divide_is_refused() {
    let names = json!({"instancetype": {"name": "c"}, "preference": {"name": "p"}});
    let spread = preference(json!({"cpu": {"preferredCPUTopology": "spread"}}));
    let response = validated(names, &[class(json!({"cpu": {"guest": 3}})), spread]);
    let causes = causes(&response);
    assert_eq!(causes.len(), 1);
    let (kind, message, field) = &causes[0];
    assert_eq!((kind.as_str(), field.as_str()), ("FieldValueInvalid", "instancetype.spec.cpu.guest"));
    assert!(message.starts_with("3 vCPUs provided by the instance type are not divisible"), "{message}");
}

#[test]
fn requirements_of_a_preference_hold() {
    let needs = preference(json!({"requirements": {"cpu": {"guest": 4}}}));
    let names = json!({"instancetype": {"name": "c"}, "preference": {"name": "p"}});
    let message = "failure checking preference requirements: insufficient CPU resources of 2 vCPU provided by instance type, preference requires 4 vCPU";
    assert_eq!(
        causes(&validated(names, &[class(json!({})), needs.clone()])),
        [("FieldValueNotFound".to_owned(), message.to_owned(), "spec.instancetype".to_owned())]
    );
    let cores = |count: u32| {
        json!({"preference": {"name": "p"}, "template": {"spec": {"domain": {
            "cpu": {"sockets": count, "cores": 1, "threads": 1}, "memory": {"guest": "1Gi"},
        }}}})
    };
    assert_eq!(
        causes(&validated(cores(2), std::slice::from_ref(&needs)))[0].2,
        "spec.template.spec.domain.cpu.sockets"
    );
    assert_eq!(validated(cores(4), &[needs])["allowed"], true);
}

#[test]
fn stored_copy_is_what_counts() {
    let copy = Wanted::get("apps", "v1", "controllerrevisions", Some("d"), "r");
    let held = json!({"kind": "ControllerRevision", "data": class(json!({})).1});
    let mut machine = vm(json!({
        "instancetype": {"name": "c"}, "template": {"spec": {"domain": {"memory": {"guest": "2Gi"}}}},
    }));
    machine["status"] = json!({"instancetypeRef": {"name": "c", "controllerRevisionRef": {"name": "r"}}});
    let response =
        review("/virtualmachines-validate", "kubevirt.io", "virtualmachines", &machine, None, &[(copy, held)]);
    assert_eq!(causes(&response)[0].2, "spec.template.spec.domain.memory.guest");
}

/// The VM after the mutating webhook, or what it says.
fn mutated(vm: &Value, old: Option<&Value>, known: &[(Wanted, Value)]) -> Result<Value, Value> {
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
        let cause = &status["details"]["causes"][0];
        assert_eq!((&cause["message"], &cause["field"]), (&json!(message), &json!(field)));
    }
}

#[test]
fn first_matcher_that_is_wrong_answers() {
    let both = |matcher: Value| vm(json!({"instancetype": matcher, "preference": matcher}));
    let fields = |status: Value| {
        let causes = status["details"]["causes"].as_array().unwrap().clone();
        causes.iter().map(|cause| cause["field"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let status = mutated(&both(json!({"name": "a", "kind": "b", "inferFromVolume": "v"})), None, &[]).unwrap_err();
    assert_eq!(fields(status), ["spec.instancetype.name", "spec.instancetype.kind"]);
    let named = |name: &str| both(json!({"name": name, "revisionName": "r"}));
    let status = mutated(&named("b"), Some(&named("a")), &[]).unwrap_err();
    assert_eq!(fields(status), ["spec.instancetype.revisionName"]);
}

#[test]
fn other_name_needs_another_revision() {
    let named = |name: &str, revision: &str| vm(json!({"instancetype": {"name": name, "revisionName": revision}}));
    assert!(mutated(&named("b", "r2"), Some(&named("a", "r1")), &[]).is_ok());
    assert!(mutated(&named("a", "r1"), Some(&named("a", "r1")), &[]).is_ok());
    let status = mutated(&named("b", "r1"), Some(&named("a", "r1")), &[]).unwrap_err();
    assert_eq!(status["details"]["causes"][0]["field"], "spec.instancetype.revisionName");
    assert_eq!(status["message"], "the Matcher Name has been updated without updating the RevisionName");
}

#[test]
fn preference_sets_what_only_it_knows() {
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

/// An object with the labels that name an instance type.
fn labelled(spec: Value) -> Value {
    json!({
        "metadata": {"labels": {
            "instancetype.kubevirt.io/default-instancetype": "small",
            "instancetype.kubevirt.io/default-instancetype-kind": "VirtualMachineInstancetype",
        }},
        "spec": spec,
    })
}

fn plain(spec: Value) -> Value {
    json!({"metadata": {}, "spec": spec})
}

#[test]
fn volumes_name_instance_types_by_their_labels() {
    let claim = |namespace: &str, name: &str| Wanted::get("", "v1", "persistentvolumeclaims", Some(namespace), name);
    let cdi = |plural: &str, namespace: &str, name: &str| {
        Wanted::get("cdi.kubevirt.io", "v1beta1", plural, Some(namespace), name)
    };
    let snapshot = Wanted::get("snapshot.storage.k8s.io", "v1", "volumesnapshots", Some("d"), "s");
    let of_claim = json!({"name": "root", "persistentVolumeClaim": {"claimName": "c"}});
    let of_data_volume = json!({"name": "root", "dataVolume": {"name": "dv"}});
    let source_ref = json!({"sourceRef": {"kind": "DataSource", "name": "ds", "namespace": "images"}, "storage": {}});
    let from_claim = json!({"source": {"pvc": {"name": "c", "namespace": "images"}}, "storage": {}});
    let missing = "unable to find required instancetype.kubevirt.io/default-instancetype label on the volume";
    // volume, spec of a DataVolume template, objects, message of a failure
    type Row<'a> = (Value, Option<Value>, Vec<(Wanted, Value)>, Option<&'a str>);
    let table: Vec<Row<'_>> = vec![
        (of_claim.clone(), None, vec![(claim("d", "c"), labelled(json!({})))], None),
        (of_claim.clone(), None, vec![(claim("d", "c"), plain(json!({})))], Some(missing)),
        (of_claim, None, vec![], Some("persistentvolumeclaims \"c\" not found")),
        (of_data_volume.clone(), None, vec![(cdi("datavolumes", "d", "dv"), labelled(json!({})))], None),
        // Finished DataVolumes may be gone.
        (of_data_volume.clone(), None, vec![(claim("d", "dv"), labelled(json!({})))], None),
        (
            of_data_volume.clone(),
            None,
            vec![
                (cdi("datavolumes", "d", "dv"), plain(from_claim.clone())),
                (claim("images", "c"), labelled(json!({}))),
            ],
            None,
        ),
        (of_data_volume.clone(), Some(from_claim), vec![(claim("images", "c"), labelled(json!({})))], None),
        (
            of_data_volume.clone(),
            Some(json!({"source": {"snapshot": {"name": "s", "namespace": ""}}})),
            vec![(snapshot, labelled(json!({})))],
            None,
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![(cdi("datasources", "images", "ds"), labelled(json!({})))],
            None,
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![
                (cdi("datasources", "images", "ds"), plain(json!({"source": {"dataSource": {"name": "other"}}}))),
                (cdi("datasources", "images", "other"), plain(json!({"source": {"pvc": {"name": "c"}}}))),
                (claim("images", "c"), labelled(json!({}))),
            ],
            None,
        ),
        (
            of_data_volume.clone(),
            Some(source_ref.clone()),
            vec![(cdi("datasources", "images", "ds"), plain(json!({"source": {}})))],
            Some(
                "unable to infer defaults from DataSource that doesn't provide DataVolumeSourcePVC or DataVolumeSourceSnapshot",
            ),
        ),
        (of_data_volume.clone(), Some(source_ref), vec![], Some("datasources.cdi.kubevirt.io \"ds\" not found")),
        (
            of_data_volume.clone(),
            Some(json!({"sourceRef": {"kind": "Thing", "name": "x"}})),
            vec![],
            Some("unable to infer defaults from DataVolumeSourceRef as Kind Thing is not supported"),
        ),
        (
            of_data_volume,
            Some(json!({"source": {"blank": {}}})),
            vec![],
            Some("unable to infer defaults from DataVolumeSpec as DataVolumeSource is not supported"),
        ),
        (
            json!({"name": "root", "containerDisk": {"image": "i"}}),
            None,
            vec![],
            Some("unable to infer defaults from volume root as type is not supported"),
        ),
        (json!({"name": "other"}), None, vec![], Some("unable to find volume root to infer defaults")),
    ];
    for (volume, template, known, failure) in table {
        let mut machine = vm(json!({
            "instancetype": {"inferFromVolume": "root"}, "template": {"spec": {"volumes": [volume]}},
        }));
        if let Some(spec) = &template {
            machine["spec"]["dataVolumeTemplates"] = json!([{"metadata": {"name": "dv"}, "spec": spec}]);
        }
        match (mutated(&machine, None, &known), failure) {
            (Ok(vm), None) => assert_eq!(
                vm["spec"]["instancetype"],
                json!({"name": "small", "kind": "VirtualMachineInstancetype"}),
                "{volume} {template:?}"
            ),
            (Err(status), Some(message)) => {
                assert_eq!((&status["message"], &status["code"]), (&json!(message), &json!(400)), "{volume}");
            }
            (found, wanted) => panic!("{volume} {template:?}: {found:?}, wanted {wanted:?}"),
        }
    }
}

#[test]
fn policy_ignore_lets_go_of_what_a_volume_does_not_name() {
    let claim = Wanted::get("", "v1", "persistentvolumeclaims", Some("d"), "c");
    let machine = vm(json!({
        "instancetype": {"inferFromVolume": "root", "inferFromVolumeFailurePolicy": "Ignore"},
        "template": {"spec": {
            "domain": {"memory": {"guest": "1Gi"}},
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}],
        }},
    }));
    let nothing = mutated(&machine, None, &[(claim.clone(), plain(json!({})))]).unwrap();
    assert_eq!(nothing["spec"].get("instancetype"), None);
    assert_eq!(nothing["spec"]["template"]["spec"]["domain"]["memory"]["guest"], "1Gi");
    let found = mutated(&machine, None, &[(claim, labelled(json!({})))]).unwrap();
    assert_eq!(found["spec"]["instancetype"]["name"], "small");
    assert_eq!(found["spec"]["template"]["spec"]["domain"].get("memory"), None);
    // A claim that is missing is no question of policy.
    assert!(mutated(&machine, None, &[]).is_err());
}

#[test]
fn instance_types_and_preferences_have_rules_of_their_own() {
    let class = |change: Value| {
        let mut spec = json!({"cpu": {"guest": 1}, "memory": {"guest": "1Gi"}});
        json_patch::merge(&mut spec, &change);
        object("VirtualMachineClusterInstancetype", spec)
    };
    let preference = |spec: Value| object("VirtualMachineClusterPreference", spec);
    let percent = "spec.memory.overcommitPercent";
    for (plural, object, refused, warning) in [
        (CLASS, class(json!({})), None, None),
        (CLASS, class(json!({"memory": {"overcommitPercent": 100}})), None, None),
        (
            CLASS,
            class(json!({"memory": {"overcommitPercent": 101}})),
            Some((percent, "spec.memory.overcommitPercent '101': must be in range between 0 and 100.")),
            None,
        ),
        (
            CLASS,
            class(json!({"memory": {"overcommitPercent": -1}})),
            Some((percent, "spec.memory.overcommitPercent '-1': must be in range between 0 and 100.")),
            None,
        ),
        (
            CLASS,
            class(json!({"memory": {"overcommitPercent": 5, "hugepages": {}}})),
            Some((
                percent,
                "spec.memory.overcommitPercent and spec.memory.hugepages should not be requested together.",
            )),
            None,
        ),
        (
            CLASS,
            class(json!({"launchSecurity": {"sev": {}}})),
            None,
            Some("launchSecurity is deprecated and will be removed in a future release. Use preference instead."),
        ),
        (PREFERENCE, preference(json!({})), None, None),
        (PREFERENCE, preference(json!({"cpu": {"preferredCPUTopology": "any"}})), None, None),
        (
            PREFERENCE,
            preference(json!({"cpu": {"preferredCPUTopology": "round"}})),
            Some(("spec.cpu.preferredCPUTopology", "unknown preferredCPUTopology round")),
            None,
        ),
        (
            PREFERENCE,
            preference(json!({"cpu": {"preferredCPUTopology": "preferCores"}})),
            None,
            Some(
                "PreferredCPUTopology preferCores is deprecated for removal in a future release, please use cores instead",
            ),
        ),
        (
            PREFERENCE,
            preference(json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "Mars"}}})),
            Some(("spec.cpu.spreadOptions.across", "across Mars is not supported")),
            None,
        ),
        (
            PREFERENCE,
            preference(
                json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "CoresThreads", "ratio": 3}}}),
            ),
            Some((
                "spec.cpu.spreadOptions.ratio",
                "only a ratio of 2 (1 core 2 threads) is allowed when spreading vCPUs over cores and threads",
            )),
            None,
        ),
        // Without spreading, how to spread does not matter.
        (PREFERENCE, preference(json!({"cpu": {"spreadOptions": {"across": "Mars"}}})), None, None),
    ] {
        for plural in [plural.to_owned(), plural.replace("cluster", "")] {
            let response = review(&format!("/{plural}-validate"), GROUP, &plural, &object, None, &[]);
            let found: Vec<_> = causes(&response).into_iter().map(|(_, message, field)| (field, message)).collect();
            let wanted: Vec<_> =
                refused.iter().map(|(field, message)| ((*field).to_owned(), (*message).to_owned())).collect();
            assert_eq!(found, wanted, "{object}");
            assert_eq!(response["allowed"], refused.is_none());
            assert_eq!(response["warnings"].get(0).and_then(Value::as_str), warning, "{object}");
        }
    }
}

#[test]
fn expanded_vm_has_the_defaults_of_a_machine() {
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
