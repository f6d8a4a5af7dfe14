//! Hot-plugged volumes: attachment pods and status.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::*;

/// A running VMI with hot-pluggable claims of these names, and these entries in its status.
fn with_volumes(names: &[&str], entries: &Value) -> VirtualMachineInstance {
    let volumes: Vec<Value> = names
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": format!("{name}-claim"), "hotpluggable": true}}))
        .collect();
    let mut instance = in_phase("Running");
    instance.spec.volumes = serde_json::from_value(json!(volumes)).unwrap();
    instance.status.as_mut().unwrap().volume_status = serde_json::from_value(entries.clone()).unwrap();
    instance
}

fn claims(phases: &[(&str, &str)]) -> BTreeMap<String, Arc<CachedClaim>> {
    let claim = |(volume, phase): &(&str, &str)| {
        let name = format!("{volume}-claim");
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "d", "uid": format!("{name}-uid")},
            "spec": {"volumeMode": "Block"}, "status": {"phase": phase},
        }))
        .unwrap();
        (name, Arc::new(CachedClaim::from(claim)))
    };
    phases.iter().map(claim).collect()
}

/// The attachment pod of a volume, named after it.
fn attachment(volume: &str, change: &Value) -> Arc<CachedAttachment> {
    let mut pod = json!({
        "metadata": {"name": format!("hp-{volume}"), "namespace": "d", "uid": format!("uid-{volume}"),
            "creationTimestamp": "2030-01-01T00:00:30Z",
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "virt-launcher-m-x", "uid": "p", "controller": true}]},
        "spec": {"containers": [{"name": "hotplug-disk", "command": ["hold-volumes", "--vmi-uid"]}], "volumes": [
            {"name": volume, "persistentVolumeClaim": {"claimName": format!("{volume}-claim")}}]},
        "status": {"phase": "Running", "containerStatuses": [
            {"name": "hotplug-disk", "ready": true, "restartCount": 0, "image": "", "imageID": ""}]},
    });
    json_patch::merge(&mut pod, change);
    Arc::new(CachedAttachment::of(serde_json::from_value(pod).unwrap()).unwrap())
}

fn decided_with(
    instance: &VirtualMachineInstance,
    claims: &BTreeMap<String, Arc<CachedClaim>>,
    attachments: &[Arc<CachedAttachment>],
    launcher: CachedPod,
) -> Decision {
    let pods = [Arc::new(launcher)];
    decide(&Observed {
        pods: pods.to_vec(),
        ended_for: ended_for(&pods),
        claims: claims.clone(),
        attachments: attachments.to_vec(),
        ..observed(instance)
    })
    .unwrap()
}

fn launcher() -> CachedPod {
    running_pod(&json!({"type": "Ready", "status": "True"}))
}

/// Returns the volumes of created pods and the names of deleted pods.
fn pods(decision: &Decision) -> (Vec<String>, Vec<String>) {
    let (mut created, mut deleted) = (Vec::new(), Vec::new());
    for effect in &decision.effects {
        match effect {
            Effect::Create { kind: Kind::Pod, object, .. } => {
                created.push(object["spec"]["volumes"][1]["name"].as_str().unwrap_or_default().to_owned());
            }
            Effect::Delete { kind: Kind::Pod, name, .. } => deleted.push(name.clone()),
            _ => {}
        }
    }
    (created, deleted)
}

/// Returns phase, message and UID of the attachment pod of each entry.
fn entries(decision: &Decision) -> Vec<(String, String, Value)> {
    let status = status_of(decision);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let entries = status["volumeStatus"].as_array().unwrap().iter();
    let uid = |entry: &Value| entry["hotplugVolume"]["attachPodUID"].clone();
    entries.map(|entry| (text(&entry["phase"]), text(&entry["message"]), uid(entry))).collect()
}

fn reasons(decision: &Decision) -> Vec<&'static str> {
    let events = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Event(event) => Some(event.reason),
        _ => None,
    });
    events.collect()
}

#[test]
fn each_volume_gets_a_pod_and_no_claim_delays_another() {
    let instance = with_volumes(&["a", "b", "c", "d"], &json!([]));
    let claims = claims(&[("b", "Bound"), ("c", "Lost"), ("d", "Pending")]);
    let decision = decided_with(&instance, &claims, &[], launcher());
    // A pending claim may wait for its first consumer.
    assert_eq!(pods(&decision), (vec!["b".to_owned(), "d".to_owned()], vec![]));
    let expected = [
        ("Pending", "PVC a-claim not found"),
        ("Bound", "PVC is in phase Bound"),
        ("Pending", "PVC is in phase Lost"),
        ("Pending", "PVC is in phase ClaimPending"),
    ];
    for ((phase, message, uid), expected) in entries(&decision).into_iter().zip(expected) {
        assert_eq!((phase.as_str(), message.as_str(), &uid), (expected.0, expected.1, &Value::Null));
    }
    assert_eq!(reasons(&decision), ["FailedPvcNotFound", "PVCNotReady", "PVCNotReady", "PVCNotReady"]);
}

#[test]
fn utility_volume_is_attached_unless_its_claim_is_a_block_device() {
    let mut instance = with_volumes(&[], &json!([]));
    instance.spec.utility_volumes = serde_json::from_value(json!([
        {"name": "a", "claimName": "a-claim"},
        {"name": "b", "claimName": "b-claim", "readOnly": true, "type": "Backup"},
        {"name": "c", "claimName": "c-claim"},
    ]))
    .unwrap();
    let mut claims = claims(&[("a", "Bound"), ("b", "Bound")]);
    let file_system = CachedClaim { block: false, ..claims["b-claim"].as_ref().clone() };
    claims.insert("b-claim".into(), Arc::new(file_system));
    let decision = decided_with(&instance, &claims, &[], launcher());
    assert_eq!(pods(&decision), (vec!["b".to_owned()], vec![]));
    let pod = decision.effects.iter().find_map(|effect| match effect {
        Effect::Create { object, .. } => Some(object["spec"]["volumes"][1]["persistentVolumeClaim"].clone()),
        _ => None,
    });
    assert_eq!(pod, Some(json!({"claimName": "b-claim", "readOnly": true})));
    let expected = [
        ("Pending", "Utility volume PVC a-claim must be filesystem mode, not block mode"),
        ("Bound", "PVC is in phase Bound"),
        ("Pending", "PVC c-claim not found"),
    ];
    for ((phase, message, _), expected) in entries(&decision).into_iter().zip(expected) {
        assert_eq!((phase.as_str(), message.as_str()), expected);
    }
    assert_eq!(status_of(&decision)["volumeStatus"][1]["persistentVolumeClaimInfo"]["claimName"], "b-claim");
}

#[test]
fn entry_follows_its_pod_until_virt_handler_owns_it() {
    let starting = json!({"status": {"phase": "Pending", "containerStatuses": null}});
    let created = "Created hotplug attachment pod hp-a, for volume a";
    let pending = "PVC is in phase ClaimPending";
    // phase before, claim, pod, expected phase, message and UID of the pod
    for (phase, claim, pod, expected, message, uid) in [
        // A pod cannot start before its claim is bound.
        ("Bound", "Pending", &starting, "Pending", pending, Value::Null),
        ("Bound", "Bound", &starting, "AttachedToNode", created, json!("uid-a")),
        ("Bound", "Bound", &json!({}), "AttachedToNode", created, json!("uid-a")),
        // Plugged in again before the pod was deleted.
        ("Detaching", "Bound", &json!({}), "AttachedToNode", created, json!("uid-a")),
        ("UnMountedFromPod", "Bound", &json!({}), "AttachedToNode", created, json!("uid-a")),
    ] {
        let instance = with_volumes(&["a"], &json!([{"name": "a", "target": "", "phase": phase, "hotplugVolume": {}}]));
        let decision = decided_with(&instance, &claims(&[("a", claim)]), &[attachment("a", pod)], launcher());
        assert_eq!(entries(&decision), [(expected.to_owned(), message.to_owned(), uid)], "{phase} {claim}");
        assert_eq!(pods(&decision), (vec![], vec![]), "{phase} {claim}");
    }
    for phase in ["MountedToPod", "Ready"] {
        let entry = json!({"name": "a", "target": "sda", "phase": phase, "message": "m", "hotplugVolume": {}});
        let instance = with_volumes(&["a"], &json!([entry]));
        let decision = decided_with(&instance, &claims(&[("a", "Bound")]), &[attachment("a", &json!({}))], launcher());
        assert_eq!(entries(&decision), [(phase.to_owned(), "m".to_owned(), json!("uid-a"))]);
    }
}

#[test]
fn removed_volume_leaves_when_virt_handler_has_taken_it() {
    let attached = json!({"attachPodName": "hp-a", "attachPodUID": "uid-a"});
    let deleting = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:50Z"}});
    let starting = json!({"status": {"phase": "Pending", "containerStatuses": null}});
    let former = "Deleted hotplug attachment pod hp-a, for volume a";
    // phase, attachment in the status, pod, expected phase (none: no entry is left), pod is deleted
    for (phase, attachment_of, pod, expected, deletes) in [
        ("Ready", &attached, Some(&json!({})), Some("Ready"), false),
        ("Ready", &attached, None, Some("Ready"), false),
        ("MountedToPod", &attached, Some(&json!({})), Some("MountedToPod"), false),
        ("AttachedToNode", &attached, Some(&json!({})), Some("AttachedToNode"), false),
        ("AttachedToNode", &attached, Some(&starting), Some("AttachedToNode"), false),
        ("AttachedToNode", &json!({"attachPodName": "hp-a"}), Some(&json!({})), None, true),
        ("UnMountedFromPod", &attached, Some(&json!({})), None, true),
        ("UnMountedFromPod", &attached, Some(&deleting), None, false),
        ("UnMountedFromPod", &attached, None, None, false),
        // Of a former release.
        ("Detaching", &attached, Some(&json!({})), None, true),
        ("Detaching", &attached, Some(&deleting), None, false),
        ("Bound", &json!({}), None, None, false),
    ] {
        let entry =
            json!({"name": "a", "target": "", "phase": phase, "message": former, "hotplugVolume": attachment_of});
        let instance = with_volumes(&[], &json!([entry]));
        let pods_of: Vec<Arc<CachedAttachment>> = pod.into_iter().map(|pod| attachment("a", pod)).collect();
        let decision = decided_with(&instance, &BTreeMap::new(), &pods_of, launcher());
        let mut status = serde_json::to_value(instance.status.as_ref().unwrap()).unwrap();
        if let Some(patch) = patch_of(&decision, Kind::Instance) {
            json_patch::merge(&mut status, &patch["status"]);
        }
        let found = status["volumeStatus"].as_array().and_then(|all| all.first()?["phase"].as_str());
        assert_eq!(found, expected, "{phase} {attachment_of}");
        assert_eq!(!pods(&decision).1.is_empty(), deletes, "{phase} {attachment_of}");
    }
}

#[test]
fn pod_without_an_entry_is_found_and_used_for_its_own_claim_only() {
    let deleting = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:50Z"}});
    let of_another = json!({"spec": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "other"}}]}});
    let both = json!({"spec": {"volumes": [
        {"name": "a", "persistentVolumeClaim": {"claimName": "a-claim"}},
        {"name": "b", "persistentVolumeClaim": {"claimName": "b-claim"}}]}});
    let (a, b, none): (&[&str], &[&str], &[&str]) = (&["a"], &["b"], &[]);
    // Volumes in the spec, pod, created, the pod is deleted
    for (volumes, pod, created, deletes) in [
        // Its entry is gone, and virt-controller has been restarted since.
        (none, &json!({}), none, true),
        (none, &deleting, none, false),
        (b, &json!({}), b, true),
        // Plugged in again.
        (a, &json!({}), none, false),
        (a, &deleting, a, false),
        // The same volume with another claim.
        (a, &of_another, a, true),
        // Of a migration: it holds the claims until the last of its volumes leaves.
        (b, &both, none, false),
        (none, &both, none, true),
    ] {
        let instance = with_volumes(volumes, &json!([]));
        let claims = claims(&[("a", "Bound"), ("b", "Bound")]);
        let decision = decided_with(&instance, &claims, &[attachment("a", pod)], launcher());
        let created: Vec<String> = created.iter().map(|name| (*name).to_owned()).collect();
        let deleted = if deletes { vec!["hp-a".to_owned()] } else { Vec::new() };
        assert_eq!(pods(&decision), (created, deleted), "{volumes:?} {pod}");
    }
}

#[test]
fn pod_of_a_removed_volume_stays_while_the_launcher_has_it() {
    let second = json!({"metadata": {"name": "hp-second", "uid": "uid-second"}});
    let of_source = json!({"metadata": {"name": "hp-source", "ownerReferences": [
        {"apiVersion": "v1", "kind": "Pod", "name": "virt-launcher-m-s", "uid": "s", "controller": true}]}});
    // Name in the status, pods, deleted
    for (known, pods_of, deleted) in [
        ("hp-a", vec![&json!({})], vec![]),
        ("hp-a", vec![&json!({}), &second], vec!["hp-second"]),
        // The guest has moved: the name is that of the pod at its former node.
        ("hp-source", vec![&json!({})], vec![]),
        ("hp-source", vec![&json!({}), &of_source], vec![]),
    ] {
        let attached = json!({"attachPodName": known, "attachPodUID": "uid-a"});
        let entry = json!({"name": "a", "target": "sda", "phase": "Ready", "hotplugVolume": attached});
        let instance = with_volumes(&[], &json!([entry]));
        let attachments: Vec<Arc<CachedAttachment>> = pods_of.iter().map(|change| attachment("a", change)).collect();
        let decision = decided_with(&instance, &claims(&[("a", "Bound")]), &attachments, launcher());
        assert_eq!(pods(&decision).1, deleted, "{known} {pods_of:?}");
    }
}

#[test]
fn failed_pod_is_replaced_and_surplus_pods_are_deleted() {
    let claims = claims(&[("a", "Bound")]);
    let failed = |created: &str| json!({"metadata": {"creationTimestamp": created}, "status": {"phase": "Failed"}});
    let deleting = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:50Z"}});
    let second =
        json!({"metadata": {"name": "hp-second", "uid": "uid-second", "creationTimestamp": "2030-01-01T00:00:40Z"}});
    let (a, none) = (|| vec!["a".to_owned()], Vec::<String>::new);
    // pods, created, deleted, waits
    for (pods_of, created, deleted, waits) in [
        (vec![failed("2030-01-01T00:00:55Z")], none(), none(), true),
        (vec![failed("2030-01-01T00:00:30Z")], a(), vec!["hp-a".to_owned()], false),
        (vec![deleting], a(), none(), false),
        (vec![json!({}), second], none(), vec!["hp-second".to_owned()], false),
    ] {
        let entry = json!({"name": "a", "target": "sda", "phase": "Ready", "hotplugVolume": {"attachPodName": "hp-a"}});
        let instance = with_volumes(&["a"], &json!([entry]));
        let pods_of: Vec<Arc<CachedAttachment>> = pods_of.iter().map(|pod| attachment("a", pod)).collect();
        let decision = decided_with(&instance, &claims, &pods_of, launcher());
        assert_eq!(pods(&decision), (created, deleted), "{pods_of:?}");
        assert_eq!(decision.wake_after.is_some(), waits, "{pods_of:?}");
    }
}

#[test]
fn pod_that_answers_no_question_is_replaced_until_its_volume_is_handed_over() {
    let claims = claims(&[("a", "Bound")]);
    let former = json!({"spec": {"containers": [{"name": "hotplug-disk", "command": ["hold-volumes"]}]}});
    let of_volume = json!({"attachPodName": "hp-a", "attachPodUID": "uid-a"});
    for (phase, is_replaced) in [
        ("Bound", true),
        ("AttachedToNode", true),
        ("MountedToPod", false),
        ("Ready", false),
        ("MemoryDumpCompleted", false),
    ] {
        let entry = json!({"name": "a", "target": "", "phase": phase, "hotplugVolume": of_volume});
        let instance = with_volumes(&["a"], &json!([entry]));
        let decision = decided_with(&instance, &claims, &[attachment("a", &former)], launcher());
        let list = |name: &str| if is_replaced { vec![name.to_owned()] } else { Vec::new() };
        assert_eq!(pods(&decision), (list("a"), list("hp-a")), "{phase}");
    }
}

#[test]
fn pods_follow_the_life_of_the_launcher() {
    let claims = claims(&[("a", "Bound")]);
    let instance = with_volumes(&["a"], &json!([]));
    let pods_of = [attachment("a", &json!({}))];
    // The launcher shuts the guest down, which still uses its disks.
    let mut deleting = instance.clone();
    deleting.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2030-01-01T00:00:50Z")).unwrap());
    assert_eq!(pods(&decided_with(&deleting, &claims, &pods_of, launcher())).0, Vec::<String>::new());
    let gone = pods(&decided_with(&deleting, &claims, &pods_of, launcher())).1;
    assert!(!gone.contains(&"hp-a".to_owned()), "{gone:?}");
    assert_eq!(pods(&decided_with(&deleting, &claims, &[], launcher())).0, Vec::<String>::new());
    // It has ended.
    let ended = pods(&decided_with(&instance, &claims, &pods_of, ended_pod("2030-01-01T00:00:30Z")));
    assert_eq!(ended, (vec![], vec!["hp-a".to_owned()]));
    // It has no node yet.
    let unbound = pod(&json!({"spec": {"nodeName": null}}));
    let starting = vmi(&json!({"spec": {"volumes": instance.spec.volumes}}));
    assert_eq!(pods(&decided_with(&starting, &claims, &[], unbound)).0, Vec::<String>::new());
}

#[test]
fn attached_volume_is_settled() {
    let claims = claims(&[("a", "Bound")]);
    let pods_of = [attachment("a", &json!({}))];
    let mut instance = with_volumes(&["a"], &json!([]));
    let decision = decided_with(&instance, &claims, &pods_of, launcher());
    let mut next = serde_json::to_value(&instance).unwrap();
    json_patch::merge(&mut next, &patch_of(&decision, Kind::Instance).unwrap());
    instance = serde_json::from_value(next).unwrap();
    assert_eq!(decided_with(&instance, &claims, &pods_of, launcher()), Decision::settled());
}

#[test]
fn data_volume_is_attached_once_it_is_filled_and_gets_a_first_consumer() {
    use crate::data_volumes::tests::{claim, volume};

    let trigger = |change: Value| {
        let command = json!({"spec": {"containers": [
            {"name": "hotplug-disk", "command": ["/usr/bin/virt-launcher", "bind-claims"]}]}});
        let mut pod = json!({"metadata": {"name": "hp-trigger", "uid": "t"}, "status": {"containerStatuses": null}});
        json_patch::merge(&mut pod, &command);
        json_patch::merge(&mut pod, &change);
        attachment("a", &pod)
    };
    let pending = json!({"status": {"phase": "Pending"}});
    let succeeded = json!({"status": {"phase": "Succeeded"}});
    let [new, old] = ["2030-01-01T00:00:55Z", "2030-01-01T00:00:30Z"]
        .map(|at| json!({"metadata": {"creationTimestamp": at}, "status": {"phase": "Failed"}}));
    let awaits = "the phase of DataVolume a-claim is WaitForFirstConsumer";
    // Phases of claim and DataVolume, trigger pod; created (trigger pods have no other volume), deleted, message.
    for (claimed, phase, pod, created, deletes, message) in [
        ("Bound", "Succeeded", None, Some("attachment"), false, "PVC is in phase Bound"),
        ("Pending", "PendingPopulation", None, Some("attachment"), false, "PVC is in phase ClaimPending"),
        ("Bound", "ImportInProgress", None, None, false, "the phase of DataVolume a-claim is ImportInProgress"),
        ("Pending", "Failed", None, None, false, "the phase of DataVolume a-claim is Failed"),
        ("Pending", "WaitForFirstConsumer", None, Some("trigger"), false, awaits),
        ("Pending", "WaitForFirstConsumer", Some(&pending), None, false, awaits),
        ("Pending", "WaitForFirstConsumer", Some(&succeeded), None, false, awaits),
        ("Pending", "WaitForFirstConsumer", Some(&new), None, false, awaits),
        ("Pending", "WaitForFirstConsumer", Some(&old), Some("trigger"), true, awaits),
        // Importers wait until no pod uses the claim.
        ("Bound", "WaitForFirstConsumer", Some(&pending), None, true, awaits),
        ("Bound", "Succeeded", Some(&succeeded), Some("attachment"), true, "PVC is in phase Bound"),
    ] {
        let mut instance = with_volumes(&[], &json!([]));
        let volumes = json!([{"name": "a", "dataVolume": {"name": "a-claim", "hotpluggable": true}}]);
        instance.spec.volumes = serde_json::from_value(volumes).unwrap();
        let decision = decide(&Observed {
            pods: vec![Arc::new(launcher())],
            claims: [claim("a-claim", claimed, &json!({}))].into(),
            data_volumes: DataVolumes { known: [volume("a-claim", phase, &json!([]))].into(), absent: false },
            attachments: pod.map(|change| trigger(change.clone())).into_iter().collect(),
            ..observed(&instance)
        })
        .unwrap();
        let row = format!("{claimed} {phase} {pod:?}");
        let made = decision.effects.iter().find_map(|effect| match effect {
            Effect::Create { kind: Kind::Pod, object, .. } => {
                Some(match object["spec"]["volumes"][0]["name"].as_str() {
                    Some("a") => "trigger",
                    _ => "attachment",
                })
            }
            _ => None,
        });
        let deleted = if deletes { vec!["hp-trigger".to_owned()] } else { Vec::new() };
        assert_eq!((made, pods(&decision).1), (created, deleted), "{row}");
        assert_eq!(entries(&decision)[0].1, message, "{row}");
    }
}
