//! Tests of migrations that have ended.

use super::*;

fn with_uid(uid: &str, created: &str) -> Value {
    json!({"metadata": {"name": uid, "uid": uid, "creationTimestamp": created, "finalizers": null}})
}

#[test]
fn failure_that_nobody_recorded_is_recorded() {
    let down = target(&json!({"status": {"phase": "Failed"}}));
    let failed = |at: &str| {
        migration(
            "Failed",
            &json!({"status": {"phaseTransitionTimestamps": [{"phase": "Failed", "phaseTransitionTimestamp": at}]}}),
        )
    };
    let begun = json!({"startTimestamp": "2030-01-01T00:09:00Z"});
    // Time of the failure, state, pods; recorded, wake-up.
    for (at, state, pods, expected) in [
        ("2030-01-01T00:09:59Z", json!({}), vec![source()], (true, false)),
        ("2030-01-01T00:09:59Z", begun.clone(), vec![source(), down.clone()], (false, true)),
        ("2030-01-01T00:08:00Z", begun.clone(), vec![source(), down], (true, false)),
        ("2030-01-01T00:08:00Z", begun, vec![source(), target(&json!({}))], (false, false)),
        ("2030-01-01T00:08:00Z", json!({"failed": true, "completed": true}), vec![source()], (false, false)),
    ] {
        let decision = decided(&failed(at), Some(&handed(&state)), &pods);
        let patch = patch_of(&decision, Kind::Instance).unwrap_or_default();
        let written = &patch["status"]["migrationState"];
        assert_eq!((written["failed"] == true, decision.wake_after.is_some()), expected, "{at} {state}");
        if expected.0 {
            assert_eq!(written["failureReason"], "Target pod is down");
        }
        // A guest that may have moved keeps its pod.
        assert!(deleted_pods(&decision).is_empty());
    }
}

#[test]
fn target_pod_of_a_failed_migration_is_deleted() {
    let failed = handed(&json!({"failed": true, "completed": true}));
    let idle = vmi(&json!({}));
    for (vmi, pod, expected) in [
        (&failed, target(&json!({})), true),
        (&idle, target(&json!({})), true),
        // Its log stays.
        (&failed, target(&json!({"status": {"phase": "Succeeded"}})), false),
        // It is the pod of the VMI.
        (&idle, pod("p", "a", &json!({"metadata": {"labels": {"kubevirt.io/migrationJobUID": "g"}}})), false),
    ] {
        let decision = decided(&migration("Failed", &json!({})), Some(vmi), &[source(), pod.clone()]);
        assert_eq!(!deleted_pods(&decision).is_empty(), expected, "{pod:?}");
    }
    let canceled = decided(&migration("Failed", &deleted()), Some(&idle), &[source(), target(&json!({}))]);
    assert!(messages(&canceled).contains(&"migration canceled and pod d/virt-launcher-m-t is deleted".to_owned()));
}

#[test]
fn target_pod_has_time_to_end_by_itself() {
    let failed = handed(&json!({"failed": true, "completed": true}));
    let mut unlabelled = failed.clone();
    unlabelled.metadata.labels = None;
    let idle = vmi(&json!({}));
    let mut ended = failed.clone();
    ended.status.get_or_insert_default().phase = Some(api::VmiPhase::Failed);
    let recent = json!([{"phase": "Failed", "phaseTransitionTimestamp": "2030-01-01T00:09:45Z"}]);
    let recent = json!({"status": {"phaseTransitionTimestamps": recent}});
    let mut canceled = deleted();
    json_patch::merge(&mut canceled, &recent);
    let gone = target(&json!({"status": {"phase": "Failed"}}));
    // VMI, change of the migration, target pod; deleted, wake-up.
    for (vmi, change, pod, expected) in [
        (&failed, &recent, target(&json!({})), (false, true)),
        (&failed, &recent, gone, (false, false)),
        (&failed, &json!({}), target(&json!({})), (true, false)),
        (&failed, &json!({"status": {"phaseTransitionTimestamps": null}}), target(&json!({})), (true, false)),
        (&failed, &canceled, target(&json!({})), (true, false)),
        // virt-handler of the target removes the label before the launcher has ended.
        (&unlabelled, &recent, target(&json!({})), (false, true)),
        // The VMI does not know of it.
        (&idle, &recent, target(&json!({})), (true, false)),
        (&ended, &recent, target(&json!({})), (true, false)),
    ] {
        let decision = decided(&migration("Failed", change), Some(vmi), &[source(), pod]);
        let found = (!deleted_pods(&decision).is_empty(), decision.wake_after.is_some());
        assert_eq!(found, expected, "{change} {decision:?}");
    }
}

#[test]
fn source_pod_that_does_not_end_is_deleted() {
    let mut moved = handed(&json!({"startTimestamp": "2030-01-01T00:08:00Z", "completed": true}));
    let name = source().metadata.name.clone();
    let status = moved.status.get_or_insert_default();
    status.node_name = Some("b".to_owned());
    status.migration_state.get_or_insert_default().source_pod = name;
    let succeeded = |at: &str| {
        let transitions = json!([{"phase": "Succeeded", "phaseTransitionTimestamp": at}]);
        migration("Succeeded", &json!({"status": {"phaseTransitionTimestamps": transitions}}))
    };
    let here = handed(&json!({"startTimestamp": "2030-01-01T00:08:00Z"}));
    let ended = pod("p", "a", &json!({"status": {"phase": "Succeeded"}}));
    // VMI, time of the success, source pod; deleted, wake-up.
    for (vmi, at, pod, expected) in [
        (&moved, "2030-01-01T00:09:00Z", source(), (true, false)),
        (&moved, "2030-01-01T00:09:59Z", source(), (false, true)),
        (&moved, "2030-01-01T00:09:00Z", ended, (false, false)),
        (&here, "2030-01-01T00:09:00Z", source(), (false, false)),
    ] {
        let decision = decided(&succeeded(at), Some(vmi), &[pod, target(&json!({}))]);
        let found = (!deleted_pods(&decision).is_empty(), decision.wake_after.is_some());
        assert_eq!(found, expected, "{at} {decision:?}");
    }
}

#[test]
fn label_of_the_target_is_removed_once_nothing_is_left_there() {
    let failed = handed(&json!({"failed": true, "completed": true}));
    for (pods, is_removed) in [(vec![source(), target(&json!({}))], false), (vec![source()], true)] {
        let decision = decided(&migration("Failed", &json!({})), Some(&failed), &pods);
        let patch = patch_of(&decision, Kind::Instance);
        let expected = json!({"metadata": {"labels": {"kubevirt.io/migrationTargetNodeName": null}}});
        assert_eq!(patch, is_removed.then_some(expected));
    }
}

#[test]
fn state_is_copied_and_the_finalizer_removed() {
    let state = json!({"startTimestamp": "2030-01-01T00:09:00Z", "completed": true});
    let mut moved = handed(&state);
    moved.status.get_or_insert_default().node_name = Some("b".to_owned());
    let pods = [pod("p", "a", &json!({"status": {"phase": "Succeeded"}})), target(&json!({}))];
    let decision = decided(&migration("Succeeded", &json!({})), Some(&moved), &pods);
    let [
        Effect::Patch { subresource: Some("status"), patch: status, .. },
        Effect::Patch { subresource: None, patch: metadata, .. },
    ] = &decision.effects[..]
    else {
        panic!("{decision:?}")
    };
    assert_eq!(status["status"]["migrationState"]["targetNode"], "b");
    assert_eq!(*metadata, json!({"metadata": {"finalizers": null}}));
    let known = json!({"metadata": {"finalizers": null}, "status": {"migrationState": moved.status.clone().unwrap().migration_state}});
    assert!(decided(&migration("Succeeded", &known), Some(&moved), &pods).is_settled());
}

#[test]
fn five_ended_migrations_are_kept() {
    let (idle, pods) = (vmi(&json!({})), [source()]);
    let newer: Vec<_> = (1..=5)
        .map(|number| {
            Arc::new(migration("Failed", &with_uid(&format!("m{number}"), &format!("2030-01-01T00:09:0{number}Z"))))
        })
        .collect();
    let own = migration("Succeeded", &with_uid("g", "2030-01-01T00:08:00Z"));
    for (count, is_deleted) in [(4, false), (5, true)] {
        let all: Vec<_> = newer.iter().take(count).cloned().chain([Arc::new(own.clone())]).collect();
        let decision = decide(&Observed { all: all.to_vec(), ..observed(&own, Some(&idle), &pods) }).unwrap();
        let deletes = |effect: &Effect| matches!(effect, Effect::Delete { kind: Kind::Migration, .. });
        assert_eq!(decision.effects.iter().any(deletes), is_deleted, "{count}");
        assert_eq!(decision.is_settled(), !is_deleted);
    }
    // The pod that the guest left goes with the migration.
    let left = pod("q", "z", &json!({"status": {"phase": "Succeeded"}}));
    let known = json!({"status": {"migrationState": {"sourcePod": "virt-launcher-m-q"}}});
    let mut old = with_uid("g", "2030-01-01T00:08:00Z");
    json_patch::merge(&mut old, &known);
    let own = migration("Succeeded", &old);
    let pods = [source(), left];
    let decision = decide(&Observed { all: newer.to_vec(), ..observed(&own, Some(&idle), &pods) }).unwrap();
    assert_eq!(deleted_pods(&decision), ["virt-launcher-m-q"]);
}
