use serde_json::{Value, json};

use super::*;

static NO_CLAIMS: BTreeMap<String, Arc<ClaimView>> = BTreeMap::new();

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn vm(spec: &Value, status: &Value) -> VirtualMachine {
    let mut vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {
            "name": "v", "namespace": "d", "uid": "vm-uid", "resourceVersion": "3", "generation": 2,
            "finalizers": ["kubevirt.io/virtualMachineControllerFinalize"],
        },
        "spec": {"template": {
            "metadata": {"labels": {"app": "x"}},
            "spec": {"domain": {"devices": {}}, "volumes": [{"name": "cd", "containerDisk": {"image": "i"}}]},
        }},
    });
    json_patch::merge(&mut vm["spec"], spec);
    if !status.is_null() {
        vm["status"] = status.clone();
    }
    serde_json::from_value(vm).unwrap()
}

fn with_strategy(strategy: &str, status: &Value) -> VirtualMachine {
    vm(&json!({"runStrategy": strategy}), status)
}

fn started(vm: &VirtualMachine, paused: bool) -> VirtualMachineInstance {
    start::instance(vm, &Chosen::default(), &ClusterConfig::default(), paused).unwrap()
}

fn instance(vm: &VirtualMachine, phase: &str) -> VirtualMachineInstance {
    let mut instance = started(vm, false);
    instance.metadata.uid = Some("vmi-uid".to_owned());
    instance.metadata.resource_version = Some("9".to_owned());
    instance.status = serde_json::from_value(json!({"phase": phase})).unwrap();
    instance
}

fn observed<'a>(
    vm: &'a VirtualMachine,
    instance: Option<&'a VirtualMachineInstance>,
    failure: Option<&'a Failure>,
    config: &'a ClusterConfig,
) -> Observed<'a> {
    Observed {
        vm,
        instance,
        claims: &NO_CLAIMS,
        instancetype: Lookup::Unnamed,
        preference: Lookup::Unnamed,
        starts: &[],
        config,
        failure,
        now: now(),
    }
}

fn decided_with(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>, failure: Option<&Failure>) -> Decision {
    decide(&observed(vm, instance, failure, &ClusterConfig::default())).unwrap()
}

fn decided(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>) -> Decision {
    decided_with(vm, instance, None)
}

fn creates(decision: &Decision) -> bool {
    decision.effects.iter().any(|effect| matches!(effect, Effect::Create { kind: Kind::Instance, .. }))
}

fn deletes(decision: &Decision) -> bool {
    decision.effects.iter().any(|effect| matches!(effect, Effect::Delete { kind: Kind::Instance, .. }))
}

fn status_patch(decision: &Decision) -> Value {
    let patch = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { subresource: Some("status"), patch, .. } => Some(patch["status"].clone()),
        _ => None,
    });
    patch.unwrap_or(Value::Null)
}

#[test]
fn run_strategies_start_and_stop_as_they_should() {
    let start = json!({"runStrategy": "Manual", "stateChangeRequests": [{"action": "Start"}]});
    let stop = json!({"runStrategy": "Manual", "stateChangeRequests": [{"action": "Stop", "uid": "vmi-uid"}]});
    let stop_other = json!({"stateChangeRequests": [{"action": "Stop", "uid": "another"}]});
    let rerun = json!({"runStrategy": "RerunOnFailure"});
    // strategy, status, phase of the machine, creates, deletes
    let table: &[(&str, &Value, Option<&str>, bool, bool)] = &[
        ("Always", &Value::Null, None, true, false),
        ("Always", &Value::Null, Some("Running"), false, false),
        ("Always", &Value::Null, Some("Succeeded"), false, true),
        ("Always", &Value::Null, Some("Failed"), false, true),
        ("Always", &stop, Some("Running"), false, true),
        ("Always", &stop_other, Some("Running"), false, false),
        ("Halted", &Value::Null, None, false, false),
        ("Halted", &Value::Null, Some("Running"), false, true),
        ("Manual", &Value::Null, None, false, false),
        ("Manual", &start, None, true, false),
        ("Manual", &stop, Some("Running"), false, true),
        ("Manual", &Value::Null, Some("Failed"), false, false),
        ("RerunOnFailure", &Value::Null, None, true, false),
        ("RerunOnFailure", &rerun, None, false, false),
        ("RerunOnFailure", &rerun, Some("Succeeded"), false, true),
        ("RerunOnFailure", &rerun, Some("Failed"), false, true),
        ("Once", &Value::Null, None, true, false),
        ("Once", &Value::Null, Some("Succeeded"), false, false),
    ];
    for (strategy, status, phase, wanted_create, wanted_delete) in table {
        let vm = with_strategy(strategy, status);
        let machine = phase.map(|phase| instance(&vm, phase));
        let decision = decided(&vm, machine.as_ref());
        assert_eq!(creates(&decision), *wanted_create, "{strategy} {status} {phase:?}");
        assert_eq!(deletes(&decision), *wanted_delete, "{strategy} {status} {phase:?}");
    }
}

#[test]
fn halted_vm_with_start_request_changes_its_strategy() {
    let vm = with_strategy("Halted", &json!({"stateChangeRequests": [{"action": "Start"}]}));
    let decision = decided(&vm, None);
    let Some(Effect::Patch { patch, subresource: None, .. }) = decision.effects.first() else { panic!("{decision:?}") };
    assert_eq!(patch["spec"]["runStrategy"], "Always");
}

#[test]
fn new_vm_gets_its_finalizer_and_its_machine_without_a_status_write_between() {
    let mut vm = with_strategy("Always", &Value::Null);
    vm.metadata.finalizers = None;
    let decision = decided(&vm, None);
    // What it starts from is kept as well.
    assert_eq!(decision.effects.len(), 3, "{decision:?}");
    assert!(matches!(decision.effects[0], Effect::Patch { kind: Kind::VirtualMachine, subresource: None, .. }));
    assert!(creates(&decision));
}

#[test]
fn machine_is_made_from_the_template_and_owned() {
    let vm = with_strategy("Always", &Value::Null);
    let machine = started(&vm, true);
    assert_eq!(machine.metadata.name.as_deref(), Some("v"));
    assert_eq!(machine.metadata.labels.as_ref().unwrap()["app"], "x");
    assert_eq!(machine.metadata.annotations.as_ref().unwrap()["kubevirt.io/vm-generation"], "2");
    assert_eq!(machine.metadata.owner_references.as_ref().unwrap()[0].uid, "vm-uid");
    assert_eq!(machine.metadata.finalizers.as_ref().unwrap(), &["kubevirt.io/virtualMachineControllerFinalize"]);
    assert_eq!(machine.spec.start_strategy, Some(api::StartStrategy::Paused));
    assert_eq!(machine.spec.domain.devices.disks[0].name, "cd");
    let uuid = |vm: &VirtualMachine| started(vm, false).spec.domain.firmware.unwrap().uuid.unwrap();
    assert_eq!(uuid(&vm), uuid(&vm));
    assert_eq!(uuid(&vm).len(), 36);
}

#[test]
fn refused_machine_shows_in_the_failure_condition_until_it_is_made() {
    let vm = with_strategy("Always", &Value::Null);
    let failure = Failure {
        reason: "FailedCreate",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let decision = decided_with(&vm, None, Some(&failure));
    assert!(!creates(&decision));
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(10)));
    let status = status_patch(&decision);
    let failed = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
    assert_eq!(
        (&failed["reason"], &failed["message"]),
        (&json!("FailedCreate"), &json!("Failure while starting VMI: denied"))
    );
    let machine = instance(&vm, "Pending");
    let mut told = vm;
    told.status = serde_json::from_value(status).unwrap();
    let status = status_patch(&decided(&told, Some(&machine)));
    assert!(!status["conditions"].as_array().unwrap().iter().any(|known| known["type"] == "Failure"));
}

#[test]
fn failed_machine_that_never_ran_is_counted_once_and_delays_the_next_start() {
    let vm = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let mut failed = instance(&vm, "Failed");
    let status = status_patch(&decided(&vm, Some(&failed)));
    assert_eq!(status["startFailure"]["consecutiveFailCount"], 1);
    // One that somebody deleted before it ran has not failed by itself.
    failed.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    assert_eq!(status_patch(&decided(&vm, Some(&failed))).get("startFailure"), None);
    let mut counted = vm;
    counted.status.as_mut().unwrap().start_failure = serde_json::from_value(status["startFailure"].clone()).unwrap();
    let again = status_patch(&decided(&counted, Some(&failed)));
    assert_eq!(again.get("startFailure"), None);
    let decision = decided(&counted, None);
    assert!(!creates(&decision) && decision.wake_after.is_some());
    assert_eq!(status_patch(&decision)["printableStatus"], "CrashLoopBackOff");
}

#[test]
fn machine_that_ran_clears_the_count() {
    let failed = json!({"startFailure": {"consecutiveFailCount": 2, "lastFailedVMIUID": "x"}, "runStrategy": "Always"});
    let vm = with_strategy("Always", &failed);
    let status = status_patch(&decided(&vm, Some(&instance(&vm, "Running"))));
    assert_eq!(status["startFailure"], Value::Null);
}

#[test]
fn failed_machine_of_rerun_on_failure_is_noted_for_a_start_before_it_is_deleted() {
    let vm = with_strategy("RerunOnFailure", &json!({"runStrategy": "RerunOnFailure"}));
    let decision = decided(&vm, Some(&instance(&vm, "Failed")));
    assert!(matches!(decision.effects[0], Effect::Patch { subresource: Some("status"), .. }));
    assert!(matches!(decision.effects[1], Effect::Delete { .. }));
    assert_eq!(status_patch(&decision)["stateChangeRequests"], json!([{"action": "Start"}]));
}

#[test]
fn vm_that_is_switched_to_rerun_on_failure_keeps_its_start_until_it_is_made() {
    let vm = with_strategy("RerunOnFailure", &json!({"runStrategy": "Halted"}));
    let failure = Failure {
        reason: "FailedCreate",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let status = status_patch(&decided_with(&vm, None, Some(&failure)));
    assert_eq!(status.get("runStrategy"), None, "{status}");
    assert!(creates(&decided(&vm, None)));
    let status = status_patch(&decided(&vm, Some(&instance(&vm, "Pending"))));
    assert_eq!(status["runStrategy"], "RerunOnFailure");
}

#[test]
fn requests_are_dropped_when_they_are_fulfilled() {
    let start = json!({"runStrategy": "Manual", "stateChangeRequests": [{"action": "Start"}]});
    let vm = with_strategy("Manual", &start);
    let status = status_patch(&decided(&vm, Some(&instance(&vm, "Pending"))));
    assert_eq!(status["stateChangeRequests"], Value::Null);
    let restart = json!({"stateChangeRequests": [{"action": "Stop", "uid": "vmi-uid"}, {"action": "Start"}]});
    let vm = with_strategy("Manual", &restart);
    let status = status_patch(&decided(&vm, None));
    assert_eq!(status["stateChangeRequests"], json!([{"action": "Start"}]));
}

#[test]
fn printable_status_follows_the_machine() {
    let condition =
        |type_: &str, status: &str, reason: &str| json!({"type": type_, "status": status, "reason": reason});
    let none = json!([]);
    let table: &[(&str, Value, &str)] = &[
        ("Pending", none.clone(), "Starting"),
        ("Scheduled", none.clone(), "Starting"),
        ("Running", none.clone(), "Running"),
        ("Running", json!([condition("Paused", "True", "")]), "Paused"),
        ("Scheduling", json!([condition("PodScheduled", "False", "Unschedulable")]), "ErrorUnschedulable"),
        ("Scheduling", json!([condition("Synchronized", "False", "ErrImagePull")]), "ErrImagePull"),
        ("Scheduling", json!([condition("Synchronized", "False", "ImagePullBackOff")]), "ImagePullBackOff"),
        ("Pending", json!([condition("Synchronized", "False", "FailedPvcNotFound")]), "ErrorPvcNotFound"),
        ("Succeeded", none, "Stopped"),
    ];
    for (phase, conditions, wanted) in table {
        let vm = with_strategy("Once", &Value::Null);
        let mut machine = instance(&vm, phase);
        machine.status.as_mut().unwrap().conditions = serde_json::from_value(conditions.clone()).unwrap();
        assert_eq!(status_patch(&decided(&vm, Some(&machine)))["printableStatus"], *wanted, "{phase} {conditions}");
    }
}

#[test]
fn claims_say_what_a_vm_waits_for_and_why_its_volumes_have_no_snapshots() {
    let volumes = json!([
        {"name": "cd", "containerDisk": {"image": "i"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "known"}},
        {"name": "more", "persistentVolumeClaim": {"claimName": "missing"}},
    ]);
    let spec = json!({"runStrategy": "Always", "template": {"spec": {"volumes": volumes}}});
    let vm = vm(&spec, &json!({"runStrategy": "Always"}));
    let machine = instance(&vm, "Pending");
    let config = ClusterConfig::default();
    for (phase, printable) in [("Pending", "WaitingForVolumeBinding"), ("Bound", "Starting")] {
        let claim =
            ClaimView { phase: phase.to_owned(), storage_class: Some("local".to_owned()), ..ClaimView::default() };
        let claims = BTreeMap::from([("known".to_owned(), Arc::new(claim))]);
        let observed = Observed { claims: &claims, ..observed(&vm, Some(&machine), None, &config) };
        let status = status_patch(&decide(&observed).unwrap());
        assert_eq!(status["printableStatus"], printable);
        let told = status["volumeSnapshotStatuses"].as_array().unwrap();
        let reasons: Vec<&str> = told.iter().filter_map(|volume| volume["reason"].as_str()).collect();
        assert_eq!(
            reasons,
            [
                "Snapshot is not supported for this volumeSource type [cd]",
                "No VolumeSnapshotClass: Volume snapshots are not configured for this StorageClass [local] [data]",
                "PVC not found",
            ]
        );
    }
}

#[test]
fn running_vm_mirrors_its_machine_and_is_then_settled() {
    let mut vm = with_strategy("Always", &Value::Null);
    let mut machine = instance(&vm, "Running");
    machine.status.as_mut().unwrap().conditions = serde_json::from_value(json!([
        {"type": "Ready", "status": "True"}, {"type": "AgentConnected", "status": "True"},
    ]))
    .unwrap();
    let status = status_patch(&decided(&vm, Some(&machine)));
    assert_eq!((&status["created"], &status["ready"]), (&json!(true), &json!(true)));
    assert_eq!(status["runStrategy"], "Always");
    assert_eq!((&status["observedGeneration"], &status["desiredGeneration"]), (&json!(2), &json!(2)));
    assert_eq!(status["conditions"].as_array().unwrap().len(), 2);
    vm.status = serde_json::from_value(status).unwrap();
    assert_eq!(decided(&vm, Some(&machine)), Decision::settled());
}

#[test]
fn changed_template_asks_for_a_restart_until_it_is_changed_back() {
    let vm = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let machine = instance(&vm, "Running");
    let mut changed = vm.clone();
    changed.metadata.generation = Some(3);
    changed.spec.template.spec.as_mut().unwrap().hostname = Some("other".to_owned());
    let status = status_patch(&decided(&changed, Some(&machine)));
    let types: Vec<&Value> = status["conditions"].as_array().unwrap().iter().map(|known| &known["type"]).collect();
    assert!(types.contains(&&json!("RestartRequired")), "{status}");
    assert_eq!(status["observedGeneration"], 2);
    let mut back = vm;
    back.metadata.generation = Some(4);
    back.status = serde_json::from_value(status).unwrap();
    let status = status_patch(&decided(&back, Some(&machine)));
    assert_eq!(status["observedGeneration"], 4);
    let types: Vec<&Value> = status["conditions"].as_array().unwrap().iter().map(|known| &known["type"]).collect();
    assert!(!types.contains(&&json!("RestartRequired")));
}

#[test]
fn deleted_vm_takes_its_machine_along_and_goes_last() {
    let mut vm = with_strategy("Always", &json!({"printableStatus": "Running"}));
    vm.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let machine = instance(&vm, "Running");
    assert!(deletes(&decided(&vm, Some(&machine))));
    let decision = decided(&vm, None);
    let [Effect::Patch { patch, subresource: None, .. }] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!(patch["metadata"]["finalizers"], Value::Null);
    vm.metadata.finalizers.as_mut().unwrap().push("orphan".to_owned());
    assert!(!deletes(&decided(&vm, Some(&machine))));
}

#[test]
fn machine_of_another_owner_is_left_alone_and_one_without_owner_adopted() {
    let vm = with_strategy("Always", &Value::Null);
    let mut foreign = instance(&vm, "Running");
    foreign.metadata.owner_references.as_mut().unwrap()[0].uid = "someone".to_owned();
    let decision = decided(&vm, Some(&foreign));
    assert!(!creates(&decision) && !deletes(&decision));
    assert!(status_patch(&decision)["conditions"].to_string().contains("belongs to another object"));
    let mut orphan = foreign;
    orphan.metadata.owner_references = None;
    let decision = decided(&vm, Some(&orphan));
    let adopts = |effect: &Effect| {
        matches!(effect, Effect::Patch { kind: Kind::Instance, patch, .. }
            if patch["metadata"]["ownerReferences"][0]["uid"] == "vm-uid")
    };
    assert!(decision.effects.iter().any(adopts), "{decision:?}");
    assert_eq!(status_patch(&decision), Value::Null);
}

#[test]
fn features_without_support_are_told_not_ignored() {
    for spec in [json!({"runStrategy": "WaitAsReceiver"}), json!({"runStrategy": "Always", "running": true})] {
        let decision = decided(&vm(&spec, &Value::Null), None);
        assert!(!creates(&decision));
        assert!(status_patch(&decision)["conditions"].to_string().contains("Failure"), "{spec}");
    }
}

mod instancetypes {
    use std::sync::Arc;

    use api::{config::ReferencePolicy, instancetype::MatchedKind};

    use super::*;
    use crate::views::{MatchedView, RevisionView};

    const COPY: &str = "v-u1.small-v1beta1-u-1-4";

    fn class() -> Arc<MatchedView> {
        let object: api::instancetype::VirtualMachineClusterInstancetype = serde_json::from_value(json!({
            "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
            "metadata": {"name": "u1.small", "uid": "u-1", "generation": 4},
            "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}, "annotations": {"from": "class"}},
        }))
        .unwrap();
        Arc::new(MatchedView::new(MatchedKind::ClusterInstancetype, object))
    }

    fn preference() -> Arc<MatchedView> {
        let object: api::instancetype::VirtualMachinePreference = serde_json::from_value(json!({
            "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachinePreference",
            "metadata": {"name": "linux", "namespace": "d", "uid": "u-2", "generation": 1},
            "spec": {
                "cpu": {"preferredCPUTopology": "cores"},
                "devices": {
                    "preferredDiskBus": "virtio", "preferredInterfaceModel": "e1000",
                    "preferredAutoattachInputDevice": true, "preferredInputBus": "virtio",
                },
            },
        }))
        .unwrap();
        Arc::new(MatchedView::new(MatchedKind::Preference, object))
    }

    fn copy_of(object: &MatchedView) -> Arc<RevisionView> {
        Arc::new(RevisionView {
            metadata: serde_json::from_value(json!({
                "name": COPY, "namespace": "d", "uid": "copy-uid",
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid",
                    "controller": true,
                }],
            }))
            .unwrap(),
            object: object.object.clone(),
        })
    }

    fn copy() -> Arc<RevisionView> {
        copy_of(&class())
    }

    /// The preference, of which there is a copy.
    fn kept_preference() -> Lookup {
        Lookup::Object(preference(), Some(copy_of(&preference())))
    }

    fn naming(strategy: &str, status: &Value) -> VirtualMachine {
        vm(
            &json!({
                "runStrategy": strategy,
                "instancetype": {"name": "u1.small"},
                "preference": {"name": "linux", "kind": "VirtualMachinePreference"},
            }),
            status,
        )
    }

    fn kept() -> Value {
        json!({
            "instancetypeRef": {"name": "u1.small", "controllerRevisionRef": {"name": COPY}},
            "preferenceRef": {
                "name": "linux", "kind": "VirtualMachinePreference",
                "controllerRevisionRef": {"name": "v-linux-v1beta1-u-2-1"},
            },
        })
    }

    fn found(
        vm: &VirtualMachine,
        instance: Option<&VirtualMachineInstance>,
        policy: ReferencePolicy,
        copies: bool,
    ) -> Decision {
        let config = ClusterConfig { reference_policy: policy, ..ClusterConfig::default() };
        let instancetype = if copies { Lookup::Revision(copy()) } else { Lookup::Object(class(), None) };
        let preference = kept_preference();
        decide(&Observed { instancetype, preference, ..observed(vm, instance, None, &config) }).unwrap()
    }

    fn made(decision: &Decision, wanted: Kind) -> Vec<Value> {
        let objects = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Create { kind, object, .. } if *kind == wanted => Some(object.clone()),
            _ => None,
        });
        objects.collect()
    }

    fn only(mut made: Vec<Value>) -> Value {
        assert_eq!(made.len(), 1, "{made:?}");
        made.remove(0)
    }

    #[test]
    fn copy_is_made_and_named_before_the_machine_is_started_from_it() {
        let vm = naming("Always", &Value::Null);
        let decision = found(&vm, None, ReferencePolicy::Reference, false);
        let mut revisions = made(&decision, Kind::ControllerRevision);
        let start = revisions.pop().unwrap();
        assert_eq!(start["metadata"]["name"], "revision-start-vm-vm-uid-2");
        assert_eq!(start["data"]["spec"]["instancetype"]["revisionName"], COPY);
        assert_eq!(start["data"]["spec"]["preference"]["revisionName"], "v-linux-v1beta1-u-2-1");
        let revision = only(revisions);
        assert_eq!(revision["metadata"]["name"], COPY);
        assert_eq!(revision["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
        let labels = &revision["metadata"]["labels"];
        assert_eq!(labels["instancetype.kubevirt.io/object-kind"], "VirtualMachineClusterInstancetype");
        assert_eq!(labels["instancetype.kubevirt.io/object-generation"], "4");
        assert_eq!(revision["data"]["spec"]["cpu"]["guest"], 2);
        assert_eq!(revision["data"]["kind"], "VirtualMachineClusterInstancetype");
        assert_eq!(status_patch(&decision), kept());
        let position = |wanted: &dyn Fn(&Effect) -> bool| decision.effects.iter().position(wanted).unwrap();
        let of =
            |kind: Kind| move |effect: &Effect| matches!(effect, Effect::Create { kind: made, .. } if *made == kind);
        assert!(position(&of(Kind::ControllerRevision)) < position(&of(Kind::Instance)));
    }

    #[test]
    fn copy_whose_name_something_else_has_stops_the_start() {
        let vm = naming("Always", &Value::Null);
        let config = ClusterConfig::default();
        let decided = |instancetype: Lookup| {
            let preference = kept_preference();
            decide(&Observed { instancetype, preference, ..observed(&vm, None, None, &config) }).unwrap()
        };
        let text = format!("found existing ControllerRevision with unexpected data: {COPY}");
        // One that is known holds something else.
        let decision = decided(Lookup::Object(class(), Some(copy_of(&preference()))));
        assert!(made(&decision, Kind::ControllerRevision).is_empty());
        assert!(!creates(&decision));
        assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(60)));
        let status = status_patch(&decision);
        assert!(status.get("instancetypeRef").is_none(), "{status}");
        let failure = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
        assert_eq!((&failure["reason"], &failure["message"]), (&json!("FailedCreate"), &json!(text)));
        let told = "error encountered while storing instancetype.kubevirt.io controllerRevisions: ";
        let is_told =
            |effect: &Effect| matches!(effect, Effect::Event(note) if note.message == format!("{told}{text}"));
        assert!(decision.effects.iter().any(is_told));
        // One that is not known turns up when the copy is made.
        let decision = decided(Lookup::Object(class(), None));
        let Some(Effect::Create { kind: Kind::ControllerRevision, notes, .. }) = decision.effects.first() else {
            panic!("{decision:?}")
        };
        assert_eq!(notes.existing_refuses.as_ref(), Some(&text));
    }

    #[test]
    fn machine_is_made_with_instance_type_and_preference() {
        let decision = found(&naming("Always", &kept()), None, ReferencePolicy::Reference, true);
        // Only what it is started from: there are copies already.
        assert_eq!(only(made(&decision, Kind::ControllerRevision))["metadata"]["name"], "revision-start-vm-vm-uid-2");
        let machine = only(made(&decision, Kind::Instance));
        let domain = &machine["spec"]["domain"];
        assert_eq!(domain["cpu"], json!({"sockets": 1, "cores": 2, "threads": 1}));
        assert_eq!(domain["memory"]["guest"], "1Gi");
        assert_eq!(domain["devices"]["disks"], json!([{"name": "cd", "disk": {"bus": "virtio"}}]));
        assert_eq!(domain["devices"]["interfaces"][0]["model"], "e1000");
        assert_eq!(domain["devices"]["inputs"], json!([{"name": "default-0", "bus": "virtio", "type": "tablet"}]));
        let annotations = &machine["metadata"]["annotations"];
        assert_eq!(annotations["kubevirt.io/cluster-instancetype-name"], "u1.small");
        assert_eq!(annotations["kubevirt.io/preference-name"], "linux");
        assert_eq!(annotations["from"], "class");
    }

    #[test]
    fn halted_vm_gets_its_copies_and_no_machine() {
        let decision = found(&naming("Halted", &Value::Null), None, ReferencePolicy::Reference, false);
        assert_eq!(made(&decision, Kind::ControllerRevision).len(), 1);
        assert!(!creates(&decision));
    }

    #[test]
    fn missing_instance_type_stops_the_start_and_is_told() {
        let vm = naming("Always", &Value::Null);
        let config = ClusterConfig::default();
        let missing =
            || instancetype::look_up(&vm, api::instancetype::matcher::Role::Instancetype, |_| None, |_, _| None);
        let decided = |vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>| {
            decide(&Observed { instancetype: missing(), ..observed(vm, instance, None, &config) }).unwrap()
        };
        let decision = decided(&vm, None);
        assert!(!creates(&decision));
        let status = status_patch(&decision);
        let failure = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
        assert_eq!(failure["reason"], "FailedFindInstancetype");
        let message = "virtualmachineclusterinstancetypes.instancetype.kubevirt.io \"u1.small\" not found";
        assert_eq!(failure["message"], message);
        let told = |decision: &Decision| decision.effects.iter().any(|effect| matches!(effect, Effect::Event(_)));
        assert!(told(&decision));
        let mut again = vm.clone();
        again.status = serde_json::from_value(status).unwrap();
        assert!(!told(&decided(&again, None)));
        // A machine that runs can still be stopped, and needs no restart.
        let halted = naming("Halted", &Value::Null);
        let running = instance(&halted, "Running");
        assert!(deletes(&decided(&halted, Some(&running))));
        let status = status_patch(&decided(&vm, Some(&running)));
        assert!(!status["conditions"].to_string().contains("RestartRequired"), "{status}");
    }

    #[test]
    fn conflict_stops_the_start_and_names_the_fields() {
        let mut vm = naming("Always", &kept());
        let spec = vm.spec.template.spec.as_mut().unwrap();
        spec.domain.memory = serde_json::from_value(json!({"guest": "2Gi"})).unwrap();
        let decision = found(&vm, None, ReferencePolicy::Reference, true);
        assert!(!creates(&decision));
        let status = status_patch(&decision);
        let failure = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "Failure").unwrap();
        let cause = "Failed to apply instancetype: VMI conflicts with instancetype spec in fields: \
                     [spec.domain.memory.guest]";
        assert_eq!(failure["message"], format!("Failure while starting VMI: {cause}"));
        let events = |decision: &Decision| {
            let events = decision.effects.iter().filter_map(|effect| match effect {
                Effect::Event(note) => Some((note.reason, note.message.clone())),
                _ => None,
            });
            events.collect::<Vec<_>>()
        };
        assert_eq!(events(&decision), [("FailedCreate", format!("Error creating virtual machine instance: {cause}"))]);
        // Once is enough.
        vm.status.as_mut().unwrap().conditions = serde_json::from_value(status["conditions"].clone()).unwrap();
        assert!(events(&found(&vm, None, ReferencePolicy::Reference, true)).is_empty());
    }

    #[test]
    fn other_instance_type_asks_for_a_restart_and_the_same_does_not() {
        let vm = naming("Always", &kept());
        let machine = only(made(&found(&vm, None, ReferencePolicy::Reference, true), Kind::Instance));
        let mut machine: VirtualMachineInstance = serde_json::from_value(machine).unwrap();
        machine.metadata.uid = Some("vmi-uid".to_owned());
        machine.status = serde_json::from_value(json!({"phase": "Running"})).unwrap();
        let conditions = |decision: &Decision| {
            let patches = decision.effects.iter().filter_map(|effect| match effect {
                Effect::Patch { subresource: Some("status"), patch, .. } => {
                    Some(patch["status"]["conditions"].to_string())
                }
                _ => None,
            });
            patches.collect::<String>()
        };
        let same = found(&vm, Some(&machine), ReferencePolicy::Reference, true);
        assert!(!conditions(&same).contains("RestartRequired"));
        let mut other = vm.clone();
        other.spec.instancetype = None;
        let changed = decide(&Observed {
            preference: kept_preference(),
            ..observed(&other, Some(&machine), None, &ClusterConfig::default())
        })
        .unwrap();
        assert!(conditions(&changed).contains("RestartRequired"));
        // The copy is of no use to the VM any more.
        assert!(changed.effects.iter().any(|effect| {
            matches!(effect, Effect::Patch { patch, .. } if patch["status"].get("instancetypeRef") == Some(&Value::Null))
        }));
    }

    #[test]
    fn policy_expand_writes_everything_into_the_vm() {
        let vm = naming("Halted", &Value::Null);
        let decision = found(&vm, None, ReferencePolicy::Expand, false);
        let Some(Effect::Patch { kind: Kind::VirtualMachine, subresource: None, patch, .. }) = decision.effects.first()
        else {
            panic!("{decision:?}")
        };
        assert_eq!(patch["spec"]["instancetype"], Value::Null);
        assert_eq!(patch["spec"]["preference"], Value::Null);
        assert_eq!(patch["spec"]["template"]["spec"]["domain"]["cpu"]["cores"], 2);
        assert!(made(&decision, Kind::ControllerRevision).is_empty());
        // One that has copies already goes on naming them.
        let decision = found(&naming("Halted", &kept()), None, ReferencePolicy::Expand, true);
        assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Patch { subresource: None, .. })));
    }

    #[test]
    fn policy_expand_all_takes_the_copies_away_and_leaves_the_machine_current() {
        let vm = naming("Always", &kept());
        let machine = only(made(&found(&vm, None, ReferencePolicy::Reference, true), Kind::Instance));
        let mut machine: VirtualMachineInstance = serde_json::from_value(machine).unwrap();
        machine.status = serde_json::from_value(json!({"phase": "Running"})).unwrap();
        let decision = found(&vm, Some(&machine), ReferencePolicy::ExpandAll, true);
        let deleted = |effect: &Effect| matches!(effect, Effect::Delete { kind: Kind::ControllerRevision, name, .. } if name == COPY);
        assert!(decision.effects.iter().any(deleted));
        let hash = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::Instance, patch, .. } => {
                Some(patch["metadata"]["annotations"]["ferrovirt.io/started-from"].clone())
            }
            _ => None,
        });
        let mut expanded = serde_json::to_value(&vm).unwrap();
        for effect in &decision.effects {
            if let Effect::Patch { kind: Kind::VirtualMachine, subresource: None, patch, .. } = effect {
                json_patch::merge(&mut expanded, patch);
            }
        }
        let expanded: VirtualMachine = serde_json::from_value(expanded).unwrap();
        assert_eq!(hash.unwrap(), Chosen::default().template(&expanded).unwrap().hash);
    }
}

mod changes;
