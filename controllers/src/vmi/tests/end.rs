//! Tests of the end of VMIs and of surplus pods.

use super::*;

#[test]
fn virt_handler_has_time_to_record_the_end_of_a_launcher() {
    let decision = decided(&in_phase("Running"), &[ended_pod("2030-01-01T00:00:55Z")]);
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(5)));
    assert_eq!(status_of(&decision).get("phase"), None);
    let decision = decided(&in_phase("Running"), &[ended_pod("2030-01-01T00:00:50Z")]);
    assert_eq!(status_of(&decision)["phase"], "Failed");
}

#[test]
fn end_of_a_launcher_counts_from_its_arrival_whatever_the_clock_of_its_node_is() {
    for finished in ["2020-01-01T00:00:00Z", "2030-01-01T00:00:59Z", "2040-01-01T00:00:00Z"] {
        for (seconds, fails) in [(0, false), (9, false), (10, true)] {
            let ended_for = Some(Duration::from_secs(seconds));
            let pods = vec![Arc::new(ended_pod(finished))];
            let decision = decide(&Observed { pods, ended_for, ..observed(&in_phase("Running")) }).unwrap();
            assert_eq!(status_of(&decision)["phase"] == "Failed", fails, "{finished} {seconds}");
        }
    }
}

#[test]
fn vmi_that_never_ran_fails_with_a_launcher_whose_end_the_kubelet_does_not_know() {
    let lost = || {
        let compute = json!({"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}});
        pod(&json!({"status": {"phase": "Failed", "reason": "Evicted", "containerStatuses": [compute]}}))
    };
    for phase in ["Scheduling", "Scheduled"] {
        let status = status_of(&decided(&in_phase(phase), &[lost()]));
        assert_eq!((&status["phase"], &status["reason"]), (&json!("Failed"), &json!("Evicted")), "{phase}");
    }
    let decision = decided(&in_phase("Running"), &[lost()]);
    assert_eq!(status_of(&decision).get("phase"), None, "{decision:?}");
}

#[test]
fn pod_that_kubelet_rejects_is_named_with_the_reason() {
    let rejected = |reason: &str, message: &str| {
        pod(&json!({"status": {"phase": "Failed", "reason": reason, "message": message}}))
    };
    let topology = ("TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with Topology locality");
    let cpus = ("UnexpectedAdmissionError", "Pod was rejected: Allocate failed due to not enough cpus available");
    let shown = |phase: &str, pod: CachedPod| {
        let decision = decided(&in_phase(phase), &[pod]);
        let events = decision.effects.iter().filter(|effect| match effect {
            Effect::Event(event) => (event.reason, event.event_type.as_str()) == ("PodRejected", "Warning"),
            _ => false,
        });
        (condition_in(&status_of(&decision), "Synchronized"), events.count(), status_of(&decision)["reason"].clone())
    };
    for (phase, (reason, message)) in [("Pending", topology), ("Scheduling", topology), ("Scheduling", cpus)] {
        let (condition, events, of_vmi) = shown(phase, rejected(reason, message));
        let expected = format!("the launcher pod ended on node n before the guest started: {reason}: {message}");
        assert_eq!((&condition["reason"], &condition["message"]), (&json!("PodRejected"), &json!(expected)), "{phase}");
        assert_eq!((condition["status"].as_str(), events, of_vmi), (Some("False"), 1, json!(reason)));
    }
    // A guest that ran, and a launcher that ended by itself.
    assert_eq!(shown("Running", rejected("Evicted", "low on memory")).0, Value::Null);
    assert_eq!(shown("Scheduling", ended_pod("2030-01-01T00:00:30Z")).0, Value::Null);
}

#[test]
fn started_vmi_without_pod_fails_and_never_gets_a_second_one() {
    for (phase, shown) in [("Scheduling", None), ("Scheduled", Some("Stopped")), ("Running", Some("Stopped"))] {
        let decision = decided(&in_phase(phase), &[]);
        assert_eq!(status_of(&decision)["phase"], "Failed", "{phase}");
        let event = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::Instance, options, .. } => options.success.as_ref().map(|note| note.reason),
            _ => None,
        });
        assert_eq!(event, shown, "{phase}");
        assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Create { .. })));
    }
    assert!(!decided(&in_phase("Failed"), &[]).effects.iter().any(|effect| matches!(effect, Effect::Create { .. })));
}

#[test]
fn deletion_removes_the_pod_first_and_the_finalizer_last() {
    let deleting = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:30Z"}});
    let merged = |phase: &str| {
        let mut vmi = serde_json::to_value(in_phase(phase)).unwrap();
        json_patch::merge(&mut vmi, &deleting);
        serde_json::from_value::<VirtualMachineInstance>(vmi).unwrap()
    };
    let ready = running_pod(&json!({"type": "Ready", "status": "True"}));
    let decision = decided(&merged("Running"), &[ready]);
    assert!(matches!(decision.effects[0], Effect::Delete { kind: Kind::Pod, .. }));
    let patch = patch_of(&decision, Kind::Instance);
    assert!(patch.is_none_or(|patch| patch["metadata"].get("finalizers").is_none()));
    // Those of VMI and VM go, those of others stay.
    let (own, of_vm) = ("kubevirt.io/foregroundDeleteVirtualMachine", "kubevirt.io/virtualMachineControllerFinalize");
    for (finalizers, left) in [
        (vec![own], Value::Null),
        (vec![of_vm, own], Value::Null),
        (vec![of_vm, "example.org/wait", own], json!(["example.org/wait"])),
    ] {
        let mut vmi = merged("Succeeded");
        vmi.metadata.finalizers = Some(finalizers.into_iter().map(str::to_owned).collect());
        let patch = patch_of(&decided(&vmi, &[]), Kind::Instance).unwrap();
        assert_eq!(patch["metadata"]["finalizers"], left);
    }
}

#[test]
fn ended_pod_of_a_deleted_vmi_is_removed_without_waiting_for_its_volumes() {
    let vmi =
        vmi(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:30Z"}, "status": {"phase": "Succeeded"}}));
    let ended = json!({"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "",
        "state": {"terminated": {"exitCode": 0, "finishedAt": "2030-01-01T00:00:40Z"}}});
    let running = json!({"name": "sidecar", "ready": true, "restartCount": 0, "image": "", "imageID": "",
        "state": {"running": {}}});
    let deleting = json!({"deletionTimestamp": "2030-01-01T00:00:30Z"});
    for (metadata, phase, containers, expected) in [
        (&deleting, "Succeeded", json!([ended]), Some(0)),
        (&deleting, "Failed", json!([ended]), Some(0)),
        // kubelet reports the phase last.
        (&deleting, "Running", json!([ended]), None),
        (&deleting, "Succeeded", json!([ended, running]), None),
        (&deleting, "Failed", json!([]), None),
        (
            &json!({"deletionTimestamp": "2030-01-01T00:00:30Z", "finalizers": ["example.org/job"]}),
            "Succeeded",
            json!([ended]),
            None,
        ),
    ] {
        let pod = pod(&json!({"metadata": metadata, "status": {"phase": phase, "containerStatuses": containers}}));
        let decision = decided(&vmi, &[pod]);
        let grace = decision.effects.iter().find_map(|effect| match effect {
            Effect::Delete { kind: Kind::Pod, grace_seconds, .. } => *grace_seconds,
            _ => None,
        });
        assert_eq!(grace, expected, "{metadata} {phase} {containers}");
    }
}

#[test]
fn pod_of_a_deleted_vmi_ends_within_the_present_grace_period() {
    for (grace, pod_metadata, expected) in [
        (json!(900), json!({}), Some(930)),
        (Value::Null, json!({}), Some(60)),
        (json!(0), json!({}), Some(30)),
        // Shortened after the deletion of the pod, and not.
        (json!(0), json!({"deletionTimestamp": "2030-01-01T00:15:00Z", "deletionGracePeriodSeconds": 930}), Some(30)),
        (json!(0), json!({"deletionTimestamp": "2030-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}), None),
        (json!(900), json!({"deletionTimestamp": "2030-01-01T00:00:30Z", "deletionGracePeriodSeconds": 1}), None),
    ] {
        let mut vmi = in_phase("Running");
        vmi.metadata.deletion_timestamp = serde_json::from_value(json!("2030-01-01T00:00:30Z")).unwrap();
        vmi.spec.termination_grace_period_seconds = grace.as_i64();
        let decision = decided(&vmi, &[pod(&json!({"metadata": pod_metadata, "status": {"phase": "Running"}}))]);
        let deleted = decision.effects.iter().find_map(|effect| match effect {
            Effect::Delete { kind: Kind::Pod, grace_seconds, .. } => Some(*grace_seconds),
            _ => None,
        });
        assert_eq!(deleted, expected.map(Some), "{grace} {pod_metadata}");
    }
}

#[test]
fn refused_deletion_of_the_pod_shows_until_the_next_attempt() {
    let failure = Failure {
        reason: "FailedDelete",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:30Z".parse().unwrap(),
        attempts: 1,
    };
    for (phase, shows) in [("Scheduling", true), ("Running", false), ("Succeeded", true), ("Failed", true)] {
        let mut vmi = in_phase(phase);
        vmi.metadata.deletion_timestamp = serde_json::from_value(json!("2030-01-01T00:00:30Z")).unwrap();
        let pods = [pod(&json!({}))];
        let decision = decided_after(&vmi, &pods, Some(&failure));
        let status = patch_of(&decision, Kind::Instance).unwrap_or_default()["status"].clone();
        let condition = condition_in(&status, "Synchronized");
        let expected = shows.then_some(("False", "FailedDelete", "failed to delete pod: denied"));
        let text = |name: &str| condition[name].as_str();
        let found = text("status").zip(text("reason")).zip(text("message"));
        assert_eq!(found.map(|((status, reason), message)| (status, reason, message)), expected, "{phase}");
        if !shows {
            continue;
        }
        vmi.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
        let decision = decided(&vmi, &pods);
        assert!(matches!(decision.effects[0], Effect::Delete { kind: Kind::Pod, .. }), "{phase}");
        assert_eq!(condition_in(&status_of(&decision), "Synchronized"), Value::Null, "{phase}");
    }
}

#[test]
fn vmi_deleted_before_it_had_a_pod_ends_in_one_write() {
    let deleting = vmi(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:30Z"}}));
    let decision = decided(&deleting, &[]);
    let patch = patch_of(&decision, Kind::Instance).unwrap();
    assert_eq!(patch["status"]["phase"], "Failed");
    assert_eq!(patch["metadata"]["finalizers"], Value::Null);
    assert_eq!(decision.effects.len(), 1);
}

#[test]
fn second_pod_of_a_start_that_was_not_answered_in_time_is_deleted() {
    let second =
        |at: &str| pod(&json!({"metadata": {"name": "virt-launcher-m-y", "uid": "q", "creationTimestamp": at}}));
    let deleted = |decision: &Decision| {
        let name = |effect: &Effect| match effect {
            Effect::Delete { kind: Kind::Pod, uid, .. } => uid.clone(),
            _ => None,
        };
        decision.effects.iter().filter_map(name).collect::<Vec<_>>()
    };
    let decision = decided(&vmi(&json!({})), &[pod(&json!({})), second("2030-01-01T00:00:05Z")]);
    assert_eq!(deleted(&decision), ["q"]);
    assert_eq!(status_of(&decision)["activePods"], json!({"p": "n"}));
    // The pod that the VMI runs in stays, whichever is older.
    let decision = decided(&in_phase("Running"), &[pod(&json!({})), second("2029-01-01T00:00:05Z")]);
    assert_eq!(deleted(&decision), ["q"]);
    assert_ne!(status_of(&decided(&in_phase("Running"), &[second("2030-01-01T00:00:05Z")]))["phase"], "Running");
}

#[test]
fn cve_2025_64435_pod_that_only_says_to_be_of_the_vmi_does_not_end_it() {
    let running = running_pod(&json!({"type": "Ready", "status": "True"}));
    let alone = decided(&in_phase("Running"), std::slice::from_ref(&running));
    // Younger, on the VMI's node, and over: with a container of that name and without.
    let ended = json!({"terminated": {"exitCode": 0, "finishedAt": "2030-01-01T00:00:40Z"}});
    let compute =
        json!({"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": ended});
    for containers in [json!([]), json!([compute])] {
        let stranger = pod(&json!({
            "metadata": {"name": "stranger", "uid": "q", "creationTimestamp": "2030-01-01T00:00:30Z"},
            "status": {"phase": "Succeeded", "containerStatuses": containers},
        }));
        assert_eq!(decided(&in_phase("Running"), &[running.clone(), stranger]), alone);
    }
}
