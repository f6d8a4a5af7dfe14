//! Tests of pools.

mod disks;
mod scale;
mod updates;

use std::sync::Arc;

use api::pool::VirtualMachinePoolSpec;
use serde_json::{Value, json};

use super::*;
use crate::runtime::Effect;

/// The current time.
fn now() -> Timestamp {
    "2030-01-01T01:00:00Z".parse().unwrap()
}

/// Returns a pool of two VMs, changed by a merge patch.
fn pool(change: &Value) -> VirtualMachinePool {
    let mut pool = json!({
        "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool",
        "metadata": {"name": "p", "namespace": "n", "uid": "pool", "resourceVersion": "1", "generation": 1},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "x"}},
            "virtualMachineTemplate": {
                "metadata": {"labels": {"app": "x"}},
                "spec": {"runStrategy": "Always", "template": {"spec": {"domain": {"devices": {}}}}},
            },
        },
    });
    json_patch::merge(&mut pool, change);
    serde_json::from_value(pool).unwrap()
}

/// Returns a VM of the pool with a VMI that runs, each changed by a merge patch. A VMI of `null` does not exist.
fn member(index: u32, vm: &Value, vmi: &Value) -> Member {
    let name = format!("p-{index}");
    let of_pool = json!([{
        "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool", "name": "p", "uid": "pool", "controller": true,
    }]);
    let labels = json!({"app": "x", "kubevirt.io/vm-pool-revision-name": "p-1"});
    let mut object = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {
            "name": name, "namespace": "n", "uid": format!("uid-{index}"), "resourceVersion": "1", "generation": 1,
            "labels": labels, "ownerReferences": of_pool, "creationTimestamp": format!("2030-01-01T00:00:{:02}Z", 30 - index),
        },
        "spec": {"runStrategy": "Always", "template": {"spec": {"domain": {"devices": {}}}}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "desiredGeneration": 1},
    });
    json_patch::merge(&mut object, vm);
    let mut instance = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "namespace": "n", "uid": format!("vmi-{index}"), "resourceVersion": "1", "labels": labels},
        "spec": {"domain": {"devices": {}}},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    });
    json_patch::merge(&mut instance, vmi);
    let vmi = (!vmi.is_null()).then(|| Arc::new(serde_json::from_value(instance).unwrap()));
    Member { vm: Arc::new(serde_json::from_value(object).unwrap()), vmi }
}

/// Returns VMs that run, with these numbers.
fn running(indices: &[u32]) -> Vec<Member> {
    indices.iter().map(|index| member(*index, &json!({}), &json!({}))).collect()
}

/// Returns the record of a pool's spec.
fn revision(name: &str, generation: i64, spec: &VirtualMachinePoolSpec) -> Arc<PoolRevision> {
    let revision = json!({
        "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": generation, "data": spec,
        "metadata": {"name": name, "namespace": "n", "uid": name},
    });
    let revision: k8s_openapi::api::apps::v1::ControllerRevision = serde_json::from_value(revision).unwrap();
    Arc::new(revision.into())
}

/// Returns an observation of a pool whose template is recorded as `p-1`.
fn observed(pool: VirtualMachinePool, members: Vec<Member>) -> Observed {
    let taken: Vec<_> = members.iter().filter_map(|member| manifest::index(&pool, &member.vm)).collect();
    let missing = wanted_replicas(&pool.spec).saturating_sub(members.len());
    Observed {
        free: (0..).filter(|index| !taken.contains(index)).take(missing).collect(),
        revisions: vec![revision("p-1", 1, &pool.spec)],
        left: None,
        is_tried: false,
        pool: Arc::new(pool),
        members,
        data_volumes: vec![],
        claims: vec![],
        failure: None,
        now: now(),
    }
}

/// Returns the decision as lines: verb, kind, name and the parts of a patch.
fn lines(observed: &Observed) -> Vec<String> {
    let effects = decide(observed).unwrap().effects;
    let line = |effect: &Effect| match effect {
        Effect::Create { kind, object, .. } => {
            format!("create {} {}", kind.kind(), object["metadata"]["name"].as_str().unwrap())
        }
        Effect::Delete { kind, name, uid: Some(_), options, .. } => {
            let propagation = if options.in_foreground { " in the foreground" } else { "" };
            format!("delete {} {name}{propagation}", kind.kind())
        }
        Effect::Patch { kind, name, patch, resource_version: Some(_), .. } if *kind != Kind::Pool => {
            let parts = patch.as_object().unwrap();
            let within = |part: &String| parts[part].as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(",");
            let parts: Vec<String> = parts.keys().map(|part| format!("{part}:{}", within(part))).collect();
            format!("patch {} {name} {}", kind.kind(), parts.join(" "))
        }
        Effect::Patch { kind: Kind::Pool, subresource: Some("status"), .. } => String::new(),
        Effect::Patch { kind: Kind::Pool, patch, .. } => format!("patch pool {patch}"),
        Effect::Event(event) => format!("event {}", event.reason),
        other => panic!("{other:?}"),
    };
    effects.iter().map(line).filter(|line| !line.is_empty()).collect()
}

/// Returns the status that a decision writes.
fn status(observed: &Observed) -> Value {
    let effects = decide(observed).unwrap().effects;
    let written = effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::Pool, subresource: Some("status"), patch, .. } => Some(patch["status"].clone()),
        _ => None,
    });
    written.unwrap_or(Value::Null)
}

fn failure(reason: &'static str) -> Option<Failure> {
    let retry_at = "2030-01-01T01:00:10Z".parse().unwrap();
    Some(Failure { reason, message: "denied".to_owned(), retry_at, attempts: 1 })
}

#[test]
fn status_counts_and_is_then_settled() {
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let members = vec![member(0, &json!({}), &json!({})), member(1, &unready, &json!({}))];
    let status = status(&observed(pool(&json!({})), members.clone()));
    assert_eq!(status, json!({"labelSelector": "app=x", "readyReplicas": 1, "replicas": 2}));
    let settled = observed(pool(&json!({"status": status})), members);
    assert_eq!(decide(&settled).unwrap(), Decision::settled());
}

#[test]
fn refused_writes_show_as_replica_failure_until_they_are_not_wanted() {
    let table: [(_, &[u32], _, _); 3] = [
        ("FailedCreate", &[], "FailedScaleOut", "error during scale out: denied"),
        ("FailedDelete", &[0, 1, 2], "FailedScaleIn", "error during scale in: denied"),
        ("FailedRevisionPruning", &[0, 1], "FailedRevisionPruning", "error while pruning vmpool revisions: denied"),
    ];
    for (refused, indices, reason, message) in table {
        let mut observed = observed(pool(&json!({})), running(indices));
        observed.revisions.push(revision("p-0", 0, &pool(&json!({"spec": {"maxUnavailable": 1}})).spec));
        observed.failure = failure(refused);
        let shown = status(&observed)["conditions"][0].clone();
        let shown = [&shown["type"], &shown["reason"], &shown["message"]].map(Clone::clone);
        assert_eq!(shown, [json!("ReplicaFailure"), json!(reason), json!(message)]);
        assert!(lines(&observed).contains(&format!("event {reason}")));
        // The others continue.
        let is_pruned = lines(&observed).contains(&"delete ControllerRevision p-0".to_owned());
        assert_eq!(is_pruned, refused != "FailedRevisionPruning", "{refused}");
    }
    let mut observed = observed(pool(&json!({})), running(&[0, 1]));
    observed.failure = failure("FailedCreate");
    assert_eq!(status(&observed)["conditions"], Value::Null);
}

#[test]
fn paused_pool_changes_no_vm() {
    let paused = pool(&json!({"spec": {"paused": true, "replicas": 5}}));
    assert_eq!(lines(&observed(paused.clone(), running(&[0, 1]))), ["event SuccessfulPaused"]);
    let conditions = status(&observed(paused, running(&[0, 1])))["conditions"].clone();
    assert_eq!(
        (&conditions[0]["type"], &conditions[0]["reason"]),
        (&json!("ReplicaPaused"), &json!("SuccessfulPaused"))
    );
    let resumed = pool(&json!({"status": {"conditions": conditions}}));
    assert_eq!(lines(&observed(resumed, running(&[0, 1]))), ["event SuccessfulResume"]);
}

#[test]
fn vm_whose_labels_do_not_match_is_released_before_another_is_made() {
    let other = json!({"metadata": {"labels": {"app": "y"}, "finalizers": ["pool.kubevirt.io/finalizer", "other"]}});
    let members = vec![member(0, &other, &json!({})), member(1, &json!({}), &json!({}))];
    let decision = decide(&observed(pool(&json!({})), members)).unwrap();
    let Effect::Patch { patch, .. } = &decision.effects[0] else { panic!("{decision:?}") };
    assert_eq!(patch["metadata"], json!({"ownerReferences": [], "finalizers": ["other"]}));
    assert_eq!(decision.effects.len(), 2);
}

#[test]
fn finalizer_of_kubevirt_on_a_pool_is_removed() {
    for deleted in [json!(null), json!("2030-01-01T00:00:00Z")] {
        let metadata = json!({"finalizers": ["other", "pool.kubevirt.io/finalizer"], "deletionTimestamp": deleted});
        let lines = lines(&observed(pool(&json!({"metadata": metadata})), running(&[0, 1])));
        assert_eq!(lines, [r#"patch pool {"metadata":{"finalizers":["other"]}}"#]);
    }
}
