//! Start, stop, deletion, status.

use super::*;

#[test]
fn run_strategies_start_and_stop_as_they_should() {
    let start = json!({"runStrategy": "Manual", "stateChangeRequests": [{"action": "Start"}]});
    let stop = json!({"runStrategy": "Manual", "stateChangeRequests": [{"action": "Stop", "uid": "vmi-uid"}]});
    let stop_other = json!({"stateChangeRequests": [{"action": "Stop", "uid": "another"}]});
    let rerun = json!({"runStrategy": "RerunOnFailure"});
    // strategy, status, phase of the VMI, creates, deletes
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
        let vmi = phase.map(|phase| instance(&vm, phase));
        let decision = decided(&vm, vmi.as_ref());
        assert_eq!(creates(&decision), *wanted_create, "{strategy} {status} {phase:?}");
        assert_eq!(deletes(&decision), *wanted_delete, "{strategy} {status} {phase:?}");
    }
}

#[test]
fn the_first_vmi_of_a_new_vm_gets_its_trace_context_and_none_of_the_template() {
    const OWN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
    const FORGED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let key = api::constants::annotation::TRACEPARENT;
    let (new, hour) = (jiff::SignedDuration::ZERO, jiff::SignedDuration::from_hours(1));
    for (own, age, expected) in
        [(Some(OWN), new, Some(OWN)), (Some(OWN), hour, None), (Some("00-invalid"), new, None), (None, new, None)]
    {
        let mut vm = with_strategy("Always", &Value::Null);
        vm.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now() - age));
        vm.metadata.annotations = own.map(|own| [(key.to_owned(), own.to_owned())].into());
        vm.spec.template.metadata.annotations = Some([(key.to_owned(), FORGED.to_owned())].into());
        let decision = decided(&vm, None);
        let created = decision.effects.iter().find_map(|effect| match effect {
            Effect::Create { kind: Kind::Instance, object, .. } => Some(object),
            _ => None,
        });
        assert_eq!(created.unwrap()["metadata"]["annotations"][key].as_str(), expected, "{own:?} {age}");
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
fn request_that_is_older_than_the_halt_starts_nothing() {
    let (start, stop) = (json!({"action": "Start"}), json!({"action": "Stop", "uid": "vmi-uid"}));
    let paused = json!({"action": "Start", "data": {"paused": "true"}});
    // Recorded strategy, requests; the strategy changes.
    for (recorded, requests, starts) in [
        ("RerunOnFailure", json!([start]), false),
        ("Manual", json!([stop, start]), false),
        ("Halted", json!([start]), true),
        ("RerunOnFailure", json!([paused]), true),
    ] {
        let vm = with_strategy("Halted", &json!({"runStrategy": recorded, "stateChangeRequests": requests}));
        let decision = decided(&vm, None);
        let changes = |effect: &Effect| matches!(effect, Effect::Patch { patch, .. } if !patch["spec"].is_null());
        assert_eq!(decision.effects.iter().any(changes), starts, "{recorded} {requests}");
        if !starts {
            let status = status_patch(&decision);
            assert_eq!((&status["runStrategy"], &status["stateChangeRequests"]), (&json!("Halted"), &Value::Null));
            assert!(status.as_object().unwrap().contains_key("stateChangeRequests"), "{recorded}");
        }
    }
}

#[test]
fn new_vm_gets_its_finalizer_and_its_vmi_without_a_status_write_between() {
    let mut vm = with_strategy("Always", &Value::Null);
    vm.metadata.finalizers = None;
    let decision = decided(&vm, None);
    // The record of the start is created as well.
    assert_eq!(decision.effects.len(), 3, "{decision:?}");
    assert!(matches!(decision.effects[0], Effect::Patch { kind: Kind::VirtualMachine, subresource: None, .. }));
    assert!(creates(&decision));
}

#[test]
fn vmi_is_created_from_the_template_and_owned() {
    let vm = with_strategy("Always", &Value::Null);
    let vmi = started(&vm, true);
    assert_eq!(vmi.metadata.name.as_deref(), Some("v"));
    assert_eq!(vmi.metadata.labels.as_ref().unwrap()["app"], "x");
    assert_eq!(vmi.metadata.annotations.as_ref().unwrap()["kubevirt.io/vm-generation"], "2");
    assert_eq!(vmi.metadata.owner_references.as_ref().unwrap()[0].uid, "vm-uid");
    assert_eq!(vmi.metadata.finalizers.as_ref().unwrap(), &["kubevirt.io/virtualMachineControllerFinalize"]);
    assert_eq!(vmi.spec.start_strategy, Some(api::StartStrategy::Paused));
    assert_eq!(vmi.spec.domain.devices.disks[0].name, "cd");
    let uuid = |vm: &VirtualMachine| started(vm, false).spec.domain.firmware.unwrap().uuid.unwrap();
    assert_eq!(uuid(&vm), uuid(&vm));
    assert_eq!(uuid(&vm).len(), 36);
}

#[test]
fn refused_vmi_shows_in_condition_failure_until_it_is_created() {
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
    let vmi = instance(&vm, "Pending");
    let mut shown = vm;
    shown.status = serde_json::from_value(status).unwrap();
    let status = status_patch(&decided(&shown, Some(&vmi)));
    assert!(!status["conditions"].as_array().unwrap().iter().any(|known| known["type"] == "Failure"));
}

#[test]
fn failed_vmi_that_never_ran_is_counted_once_and_delays_the_next_start() {
    let vm = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let mut failed = instance(&vm, "Failed");
    let status = status_patch(&decided(&vm, Some(&failed)));
    assert_eq!(status["startFailure"]["consecutiveFailCount"], 1);
    // A VMI that was deleted before it ran has not failed.
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
fn vmi_that_ran_clears_the_count() {
    let failed = json!({"startFailure": {"consecutiveFailCount": 2, "lastFailedVMIUID": "x"}, "runStrategy": "Always"});
    let vm = with_strategy("Always", &failed);
    let status = status_patch(&decided(&vm, Some(&instance(&vm, "Running"))));
    assert_eq!(status["startFailure"], Value::Null);
}

#[test]
fn vmi_that_is_not_started_again_stays_for_two_seconds() {
    let status = |requests: Value| json!({"runStrategy": "RerunOnFailure", "stateChangeRequests": requests});
    let start = json!([{"action": "Start"}]);
    // strategy, requests, phase, end; deleted, wakes after seconds
    for (strategy, requests, phase, end, deleted, wake) in [
        ("RerunOnFailure", json!([]), "Succeeded", "2030-01-01T00:01:00Z", false, Some(2)),
        ("RerunOnFailure", json!([]), "Succeeded", "2030-01-01T00:00:59Z", false, Some(1)),
        ("RerunOnFailure", json!([]), "Succeeded", "2030-01-01T00:00:58Z", true, None),
        // The clock of the node is ahead.
        ("RerunOnFailure", json!([]), "Succeeded", "2030-01-01T00:01:01Z", false, Some(3)),
        ("RerunOnFailure", json!([]), "Succeeded", "2030-01-01T01:00:00Z", true, None),
        ("RerunOnFailure", start, "Succeeded", "2030-01-01T00:01:00Z", true, None),
        ("RerunOnFailure", json!([]), "Failed", "2030-01-01T00:01:00Z", true, None),
        ("Always", json!([]), "Succeeded", "2030-01-01T00:01:00Z", true, None),
        ("Halted", json!([]), "Succeeded", "2030-01-01T00:01:00Z", true, None),
    ] {
        let vm = with_strategy(strategy, &status(requests.clone()));
        let mut vmi = instance(&vm, phase);
        let ended = json!([{"phase": phase, "phaseTransitionTimestamp": end}]);
        vmi.status.as_mut().unwrap().phase_transition_timestamps = serde_json::from_value(ended).unwrap();
        let decision = decided(&vm, Some(&vmi));
        assert_eq!(deletes(&decision), deleted, "{strategy} {requests} {phase} {end}");
        if let Some(seconds) = wake {
            assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(seconds)), "{end}");
        }
    }
}

#[test]
fn failed_vmi_of_rerun_on_failure_is_noted_for_a_start_before_it_is_deleted() {
    let vm = with_strategy("RerunOnFailure", &json!({"runStrategy": "RerunOnFailure"}));
    let decision = decided(&vm, Some(&instance(&vm, "Failed")));
    assert!(matches!(decision.effects[0], Effect::Patch { subresource: Some("status"), .. }));
    assert!(matches!(decision.effects[1], Effect::Delete { .. }));
    assert_eq!(status_patch(&decision)["stateChangeRequests"], json!([{"action": "Start"}]));
}

#[test]
fn interrupted_move_of_volumes_is_shown_before_the_vmi_is_deleted() {
    let volumes = json!([{"name": "a", "persistentVolumeClaim": {"claimName": "new"}}]);
    let disks = json!([{"name": "a", "disk": {}}]);
    let template = json!({"spec": {"volumes": volumes, "domain": {"devices": {"disks": disks}}}});
    let spec = json!({"runStrategy": "Always", "updateVolumesStrategy": "Migration", "template": template});
    let vm = vm(&spec, &json!({"runStrategy": "Always"}));
    let moved =
        json!([{"volumeName": "a", "sourcePVCInfo": {"claimName": "old"}, "destinationPVCInfo": {"claimName": "new"}}]);
    for (moves, is_shown) in [("True", true), ("False", false)] {
        let mut ended = instance(&vm, "Succeeded");
        let status = ended.status.as_mut().unwrap();
        status.migrated_volumes = serde_json::from_value(moved.clone()).unwrap();
        status.conditions = serde_json::from_value(json!([{"type": "VolumesChange", "status": moves}])).unwrap();
        let decision = decided(&vm, Some(&ended));
        let at = |is: fn(&Effect) -> bool| decision.effects.iter().position(is);
        let shown = at(|effect| matches!(effect, Effect::Patch { subresource: Some("status"), .. }));
        let deleted = at(|effect| matches!(effect, Effect::Delete { kind: Kind::Instance, .. }));
        assert!(deleted.is_some() && (shown.is_some() && shown < deleted) == is_shown, "{moves} {decision:?}");
        let conditions = status_patch(&decision)["conditions"].to_string();
        assert_eq!(conditions.contains("ManualRecoveryRequired"), is_shown, "{moves} {conditions}");
    }
}

#[test]
fn vm_switched_to_rerun_on_failure_is_started_even_after_a_delay() {
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
fn printable_status_follows_the_vmi() {
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
        let mut vmi = instance(&vm, phase);
        vmi.status.as_mut().unwrap().conditions = serde_json::from_value(conditions.clone()).unwrap();
        assert_eq!(status_patch(&decided(&vm, Some(&vmi)))["printableStatus"], *wanted, "{phase} {conditions}");
    }
}

#[test]
fn claims_determine_the_printable_status_and_the_snapshot_reasons() {
    let volumes = json!([
        {"name": "cd", "containerDisk": {"image": "i"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "known"}},
        {"name": "more", "persistentVolumeClaim": {"claimName": "missing"}},
    ]);
    let spec = json!({"runStrategy": "Always", "template": {"spec": {"volumes": volumes}}});
    let vm = vm(&spec, &json!({"runStrategy": "Always"}));
    let vmi = instance(&vm, "Pending");
    let config = ClusterConfig::default();
    for (phase, printable) in [("Pending", "WaitingForVolumeBinding"), ("Bound", "Starting")] {
        let claim =
            CachedClaim { phase: phase.to_owned(), storage_class: Some("local".to_owned()), ..CachedClaim::default() };
        let claims = BTreeMap::from([("known".to_owned(), Arc::new(claim))]);
        let observed = Observed { claims: claims.clone(), ..observed(&vm, Some(&vmi), None, &config) };
        let status = status_patch(&decide(&observed).unwrap());
        assert_eq!(status["printableStatus"], printable);
        let shown = status["volumeSnapshotStatuses"].as_array().unwrap();
        let reasons: Vec<&str> = shown.iter().filter_map(|volume| volume["reason"].as_str()).collect();
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
fn running_vm_mirrors_its_vmi_and_is_then_settled() {
    let mut vm = with_strategy("Always", &Value::Null);
    let mut vmi = instance(&vm, "Running");
    vmi.status.as_mut().unwrap().conditions = serde_json::from_value(json!([
        {"type": "Ready", "status": "True"}, {"type": "AgentConnected", "status": "True"},
    ]))
    .unwrap();
    let location =
        |status: &Value| [&status["nodeName"], &status["ipAddress"]].map(|field| field.as_str().map(str::to_owned));
    let place = json!({"nodeName": "n", "interfaces": [{"name": "default", "ipAddress": "10.0.0.2"}]});
    let mut placed = serde_json::to_value(&vmi).unwrap();
    json_patch::merge(&mut placed["status"], &place);
    for (phase, expected) in
        [("Scheduled", [None, None]), ("Running", [Some("n".to_owned()), Some("10.0.0.2".to_owned())])]
    {
        placed["status"]["phase"] = json!(phase);
        vmi = serde_json::from_value(placed.clone()).unwrap();
        assert_eq!(location(&status_patch(&decided(&vm, Some(&vmi)))), expected, "{phase}");
    }
    let status = status_patch(&decided(&vm, Some(&vmi)));
    assert_eq!((&status["created"], &status["ready"]), (&json!(true), &json!(true)));
    assert_eq!(status["runStrategy"], "Always");
    assert_eq!((&status["observedGeneration"], &status["desiredGeneration"]), (&json!(2), &json!(2)));
    assert_eq!(status["conditions"].as_array().unwrap().len(), 2);
    vm.status = serde_json::from_value(status).unwrap();
    assert_eq!(decided(&vm, Some(&vmi)), Decision::settled());
}

#[test]
fn warning_of_the_vmi_is_an_event_of_the_vm_once() {
    let event = |vm: &VirtualMachine, vmi: &VirtualMachineInstance| {
        let effects = decided(vm, Some(vmi)).effects;
        effects.into_iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::VirtualMachine, options, .. } => {
                options.success.map(|event| (event.reason, event.message))
            }
            _ => None,
        })
    };
    for (reason, expected) in [
        ("FailedMount", true),
        ("FailedCreate", true),
        ("FailedBackendStorageCreate", true),
        ("FailedBackendStorageProbe", true),
        ("BackendStorageNotReady", false),
        ("ErrImagePull", false),
        ("", false),
        ("Other", false),
    ] {
        let mut vm = with_strategy("Always", &Value::Null);
        let mut vmi = instance(&vm, "Scheduling");
        vmi.status.as_mut().unwrap().conditions = serde_json::from_value(json!([
            {"type": "Synchronized", "status": "False", "reason": reason, "message": "secret \"s\" not found"},
        ]))
        .unwrap();
        let found = event(&vm, &vmi);
        assert_eq!(
            found.is_some_and(|found| found == (reason, "secret \"s\" not found".to_owned())),
            expected,
            "{reason}"
        );
        vm.status = serde_json::from_value(status_patch(&decided(&vm, Some(&vmi)))).unwrap();
        assert_eq!(event(&vm, &vmi), None, "{reason}");
    }
}

#[test]
fn changed_template_requires_a_restart_until_it_is_changed_back() {
    let vm = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let config = ClusterConfig::default();
    let mut vmi = instance(&vm, "Running");
    vmi.spec = start::defaulted_spec(&observed(&vm, None, None, &config), &Chosen::default(), false).unwrap();
    let starts = records(&decided(&vm, None));
    let decided = |vm: &VirtualMachine| {
        decide(&Observed { starts: starts.to_vec(), ..observed(vm, Some(&vmi), None, &config) }).unwrap()
    };
    let mut changed = vm.clone();
    changed.metadata.generation = Some(3);
    changed.spec.template.spec.as_mut().unwrap().hostname = Some("other".to_owned());
    let status = status_patch(&decided(&changed));
    let message = "a non-live-updatable field was changed in the template spec: spec.template.spec.hostname";
    let restart = status["conditions"].as_array().unwrap().iter().find(|known| known["type"] == "RestartRequired");
    assert_eq!(restart.unwrap()["message"], message);
    assert_eq!(status["observedGeneration"], 2);
    let mut back = vm;
    back.metadata.generation = Some(4);
    back.status = serde_json::from_value(status).unwrap();
    let status = status_patch(&decided(&back));
    assert_eq!(status["observedGeneration"], 4);
    let types: Vec<&Value> = status["conditions"].as_array().unwrap().iter().map(|known| &known["type"]).collect();
    assert!(!types.contains(&&json!("RestartRequired")));
}

#[test]
fn deleted_vm_deletes_its_vmi_first() {
    let mut vm = with_strategy("Always", &json!({"printableStatus": "Running"}));
    vm.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let vmi = instance(&vm, "Running");
    assert!(deletes(&decided(&vm, Some(&vmi))));
    let decision = decided(&vm, None);
    let [Effect::Patch { patch, subresource: None, .. }] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!(patch["metadata"]["finalizers"], Value::Null);
    vm.metadata.finalizers.as_mut().unwrap().push("orphan".to_owned());
    assert!(!deletes(&decided(&vm, Some(&vmi))));
}

#[test]
fn vmi_of_another_owner_is_left_alone_and_one_without_owner_adopted() {
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
fn unsupported_features_are_reported_not_ignored() {
    for spec in [json!({"runStrategy": "WaitAsReceiver"}), json!({"runStrategy": "Always", "running": true})] {
        let decision = decided(&vm(&spec, &Value::Null), None);
        assert!(!creates(&decision));
        assert!(status_patch(&decision)["conditions"].to_string().contains("Failure"), "{spec}");
    }
}
