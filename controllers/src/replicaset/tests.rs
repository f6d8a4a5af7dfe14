use serde_json::Value;

use super::*;

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn set(change: &Value) -> VirtualMachineInstanceReplicaSet {
    let mut set = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": "r", "namespace": "d", "uid": "set", "resourceVersion": "1"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "x"}},
            "template": {"metadata": {"labels": {"app": "x"}}, "spec": {"domain": {"devices": {}}}},
        },
    });
    json_patch::merge(&mut set, change);
    serde_json::from_value(set).unwrap()
}

fn vmi(name: &str, owner: Option<&str>, change: &Value) -> Arc<VirtualMachineInstance> {
    let owners = owner.map(|uid| {
        json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet",
        "name": "r", "uid": uid, "controller": true}])
    });
    let mut vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "namespace": "d", "uid": name, "labels": {"app": "x"}, "ownerReferences": owners},
        "spec": {"domain": {"devices": {}}},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    });
    json_patch::merge(&mut vmi, change);
    Arc::new(serde_json::from_value(vmi).unwrap())
}

fn decided(set: &VirtualMachineInstanceReplicaSet, vmis: &[Arc<VirtualMachineInstance>]) -> Decision {
    decided_after(set, vmis, None)
}

fn decided_after(
    set: &VirtualMachineInstanceReplicaSet,
    vmis: &[Arc<VirtualMachineInstance>],
    failure: Option<&Failure>,
) -> Decision {
    let (set, instances) = (Arc::new(set.clone()), vmis.to_vec());
    decide(&Observed { set, instances, failures: failure.cloned().into(), now: now() }).unwrap()
}

fn created(decision: &Decision) -> usize {
    decision.effects.iter().filter(|effect| matches!(effect, Effect::Create { .. })).count()
}

fn deleted<'a>(decision: &'a Decision) -> Vec<&'a str> {
    let name = |effect: &'a Effect| match effect {
        Effect::Delete { name, .. } => Some(name.as_str()),
        _ => None,
    };
    decision.effects.iter().filter_map(name).collect()
}

fn status(decision: &Decision) -> Value {
    let patch = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::ReplicaSet, patch, .. } => Some(patch["status"].clone()),
        _ => None,
    });
    patch.unwrap_or(Value::Null)
}

#[test]
fn missing_vmis_are_created_and_surplus_ones_deleted() {
    assert_eq!(created(&decided(&set(&json!({})), &[])), 2);
    assert_eq!(created(&decided(&set(&json!({"spec": {"replicas": null}})), &[])), 1);
    let three =
        [vmi("a", Some("set"), &json!({})), vmi("b", Some("set"), &json!({})), vmi("c", Some("set"), &json!({}))];
    let decision = decided(&set(&json!({})), &three);
    assert_eq!((created(&decision), deleted(&decision).len()), (0, 1));
}

#[test]
fn vmi_that_is_not_ready_is_deleted_before_one_that_is() {
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let vmis = [vmi("a", Some("set"), &json!({})), vmi("b", Some("set"), &unready), vmi("c", Some("set"), &json!({}))];
    assert_eq!(deleted(&decided(&set(&json!({})), &vmis)), ["b"]);
}

#[test]
fn vmi_whose_pod_is_going_is_deleted_and_replaced_at_once() {
    let going = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "PodTerminating"}]}});
    let vmis = |second: &Value| [vmi("a", Some("set"), &going), vmi("b", Some("set"), second)];
    // wanted, the other VMI, made, deleted
    let table: [(u32, Value, usize, &[&str]); 4] = [
        (2, json!({}), 1, &["a"]),
        (1, json!({}), 0, &["a"]),
        (0, json!({}), 0, &["a", "b"]),
        (2, going.clone(), 2, &["a", "b"]),
    ];
    for (replicas, second, made, gone) in table {
        let decision = decided(&set(&json!({"spec": {"replicas": replicas}})), &vmis(&second));
        assert_eq!((created(&decision), deleted(&decision)), (made, gone.to_vec()), "{replicas} {second}");
    }
}

#[test]
fn finished_vmis_are_deleted_and_replaced() {
    let vmis = [vmi("a", Some("set"), &json!({"status": {"phase": "Succeeded"}})), vmi("b", Some("set"), &json!({}))];
    let decision = decided(&set(&json!({})), &vmis);
    assert_eq!((created(&decision), deleted(&decision)), (1, vec!["a"]));
}

#[test]
fn paused_or_deleted_set_does_not_scale() {
    for change in
        [json!({"spec": {"paused": true}}), json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}})]
    {
        let decision = decided(&set(&change), &[vmi("a", Some("set"), &json!({}))]);
        assert_eq!((created(&decision), deleted(&decision).len()), (0, 0));
        assert_eq!(status(&decision)["replicas"], 1);
    }
    let decision = decided(&set(&json!({"spec": {"paused": true}})), &[]);
    assert_eq!(status(&decision)["conditions"][0]["type"], "ReplicaPaused");
    assert!(
        decision
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Event(note) if note.reason == "SuccessfulPaused"))
    );
}

#[test]
fn matching_orphan_is_adopted_before_vmis_are_created() {
    let decision = decided(&set(&json!({})), &[vmi("a", None, &json!({}))]);
    assert_eq!(created(&decision), 0);
    assert!(matches!(&decision.effects[0], Effect::Patch { kind: Kind::Instance, patch, .. }
        if patch["metadata"]["ownerReferences"][0]["uid"] == "set"));
    let foreign = decided(&set(&json!({})), &[vmi("a", Some("another"), &json!({}))]);
    assert_eq!(created(&foreign), 2);
}

#[test]
fn vmi_whose_labels_do_not_match_any_more_is_released() {
    let decision = decided(&set(&json!({})), &[vmi("a", Some("set"), &json!({"metadata": {"labels": {"app": "y"}}}))]);
    assert!(matches!(&decision.effects[0], Effect::Patch { kind: Kind::Instance, patch, .. }
        if patch["metadata"]["ownerReferences"] == json!([])));
}

#[test]
fn status_counts_and_is_then_settled() {
    let vmis = [vmi("a", Some("set"), &json!({})), vmi("b", Some("set"), &json!({}))];
    let status = status(&decided(&set(&json!({})), &vmis));
    assert_eq!(status, json!({"labelSelector": "app=x", "readyReplicas": 2, "replicas": 2}));
    assert_eq!(decided(&set(&json!({"status": status})), &vmis), Decision::settled());
}

#[test]
fn refused_vmi_shows_as_replica_failure() {
    let failure = Failure {
        reason: "FailedCreate",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let set = set(&json!({}));
    let decision = decided_after(&set, &[], Some(&failure));
    assert_eq!(created(&decision), 0);
    let conditions = status(&decision)["conditions"].clone();
    assert_eq!((&conditions[0]["type"], &conditions[0]["reason"]), (&json!("ReplicaFailure"), &json!("FailedCreate")));
    // It is gone with the wish, and holds up no deletion.
    let shown = |spec: Value| self::set(&json!({"spec": spec, "status": {"conditions": conditions}}));
    for (spec, gone) in [(json!({"replicas": 0}), vec!["a"]), (json!({"paused": true}), vec![])] {
        let (set, vmis) = (shown(spec), [vmi("a", Some("set"), &json!({}))]);
        let decision = decided_after(&set, &vmis, Some(&failure));
        assert_eq!((deleted(&decision), decision.wake_after), (gone, None));
        assert!(!status(&decision)["conditions"].to_string().contains("ReplicaFailure"), "{decision:?}");
    }
}

#[test]
fn refused_creation_and_refused_deletion_wait_for_their_own_times() {
    let refused = |reason: &'static str, retry_at: &str| Failure {
        reason,
        message: reason.to_owned(),
        retry_at: retry_at.parse().unwrap(),
        attempts: 1,
    };
    let create = || refused("FailedCreate", "2030-01-01T00:01:10Z");
    let delete = || refused("FailedDelete", "2030-01-01T00:01:20Z");
    let ended = json!({"status": {"phase": "Failed"}});
    for failures in [[create(), delete()], [delete(), create()]] {
        let (set, instances) = (Arc::new(set(&json!({}))), vec![vmi("a", Some("set"), &ended)]);
        let decision = decide(&Observed { set, instances, failures: failures.into(), now: now() }).unwrap();
        assert_eq!((created(&decision), deleted(&decision).len()), (0, 0));
        assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(10)));
        assert_eq!(status(&decision)["conditions"][0]["reason"], "FailedCreate");
    }
}

#[test]
fn reserved_labels_of_a_template_from_before_reach_no_vmi() {
    let labelled = |selector: Value| {
        set(&json!({"spec": {
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": {"kubevirt.io/nodeName": "n"}}},
        }}))
    };
    let decision = decided(&labelled(json!({})), &[]);
    assert_eq!(created(&decision), 2);
    for effect in &decision.effects {
        if let Effect::Create { object, .. } = effect {
            assert_eq!(object["metadata"]["labels"], json!({"app": "x"}));
        }
    }
    // One that such a label is needed for would never be counted, and others be made without end.
    assert_eq!(created(&decided(&labelled(json!({"kubevirt.io/nodeName": "n"})), &[])), 0);
}
