//! Tests of VMIs with a second pod: that of a migration.

use super::*;

const MIGRATION: &str = "g";

fn migrations() -> [Arc<VirtualMachineInstanceMigration>; 1] {
    let migration = json!({"metadata": {"name": "mig", "namespace": "d", "uid": MIGRATION}, "spec": {"vmiName": "m"},
        "status": {"phase": "Scheduling"}});
    [Arc::new(serde_json::from_value(migration).unwrap())]
}

fn source() -> CachedPod {
    running_pod(&json!({"type": "Ready", "status": "True"}))
}

/// The target pod on node `b`.
fn target(change: &Value) -> CachedPod {
    let mut all = json!({
        "metadata": {"name": "virt-launcher-m-t", "uid": "t", "creationTimestamp": "2030-01-01T00:00:40Z",
            "labels": {"kubevirt.io/migrationJobUID": MIGRATION}},
        "spec": {"nodeName": "b"},
        "status": {"phase": "Running", "containerStatuses": [{"name": "compute", "ready": true, "restartCount": 0,
            "image": "", "imageID": "", "state": {"running": {}}}]},
    });
    json_patch::merge(&mut all, change);
    // A pod without a node.
    if change["spec"]["nodeName"].is_null() && change["spec"].is_object() {
        all["spec"]["nodeName"] = Value::Null;
    }
    pod(&all)
}

fn running(change: &Value) -> VirtualMachineInstance {
    let mut all = json!({
        "metadata": {"labels": {"kubevirt.io/nodeName": "n"}},
        "status": {
            "phase": "Running", "nodeName": "n", "activePods": {"p": "n"}, "launcherContainerImageVersion": "launcher:1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    json_patch::merge(&mut all, change);
    vmi(&all)
}

fn state(change: &Value) -> Value {
    let mut state = json!({"migrationUid": MIGRATION, "sourceNode": "n", "sourcePod": "virt-launcher-m-x",
        "targetNode": "b", "targetPod": "virt-launcher-m-t"});
    json_patch::merge(&mut state, change);
    json!({"status": {"migrationState": state, "activePods": {"t": "b"}}})
}

fn moved(change: &Value) -> VirtualMachineInstance {
    let mut all = state(change);
    json_patch::merge(
        &mut all,
        &json!({"metadata": {"labels": {"kubevirt.io/nodeName": "b"}}, "status": {"nodeName": "b"}}),
    );
    running(&all)
}

fn decided_with(
    vmi: &VirtualMachineInstance,
    pods: &[CachedPod],
    migrations: &[Arc<VirtualMachineInstanceMigration>],
) -> Decision {
    let pods: Vec<Arc<CachedPod>> = pods.iter().cloned().map(Arc::new).collect();
    let ended_for = ended_for(&pods);
    decide(&Observed { pods, ended_for, migrations: migrations.to_vec(), ..observed(vmi) }).unwrap()
}

fn deleted(decision: &Decision) -> Vec<String> {
    let name = |effect: &Effect| match effect {
        Effect::Delete { kind: Kind::Pod, name, .. } => Some(name.clone()),
        _ => None,
    };
    decision.effects.iter().filter_map(name).collect()
}

#[test]
fn target_is_an_active_pod_and_decides_nothing() {
    let (vmi, migrations) = (running(&json!({})), migrations());
    let bound = decided_with(&vmi, &[source(), target(&json!({}))], &migrations);
    assert_eq!(patch_of(&bound, Kind::Instance), Some(json!({"status": {"activePods": {"t": "b"}}})));
    // Nothing is written before the target has a node, and nothing when it ends.
    for change in
        [json!({"spec": {"nodeName": null}, "status": {"phase": "Pending"}}), json!({"status": {"phase": "Failed"}})]
    {
        let decision = decided_with(&vmi, &[source(), target(&change)], &migrations);
        assert!(decision.is_settled(), "{change} {decision:?}");
    }
    let handed = running(&state(&json!({})));
    assert!(decided_with(&handed, &[source(), target(&json!({}))], &migrations).is_settled());
}

#[test]
fn pod_is_the_targets_once_the_guest_has_moved() {
    let migrations = migrations();
    let vmi = moved(&json!({"startTimestamp": "2030-01-01T00:00:50Z"}));
    let mut vmi = vmi;
    // virt-handler of the target clears them.
    vmi.status.as_mut().unwrap().launcher_container_image_version = None;
    let ready = target(&json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}));
    let decision = decided_with(&vmi, &[source(), ready.clone()], &migrations);
    let status = status_of(&decision);
    assert_eq!(status["launcherContainerImageVersion"], "launcher:1");
    assert!(deleted(&decision).is_empty());
    let labels = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::Pod, name, subresource: Some("status"), patch, .. } => {
            Some((name.clone(), patch.clone()))
        }
        _ => None,
    });
    let (name, patch) = labels.unwrap();
    assert_eq!(
        (name.as_str(), &patch["metadata"]["labels"]["kubevirt.io/nodeName"]),
        ("virt-launcher-m-t", &json!("b"))
    );
    // The end of the pod that the guest left means nothing.
    let ended = pod(&json!({"metadata": {"name": "virt-launcher-m-x"}, "status": {"phase": "Succeeded"}}));
    let status = status_of(&decided_with(&vmi, &[ended, ready], &migrations));
    assert_eq!((&status["phase"], &status["activePods"]), (&Value::Null, &json!({"p": null})));
}

#[test]
fn pod_that_the_guest_left_ends_by_itself_or_is_deleted() {
    let ready = target(&json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}));
    let over = |end: &str| moved(&json!({"completed": true, "endTimestamp": end}));
    for (end, expected) in [("2030-01-01T00:00:30Z", false), ("2029-12-31T23:59:00Z", true)] {
        let decision = decided_with(&over(end), &[source(), ready.clone()], &[]);
        assert_eq!(deleted(&decision) == ["virt-launcher-m-x"], expected, "{end} {:?}", deleted(&decision));
    }
}

#[test]
fn target_of_no_migration_is_deleted() {
    let pods = [source(), target(&json!({}))];
    // Before the hand-off its migration may have been removed by force.
    assert_eq!(deleted(&decided_with(&running(&json!({})), &pods, &[])), ["virt-launcher-m-t"]);
    // virt-handler goes on after the hand-off.
    assert!(deleted(&decided_with(&running(&state(&json!({}))), &pods, &[])).is_empty());
    let failed = running(&state(&json!({"failed": true, "completed": true})));
    assert_eq!(deleted(&decided_with(&failed, &pods, &[])), ["virt-launcher-m-t"]);
}

#[test]
fn target_of_a_failed_migration_has_time_to_end_by_itself() {
    let pods = [source(), target(&json!({}))];
    let failed = |change: &Value| {
        let mut all = json!({"failed": true, "completed": true, "endTimestamp": "2030-01-01T00:00:45Z"});
        json_patch::merge(&mut all, change);
        running(&state(&all))
    };
    let mut ended = failed(&json!({}));
    ended.status.as_mut().unwrap().phase = Some(VmiPhase::Failed);
    for (vmi, is_kept) in [
        (failed(&json!({})), true),
        (failed(&json!({"endTimestamp": "2030-01-01T00:00:30Z"})), false),
        (failed(&json!({"targetPod": "virt-launcher-m-s"})), false),
        (ended, false),
    ] {
        let decision = decided_with(&vmi, &pods, &[]);
        assert_eq!(deleted(&decision).is_empty(), is_kept, "{:?}", vmi.status);
        if is_kept {
            assert_eq!(decision.wake_after, Some(Duration::from_millis(15_001)));
            // virt-handler of the target finds the launcher by it.
            let patch = patch_of(&decision, Kind::Instance).unwrap_or_default();
            assert!(patch["status"]["activePods"].is_null(), "{patch}");
        }
    }
    let gone = [source(), target(&json!({"status": {"phase": "Failed"}}))];
    let decision = decided_with(&failed(&json!({})), &gone, &[]);
    assert!(deleted(&decision).is_empty() && decision.wake_after.is_none());
}

#[test]
fn vmi_ends_when_no_pod_can_run_its_guest() {
    let migrations = migrations();
    let begun = json!({"startTimestamp": "2030-01-01T00:00:50Z"});
    // State of the migration, the target has ended; the VMI fails.
    for (vmi, is_down, fails) in [
        (running(&json!({})), false, true),
        (running(&state(&json!({}))), false, true),
        (running(&state(&begun)), false, false),
        (running(&state(&begun)), true, true),
        (running(&state(&json!({"startTimestamp": "2030-01-01T00:00:50Z", "failed": true}))), false, true),
    ] {
        let change = if is_down { json!({"status": {"phase": "Failed"}}) } else { json!({}) };
        let decision = decided_with(&vmi, &[target(&change)], &migrations);
        let phase = patch_of(&decision, Kind::Instance).unwrap_or_default()["status"]["phase"].clone();
        assert_eq!(phase == "Failed", fails, "{:?} {is_down}", vmi.status);
        let creates = |effect: &Effect| matches!(effect, Effect::Create { .. });
        assert!(!decision.effects.iter().any(creates));
    }
}

#[test]
fn attachment_pods_of_the_target_stay() {
    let attachment = |launcher: &str, uid: &str| {
        let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": launcher, "uid": uid, "controller": true}]);
        let metadata =
            json!({"name": format!("hp-{uid}"), "namespace": "d", "uid": format!("a-{uid}"), "ownerReferences": owner});
        Arc::new(CachedAttachment {
            metadata: serde_json::from_value(metadata).unwrap(),
            phase: "Running".to_owned(),
            claims: BTreeMap::from([("data".to_owned(), "c".to_owned())]),
            temporary: false,
            answers: true,
            ready: true,
        })
    };
    let plugged = json!({
        "spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}]},
        "status": {"volumeStatus": [{"name": "data", "target": "sda", "phase": "Ready",
            "hotplugVolume": {"attachPodName": "hp-p", "attachPodUID": "a-p"}}]},
    });
    let attachments = [attachment("virt-launcher-m-x", "p"), attachment("virt-launcher-m-t", "t")];
    let (running, migrations) = (running(&plugged), migrations());
    let pods: Vec<Arc<CachedPod>> = [source(), target(&json!({}))].into_iter().map(Arc::new).collect();
    let before = Observed {
        pods: pods.to_vec(),
        attachments: attachments.to_vec(),
        migrations: migrations.to_vec(),
        ..observed(&running)
    };
    assert!(deleted(&decide(&before).unwrap()).is_empty());
    // Once the guest has moved, its volumes come from the target's pod. That of the source goes with its launcher.
    let mut change = plugged;
    json_patch::merge(&mut change, &json!({"metadata": {"labels": {"kubevirt.io/nodeName": "b"}}}));
    let mut vmi = moved(&json!({"completed": true}));
    vmi.spec.volumes = running.spec.volumes.clone();
    vmi.status.as_mut().unwrap().volume_status = running.status.as_ref().unwrap().volume_status.clone();
    for (is_ended, expected) in [(false, vec![]), (true, vec!["hp-p".to_owned()])] {
        let phase = if is_ended { "Succeeded" } else { "Running" };
        let left = pod(&json!({"status": {"phase": phase}}));
        let pods: Vec<Arc<CachedPod>> = [left, target(&json!({}))].into_iter().map(Arc::new).collect();
        let after = Observed { pods: pods.to_vec(), attachments: attachments.to_vec(), ..observed(&vmi) };
        let decision = decide(&after).unwrap();
        let entries = status_of(&decision)["volumeStatus"].clone();
        assert_eq!(entries[0]["hotplugVolume"]["attachPodUID"], "a-t");
        assert_eq!(deleted(&decision), expected);
    }
}

#[test]
fn end_of_the_source_pod_ends_the_vmi_unless_the_target_may_have_the_guest() {
    let migrations = migrations();
    let ended = |at: &str| {
        let terminated = json!({"terminated": {"exitCode": 0, "finishedAt": at}});
        pod(&json!({"metadata": {"name": "virt-launcher-m-x"}, "status": {"phase": "Failed", "containerStatuses": [
            {"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": terminated}]}}))
    };
    let begun = json!({"startTimestamp": "2030-01-01T00:00:50Z"});
    // The VMI, its source pod is absent, the target has ended; the VMI fails.
    for (change, is_absent, target_is_down, fails) in [
        (json!({}), false, false, true),
        (json!({}), true, false, true),
        (begun.clone(), false, false, false),
        (begun.clone(), true, false, false),
        (begun.clone(), false, true, true),
        (begun.clone(), true, true, true),
        // It may begin at any time, and write its begin later.
        (json!({"targetNodeAddress": "10.0.0.2"}), false, false, false),
        (json!({"targetNodeAddress": "10.0.0.2"}), true, false, false),
        // virt-handler of the target does not have the guest.
        (json!({"startTimestamp": "2030-01-01T00:00:50Z", "failed": true, "completed": true}), false, false, true),
        (json!({"startTimestamp": "2030-01-01T00:00:50Z", "failed": true, "completed": true}), true, false, true),
    ] {
        let phase = if target_is_down { "Failed" } else { "Running" };
        let mut pods = vec![target(&json!({"status": {"phase": phase}}))];
        pods.extend((!is_absent).then(|| ended("2029-12-31T23:59:00Z")));
        let decision = decided_with(&running(&state(&change)), &pods, &migrations);
        let phase = patch_of(&decision, Kind::Instance).unwrap_or_default()["status"]["phase"].clone();
        assert_eq!(phase == "Failed", fails, "{change} {is_absent} {target_is_down}");
    }
}
