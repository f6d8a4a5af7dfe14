//! Tests of the condition of a migration that waits.

use super::*;
use crate::resources::pod_warnings::Warning;

fn waiting(status: &Value) -> Value {
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == "migrationWaiting").unwrap_or(Value::Null)
}

/// Returns the condition that a decision writes.
fn shown(decision: &Decision) -> Value {
    waiting(&patch_of(decision, Kind::Migration).unwrap_or_default()["status"])
}

fn unschedulable(message: &str) -> Arc<CachedPod> {
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message});
    target(&json!({"spec": {"nodeName": null},
        "status": {"phase": "Pending", "containerStatuses": null, "conditions": [condition]}}))
}

#[test]
fn migration_says_what_it_waits_for() {
    let vmi = vmi(&json!({}));
    let pending = migration("Pending", &json!({}));
    let scheduling = migration("Scheduling", &json!({}));
    let without_target = [source()];
    let unschedulable = [source(), unschedulable("0/2 nodes are available")];
    let starting = [source(), target(&json!({"status": {"phase": "Pending", "containerStatuses": null}}))];
    let metadata = serde_json::from_value(json!({"name": "virt-launcher-m-t", "namespace": "d", "uid": "t"})).unwrap();
    let warning = Some(Warning { reason: "FailedMount", message: "no secret".to_owned() });
    let warnings = [Arc::new(PodWarning { metadata, read_at: now(), warning })];
    let unoffered = ["cpu-model.node.kubevirt.io/Haswell".to_owned()];
    let failure =
        Failure { reason: event::FAILED_CREATE, message: "exceeded quota: q".to_owned(), retry_at: now(), attempts: 1 };
    let node = Full::Node("a".to_owned());
    let of = |migration, pods| Observed { is_admitted: false, ..observed(migration, Some(&vmi), pods) };
    for (observed, reason, message) in [
        (
            Observed { full: Some(Full::Cluster), ..of(&pending, &without_target) },
            "ParallelMigrationsPerCluster",
            "as many migrations are under way as the cluster allows: 5 (parallelMigrationsPerCluster)",
        ),
        (
            Observed { full: Some(node), ..of(&pending, &without_target) },
            "ParallelOutboundMigrationsPerNode",
            "as many migrations leave node a as a node allows: 2 (parallelOutboundMigrationsPerNode)",
        ),
        (
            Observed {
                held: Some("snapshot \"s\" in progress".to_owned()),
                ..observed(&pending, Some(&vmi), &without_target)
            },
            "OperationInProgress",
            "the data of the VM must hold still: snapshot \"s\" in progress",
        ),
        (
            Observed { failures: Some(failure.clone()).into(), ..of(&pending, &without_target) },
            "FailedCreate",
            "cannot create the target pod: exceeded quota: q",
        ),
        (
            Observed { unoffered: unoffered.to_vec(), ..of(&scheduling, &unschedulable) },
            "TargetPodUnschedulable",
            "target pod virt-launcher-m-t has no node: 0/2 nodes are available; no other node offers the CPU model Haswell",
        ),
        (
            Observed { warnings: warnings.to_vec(), ..of(&scheduling, &starting) },
            "TargetPodNotStarted",
            "target pod virt-launcher-m-t does not start: FailedMount: no secret",
        ),
    ] {
        let condition = shown(&decide(&observed).unwrap());
        assert_eq!((&condition["reason"], &condition["message"]), (&json!(reason), &json!(message)));
        assert_eq!(condition["status"], "True");
    }
    assert_eq!(shown(&decide(&of(&pending, &without_target)).unwrap()), Value::Null);
}

#[test]
fn short_wait_and_repeated_texts_are_not_written() {
    let vmi = vmi(&json!({}));
    let begun = json!([{"phase": "Pending", "phaseTransitionTimestamp": "2030-01-01T00:09:57Z"}]);
    let new = migration("Pending", &json!({"status": {"phaseTransitionTimestamps": begun}}));
    let pods = [source()];
    let full = Full::Cluster;
    let decision =
        decide(&Observed { is_admitted: false, full: Some(full), ..observed(&new, Some(&vmi), &pods) }).unwrap();
    assert_eq!(shown(&decision), Value::Null);
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(2)));
    let known = |probed: &str| {
        let message = "target pod virt-launcher-m-t has no node: a";
        let condition = json!({"type": "migrationWaiting", "status": "True", "reason": "TargetPodUnschedulable",
            "message": message, "lastProbeTime": probed});
        migration("Scheduling", &json!({"status": {"conditions": [condition]}}))
    };
    for (probed, text, is_written) in [
        ("2030-01-01T00:00:00Z", "a", false),
        ("2030-01-01T00:09:55Z", "b", false),
        ("2030-01-01T00:00:00Z", "b", true),
    ] {
        let decision = decided(&known(probed), Some(&vmi), &[source(), unschedulable(text)]);
        assert_eq!(!shown(&decision).is_null(), is_written, "{probed} {text}");
    }
    // The wait has ended.
    let running = [source(), target(&json!({}))];
    let patch = patch_of(&decided(&known("2030-01-01T00:00:00Z"), Some(&vmi), &running), Kind::Migration).unwrap();
    assert_eq!(patch["status"]["conditions"], Value::Null, "{patch}");
}
