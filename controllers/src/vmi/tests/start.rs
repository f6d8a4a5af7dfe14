//! Tests of the way from Pending to Scheduled.

use super::*;
use crate::resources::pod_warnings::Warning;

#[test]
fn new_vmi_gets_its_pod_and_nothing_else_is_written() {
    let decision = decided(&vmi(&json!({})), &[]);
    assert!(matches!(decision.effects.as_slice(), [Effect::Create { kind: Kind::Pod, .. }]), "{decision:?}");
}

#[test]
fn pod_gets_the_same_names_at_each_attempt() {
    let names = |change: &Value| {
        let decision = decided(&vmi(change), &[]);
        let [Effect::Create { kind: Kind::Pod, object, options, .. }] = decision.effects.as_slice() else {
            panic!("{decision:?}")
        };
        assert_eq!(object["metadata"]["name"], options.names[0]);
        assert_eq!(object["metadata"]["generateName"], Value::Null);
        options.names.clone()
    };
    let first = names(&json!({}));
    assert!(first.len() > 1 && first.iter().all(|name| name.starts_with("virt-launcher-m-")), "{first:?}");
    for (change, is_same) in [
        (json!({"metadata": {"labels": {"a": "b"}}, "spec": {"hostname": "h"}}), true),
        // The pod of the former VMI may still be there.
        (json!({"metadata": {"uid": "other"}}), false),
    ] {
        assert_eq!(names(&change) == first, is_same, "{change}");
    }
}

#[test]
fn vmi_that_was_created_while_an_operation_began_gets_its_pod_after_it() {
    let lease = json!({"operation": "Restore", "name": "r", "uid": "restore-uid"});
    let held: OperationLease = serde_json::from_value(lease).unwrap();
    let mut observed = Observed { held: Some(held), ..observed(&vmi(&json!({}))) };
    let decision = decide(&observed).unwrap();
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(condition["message"], "the VM starts after the end of an operation: restore \"r\" in progress");
    assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Create { .. })), "{decision:?}");
    observed.held = None;
    assert!(matches!(decide(&observed).unwrap().effects.as_slice(), [Effect::Create { kind: Kind::Pod, .. }]));
}

/// Returns the decision about a VMI whose pods no watch shows.
fn decided_without(instance: &VirtualMachineInstance, missing: &[&str]) -> Decision {
    let missing: Vec<String> = missing.iter().map(|uid| (*uid).to_owned()).collect();
    decide(&Observed { missing: missing.to_vec(), ..observed(instance) }).unwrap()
}

fn restored(decision: &Decision) -> Option<(Option<&str>, Vec<&str>)> {
    match decision.effects.as_slice() {
        [Effect::Restore { namespace, name, uids, labels, owner }] => {
            assert_eq!(namespace.as_deref(), Some("d"));
            assert_eq!(json!(labels), json!({"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": "u"}));
            assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("VirtualMachineInstance", "u"));
            Some((name.as_deref(), uids.iter().map(String::as_str).collect()))
        }
        _ => None,
    }
}

#[test]
fn launcher_without_its_label_is_searched_for_and_no_second_one_is_created() {
    let deleting = |mut vmi: VirtualMachineInstance| {
        vmi.metadata.deletion_timestamp = serde_json::from_value(json!("2030-01-01T00:00:30Z")).unwrap();
        vmi
    };
    let unseen = || CachedPod { unseen: true, ..running_pod(&json!({"type": "Ready", "status": "True"})) };
    let mut vmis: Vec<VirtualMachineInstance> =
        ["Scheduling", "Scheduled", "Running", "Failed", "Succeeded"].map(in_phase).into();
    vmis.push(deleting(in_phase("Running")));
    for vmi in &vmis {
        assert_eq!(restored(&decided_without(vmi, &["p"])), Some((None, vec!["p"])), "{:?}", vmi.phase());
        let decision = decided(vmi, &[unseen()]);
        assert_eq!(restored(&decision), Some((Some("virt-launcher-m-x"), vec!["p"])), "{:?}", vmi.phase());
    }
    // A pod that lost its label before the status of its VMI named it.
    let decision = decided(&vmi(&json!({})), &[unseen()]);
    assert_eq!(restored(&decision), Some((Some("virt-launcher-m-x"), vec!["p"])));
    // Its end was seen.
    assert_eq!(status_of(&decided_without(&in_phase("Running"), &[]))["phase"], "Failed");
}

#[test]
fn pod_that_waits_for_the_scheduler_causes_no_write_at_first() {
    let waiting = |since: &str| {
        pod(&json!({
            "metadata": {"creationTimestamp": since}, "spec": {"nodeName": null}, "status": {"conditions": null},
        }))
    };
    let decision = decided(&vmi(&json!({})), &[waiting("2030-01-01T00:00:58Z")]);
    assert_eq!(decision, Decision { effects: Vec::new(), wake_after: Some(Duration::from_secs(3)) });
    // Nobody schedules it.
    let decision = decided(&vmi(&json!({})), &[waiting("2030-01-01T00:00:55Z")]);
    assert_eq!(decision.wake_after, None);
    let status = status_of(&decision);
    assert_eq!(status["phase"], "Scheduling");
    assert_eq!(status.get("nodeName"), None);
    assert_eq!(status["activePods"], json!({"p": ""}));
    assert_eq!(condition_in(&status, "Ready")["reason"], "GuestNotRunning");
}

#[test]
fn vmi_shows_that_it_waits_for_the_scheduler_after_some_time() {
    let vmi = vmi(&json!({"status": {"phase": "Scheduling", "activePods": {"p": ""}}}));
    let patch = patch_of(&decided(&vmi, &[pod(&json!({}))]), Kind::Instance).unwrap();
    assert_eq!(patch["metadata"]["labels"]["kubevirt.io/nodeName"], "n");
    assert_eq!((&patch["status"]["nodeName"], &patch["status"]["activePods"]), (&json!("n"), &json!({"p": "n"})));
}

#[test]
fn bound_pod_is_shown_in_one_write_and_its_readiness_gate_opens() {
    let decision = decided(&vmi(&json!({})), &[starting_pod(1)]);
    assert_eq!(decision.effects.len(), 2);
    let gate = patch_of(&decision, Kind::Pod).unwrap();
    assert_eq!(gate["metadata"]["labels"], json!({"kubevirt.io/nodeName": "n"}));
    assert_eq!(gate["status"]["conditions"][0]["status"], "True");
    let patch = patch_of(&decision, Kind::Instance).unwrap();
    assert_eq!(patch["metadata"]["labels"]["kubevirt.io/nodeName"], "n");
    let status = &patch["status"];
    assert_eq!(status["phase"], "Scheduling");
    assert_eq!(status["nodeName"], "n");
    assert_eq!(status["activePods"], json!({"p": "n"}));
    assert_eq!(status["qosClass"], "Burstable");
    assert_eq!(status["launcherContainerImageVersion"], "launcher:1");
    assert_eq!(condition_in(status, "Ready")["status"], "False");
    assert_eq!(status["phaseTransitionTimestamps"][0]["phase"], "Scheduling");
}

#[test]
fn readiness_gate_stays_closed_for_a_guest_that_starts_paused_or_not_at_all() {
    for change in [
        json!({"spec": {"startStrategy": "Paused"}}),
        json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z", "finalizers": ["f"]}}),
        json!({"status": {"phase": "Failed"}}),
    ] {
        assert_eq!(patch_of(&decided(&vmi(&change), &[starting_pod(1)]), Kind::Pod), None, "{change}");
    }
}

#[test]
fn networks_of_the_pod_are_shown() {
    let vmi = vmi(&json!({
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}}]}},
            "networks": [{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "blue"}}],
        },
        "status": {"phase": "Scheduling", "nodeName": "n", "activePods": {"p": "n"}},
    }));
    let interfaces = |status: &str| {
        let pod = pod(&json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/network-status": status}}}));
        status_of(&decided(&vmi, &[pod]))["interfaces"].clone()
    };
    let shown = json!([
        {"name": "more", "default": true, "dns": {}},
        {"name": "d/blue", "interface": "pod094a367b026", "ips": ["10.1.0.2"], "mac": "0a:58:00:00:00:07"},
    ]);
    assert_eq!(
        interfaces(&shown.to_string()),
        json!([{"name": "lan", "infoSource": "multus-status", "podInterfaceName": "pod094a367b026"}])
    );
    for nothing in ["", "[]", "{}", "[{\"interface\": 7}]"] {
        assert_eq!(interfaces(nothing), Value::Null, "{nothing}");
    }
}

#[test]
fn unschedulable_pod_is_shown_with_its_reason() {
    let unschedulable = pod(&json!({"spec": {"nodeName": null}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]}}));
    let decision = decided(&vmi(&json!({})), &[unschedulable]);
    assert_eq!(patch_of(&decision, Kind::Instance).unwrap().get("metadata"), None, "{decision:?}");
    let status = status_of(&decision);
    assert_eq!(status["phase"], "Scheduling");
    assert_eq!(status.get("nodeName"), None);
    let condition = condition_in(&status, "PodScheduled");
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("Unschedulable"), &json!("no node")));
}

#[test]
fn failed_image_pull_is_shown_once() {
    let stuck = |message: &str| {
        pod(&json!({"status": {
            "conditions": [{"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"}],
            "containerStatuses": [{"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "",
                "state": {"waiting": {"reason": "ErrImagePull", "message": message}}}],
        }}))
    };
    let decision = decided(&in_phase("Scheduling"), &[stuck("a")]);
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("False"), &json!("ErrImagePull")));
    let mut shown = in_phase("Scheduling");
    let status = shown.status.as_mut().unwrap();
    status.conditions.push(serde_json::from_value(condition).unwrap());
    assert_eq!(decided(&shown, &[stuck("another wording")]), Decision::settled());
}

#[test]
fn conditions_of_virt_handler_stay() {
    let shown = |reason: &str| {
        let mut vmi = in_phase("Scheduling");
        let condition = json!({"type": "Synchronized", "status": "False", "reason": reason, "message": "m"});
        vmi.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
        decided(&vmi, &[starting_pod(1)])
    };
    assert_eq!(patch_of(&shown("Synchronizing with the Domain failed."), Kind::Instance), None);
    for own in [
        "ErrImagePull",
        "FailedCreate",
        "FailedPvcNotFound",
        "BackendStorageNotReady",
        "FailedBackendStorageCreate",
        "FailedBackendStorageProbe",
        "Failed deleting backend storage",
        "OperationInProgress",
    ] {
        assert_eq!(condition_in(&status_of(&shown(own)), "Synchronized"), Value::Null, "{own}");
    }
}

#[test]
fn refused_pod_shows_its_reason_and_is_retried_later() {
    let failure = Failure {
        reason: "FailedCreate",
        message: "exceeded quota".to_owned(),
        retry_at: "2030-01-01T00:01:30Z".parse().unwrap(),
        attempts: 1,
    };
    let decision = decided_after(&vmi(&json!({})), &[], Some(&failure));
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(30)));
    assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Create { .. })));
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(condition["reason"], "FailedCreate");
    assert_eq!(condition["message"], "failed to create virtual machine pod: exceeded quota");
    let security = "pods \"virt-launcher-m\" is forbidden: violates PodSecurity \"restricted:latest\"";
    let refusal = Failure { message: security.to_owned(), ..failure.clone() };
    let condition = condition_in(&status_of(&decided_after(&vmi(&json!({})), &[], Some(&refusal))), "Synchronized");
    let expected = format!("failed to create pod for vmi d/m, it needs a privileged namespace to run: {security}");
    assert_eq!((condition["reason"].as_str(), condition["message"].as_str()), (Some("FailedCreate"), Some(&*expected)));
    let due = Failure { retry_at: now(), ..failure };
    let decision = decided_after(&vmi(&json!({})), &[], Some(&due));
    let Effect::Create { kind: Kind::Pod, options, .. } = &decision.effects[0] else { panic!("{decision:?}") };
    for (error, expected) in [
        ("exceeded quota", "Error creating pod: {error}"),
        (
            security,
            "failed to render launch manifest: failed to create pod for vmi d/m, \
             it needs a privileged namespace to run: {error}",
        ),
    ] {
        let event = options.refusal(error).unwrap();
        assert_eq!((event.reason, event.message.as_str()), ("FailedCreate", expected));
    }
}

#[test]
fn missing_claim_is_shown_and_awaited() {
    let claim = vmi(&json!({"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}}));
    let decision = decided(&claim, &[]);
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(condition["reason"], "FailedPvcNotFound");
    assert_eq!(condition["message"], "PVC d/c does not exist, waiting for it to appear");
    assert!(decision.effects.iter().any(|effect| matches!(effect, Effect::Event(_))));
}

#[test]
fn vmi_that_depends_on_the_tsc_gets_a_frequency_before_its_pod() {
    let invtsc = json!({"spec": {"domain": {"cpu": {"features": [{"name": "invtsc", "policy": "require"}]}}}});
    let hyperv = json!({"spec": {"domain": {"features": {"hyperv": {"reenlightenment": {"enabled": true}}}}}});
    let with_hint = json!({"status": {"topologyHints": {"tscFrequency": 2000}}});
    let merged = |first: &Value, second: &Value| {
        let mut both = first.clone();
        json_patch::merge(&mut both, second);
        both
    };
    // change, emulation, frequency that nodes offer, hint written, pod made
    let table = [
        (json!({}), false, Some(2000), Value::Null, true),
        (invtsc.clone(), false, Some(2000), json!(2000), false),
        (merged(&invtsc, &with_hint), false, Some(1000), Value::Null, true),
        (invtsc.clone(), false, None, Value::Null, false),
        (invtsc, true, None, Value::Null, true),
        (hyperv.clone(), false, Some(2000), json!(2000), false),
        (hyperv, false, None, Value::Null, true),
    ];
    for (change, use_emulation, frequency, hint, pod) in table {
        let instance = vmi(&change);
        let decision = decide(&Observed {
            config: Arc::new(ClusterConfig { use_emulation, ..ClusterConfig::default() }),
            frequency,
            ..observed(&instance)
        })
        .unwrap();
        let made = decision.effects.iter().find_map(|effect| match effect {
            Effect::Create { kind: Kind::Pod, object, .. } => Some(object["spec"]["nodeSelector"].clone()),
            _ => None,
        });
        assert_eq!(made.is_some(), pod, "{change} {frequency:?}");
        let patch = patch_of(&decision, Kind::Instance).unwrap_or_default();
        assert_eq!(patch["status"]["topologyHints"]["tscFrequency"], hint, "{change} {frequency:?}");
        let reason = condition_in(&patch["status"], "Synchronized")["reason"].clone();
        assert_eq!(reason == "FailedGatherhingClusterTopologyHints", !pod && hint.is_null(), "{change} {patch}");
        let selects = made.is_some_and(|made| made["scheduling.node.kubevirt.io/tsc-frequency-2000"] == "true");
        assert_eq!(selects, change["status"]["topologyHints"].is_object(), "{change}");
    }
}

#[test]
fn vmi_with_vsock_gets_a_context_id_before_its_pod() {
    // present context ID, free context ID, written status, pod created
    let table = [
        (Value::Null, Some(7), json!(7), false),
        (json!(7), Some(7), Value::Null, true),
        // Another VMI has it as well.
        (json!(7), Some(9), json!(9), false),
        (Value::Null, None, Value::Null, false),
    ];
    for (held, cid, written, pod) in table {
        let devices = json!({"autoattachVSOCK": true});
        let instance = vmi(&json!({"spec": {"domain": {"devices": devices}}, "status": {"VSOCKCID": held}}));
        let decision = decide(&Observed { cid, ..observed(&instance) }).unwrap();
        let made = decision.effects.iter().find_map(|effect| match effect {
            Effect::Create { kind: Kind::Pod, object, .. } => Some(object["spec"]["containers"][0].clone()),
            _ => None,
        });
        assert_eq!(made.is_some(), pod, "{held} {cid:?}");
        if let Some(made) = made {
            assert_eq!(made["resources"]["limits"]["devices.kubevirt.io/vhost-vsock"], "1");
        }
        let patch = patch_of(&decision, Kind::Instance).unwrap_or_default();
        assert_eq!(patch["status"]["VSOCKCID"], written, "{held} {cid:?}");
        let says = condition_in(&patch["status"], "Synchronized")["reason"] == "FailedCreate";
        assert_eq!(says, cid.is_none(), "{held} {patch}");
        assert_eq!(decision.wake_after.is_some(), cid.is_none());
    }
}

fn starting_pod(age: i64) -> CachedPod {
    let created = now().checked_sub(jiff::SignedDuration::from_secs(age)).unwrap().to_string();
    pod(&json!({"metadata": {"creationTimestamp": created}}))
}

fn warning_about(reason: Option<&'static str>, seconds_ago: i64) -> Arc<PodWarning> {
    let warning = reason.map(|reason| Warning { reason, message: "secret \"s\" not found".to_owned() });
    let read_at = now().checked_sub(jiff::SignedDuration::from_secs(seconds_ago)).unwrap();
    let metadata = serde_json::from_value(json!({"name": "virt-launcher-m-x", "namespace": "d", "uid": "p"})).unwrap();
    Arc::new(PodWarning { metadata, read_at, warning })
}

fn decided_with(vmi: &VirtualMachineInstance, pod: CachedPod, warnings: &[Arc<PodWarning>]) -> Decision {
    decide(&Observed { pods: vec![Arc::new(pod)], warnings: warnings.to_vec(), ..observed(vmi) }).unwrap()
}

#[test]
fn events_are_read_only_of_pods_that_should_have_started() {
    let read =
        Effect::ReadWarnings { namespace: "d".to_owned(), pod: "virt-launcher-m-x".to_owned(), uid: "p".to_owned() };
    let vmi = in_phase("Scheduling");
    let unread: &[Arc<PodWarning>] = &[];
    let [fresh, old] = [[warning_about(None, 3)], [warning_about(None, 10)]];
    for (pod, warnings, reads, wake) in [
        (starting_pod(1), unread, false, Some(9)),
        (starting_pod(10), unread, true, Some(10)),
        (starting_pod(13), fresh.as_slice(), false, Some(7)),
        (starting_pod(20), old.as_slice(), true, Some(10)),
        (running_pod(&json!({"type": "Ready", "status": "True"})), unread, false, None),
    ] {
        let decision = decided_with(&vmi, pod, warnings);
        assert_eq!(decision.effects.contains(&read), reads, "{warnings:?}");
        assert_eq!(decision.wake_after.map(|wake| wake.as_secs()), wake, "{warnings:?}");
    }
}

#[test]
fn warning_about_the_pod_is_shown_with_one_event_until_the_pod_starts() {
    let vmi = in_phase("Scheduling");
    let decision = decided_with(&vmi, starting_pod(20), &[warning_about(Some("FailedMount"), 1)]);
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(
        (&condition["status"], &condition["reason"], &condition["message"]),
        (&json!("False"), &json!("FailedMount"), &json!("secret \"s\" not found"))
    );
    let events = |decision: &Decision| {
        decision
            .effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Event(event) if event.reason == "FailedMount" => Some(event.event_type.as_str()),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    // The VMI may start all the same.
    assert_eq!(events(&decision), ["Normal"]);
    let mut shown = vmi.clone();
    shown.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
    let is_shown_after = |pod: CachedPod, warnings: &[Arc<PodWarning>]| {
        let decision = decided_with(&shown, pod, warnings);
        assert!(events(&decision).is_empty());
        let patch = patch_of(&decision, Kind::Instance);
        patch.is_none_or(|patch| !condition_in(&patch["status"], "Synchronized").is_null())
    };
    assert!(is_shown_after(starting_pod(20), &[warning_about(Some("FailedMount"), 1)]));
    // Another leader has not read the events.
    assert!(is_shown_after(starting_pod(20), &[]));
    assert!(!is_shown_after(starting_pod(20), &[warning_about(None, 1)]));
    assert!(!is_shown_after(running_pod(&json!({"type": "Ready", "status": "True"})), &[]));
}

#[test]
fn requirement_that_no_node_offers_is_named() {
    let unschedulable = pod(&json!({"spec": {"nodeName": null}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}]}}));
    let unoffered = ["machine-type.node.kubevirt.io/pc-q35-99".to_owned()];
    let vmi = vmi(&json!({}));
    let observed = Observed { pods: vec![Arc::new(unschedulable)], unoffered: unoffered.to_vec(), ..observed(&vmi) };
    let condition = condition_in(&status_of(&decide(&observed).unwrap()), "PodScheduled");
    assert_eq!(condition["message"], "0/2 nodes are available; no node offers the machine type pc-q35-99");
}

#[test]
fn vmi_with_dedicated_cpus_needs_a_guaranteed_pod() {
    let pinned = vmi(&json!({"spec": {"domain": {"cpu": {"cores": 1, "dedicatedCpuPlacement": true}}}}));
    let of_class = |class: &str| pod(&json!({"status": {"qosClass": class}}));
    let status = status_of(&decided(&pinned, &[of_class("Guaranteed")]));
    assert_eq!((&status["phase"], &status["nodeName"]), (&json!("Scheduling"), &json!("n")));
    let decision = decided(&pinned, &[of_class("Burstable")]);
    let status = status_of(&decision);
    assert_eq!((&status["phase"], &status["reason"]), (&json!("Failed"), &json!("FailedGuaranteeResources")));
    assert_eq!(status.get("nodeName"), None);
    let is_event =
        |effect: &Effect| matches!(effect, Effect::Event(event) if event.reason == "FailedGuaranteeResources");
    assert!(decision.effects.iter().any(is_event), "{decision:?}");
}
