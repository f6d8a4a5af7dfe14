//! Tests of running VMIs: readiness, labels and annotations of the pod.

use super::*;

#[test]
fn running_vmi_opens_its_readiness_gate_and_waits_for_the_pod() {
    let unready = running_pod(&json!({"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}));
    let closed = CachedPod { unpaused: None, ..unready.clone() };
    let decision = decided(&in_phase("Running"), &[closed]);
    assert_eq!(decision.effects.len(), 1, "{decision:?}");
    let gate = &patch_of(&decision, Kind::Pod).unwrap()["status"]["conditions"][0];
    assert_eq!((&gate["status"], &gate["reason"]), (&json!("True"), &json!("NotPaused")));
    assert_eq!(decided(&in_phase("Running"), &[unready]), Decision::settled());
}

#[test]
fn ready_pod_makes_its_vmi_ready_and_then_all_is_settled() {
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
fn paused_vmi_closes_its_readiness_gate() {
    let mut paused = in_phase("Running");
    let condition = json!({"type": "Paused", "status": "True"});
    paused.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
    let decision = decided(&paused, &[running_pod(&json!({"type": "Ready", "status": "True"}))]);
    let gate = &patch_of(&decision, Kind::Pod).unwrap()["status"]["conditions"][0];
    assert_eq!((&gate["status"], &gate["reason"]), (&json!("False"), &json!("Paused")));
}

#[test]
fn vmi_with_an_older_launcher_is_marked_with_its_pod() {
    let old =
        CachedPod { image: Some("launcher:0".to_owned()), ..running_pod(&json!({"type": "Ready", "status": "True"})) };
    let decision = decided(&in_phase("Running"), &[old]);
    let key = "kubevirt.io/outdatedLauncherImage";
    assert_eq!(patch_of(&decision, Kind::Instance).unwrap()["metadata"]["labels"][key], "");
    assert_eq!(patch_of(&decision, Kind::Pod).unwrap()["metadata"]["labels"][key], "");
}

#[test]
fn pod_of_a_running_vmi_gets_the_label_of_its_node() {
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
fn vmi_that_must_leave_its_node_and_its_pod_show_it_until_the_end_of_the_eviction() {
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
fn pod_of_a_running_vmi_has_the_configured_annotations_for_backups() {
    let ready = || running_pod(&json!({"type": "Ready", "status": "True"}));
    let (skip, pre) = ("kubevirt.io/skip-backup-hooks", "pre.hook.backup.velero.io/container");
    let bare = || {
        let mut pod = ready();
        pod.metadata.annotations.get_or_insert_default().remove(pre);
        pod
    };
    let (set, removed) = (json!("compute"), Value::Null);
    // annotations of the VMI, the cluster's word, pod, whether the pod is changed, and to what
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
            pods: vec![Arc::new(pod)],
            config: Arc::new(ClusterConfig { skip_backup_hooks, ..ClusterConfig::default() }),
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
fn pod_has_its_vmis_annotations_for_deschedulers_and_the_mark_of_an_eviction() {
    let prefix = "descheduler.alpha.kubernetes.io";
    let (evict, leaves) = (format!("{prefix}/evict"), format!("{prefix}/eviction-in-progress"));
    let only = format!("{prefix}/request-evict-only");
    let pod = |annotations: Value| {
        let mut pod = running_pod(&json!({"type": "Ready", "status": "True"}));
        let own = pod.metadata.annotations.get_or_insert_default();
        own.extend(serde_json::from_value::<BTreeMap<String, String>>(annotations).unwrap());
        pod
    };
    // annotations of the VMI, the node it is to leave, annotations of the pod, changes
    let table = [
        (json!({}), "", json!({}), Value::Null),
        (json!({&evict: "true"}), "", json!({}), json!({&evict: "true"})),
        (json!({&evict: "true"}), "", json!({&evict: "true"}), Value::Null),
        (json!({}), "", json!({&evict: "true"}), json!({&evict: null})),
        (json!({}), "n", json!({}), json!({&leaves: "true"})),
        (json!({}), "", json!({&leaves: "true"}), json!({&leaves: null})),
        // Another value is replaced.
        (json!({&only: "x"}), "", json!({&only: "x"}), json!({&only: ""})),
    ];
    for (annotations, node, known, changes) in table {
        let mut instance = in_phase("Running");
        instance.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        instance.status.as_mut().unwrap().evacuation_node_name = (!node.is_empty()).then(|| node.to_owned());
        let patch = patch_of(&decided(&instance, &[pod(known.clone())]), Kind::Pod).unwrap_or_default();
        assert_eq!(patch["metadata"]["annotations"], changes, "{annotations} {node} {known}");
    }
    let mut removed = pod(json!({}));
    removed.metadata.annotations.get_or_insert_default().remove(&only);
    let patch = patch_of(&decided(&in_phase("Running"), &[removed]), Kind::Pod).unwrap();
    assert_eq!(patch, json!({"metadata": {"annotations": {&only: ""}}}));
}
