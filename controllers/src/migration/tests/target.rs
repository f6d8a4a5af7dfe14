//! Tests of the target pod, the hand-off and the abort.

use super::*;
use crate::{runtime::Failure, vmi::plugged_volumes};

#[test]
fn admitted_migration_gets_a_pod() {
    let (idle, only) = (vmi(&json!({})), [source()]);
    let waiting = migration("Pending", &json!({}));
    let pod = created_pod(&decided(&waiting, Some(&idle), &only)).unwrap();
    assert_eq!(pod["metadata"]["labels"]["kubevirt.io/migrationJobUID"], "g");
    assert_eq!(pod["metadata"]["annotations"]["kubevirt.io/migrationJobName"], "mig");
    for (uid, is_same) in [("g", true), ("other", false)] {
        let migration = migration("Pending", &json!({"metadata": {"uid": uid}}));
        let again = created_pod(&decided(&migration, Some(&idle), &only)).unwrap();
        assert_eq!(again["metadata"]["name"] == pod["metadata"]["name"], is_same, "{uid}");
    }
    let refused = |message: &str| Failure {
        reason: event::FAILED_CREATE,
        message: message.to_owned(),
        retry_at: now() + jiff::SignedDuration::from_secs(2),
        attempts: 1,
    };
    for (message, is_quota) in [("pods \"x\" is forbidden: exceeded quota: q", true), ("webhook says no", false)] {
        let failure = refused(message);
        let decision =
            decide(&Observed { failures: Some(failure.clone()).into(), ..observed(&waiting, Some(&idle), &only) })
                .unwrap();
        assert!(created_pod(&decision).is_none());
        assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(2)));
        let patch = patch_of(&decision, Kind::Migration).unwrap();
        let conditions = patch["status"]["conditions"].as_array().unwrap();
        let types: Vec<&str> = conditions.iter().filter_map(|condition| condition["type"].as_str()).collect();
        let quota = is_quota.then_some("migrationRejectedByResourceQuota");
        assert_eq!(types, quota.into_iter().chain(["migrationWaiting"]).collect::<Vec<_>>(), "{message}");
    }
}

#[test]
fn pod_that_pod_security_forbids_has_its_own_event() {
    let decision = decided(&migration("Pending", &json!({})), Some(&vmi(&json!({}))), &[source()]);
    let options = decision.effects.iter().find_map(|effect| match effect {
        Effect::Create { kind: Kind::Pod, options, .. } => Some(options),
        _ => None,
    });
    for (error, expected) in [
        ("webhook says no", "Error creating pod: {error}"),
        (
            "pods \"x\" is forbidden: violates PodSecurity \"restricted:latest\"",
            "failed to render launch manifest: failed to create target pod for vmi d/m, \
             it needs a privileged namespace to run: {error}",
        ),
    ] {
        let event = options.unwrap().refusal(error).unwrap();
        assert_eq!((event.reason, event.message.as_str()), ("FailedCreate", expected));
    }
}

#[test]
fn pod_that_does_not_start_is_deleted_in_time() {
    let idle = vmi(&json!({}));
    let unschedulable = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
    let pod = |created: &str, conditions: &Value| {
        target(&json!({
            "metadata": {"creationTimestamp": created}, "spec": {"nodeName": null},
            "status": {"phase": "Pending", "containerStatuses": null, "conditions": conditions},
        }))
    };
    let annotated = |key: &str| json!({"metadata": {"annotations": {key: "20"}}});
    // Annotation, creation of the pod, conditions; deleted, wake-up. The last: until the migration fails without its deletion.
    for (annotations, created, conditions, expected) in [
        (json!({}), "2030-01-01T00:09:30Z", json!([]), (false, Some(870))),
        (json!({}), "2029-12-31T23:50:00Z", json!([]), (true, Some(930))),
        (json!({}), "2030-01-01T00:09:30Z", unschedulable.clone(), (false, Some(270))),
        (json!({}), "2030-01-01T00:05:00Z", unschedulable.clone(), (true, Some(930))),
        (
            annotated("kubevirt.io/migrationPendingPodTimeoutSeconds"),
            "2030-01-01T00:09:30Z",
            json!([]),
            (true, Some(50)),
        ),
        (
            annotated("kubevirt.io/migrationUnschedulablePodTimeoutSeconds"),
            "2030-01-01T00:09:30Z",
            unschedulable.clone(),
            (true, Some(930)),
        ),
    ] {
        let pods = [source(), pod(created, &conditions)];
        let decision = decided(&migration("Scheduling", &annotations), Some(&idle), &pods);
        let wake = decision.wake_after.map(|wake| wake.as_secs());
        assert_eq!((!deleted_pods(&decision).is_empty(), wake), expected, "{annotations} {created} {conditions}");
        let reports = messages(&decision).iter().any(|message| message.ends_with("is currently unschedulable."));
        assert_eq!(reports, conditions == unschedulable);
    }
}

#[test]
fn vmi_tells_that_no_other_node_has_its_host_model() {
    let (model, feature) = ("cpu-model-migration.node.kubevirt.io/Skylake", "cpu-feature.node.kubevirt.io/vmx");
    let machine = "machine-type.node.kubevirt.io/q35";
    let pod = target(&json!({
        "metadata": {"creationTimestamp": "2030-01-01T00:09:30Z"}, "spec": {"nodeName": null},
        "status": {"phase": "Pending", "containerStatuses": null,
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
    }));
    let pods = [source(), pod];
    // Model of the VMI, labels that no other node has, whether it was told; labels that are told.
    for (cpu, unoffered, is_reported, expected) in [
        (json!({"model": "host-model"}), vec![model, machine, feature], false, Some(vec![model, feature])),
        (json!({"model": null}), vec![model], false, Some(vec![model])),
        (json!({"model": "host-model"}), vec![feature], true, None),
        (json!({"model": "host-model"}), vec![machine], false, None),
        (json!({"model": "host-model"}), vec![], false, None),
        (json!({"model": "Haswell"}), vec![feature], false, None),
    ] {
        let instance = vmi(&json!({"spec": {"domain": {"cpu": cpu}}}));
        let own = migration("Scheduling", &json!({}));
        let labels = unoffered.iter().map(|key| (*key).to_owned()).collect();
        let seen = Observed { unoffered: labels, is_reported, ..observed(&own, Some(&instance), &pods) };
        let decision = decide(&seen).unwrap();
        let told = decision.effects.iter().find_map(|effect| match effect {
            Effect::Event(told) if told.reason == event::NO_SUITABLE_NODES_FOR_HOST_MODEL_MIGRATION => Some(told),
            _ => None,
        });
        let message = |keys: Vec<&str>| {
            let start =
                "Migration cannot proceed since no node is suitable to run the required CPU model / required features";
            format!("{start}: {}", keys.join(", "))
        };
        assert_eq!(told.map(|told| told.message.clone()), expected.map(message), "{cpu} {unoffered:?}");
        let kind = told.and_then(|told| told.regarding.kind.as_deref());
        assert!(kind.is_none_or(|kind| kind == "VirtualMachineInstance"), "{kind:?}");
    }
}

#[test]
fn surplus_pods_and_pods_beside_the_guest_are_deleted() {
    let idle = vmi(&json!({}));
    let second = pod(
        "z",
        "c",
        &json!({"metadata": {"labels": {"kubevirt.io/migrationJobUID": "g"},
        "creationTimestamp": "2030-01-01T00:09:40Z"}}),
    );
    let decision = decided(&migration("Scheduling", &json!({})), Some(&idle), &[source(), second, pending_target()]);
    assert_eq!(deleted_pods(&decision), ["virt-launcher-m-z"]);
    let beside = target(&json!({"spec": {"nodeName": "a"}}));
    let decision = decided(&migration("Scheduled", &json!({})), Some(&idle), &[source(), beside]);
    assert_eq!(deleted_pods(&decision), ["virt-launcher-m-t"]);
    assert!(patch_of(&decision, Kind::Instance).is_none());
}

#[test]
fn evacuation_does_not_end_on_a_node_that_is_being_drained() {
    let (idle, pods) = (vmi(&json!({})), [source(), target(&json!({}))]);
    for (key, is_target_drained, is_deleted) in [
        ("kubevirt.io/evacuationMigration", true, true),
        ("kubevirt.io/evacuationMigration", false, false),
        ("kubevirt.io/workloadUpdateMigration", true, false),
    ] {
        for phase in ["Scheduling", "Scheduled"] {
            let own = migration(phase, &json!({"metadata": {"annotations": {key: "a"}}}));
            let decision = decide(&Observed { is_target_drained, ..observed(&own, Some(&idle), &pods) }).unwrap();
            assert_eq!(!deleted_pods(&decision).is_empty(), is_deleted, "{key} {is_target_drained} {phase}");
            assert_eq!(patch_of(&decision, Kind::Instance).is_none(), is_deleted, "{key} {is_target_drained} {phase}");
        }
    }
}

#[test]
fn migration_is_handed_over_once_its_pod_runs() {
    // What a former migration left is dropped.
    let idle = vmi(&json!({"status": {"migrationState": {
        "migrationUid": "old", "completed": true, "failed": true, "failureReason": "x", "endTimestamp": "2029-01-01T00:00:00Z"}}}));
    let pods = [source(), target(&json!({}))];
    let decision = decided(&migration("Scheduling", &json!({})), Some(&idle), &pods);
    let [
        Effect::Patch { kind: Kind::Instance, patch, resource_version, .. },
        Effect::Patch { kind: Kind::Migration, .. },
    ] = &decision.effects[..]
    else {
        panic!("{decision:?}")
    };
    assert_eq!(resource_version.as_deref(), Some("3"));
    assert_eq!(patch["metadata"]["labels"], json!({"kubevirt.io/migrationTargetNodeName": "b"}));
    assert_eq!(patch["status"]["activePods"], json!({"t": "b"}));
    let state = &patch["status"]["migrationState"];
    for (field, value) in [
        ("migrationUid", json!("g")),
        ("sourceNode", json!("a")),
        ("sourcePod", json!("virt-launcher-m-p")),
        ("targetNode", json!("b")),
        ("targetPod", json!("virt-launcher-m-t")),
        ("targetMemoryOverhead", json!("1000")),
        ("completed", Value::Null),
        ("failed", Value::Null),
        ("endTimestamp", Value::Null),
    ] {
        assert_eq!(state[field], value, "{field}");
    }
    assert_eq!(state["migrationConfiguration"]["parallelMigrationsPerCluster"], 5);
    let messages = messages(&decision);
    assert_eq!(messages, ["Migration target pod is ready for preparation by virt-handler."]);
    // Neither while another is under way, nor for a paused start.
    let busy = handed(&json!({"migrationUid": "x"}));
    let decision = decided(&migration("Scheduled", &json!({})), Some(&busy), &pods);
    assert!(patch_of(&decision, Kind::Instance).is_none());
}

#[test]
fn policy_without_settings_is_not_named() {
    let (idle, pods) = (vmi(&json!({})), [source(), target(&json!({}))]);
    let own = migration("Scheduled", &json!({}));
    for (settings, is_named) in [
        (json!({}), false),
        (json!({"allowAutoConverge": false}), true),
        (json!({"allowPostCopy": false}), true),
        (json!({"allowWorkloadDisruption": false}), true),
        (json!({"bandwidthPerMigration": "0"}), true),
        (json!({"completionTimeoutPerGiB": 150}), true),
        (json!({"maxDowntimeMs": 300}), true),
    ] {
        let mut spec = json!({"selectors": {}});
        json_patch::merge(&mut spec, &settings);
        let metadata = serde_json::from_value(json!({"name": "p"})).unwrap();
        let policies = vec![Arc::new(CachedPolicy { metadata, spec: serde_json::from_value(spec).unwrap() })];
        let decision = decide(&Observed { policies, ..observed(&own, Some(&idle), &pods) }).unwrap();
        let state = patch_of(&decision, Kind::Instance).unwrap()["status"]["migrationState"].clone();
        assert_eq!(state["migrationPolicyName"] == "p", is_named, "{settings} {state}");
        assert!(state["migrationConfiguration"].is_object(), "{settings} {state}");
    }
}

#[test]
fn deleted_migration_is_aborted_as_soon_as_possible() {
    let pods = [source(), target(&json!({}))];
    let address = json!({"targetNodeAddress": "10.0.0.2"});
    let with = |change: Value| {
        let mut state = address.clone();
        json_patch::merge(&mut state, &change);
        state
    };
    // State of the migration; whether the source is asked, whether it ends at once.
    for (phase, state, expected) in [
        ("Scheduled", json!({}), (true, true)),
        ("PreparingTarget", json!({}), (true, true)),
        ("TargetReady", address.clone(), (true, false)),
        ("Running", with(json!({"startTimestamp": "2030-01-01T00:09:40Z"})), (true, false)),
        ("Running", with(json!({"abortRequested": true})), (false, false)),
    ] {
        let decision = decided(&migration(phase, &deleted()), Some(&handed(&state)), &pods);
        let patch = patch_of(&decision, Kind::Instance).map(|patch| patch["status"]["migrationState"].clone());
        let patch = patch.unwrap_or_default();
        assert_eq!((patch["abortRequested"] == true, patch["failed"] == true), expected, "{phase} {state}");
        assert_eq!(patch["abortStatus"] == "Succeeded", expected.1);
        let condition = &patch_of(&decision, Kind::Migration).unwrap()["status"]["conditions"][0];
        assert_eq!((&condition["type"], &condition["status"]), (&json!("migrationAbortRequested"), &json!("True")));
    }
    // A guest that has moved is not called back.
    let mut moved = handed(&with(json!({"startTimestamp": "2030-01-01T00:09:40Z"})));
    moved.status.get_or_insert_default().node_name = Some("b".to_owned());
    let decision = decided(&migration("Running", &deleted()), Some(&moved), &pods);
    assert!(patch_of(&decision, Kind::Instance).is_none());
}

#[test]
fn migration_without_an_object_is_ended() {
    let waiting = migration("Pending", &json!({}));
    let all = [Arc::new(waiting.clone())];
    for (state, expected) in [
        (json!({"migrationUid": "gone"}), (true, true)),
        (json!({"migrationUid": "gone", "targetNodeAddress": "10.0.0.2"}), (true, false)),
    ] {
        let busy = handed(&state);
        let pods = [source()];
        let decision =
            decide(&Observed { all: all.to_vec(), is_admitted: false, ..observed(&waiting, Some(&busy), &pods) })
                .unwrap();
        let patch = patch_of(&decision, Kind::Instance).unwrap()["status"]["migrationState"].clone();
        assert_eq!((patch["abortRequested"] == true, patch["failed"] == true), expected, "{state}");
    }
}

#[test]
fn time_at_which_the_guest_ran_is_recorded_on_the_pod() {
    let state = json!({"targetNodeAddress": "10.0.0.2", "startTimestamp": "2030-01-01T00:09:40Z",
        "targetNodeDomainReadyTimestamp": "2030-01-01T00:09:55Z"});
    let decision = decided(&migration("Running", &json!({})), Some(&handed(&state)), &[source(), target(&json!({}))]);
    let patch = patch_of(&decision, Kind::Pod).unwrap();
    let annotations = &patch["metadata"]["annotations"];
    assert_eq!(*annotations, json!({"kubevirt.io/migration-target-ready-timestamp": "2030-01-01 00:09:55 +0000 UTC"}));
    let marked = target(&json!({"metadata": {"annotations": annotations}}));
    let decision = decided(&migration("Running", &json!({})), Some(&handed(&state)), &[source(), marked]);
    assert!(decision.effects.is_empty(), "{decision:?}");
}

#[test]
fn hot_plugged_volumes_are_attached_to_the_target() {
    let plugged = json!({
        "spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}]},
        "status": {"volumeStatus": [{"name": "data", "target": "sda", "phase": "Ready", "hotplugVolume": {"attachPodName": "hp", "attachPodUID": "h"}}]},
    });
    let claim = CachedClaim {
        metadata: serde_json::from_value(json!({"name": "c", "uid": "cu"})).unwrap(),
        block: true,
        phase: "Bound".to_owned(),
        ..CachedClaim::default()
    };
    let claims = BTreeMap::from([("c".to_owned(), Arc::new(claim))]);
    let (idle, pods) = (vmi(&plugged), [source(), target(&json!({}))]);
    let waiting = migration("Pending", &json!({}));
    let decision = decide(&Observed { claims: claims.clone(), ..observed(&waiting, Some(&idle), &pods) }).unwrap();
    let pod = created_pod(&decision).unwrap();
    assert_eq!(pod["metadata"]["ownerReferences"][0]["uid"], "t");
    let labels = json!({"kubevirt.io": "hotplug-disk", "kubevirt.io/migrationJobUID": "g"});
    assert_eq!(pod["metadata"]["labels"], labels);
    assert_eq!(pod["metadata"]["annotations"]["kubevirt.io/migrationJobName"], "mig");
    assert_eq!(pod["spec"]["containers"][0]["volumeDevices"][0]["devicePath"], "/path/data/cu");
    assert!(entered(&decision, 1).is_empty());
    let attachment = |ready: bool, phase: &str, volume: &str| {
        let owner =
            json!([{"apiVersion": "v1", "kind": "Pod", "name": "virt-launcher-m-t", "uid": "t", "controller": true}]);
        let metadata = json!({"name": "hp-2", "namespace": "d", "uid": "h2", "ownerReferences": owner});
        let metadata = serde_json::from_value(metadata).unwrap();
        let (answers, phase) = (true, phase.to_owned());
        let claims = BTreeMap::from([(volume.to_owned(), "c".to_owned())]);
        [Arc::new(CachedAttachment { metadata, answers, ready, phase, claims, ..CachedAttachment::default() })]
    };
    for (ready, phase, expected) in
        [(false, "Pending", &[][..]), (true, "Running", &["Scheduling", "Scheduled"]), (false, "Failed", &["Failed"])]
    {
        let attachments = attachment(ready, phase, "data");
        let observed = Observed {
            claims: claims.clone(),
            attachments: attachments.to_vec(),
            ..observed(&waiting, Some(&idle), &pods)
        };
        let decision = decide(&observed).unwrap();
        assert_eq!(entered(&decision, 1), expected, "{phase}");
        let state = patch_of(&decision, Kind::Instance).map(|patch| patch["status"]["migrationState"].clone());
        let uid = state.map(|state| state["targetAttachmentPodUID"].clone());
        assert_eq!(uid, ready.then(|| json!("h2")), "{phase}");
    }
    // The volume was plugged in after the pod of another one was made, and after the target was scheduled.
    for phase in ["Pending", "Scheduling", "Scheduled"] {
        let (waiting, other) = (migration(phase, &json!({})), attachment(true, "Running", "other"));
        let late =
            Observed { claims: claims.clone(), attachments: other.to_vec(), ..observed(&waiting, Some(&idle), &pods) };
        let decision = decide(&late).unwrap();
        let volumes = created_pod(&decision).map(|pod| pod["spec"]["volumes"][1]["name"].clone());
        assert_eq!(volumes, Some(json!("data")), "{phase}");
        assert_eq!(patch_of(&decision, Kind::Instance), None, "{phase}");
    }
}

#[test]
fn volumes_that_the_launcher_does_not_get_delay_no_migration() {
    let pod = |ready: bool| {
        let metadata = serde_json::from_value(json!({"name": "hp", "namespace": "d", "uid": "h"})).unwrap();
        [Arc::new(CachedAttachment { metadata, ready, answers: true, ..CachedAttachment::default() })]
    };
    // Phase, UID in the status, the pod runs; the volume moves.
    for (phase, uid, ready, moves) in [
        ("Bound", Some("h"), true, false),
        ("AttachedToNode", None, true, false),
        // Its claim cannot be mounted, or not yet.
        ("AttachedToNode", Some("h"), false, false),
        ("AttachedToNode", Some("h"), true, true),
        ("MountedToPod", Some("h"), false, true),
        // Its pod was lost.
        ("Ready", None, false, true),
        ("UnMountedFromPod", Some("h"), true, false),
    ] {
        let plugged = vmi(&json!({
            "spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}]},
            "status": {"volumeStatus": [{"name": "data", "target": "", "phase": phase,
                "hotplugVolume": {"attachPodName": "hp", "attachPodUID": uid}}]},
        }));
        assert_eq!(!plugged_volumes(&plugged, &pod(ready)).is_empty(), moves, "{phase} {uid:?} {ready}");
    }
}

#[test]
fn volume_that_was_removed_leaves_the_guest_before_a_migration() {
    let removed = |target: &str| {
        vmi(&json!({"status": {"volumeStatus": [{"name": "data", "target": target, "phase": "Ready",
            "hotplugVolume": {"attachPodName": "hp", "attachPodUID": "h"}}]}}))
    };
    let pods = [source(), target(&json!({}))];
    // Phase, device of the guest, phases that are entered; the migration is handed over.
    for (phase, device, expected, is_handed_over) in [
        ("Scheduling", "sda", &[][..], false),
        ("Scheduled", "sda", &[], false),
        ("Scheduling", "", &["Scheduled"], true),
        ("Scheduled", "", &[], true),
    ] {
        let decision = decided(&migration(phase, &json!({})), Some(&removed(device)), &pods);
        assert_eq!(entered(&decision, 1), expected, "{phase} {device}");
        assert_eq!(patch_of(&decision, Kind::Instance).is_some(), is_handed_over, "{phase} {device}");
        assert!(created_pod(&decision).is_none(), "{phase} {device}");
    }
}

#[test]
fn migration_with_a_target_pod_waits_for_the_end_of_a_snapshot() {
    let vmi = vmi(&json!({}));
    let pods = [source(), target(&json!({}))];
    // Phase, the snapshot is taken, phases that are entered; the migration is handed over.
    for (phase, is_held, expected, is_handed_over) in [
        ("Scheduling", true, &[][..], false),
        ("Scheduling", false, &["Scheduled"], true),
        ("Scheduled", true, &[], false),
    ] {
        let migration = migration(phase, &json!({}));
        let held = is_held.then(|| "snapshot \"s\" in progress".to_owned());
        let decision = decide(&Observed { held, ..observed(&migration, Some(&vmi), &pods) }).unwrap();
        assert_eq!(entered(&decision, 1), expected, "{phase} {is_held}");
        assert_eq!(patch_of(&decision, Kind::Instance).is_some(), is_handed_over, "{phase} {is_held}");
        let patch = patch_of(&decision, Kind::Migration).unwrap_or_default();
        let waits = patch["status"]["conditions"][0]["reason"] == "OperationInProgress";
        assert_eq!(waits, is_held && phase == "Scheduling", "{phase} {is_held}");
    }
}
