use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::*;

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn machine(change: &Value) -> VirtualMachineInstance {
    let mut machine = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "m", "namespace": "d", "uid": "u", "resourceVersion": "3",
            "finalizers": ["kubevirt.io/foregroundDeleteVirtualMachine"],
        },
        "spec": {"domain": {"devices": {}, "memory": {"guest": "64Mi"}}},
        "status": {"phase": "Pending"},
    });
    json_patch::merge(&mut machine, change);
    serde_json::from_value(machine).unwrap()
}

fn in_phase(phase: &str) -> VirtualMachineInstance {
    machine(&json!({
        "metadata": {"labels": {"kubevirt.io/nodeName": "n"}},
        "status": {
            "phase": phase, "nodeName": "n", "activePods": {"p": "n"}, "launcherContainerImageVersion": "launcher:1",
            "conditions": [{"type": "Ready", "status": "False", "reason": "GuestNotRunning",
                "message": "Guest VM is not reported as running"}],
        },
    }))
}

fn pod(change: &Value) -> PodView {
    let mut pod = json!({
        "metadata": {"name": "virt-launcher-m-x", "namespace": "d", "uid": "p", "creationTimestamp": "2030-01-01T00:00:00Z"},
        "spec": {"nodeName": "n", "containers": [{"name": "compute", "image": "launcher:1"}]},
        "status": {"phase": "Pending", "qosClass": "Burstable", "conditions": [{"type": "PodScheduled", "status": "True"}]},
    });
    json_patch::merge(&mut pod, change);
    PodView::from(serde_json::from_value::<Pod>(pod).unwrap())
}

fn running_pod(ready: &Value) -> PodView {
    let metadata = json!({
        "labels": {"kubevirt.io/nodeName": "n"},
        "annotations": {"pre.hook.backup.velero.io/container": "compute"},
    });
    pod(&json!({"metadata": metadata, "status": {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"},
            ready,
        ],
        "containerStatuses": [{"name": "compute", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": {"running": {}}}],
    }}))
}

fn ended_pod(finished: &str) -> PodView {
    pod(&json!({"status": {
        "phase": "Failed",
        "containerStatuses": [{"name": "compute", "ready": false, "restartCount": 0, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 1, "finishedAt": finished}}}],
    }}))
}

/// A VMI without pods.
fn observed(instance: &VirtualMachineInstance) -> Observed<'_> {
    static CONFIG: std::sync::LazyLock<ClusterConfig> = std::sync::LazyLock::new(ClusterConfig::default);
    static CLAIMS: BTreeMap<String, Arc<ClaimView>> = BTreeMap::new();
    Observed {
        instance,
        pods: &[],
        missing: &[],
        config: &CONFIG,
        launcher_image: "launcher:1",
        claims: &CLAIMS,
        limits: NamespaceLimits::default(),
        frequency: None,
        cid: None,
        definitions: None,
        failure: None,
        now: now(),
    }
}

fn decided_after(instance: &VirtualMachineInstance, pods: &[PodView], failure: Option<&Failure>) -> Decision {
    let pods: Vec<Arc<PodView>> = pods.iter().cloned().map(Arc::new).collect();
    decide(&Observed { pods: &pods, failure, ..observed(instance) }).unwrap()
}

fn decided(instance: &VirtualMachineInstance, pods: &[PodView]) -> Decision {
    decided_after(instance, pods, None)
}

fn patch_of(decision: &Decision, kind: Kind) -> Option<Value> {
    decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: found, patch, .. } if *found == kind => Some(patch.clone()),
        _ => None,
    })
}

fn status_of(decision: &Decision) -> Value {
    patch_of(decision, Kind::Instance).unwrap()["status"].clone()
}

fn condition_in(status: &Value, type_: &str) -> Value {
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == type_).unwrap_or(Value::Null)
}

#[test]
fn new_machine_gets_its_pod_and_nothing_else_is_written() {
    let decision = decided(&machine(&json!({})), &[]);
    assert!(matches!(decision.effects.as_slice(), [Effect::Create { kind: Kind::Pod, .. }]), "{decision:?}");
}

/// Returns the decision about a VMI whose pods no watch shows.
fn decided_without(instance: &VirtualMachineInstance, missing: &[&str]) -> Decision {
    let missing: Vec<String> = missing.iter().map(|uid| (*uid).to_owned()).collect();
    decide(&Observed { missing: &missing, ..observed(instance) }).unwrap()
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
fn launcher_without_its_label_is_looked_for_and_no_second_one_is_made() {
    let deleting = |mut machine: VirtualMachineInstance| {
        machine.metadata.deletion_timestamp = serde_json::from_value(json!("2030-01-01T00:00:30Z")).unwrap();
        machine
    };
    let unseen = || PodView { unseen: true, ..running_pod(&json!({"type": "Ready", "status": "True"})) };
    let mut machines: Vec<VirtualMachineInstance> =
        ["Scheduling", "Scheduled", "Running", "Failed", "Succeeded"].map(in_phase).into();
    machines.push(deleting(in_phase("Running")));
    for machine in &machines {
        assert_eq!(restored(&decided_without(machine, &["p"])), Some((None, vec!["p"])), "{:?}", machine.phase());
        let decision = decided(machine, &[unseen()]);
        assert_eq!(restored(&decision), Some((Some("virt-launcher-m-x"), vec!["p"])), "{:?}", machine.phase());
    }
    // One that lost its label before its VMI told of it.
    let decision = decided(&machine(&json!({})), &[unseen()]);
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
    let decision = decided(&machine(&json!({})), &[waiting("2030-01-01T00:00:58Z")]);
    assert_eq!(decision, Decision { effects: Vec::new(), wake_after: Some(Duration::from_secs(3)) });
    // Nobody schedules it.
    let decision = decided(&machine(&json!({})), &[waiting("2030-01-01T00:00:55Z")]);
    assert_eq!(decision.wake_after, None);
    let status = status_of(&decision);
    assert_eq!(status["phase"], "Scheduling");
    assert_eq!(status.get("nodeName"), None);
    assert_eq!(status["activePods"], json!({"p": ""}));
    assert_eq!(condition_in(&status, "Ready")["reason"], "GuestNotRunning");
}

#[test]
fn machine_that_waited_long_for_the_scheduler_is_told_its_node() {
    let machine = machine(&json!({"status": {"phase": "Scheduling", "activePods": {"p": ""}}}));
    let patch = patch_of(&decided(&machine, &[pod(&json!({}))]), Kind::Instance).unwrap();
    assert_eq!(patch["metadata"]["labels"]["kubevirt.io/nodeName"], "n");
    assert_eq!((&patch["status"]["nodeName"], &patch["status"]["activePods"]), (&json!("n"), &json!({"p": "n"})));
}

#[test]
fn bound_pod_is_told_in_one_write() {
    let decision = decided(&machine(&json!({})), &[pod(&json!({}))]);
    assert_eq!(decision.effects.len(), 1);
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
fn networks_that_the_pod_was_connected_to_are_told() {
    let machine = machine(&json!({
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}}]}},
            "networks": [{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "blue"}}],
        },
        "status": {"phase": "Scheduling", "nodeName": "n", "activePods": {"p": "n"}},
    }));
    let interfaces = |status: &str| {
        let pod = pod(&json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/network-status": status}}}));
        status_of(&decided(&machine, &[pod]))["interfaces"].clone()
    };
    let told = json!([
        {"name": "more", "default": true, "dns": {}},
        {"name": "d/blue", "interface": "pod094a367b026", "ips": ["10.1.0.2"], "mac": "0a:58:00:00:00:07"},
    ]);
    assert_eq!(
        interfaces(&told.to_string()),
        json!([{"name": "lan", "infoSource": "multus-status", "podInterfaceName": "pod094a367b026"}])
    );
    for nothing in ["", "[]", "{}", "[{\"interface\": 7}]"] {
        assert_eq!(interfaces(nothing), Value::Null, "{nothing}");
    }
}

#[test]
fn pod_that_cannot_be_scheduled_is_told_with_its_reason() {
    let unschedulable = pod(&json!({"spec": {"nodeName": null}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]}}));
    let decision = decided(&machine(&json!({})), &[unschedulable]);
    assert_eq!(patch_of(&decision, Kind::Instance).unwrap().get("metadata"), None, "{decision:?}");
    let status = status_of(&decision);
    assert_eq!(status["phase"], "Scheduling");
    assert_eq!(status.get("nodeName"), None);
    let condition = condition_in(&status, "PodScheduled");
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("Unschedulable"), &json!("no node")));
}

#[test]
fn image_that_cannot_be_pulled_is_told_once() {
    let stuck = |message: &str| {
        pod(
            &json!({"status": {"containerStatuses": [{"name": "compute", "ready": false, "restartCount": 0, "image": "",
            "imageID": "", "state": {"waiting": {"reason": "ErrImagePull", "message": message}}}]}}),
        )
    };
    let decision = decided(&in_phase("Scheduling"), &[stuck("a")]);
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("False"), &json!("ErrImagePull")));
    let mut told = in_phase("Scheduling");
    let status = told.status.as_mut().unwrap();
    status.conditions.push(serde_json::from_value(condition).unwrap());
    assert_eq!(decided(&told, &[stuck("another wording")]), Decision::settled());
}

#[test]
fn what_the_node_agent_says_of_a_start_stays() {
    let told = |reason: &str| {
        let mut machine = in_phase("Scheduling");
        let condition = json!({"type": "Synchronized", "status": "False", "reason": reason, "message": "m"});
        machine.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
        decided(&machine, &[pod(&json!({}))])
    };
    assert_eq!(told("Synchronizing with the Domain failed."), Decision::settled());
    for own in ["ErrImagePull", "FailedCreate", "FailedPvcNotFound"] {
        assert_eq!(condition_in(&status_of(&told(own)), "Synchronized"), Value::Null, "{own}");
    }
}

#[test]
fn refused_pod_shows_its_reason_and_is_tried_again_later() {
    let failure = Failure {
        reason: "FailedCreate",
        message: "exceeded quota".to_owned(),
        retry_at: "2030-01-01T00:01:30Z".parse().unwrap(),
        attempts: 1,
    };
    let decision = decided_after(&machine(&json!({})), &[], Some(&failure));
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(30)));
    assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Create { .. })));
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(condition["reason"], "FailedCreate");
    assert_eq!(condition["message"], "failed to create virtual machine pod: exceeded quota");
    let due = Failure { retry_at: now(), ..failure };
    let decision = decided_after(&machine(&json!({})), &[], Some(&due));
    assert!(matches!(decision.effects[0], Effect::Create { kind: Kind::Pod, .. }));
}

#[test]
fn missing_claim_is_told_and_waited_for() {
    let claim = machine(&json!({"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}}));
    let decision = decided(&claim, &[]);
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(condition["reason"], "FailedPvcNotFound");
    assert_eq!(condition["message"], "PVC d/c does not exist, waiting for it to appear");
    assert!(decision.effects.iter().any(|effect| matches!(effect, Effect::Event(_))));
}

#[test]
fn running_machine_opens_its_readiness_gate_and_waits_for_the_pod() {
    let unready = running_pod(&json!({"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}));
    let closed = PodView { unpaused: None, ..unready.clone() };
    let decision = decided(&in_phase("Running"), &[closed]);
    assert_eq!(decision.effects.len(), 1, "{decision:?}");
    let gate = &patch_of(&decision, Kind::Pod).unwrap()["status"]["conditions"][0];
    assert_eq!((&gate["status"], &gate["reason"]), (&json!("True"), &json!("NotPaused")));
    assert_eq!(decided(&in_phase("Running"), &[unready]), Decision::settled());
}

#[test]
fn ready_pod_makes_its_machine_ready_and_then_all_is_settled() {
    let ready = running_pod(&json!({"type": "Ready", "status": "True"}));
    let decision = decided(&in_phase("Running"), std::slice::from_ref(&ready));
    assert_eq!(decision.effects.len(), 1);
    let status = status_of(&decision);
    assert_eq!(condition_in(&status, "Ready")["status"], "True");
    let mut settled = in_phase("Running");
    settled.status.as_mut().unwrap().conditions = serde_json::from_value(status["conditions"].clone()).unwrap();
    assert_eq!(decided(&settled, &[ready]), Decision::settled());
}

#[test]
fn paused_machine_closes_its_readiness_gate() {
    let mut paused = in_phase("Running");
    let condition = json!({"type": "Paused", "status": "True"});
    paused.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
    let decision = decided(&paused, &[running_pod(&json!({"type": "Ready", "status": "True"}))]);
    let gate = &patch_of(&decision, Kind::Pod).unwrap()["status"]["conditions"][0];
    assert_eq!((&gate["status"], &gate["reason"]), (&json!("False"), &json!("Paused")));
}

#[test]
fn node_agent_is_given_time_to_record_the_end_of_a_launcher() {
    let decision = decided(&in_phase("Running"), &[ended_pod("2030-01-01T00:00:55Z")]);
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(5)));
    assert_eq!(status_of(&decision).get("phase"), None);
    let decision = decided(&in_phase("Running"), &[ended_pod("2030-01-01T00:00:50Z")]);
    assert_eq!(status_of(&decision)["phase"], "Failed");
}

#[test]
fn machine_that_never_ran_fails_with_a_launcher_that_kubelet_lost_sight_of() {
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
fn started_machine_without_pod_fails_and_never_gets_a_second_one() {
    for (phase, told) in [("Scheduling", None), ("Scheduled", Some("Stopped")), ("Running", Some("Stopped"))] {
        let decision = decided(&in_phase(phase), &[]);
        assert_eq!(status_of(&decision)["phase"], "Failed", "{phase}");
        let event = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::Instance, notes, .. } => notes.success.as_ref().map(|note| note.reason),
            _ => None,
        });
        assert_eq!(event, told, "{phase}");
        assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Create { .. })));
    }
    assert!(!decided(&in_phase("Failed"), &[]).effects.iter().any(|effect| matches!(effect, Effect::Create { .. })));
}

#[test]
fn deletion_takes_the_pod_first_and_the_finalizer_when_both_are_done() {
    let deleting = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:30Z"}});
    let merged = |phase: &str| {
        let mut machine = serde_json::to_value(in_phase(phase)).unwrap();
        json_patch::merge(&mut machine, &deleting);
        serde_json::from_value::<VirtualMachineInstance>(machine).unwrap()
    };
    let ready = running_pod(&json!({"type": "Ready", "status": "True"}));
    let decision = decided(&merged("Running"), &[ready]);
    assert!(matches!(decision.effects[0], Effect::Delete { kind: Kind::Pod, .. }));
    let patch = patch_of(&decision, Kind::Instance);
    assert!(patch.is_none_or(|patch| patch["metadata"].get("finalizers").is_none()));
    // Those of machine and VM go, those of others stay.
    let (own, of_vm) = ("kubevirt.io/foregroundDeleteVirtualMachine", "kubevirt.io/virtualMachineControllerFinalize");
    for (finalizers, left) in [
        (vec![own], Value::Null),
        (vec![of_vm, own], Value::Null),
        (vec![of_vm, "example.org/wait", own], json!(["example.org/wait"])),
    ] {
        let mut machine = merged("Succeeded");
        machine.metadata.finalizers = Some(finalizers.into_iter().map(str::to_owned).collect());
        let patch = patch_of(&decided(&machine, &[]), Kind::Instance).unwrap();
        assert_eq!(patch["metadata"]["finalizers"], left);
    }
}

#[test]
fn machine_deleted_before_it_had_a_pod_goes_in_one_write() {
    let deleting = machine(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:30Z"}}));
    let decision = decided(&deleting, &[]);
    let patch = patch_of(&decision, Kind::Instance).unwrap();
    assert_eq!(patch["status"]["phase"], "Failed");
    assert_eq!(patch["metadata"]["finalizers"], Value::Null);
    assert_eq!(decision.effects.len(), 1);
}

#[test]
fn machine_with_an_older_launcher_is_marked_with_its_pod() {
    let old =
        PodView { image: Some("launcher:0".to_owned()), ..running_pod(&json!({"type": "Ready", "status": "True"})) };
    let decision = decided(&in_phase("Running"), &[old]);
    let key = "kubevirt.io/outdatedLauncherImage";
    assert_eq!(patch_of(&decision, Kind::Instance).unwrap()["metadata"]["labels"][key], "");
    assert_eq!(patch_of(&decision, Kind::Pod).unwrap()["metadata"]["labels"][key], "");
}

#[test]
fn pod_of_a_running_machine_gets_the_label_of_its_node() {
    let ready = || running_pod(&json!({"type": "Ready", "status": "True"}));
    let unlabelled = || {
        let mut pod = ready();
        pod.metadata.labels = None;
        pod
    };
    // phase, pod, labels written to the pod
    let table = [
        ("Running", unlabelled(), json!({"kubevirt.io/nodeName": "n"})),
        ("Scheduled", unlabelled(), Value::Null),
        ("Succeeded", unlabelled(), Value::Null),
        ("Running", ready(), Value::Null),
    ];
    for (phase, pod, labels) in table {
        let patch = patch_of(&decided(&in_phase(phase), &[pod]), Kind::Pod).unwrap_or_default();
        assert_eq!(patch["metadata"]["labels"], labels, "{phase}");
    }
}

#[test]
fn machine_that_is_to_leave_its_node_says_so_with_its_pod_until_it_stays() {
    let ready = running_pod(&json!({"type": "Ready", "status": "True"}));
    let mut leaving = in_phase("Running");
    leaving.status.as_mut().unwrap().evacuation_node_name = Some("n".to_owned());
    let decision = decided(&leaving, std::slice::from_ref(&ready));
    let condition = condition_in(&status_of(&decision), "EvictionRequested");
    assert_eq!((&condition["status"], &condition["message"]), (&json!("True"), &json!("VMI is marked for eviction")));
    let key = "descheduler.alpha.kubernetes.io/eviction-in-progress";
    assert_eq!(patch_of(&decision, Kind::Pod).unwrap(), json!({"metadata": {"annotations": {key: "true"}}}));

    let mut marked = ready;
    marked.metadata.annotations.get_or_insert_default().insert(key.to_owned(), "true".to_owned());
    assert_eq!(patch_of(&decided(&leaving, std::slice::from_ref(&marked)), Kind::Pod), None);
    let stays = patch_of(&decided(&in_phase("Running"), &[marked]), Kind::Pod).unwrap();
    assert_eq!(stays, json!({"metadata": {"annotations": {key: null}}}));
}

#[test]
fn pod_of_a_running_machine_has_the_annotations_for_backups_that_are_wanted() {
    let ready = || running_pod(&json!({"type": "Ready", "status": "True"}));
    let bare = || {
        let mut pod = ready();
        pod.metadata.annotations = None;
        pod
    };
    let (skip, pre) = ("kubevirt.io/skip-backup-hooks", "pre.hook.backup.velero.io/container");
    let (set, removed) = (json!("compute"), Value::Null);
    // annotations of the machine, the cluster's word, pod, whether the pod is changed, and to what
    let table = [
        (json!({}), false, ready(), false, &removed),
        (json!({}), false, bare(), true, &set),
        (json!({skip: "false"}), false, bare(), true, &set),
        (json!({skip: "true"}), false, bare(), false, &removed),
        (json!({skip: "true"}), false, ready(), true, &removed),
        (json!({}), true, ready(), true, &removed),
        (json!({}), true, bare(), false, &removed),
        // A user's own hooks stay where ours are not wanted.
        (json!({skip: "true", pre: "compute"}), false, ready(), false, &removed),
    ];
    for (annotations, skip_backup_hooks, pod, changes, container) in table {
        let mut instance = in_phase("Running");
        instance.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        let decision = decide(&Observed {
            pods: &[Arc::new(pod)],
            config: &ClusterConfig { skip_backup_hooks, ..ClusterConfig::default() },
            ..observed(&instance)
        });
        let patch = patch_of(&decision.unwrap(), Kind::Pod);
        assert_eq!(patch.is_some(), changes, "{annotations} {skip_backup_hooks}: {patch:?}");
        let written = patch.map(|patch| patch["metadata"]["annotations"].clone()).unwrap_or_default();
        assert_eq!(&written[pre], container, "{annotations} {skip_backup_hooks}");
        assert!(!changes || written.as_object().is_some_and(|all| all.len() == 5), "{written}");
    }
}

#[test]
fn pod_tells_a_descheduler_what_its_machine_says_and_that_it_leaves() {
    let prefix = "descheduler.alpha.kubernetes.io";
    let (evict, leaves) = (format!("{prefix}/evict"), format!("{prefix}/eviction-in-progress"));
    let pod = |annotations: Value| {
        let mut pod = running_pod(&json!({"type": "Ready", "status": "True"}));
        let own = pod.metadata.annotations.get_or_insert_default();
        own.extend(serde_json::from_value::<BTreeMap<String, String>>(annotations).unwrap());
        pod
    };
    // annotations of the machine, the node it is to leave, annotations of the pod, changes
    let table = [
        (json!({}), "", json!({}), Value::Null),
        (json!({&evict: "true"}), "", json!({}), json!({&evict: "true"})),
        (json!({&evict: "true"}), "", json!({&evict: "true"}), Value::Null),
        (json!({}), "", json!({&evict: "true"}), json!({&evict: null})),
        (json!({}), "n", json!({}), json!({&leaves: "true"})),
        (json!({}), "", json!({&leaves: "true"}), json!({&leaves: null})),
    ];
    for (annotations, node, known, changes) in table {
        let mut instance = in_phase("Running");
        instance.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        instance.status.as_mut().unwrap().evacuation_node_name = (!node.is_empty()).then(|| node.to_owned());
        let patch = patch_of(&decided(&instance, &[pod(known.clone())]), Kind::Pod).unwrap_or_default();
        assert_eq!(patch["metadata"]["annotations"], changes, "{annotations} {node} {known}");
    }
}

#[test]
fn machine_that_depends_on_the_counter_gets_a_frequency_before_its_pod() {
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
        let instance = machine(&change);
        let decision = decide(&Observed {
            config: &ClusterConfig { use_emulation, ..ClusterConfig::default() },
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
fn machine_with_vsock_gets_a_context_id_before_its_pod() {
    // context id that it has, one that it can have, what is written, pod made
    let table = [
        (Value::Null, Some(7), json!(7), false),
        (json!(7), Some(7), Value::Null, true),
        // Another machine has it as well.
        (json!(7), Some(9), json!(9), false),
        (Value::Null, None, Value::Null, false),
    ];
    for (held, cid, written, pod) in table {
        let devices = json!({"autoattachVSOCK": true});
        let instance = machine(&json!({"spec": {"domain": {"devices": devices}}, "status": {"VSOCKCID": held}}));
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
    let decision = decided(&machine(&json!({})), &[pod(&json!({})), second("2030-01-01T00:00:05Z")]);
    assert_eq!(deleted(&decision), ["q"]);
    assert_eq!(status_of(&decision)["activePods"], json!({"p": "n"}));
    // The pod that the machine runs in stays, whichever is older.
    let decision = decided(&in_phase("Running"), &[pod(&json!({})), second("2029-01-01T00:00:05Z")]);
    assert_eq!(deleted(&decision), ["q"]);
    assert_ne!(status_of(&decided(&in_phase("Running"), &[second("2030-01-01T00:00:05Z")]))["phase"], "Running");
}

#[test]
fn cve_2025_64435_pod_that_only_says_to_be_of_the_machine_does_not_end_it() {
    let running = running_pod(&json!({"type": "Ready", "status": "True"}));
    let alone = decided(&in_phase("Running"), std::slice::from_ref(&running));
    // Younger, on the machine's node, and over: with a container of that name and without.
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
