//! Tests of decisions about nodes.

use std::sync::Arc;

use serde_json::Value;

use super::*;

/// More than the longest silence.
const LONG: Option<Duration> = Some(Duration::from_secs(600));

fn node() -> CachedNode {
    let metadata = json!({"name": "n", "resourceVersion": "7", "labels": {"kubevirt.io/schedulable": "true"}});
    CachedNode { metadata: serde_json::from_value(metadata).unwrap(), ..CachedNode::default() }
}

fn vmi(phase: &str, pod: Option<CachedPod>) -> VmiWithPods {
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "d", "uid": "u", "resourceVersion": "3"},
        "spec": {"domain": {"devices": {}}},
        "status": {"phase": phase, "nodeName": "n"},
    });
    VmiWithPods { vmi: Arc::new(serde_json::from_value(vmi).unwrap()), pods: pod.into_iter().map(Arc::new).collect() }
}

fn decided(node: Option<&CachedNode>, silence: Option<Duration>, vmis: &[VmiWithPods]) -> Decision {
    let set = CachedWorkload { wanted: 1, ready: 1, ..CachedWorkload::default() };
    decide(&Observed {
        key: Key::new("", "n"),
        node: node.cloned().map(Arc::new),
        vmis: vmis.to_vec(),
        has_handler: true,
        daemon_set: Some(Arc::new(set)),
        frequencies: BTreeSet::new(),
        silence,
    })
    .unwrap()
}

fn patches(decision: &Decision) -> Vec<Value> {
    let patch = |effect: &Effect| match effect {
        Effect::Patch { patch, .. } => Some(patch.clone()),
        _ => None,
    };
    decision.effects.iter().filter_map(patch).collect()
}

#[test]
fn recent_heartbeat_changes_nothing_and_sets_the_next_decision() {
    let decision = decided(Some(&node()), Some(Duration::from_secs(120)), &[vmi("Running", None)]);
    assert!(decision.effects.is_empty());
    assert_eq!(decision.wake_after, Some(Duration::from_secs(180)));
}

#[test]
fn node_without_virt_handler_is_left_alone() {
    assert_eq!(decided(Some(&node()), None, &[]), Decision::settled());
}

#[test]
fn silent_node_is_marked_once() {
    let mut silent = node();
    let limit = Some(Duration::from_secs(300));
    let decision = decided(Some(&silent), limit, &[]);
    assert_eq!(patches(&decision), [json!({"metadata": {"labels": {"kubevirt.io/schedulable": "false"}}})]);
    silent.metadata.labels = None;
    assert!(decided(Some(&silent), limit, &[]).effects.is_empty());
}

#[test]
fn vmi_without_live_pod_on_a_silent_node_fails_and_one_with_a_live_pod_stays() {
    let silent = node();
    let failed = json!({"status": {"phase": "Failed", "reason": "NodeUnresponsive"}});
    let decision = decided(Some(&silent), LONG, &[vmi("Running", None)]);
    assert!(patches(&decision).contains(&failed));
    let alive = CachedPod { phase: "Running".to_owned(), ..CachedPod::default() };
    let decision = decided(Some(&silent), LONG, &[vmi("Running", Some(alive))]);
    assert!(!patches(&decision).contains(&failed));
    let decision = decided(Some(&silent), LONG, &[vmi("Scheduling", None)]);
    assert!(!patches(&decision).contains(&failed));
}

#[test]
fn vmi_that_moves_to_another_node_fails_only_without_a_pod_there() {
    let silent = node();
    let on = |node: &str, phase: &str| CachedPod {
        phase: phase.to_owned(),
        node_name: Some(node.to_owned()),
        ..CachedPod::default()
    };
    let moving = json!({"migrationUid": "x"});
    let ended = json!({"migrationUid": "x", "completed": true, "failed": true});
    // Pod, state of the migration; the VMI fails.
    for (pod, state, fails) in [
        (on("n", "Running"), &Value::Null, false),
        (on("n", "Failed"), &Value::Null, true),
        // The guest may run there.
        (on("target", "Running"), &moving, false),
        (on("target", "Failed"), &moving, true),
        // It has never left the silent node.
        (on("target", "Running"), &ended, true),
        (on("target", "Running"), &Value::Null, true),
    ] {
        let mut vmi = vmi("Running", Some(pod.clone()));
        let mut object = serde_json::to_value(&*vmi.vmi).unwrap();
        object["status"]["migrationState"] = state.clone();
        vmi.vmi = Arc::new(serde_json::from_value(object).unwrap());
        let failed = patches(&decided(Some(&silent), LONG, &[vmi])).contains(&json!({
            "status": {"phase": "Failed", "reason": "NodeUnresponsive"},
        }));
        assert_eq!(failed, fails, "{} {} {state}", pod.node_name.as_deref().unwrap(), pod.phase);
    }
}

#[test]
fn node_without_virt_handler_is_reported_once_the_others_have_settled() {
    let silent = node();
    let alive = CachedPod { phase: "Running".to_owned(), ..CachedPod::default() };
    let vmis = [vmi("Running", Some(alive))];
    // scheduled pods of virt-handler, ready ones, of two; event
    for (scheduled, ready, shown) in [(2, 1, true), (1, 2, true), (1, 1, false)] {
        let set = CachedWorkload { wanted: 2, scheduled, ready, ..CachedWorkload::default() };
        let observed = Observed {
            key: Key::new("", "n"),
            node: Some(Arc::new(silent.clone())),
            vmis: vmis.to_vec(),
            has_handler: false,
            daemon_set: Some(Arc::new(set)),
            frequencies: BTreeSet::new(),
            silence: LONG,
        };
        let effects = decide(&observed).unwrap().effects;
        let reports = |effect: &Effect| matches!(effect, Effect::Event(note) if note.message.contains("orphaned"));
        assert_eq!(effects.iter().any(reports), shown, "{scheduled} {ready}");
    }
}

#[test]
fn vmi_on_a_node_that_is_gone_fails_when_its_pod_is_gone_too() {
    let decision = decided(None, None, &[vmi("Running", None)]);
    assert_eq!(patches(&decision), [json!({"status": {"phase": "Failed", "reason": "NodeUnresponsive"}})]);
}
