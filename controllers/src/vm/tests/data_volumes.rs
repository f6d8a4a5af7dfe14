//! DataVolumes: creation, the start that waits for them, status.

use super::*;
use crate::{runtime::DataVolumeCreation, vm::data_volumes::Source};

/// A VM with DataVolume `root` from a claim in another namespace.
pub(super) fn with_template(strategy: &str, status: &Value) -> VirtualMachine {
    let template = json!({
        "metadata": {"name": "root", "labels": {"l": "1"}, "annotations": {"a": "b", "cdi.kubevirt.io/storage.clone.token": "t"}},
        "spec": {"source": {"pvc": {"namespace": "images", "name": "fedora"}}, "storage": {}},
    });
    let mut vm = vm(&json!({"runStrategy": strategy, "dataVolumeTemplates": [template]}), status);
    let spec = vm.spec.template.spec.as_mut().unwrap();
    spec.priority_class_name = Some("high".to_owned());
    spec.volumes = serde_json::from_value(json!([{"name": "disk", "dataVolume": {"name": "root"}}])).unwrap();
    vm
}

/// A DataVolume of the VM.
fn data_volume(status: &Value) -> Arc<DataVolume> {
    let owner = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid", "controller": true,
    });
    let metadata =
        json!({"name": "root", "namespace": "d", "uid": "dv", "resourceVersion": "4", "ownerReferences": [owner]});
    Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).unwrap())
}

pub(super) fn claim(change: &Value) -> Arc<CachedClaim> {
    let mut claim = json!({"metadata": {"name": "root", "namespace": "d"}, "spec": {}, "status": {"phase": "Bound"}});
    json_patch::merge(&mut claim, change);
    Arc::new(serde_json::from_value::<k8s_openapi::api::core::v1::PersistentVolumeClaim>(claim).unwrap().into())
}

/// The record of a start with DataVolume `root`.
fn record() -> Arc<StartRevision> {
    let metadata = serde_json::from_value(json!({"name": "r", "namespace": "d", "uid": "r"})).unwrap();
    Arc::new(StartRevision { metadata, template: None, data_volumes: vec!["root".to_owned()] })
}

fn observed_with(vm: &VirtualMachine, present: Option<Arc<DataVolume>>, claim: Option<Arc<CachedClaim>>) -> Observed {
    let by_name = |name: &str| name.to_owned();
    Observed {
        data_volumes: present.map(|present| (by_name("root"), present)).into_iter().collect(),
        claims: claim.map(|claim| (by_name("root"), claim)).into_iter().collect(),
        ..observed(vm, None, None, &ClusterConfig::default())
    }
}

pub(super) fn creation(decision: &Decision) -> Option<&DataVolumeCreation> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::CreateDataVolume { creation, .. } => Some(&**creation),
        _ => None,
    })
}

/// Returns reason and message of a condition in the status that a decision writes.
fn condition(decision: &Decision, type_: &str) -> String {
    let status = status_patch(decision);
    let found = status["conditions"].as_array().into_iter().flatten().find(|known| known["type"] == type_);
    found
        .map(|known| format!("{}: {}", known["reason"].as_str().unwrap(), known["message"].as_str().unwrap()))
        .unwrap_or_default()
}

fn events(decision: &Decision) -> Vec<String> {
    let event = |effect: &Effect| match effect {
        Effect::Event(event) => Some(format!("{}: {}", event.reason, event.message)),
        _ => None,
    };
    decision.effects.iter().filter_map(event).collect()
}

#[test]
fn data_volume_is_created_from_its_template_before_the_vmi() {
    let vm = with_template("Always", &Value::Null);
    let decision = decide(&observed_with(&vm, None, None)).unwrap();
    let created = creation(&decision).unwrap();
    assert!(!creates(&decision) && !created.adopts_claim);
    assert_eq!(created.service_account, "default");
    let made = serde_json::to_value(&created.data_volume).unwrap();
    let metadata = json!({
        "name": "root", "namespace": "d",
        "labels": {"l": "1", "kubevirt.io/created-by": "vm-uid"},
        "annotations": {"a": "b", "cdi.kubevirt.io/allowClaimAdoption": "true"},
        "ownerReferences": [{
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid",
            "controller": true, "blockOwnerDeletion": true,
        }],
    });
    assert_eq!(made["metadata"], metadata);
    assert_eq!(made["spec"]["priorityClassName"], "high");
    assert_eq!(made["spec"]["source"], json!({"pvc": {"namespace": "images", "name": "fedora"}}));
    // One write of the status follows when the DataVolume shows.
    assert_eq!(status_patch(&decision), Value::Null);
}

#[test]
fn use_of_the_data_is_recorded_before_the_vmi_is_created() {
    let vm = with_template("Always", &Value::Null);
    let filled = data_volume(&json!({"phase": "Succeeded"}));
    let decision = decide(&observed_with(&vm, Some(filled), Some(claim(&json!({}))))).unwrap();
    let [Effect::Create { kind: Kind::ControllerRevision, .. }, Effect::Create { kind: Kind::Instance, .. }] =
        decision.effects.as_slice()
    else {
        panic!("{decision:?}")
    };
    assert_eq!(records(&decision)[0].data_volumes, ["root"]);
}

#[test]
fn service_account_is_that_of_the_vm() {
    let volume = json!({"name": "sa", "serviceAccount": {"serviceAccountName": "of-volume"}});
    for (change, expected) in [
        (json!({}), "default"),
        (json!({"volumes": [volume]}), "of-volume"),
        (json!({"volumes": [volume], "serviceAccountName": "named"}), "named"),
        (json!({"serviceAccountName": ""}), "default"),
    ] {
        let mut vm = serde_json::to_value(with_template("Always", &Value::Null)).unwrap();
        json_patch::merge(&mut vm["spec"]["template"]["spec"], &change);
        let vm = serde_json::from_value(vm).unwrap();
        let decision = decide(&observed_with(&vm, None, None)).unwrap();
        assert_eq!(creation(&decision).unwrap().service_account, expected, "{change}");
    }
}

#[test]
fn start_waits_for_the_phases_that_permit_it() {
    for (phase, starts, printed) in [
        ("", false, "Provisioning"),
        ("Pending", false, "Provisioning"),
        ("ImportInProgress", false, "Provisioning"),
        ("UploadReady", false, "Provisioning"),
        ("Paused", false, "Provisioning"),
        ("Unknown", false, "Provisioning"),
        ("AnyNewPhase", false, "Provisioning"),
        ("Failed", false, "DataVolumeError"),
        ("Succeeded", true, ""),
        ("WaitForFirstConsumer", true, ""),
        ("PendingPopulation", true, ""),
    ] {
        let vm = with_template("Always", &Value::Null);
        let present = data_volume(&json!({"phase": phase}));
        let decision = decide(&observed_with(&vm, Some(present), Some(claim(&json!({}))))).unwrap();
        assert_eq!((creates(&decision), creation(&decision)), (starts, None), "{phase}");
        assert_eq!(status_patch(&decision)["printableStatus"].as_str().unwrap_or_default(), printed, "{phase}");
    }
}

#[test]
fn halted_vm_is_filled_ahead_unless_it_is_told_not_to() {
    for (strategy, immediate, expected) in [
        ("Halted", None, true),
        ("Halted", Some("false"), false),
        ("Halted", Some("true"), true),
        ("Always", Some("false"), true),
    ] {
        let mut vm = with_template(strategy, &Value::Null);
        let key = api::constants::annotation::IMMEDIATE_DATA_VOLUME_CREATION;
        vm.metadata.annotations = immediate.map(|value| [(key.to_owned(), value.to_owned())].into());
        let decision = decide(&observed_with(&vm, None, None)).unwrap();
        assert_eq!(creation(&decision).is_some(), expected, "{strategy} {immediate:?}");
    }
    let vm = with_template("Halted", &Value::Null);
    let present = |phase: &str| Some(data_volume(&json!({"phase": phase})));
    let printed =
        |phase| status_patch(&decide(&observed_with(&vm, present(phase), None)).unwrap())["printableStatus"].clone();
    assert_eq!((printed("ImportInProgress"), printed("Succeeded")), (json!("Provisioning"), json!("Stopped")));
}

#[test]
fn errors_of_an_import_count_when_they_stay() {
    let failing = |reason: &str, restarts: i32, at: &str| {
        json!({"phase": "ImportInProgress", "restartCount": restarts, "conditions": [
            {"type": "Running", "status": "False", "reason": reason, "message": "no route", "lastTransitionTime": at},
        ]})
    };
    let (new, old) = ("2030-01-01T00:00:50Z", "2030-01-01T00:00:30Z");
    for (status, printed, wake) in [
        (failing("Error", 0, new), "Provisioning", Some(20)),
        (failing("Error", 1, old), "DataVolumeError", None),
        (failing("Error", 2, new), "DataVolumeError", None),
        (failing("ImagePullFailed", 0, new), "Provisioning", Some(20)),
        (failing("ImagePullFailed", 0, old), "DataVolumeError", None),
        (failing("Scratch space required", 3, old), "Provisioning", None),
        (failing("Completed", 3, old), "Provisioning", None),
    ] {
        let vm = with_template("Always", &Value::Null);
        let decision = decide(&observed_with(&vm, Some(data_volume(&status)), None)).unwrap();
        assert_eq!(status_patch(&decision)["printableStatus"], printed, "{status}");
        assert_eq!(decision.wake_after, wake.map(std::time::Duration::from_secs), "{status}");
        let told = events(&decision);
        assert_eq!(told.len(), usize::from(printed == "DataVolumeError"), "{told:?}");
        let repeated = if printed == "DataVolumeError" { "repeated errors: " } else { "" };
        let text = format!("NotAllDVsReady: DataVolume root: {repeated}ImportInProgress: no route");
        assert_eq!(condition(&decision, "DataVolumesReady"), text, "{status}");
        // The condition shows the error already.
        let mut shown = vm;
        shown.status = serde_json::from_value(status_patch(&decision)).unwrap();
        let again = decide(&observed_with(&shown, Some(data_volume(&status)), None)).unwrap();
        assert!(events(&again).is_empty() && status_patch(&again).is_null(), "{again:?}");
    }
}

#[test]
fn progress_shows_in_steps() {
    let message = |progress: &str| {
        let vm = with_template("Always", &Value::Null);
        let present = data_volume(&json!({"phase": "ImportInProgress", "progress": progress}));
        condition(&decide(&observed_with(&vm, Some(present), None)).unwrap(), "DataVolumesReady")
    };
    for (progress, expected) in [
        ("N/A", ""),
        ("0.10%", ""),
        ("9.99%", ""),
        ("41.37%", ", 40 %"),
        ("49.00%", ", 40 %"),
        ("100.0%", ", 100 %"),
        ("x%", ""),
    ] {
        assert_eq!(
            message(progress),
            format!("NotAllDVsReady: DataVolume root: ImportInProgress{expected}"),
            "{progress}"
        );
    }
}

#[test]
fn refused_steps_show_in_condition_failure() {
    let refused = |phase: &str, type_: &str, reason: &str| json!({"phase": phase, "conditions": [{"type": type_, "status": "False", "reason": reason, "message": "M"}]});
    let factor = " (an import can need the size of the DataVolume up to three times)";
    for (status, suffix, event) in [
        (refused("Pending", "Bound", "ErrExceededQuota"), Some(factor), "exceeds quota limits"),
        (refused("ImportInProgress", "Bound", "ErrExceededQuota"), None, ""),
        (refused("ImportScheduled", "Running", "ErrExceededQuota"), Some(factor), "exceeds quota limits"),
        (refused("ImportScheduled", "Running", "ErrStartingPod"), Some(""), "cannot be filled"),
        (refused("", "Bound", "ErrClaimNotValid"), Some(""), "cannot be filled"),
        (refused("CloneScheduled", "Bound", "CloneWithoutSource"), Some(""), "cannot be filled"),
        (refused("CloneScheduled", "Bound", "CloneValidationFailed"), Some(""), "cannot be filled"),
        (refused("Pending", "Bound", "NoCSIDriverForExternalPopulation"), Some(""), "cannot be filled"),
        (refused("Pending", "Bound", "Pending"), None, ""),
    ] {
        let vm = with_template("Always", &Value::Null);
        let decision = decide(&observed_with(&vm, Some(data_volume(&status)), None)).unwrap();
        let failure = suffix.map(|suffix| format!(
            "FailedCreate: Error encountered while creating DataVolumes: DataVolume root importer is not running due to an error: M{suffix}"
        ));
        assert_eq!(condition(&decision, "Failure"), failure.unwrap_or_default(), "{status}");
        assert_eq!(events(&decision).iter().any(|told| told.contains(event)), suffix.is_some(), "{status}");
        assert_eq!(status_patch(&decision)["printableStatus"], "Provisioning", "{status}");
    }
}

#[test]
fn refused_creation_shows_and_is_repeated_later() {
    let failure = Failure {
        reason: "FailedDataVolumeCreate",
        message: "not authorized to create DataVolume: User u".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let vm = with_template("Always", &Value::Null);
    let after = |failure: Failure| Observed { failures: Some(failure).into(), ..observed_with(&vm, None, None) };
    let decision = decide(&after(failure.clone())).unwrap();
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(10)));
    assert!(!creates(&decision) && creation(&decision).is_none());
    assert_eq!(
        condition(&decision, "Failure"),
        "FailedCreate: Error encountered while creating DataVolumes: not authorized to create DataVolume: User u"
    );
    assert_eq!(status_patch(&decision)["printableStatus"], "Provisioning");
    assert!(creation(&decide(&after(Failure { retry_at: now(), ..failure })).unwrap()).is_some());
}

#[test]
fn existing_claim_is_taken_over_or_used_as_it_is() {
    let owned = |kind: &str| {
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": kind, "name": "root", "uid": "x", "controller": true},
        ]}})
    };
    let filling = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.pod.phase": "Running"}}});
    // change of the claim, served, adopts, starts
    for (change, served, adopts, starts) in [
        (json!({}), true, true, true),
        (json!({"status": {"phase": "Pending"}}), true, true, true),
        (filling.clone(), true, false, false),
        (json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}), true, false, false),
        // The garbage collector deletes the claim of a DataVolume that is gone.
        (owned("DataVolume"), true, false, false),
        (owned("Other"), true, false, true),
        (owned("DataVolume"), false, false, true),
        (json!({"status": {"phase": "Pending"}}), false, false, false),
        (filling, false, false, false),
    ] {
        let vm = with_template("Always", &Value::Null);
        let observed = observed_with(&vm, None, Some(claim(&change)));
        let decision = decide(&Observed { serves_data_volumes: served, ..observed }).unwrap();
        assert_eq!(creation(&decision).is_some_and(|made| made.adopts_claim), adopts, "{change} {served}");
        assert_eq!((creation(&decision).is_some(), creates(&decision)), (adopts, starts), "{change} {served}");
    }
}

#[test]
fn existing_claim_is_used_if_its_data_volume_is_refused() {
    let failure = Failure {
        reason: "FailedDataVolumeCreate",
        message: "not authorized to create DataVolume: User u".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let vm = with_template("Always", &Value::Null);
    let observed = observed_with(&vm, None, Some(claim(&json!({}))));
    let decision = decide(&Observed { failures: Some(failure).into(), ..observed }).unwrap();
    assert!(creation(&decision).is_none() && creates(&decision));
    assert!(condition(&decision, "Failure").ends_with("User u"), "{decision:?}");
}

#[test]
fn cluster_without_data_volumes_is_named_until_it_has_them() {
    let vm = with_template("Always", &Value::Null);
    let decision = decide(&Observed { serves_data_volumes: false, ..observed_with(&vm, None, None) }).unwrap();
    assert!(creation(&decision).is_none() && !creates(&decision) && decision.wake_after.is_none());
    assert_eq!(
        condition(&decision, "Failure"),
        "FailedCreate: Error encountered while creating DataVolumes: failed to create DataVolume: the server could not find the \
         requested resource (post datavolumes.cdi.kubevirt.io): CustomResourceDefinition datavolumes.cdi.kubevirt.io is not installed; \
         install CDI or enable the importer of Ferrovirt (without hooks: apply importer-crds.yaml)"
    );
    assert_eq!(status_patch(&decision)["printableStatus"], "Provisioning");
    let mut shown = vm;
    shown.status = serde_json::from_value(status_patch(&decision)).unwrap();
    let again = decide(&Observed { serves_data_volumes: false, ..observed_with(&shown, None, None) }).unwrap();
    assert!(again.effects.is_empty(), "{again:?}");
}

#[test]
fn deleted_data_volume_of_a_vm_that_ran_waits_for_an_explicit_start() {
    let start = json!([{"action": "Start"}]);
    let leaving = || Some(claim(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}})));
    // strategy, status, claim, creates, printed
    for (strategy, status, claim, expected, printed) in [
        ("Always", json!({"runStrategy": "Always"}), None, false, "DataVolumeError"),
        ("Halted", json!({"runStrategy": "Halted"}), None, false, "Stopped"),
        ("Always", json!({"runStrategy": "Halted"}), None, true, ""),
        ("Manual", json!({"runStrategy": "Manual"}), None, false, "Stopped"),
        ("Manual", json!({"runStrategy": "Manual", "stateChangeRequests": start}), None, true, ""),
        ("Always", json!({"runStrategy": "Halted"}), leaving(), false, "DataVolumeError"),
    ] {
        let vm = with_template(strategy, &status);
        let observed = Observed { starts: vec![record()], ..observed_with(&vm, None, claim) };
        let decision = decide(&observed).unwrap();
        assert_eq!(creation(&decision).is_some(), expected, "{strategy} {status}");
        assert!(!creates(&decision));
        assert_eq!(
            status_patch(&decision)["printableStatus"].as_str().unwrap_or_default(),
            printed,
            "{strategy} {status}"
        );
        if !expected {
            assert!(condition(&decision, "Failure").contains("DataVolume root: it was deleted"), "{strategy}");
            // The new strategy still counts as one when the claim is gone.
            assert_eq!(status_patch(&decision)["runStrategy"], Value::Null);
        }
    }
}

#[test]
fn deleted_data_volume_of_a_hibernated_vm_waits_until_the_memory_is_discarded() {
    for (phase, is_created) in [("Hibernated", false), ("Resuming", false), ("Removing", true)] {
        let instance = json!({"spec": {"domain": {"devices": {}}}});
        let status = json!({
            "runStrategy": "Manual", "stateChangeRequests": [{"action": "Start"}],
            "hibernation": {"phase": phase, "claimName": "c", "fileName": "v.memory.save", "instance": instance},
        });
        let vm = with_template("Manual", &status);
        let saved = Arc::new(CachedClaim::default());
        let observed =
            Observed { starts: vec![record()], hibernation_claim: Some(saved), ..observed_with(&vm, None, None) };
        let decision = decide(&observed).unwrap();
        assert_eq!(creation(&decision).is_some(), is_created, "{phase}");
        assert!(!creates(&decision), "{phase}");
        if !is_created {
            assert!(condition(&decision, "Failure").contains("start --discard"), "{phase} {decision:?}");
        }
    }
}

#[test]
fn running_vm_tells_that_its_disk_is_lost_and_runs_on() {
    let vm = with_template("Always", &json!({"runStrategy": "Always"}));
    let running = instance(&vm, "Running");
    let leaving = claim(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}));
    let mut observed = Observed { starts: vec![record()], ..observed_with(&vm, None, Some(leaving)) };
    observed.instance = Some(Arc::new(running));
    let decision = decide(&observed).unwrap();
    assert!(creation(&decision).is_none() && !deletes(&decision));
    assert_eq!(status_patch(&decision)["printableStatus"], "Running");
    assert!(condition(&decision, "Failure").contains("stop the VM"), "{decision:?}");
}

#[test]
fn orphan_is_adopted_and_a_foreign_data_volume_is_not_used() {
    let vm = with_template("Always", &Value::Null);
    let mut orphan = (*data_volume(&json!({"phase": "Succeeded"}))).clone();
    orphan.metadata.owner_references = None;
    let decision = decide(&observed_with(&vm, Some(Arc::new(orphan.clone())), None)).unwrap();
    let Some(Effect::Patch { kind: Kind::DataVolume, patch, .. }) = decision.effects.first() else {
        panic!("{decision:?}")
    };
    assert_eq!(patch["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
    orphan.metadata.owner_references = serde_json::from_value(json!([
        {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "other", "uid": "x", "controller": true},
    ]))
    .unwrap();
    let decision = decide(&observed_with(&vm, Some(Arc::new(orphan)), None)).unwrap();
    assert!(!creates(&decision) && creation(&decision).is_none());
    let failure = condition(&decision, "Failure");
    assert!(failure.ends_with("\"root\" already exists: it belongs to VirtualMachine other"), "{failure}");
    assert_eq!(status_patch(&decision)["printableStatus"], "DataVolumeError");
}

#[test]
fn import_outranks_a_launcher_pod_without_node() {
    let vm = with_template("Always", &Value::Null);
    let mut waiting = instance(&vm, "Scheduling");
    let conditions = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
    waiting.status.as_mut().unwrap().conditions = serde_json::from_value(conditions).unwrap();
    for (phase, printed) in [
        ("ImportInProgress", "Provisioning"),
        ("CSICloneInProgress", "Provisioning"),
        ("RebindInProgress", "Provisioning"),
        ("Pending", "ErrorUnschedulable"),
        ("PendingPopulation", "ErrorUnschedulable"),
        ("Failed", "DataVolumeError"),
    ] {
        let mut observed = observed_with(&vm, Some(data_volume(&json!({"phase": phase}))), None);
        observed.instance = Some(Arc::new(waiting.clone()));
        assert_eq!(status_patch(&decide(&observed).unwrap())["printableStatus"], printed, "{phase}");
    }
}

#[test]
fn missing_source_claim_is_named() {
    let vm = with_template("Always", &Value::Null);
    let source = Source {
        source: api::cdi::data_volume::DataVolumeImportSource::default(),
        absent_claim: Some("fedora".to_owned()),
        is_referenced: false,
    };
    let sources = [("root".to_owned(), source)].into();
    let decision = decide(&Observed { sources, ..observed_with(&vm, None, None) }).unwrap();
    let expected = "SourcePVCNotAvailabe: Source PVC fedora not available: Target PVC root will remain unpopulated until source is created";
    assert_eq!(events(&decision), [expected]);
    assert!(creation(&decision).is_some());
}

#[test]
fn clone_of_an_image_that_is_gone_is_replaced_by_one_of_its_successor() {
    let from = |name: &str| json!({"pvc": {"namespace": "images", "name": name}});
    let without_source = json!({"phase": "CloneScheduled", "conditions": [
        {"type": "Bound", "status": "False", "reason": "CloneWithoutSource", "message": "M"},
    ]});
    let working = json!({"phase": "CloneInProgress"});
    // status, present name of the image, by a DataSource, used before
    for (status, image, is_referenced, used, expected) in [
        (&without_source, "new", true, false, true),
        (&without_source, "old", true, false, false),
        (&without_source, "new", false, false, false),
        (&without_source, "new", true, true, false),
        (&working, "new", true, false, false),
    ] {
        let vm = with_template("Always", &Value::Null);
        let mut present = (*data_volume(status)).clone();
        present.spec.source = serde_json::from_value(from("old")).unwrap();
        let source = serde_json::from_value(from(image)).unwrap();
        let source = Source { source, absent_claim: None, is_referenced };
        let starts = if used { vec![record()] } else { vec![] };
        let sources = [("root".to_owned(), source)].into();
        let observed = Observed { sources, starts, ..observed_with(&vm, Some(Arc::new(present)), None) };
        let decision = decide(&observed).unwrap();
        let deleted = decision.effects.iter().any(
            |effect| matches!(effect, Effect::Delete { kind: Kind::DataVolume, uid: Some(uid), .. } if uid == "dv"),
        );
        assert_eq!(deleted, expected, "{status} {image} {is_referenced} {used}");
    }
}

#[test]
fn volume_without_template_shows_and_does_not_hold_back_the_vmi() {
    let mut vm = with_template("Always", &Value::Null);
    vm.spec.data_volume_templates.clear();
    let decision = decide(&observed_with(&vm, Some(data_volume(&json!({"phase": "Failed"}))), None)).unwrap();
    assert!(creates(&decision) && creation(&decision).is_none());
    vm.spec.run_strategy = Some(RunStrategy::Halted);
    let decision = decide(&observed_with(&vm, Some(data_volume(&json!({"phase": "ImportInProgress"}))), None)).unwrap();
    assert_eq!(status_patch(&decision)["printableStatus"], "Provisioning");
}
