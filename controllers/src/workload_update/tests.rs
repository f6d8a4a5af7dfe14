//! Tests of evictions.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;

fn deployment() -> Deployment {
    Deployment::of("kubevirt", "registry.example/virt-launcher", "", "v1")
}

fn observed<'a>(
    kubevirt: &'a KubeVirt,
    deployment: &'a Deployment,
    outdated: &'a [VmiWithPods],
    last_batch: Option<Timestamp>,
) -> Observed<'a> {
    Observed { kubevirt, deployment, outdated_count: outdated.len(), outdated, last_batch, now: now() }
}

fn now() -> Timestamp {
    "2030-01-01T00:10:00Z".parse().unwrap()
}

fn kubevirt(strategy: &Value, status: &Value) -> KubeVirt {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"workloadUpdateStrategy": strategy}, "status": status,
    }))
    .unwrap()
}

fn vmi(number: usize, status: &Value, deleted: Option<&str>) -> VmiWithPods {
    let pod = CachedPod {
        metadata: serde_json::from_value(json!({
            "name": format!("virt-launcher-m{number}-x"), "namespace": "d", "uid": format!("p{number}"),
            "deletionTimestamp": deleted,
        }))
        .unwrap(),
        phase: "Running".to_owned(),
        ..CachedPod::default()
    };
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": format!("m{number}"), "namespace": "d", "uid": format!("u{number}")},
        "spec": {"domain": {"devices": {}}}, "status": status,
    });
    VmiWithPods { vmi: Arc::new(serde_json::from_value(vmi).unwrap()), pods: vec![Arc::new(pod)] }
}

fn evicted(decision: &Decision) -> Vec<String> {
    let mut names: Vec<String> = decision
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Evict { name, .. } => name.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    names.sort();
    names
}

#[test]
fn vmis_are_evicted_in_batches_according_to_the_strategy() {
    let running: Vec<VmiWithPods> = (0..12).map(|number| vmi(number, &json!({"phase": "Running"}), None)).collect();
    let deployment = deployment();
    let id = deployment.id();
    let deployed = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": id});
    let changing = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": "b"});
    // The status before a new virt-controller has written it.
    let former = json!({"phase": "Deployed", "observedDeploymentID": "a", "targetDeploymentID": "a"});
    let evict = json!({"workloadUpdateMethods": ["Evict"]});
    let few = json!({"workloadUpdateMethods": ["Evict"], "batchEvictionSize": 3, "batchEvictionInterval": "5m0s"});
    let none = json!({"workloadUpdateMethods": ["Evict"], "batchEvictionSize": 0});
    let seconds = |seconds: u64| Some(Duration::from_secs(seconds));
    // strategy, status, time of the last batch, VMIs evicted, seconds until the next decision
    for (strategy, status, last, count, wake) in [
        (&json!({}), &deployed, None, 0, None),
        (&evict, &deployed, None, 10, seconds(60)),
        (&evict, &deployed, Some("2030-01-01T00:09:15Z"), 0, seconds(15)),
        (&evict, &deployed, Some("2030-01-01T00:09:00Z"), 10, seconds(60)),
        (&evict, &changing, None, 0, None),
        (&evict, &former, None, 0, None),
        (&evict, &json!({"phase": "Deploying"}), None, 0, None),
        (&few, &deployed, None, 3, seconds(300)),
        (&few, &deployed, Some("2030-01-01T00:09:00Z"), 0, seconds(240)),
        (&none, &deployed, None, 0, seconds(60)),
    ] {
        let kubevirt = kubevirt(strategy, status);
        let last = last.map(|last: &str| last.parse().unwrap());
        let decision = decide(&observed(&kubevirt, &deployment, &running, last));
        assert_eq!(evicted(&decision).len(), count, "{strategy} {status} {last:?}");
        assert_eq!(decision.wake_after, wake, "{strategy} {status} {last:?}");
    }
    let kubevirt = kubevirt(&evict, &deployed);
    assert_eq!(decide(&observed(&kubevirt, &deployment, &[], None)), Decision::settled());
}

#[test]
fn only_running_vmis_that_are_not_leaving_are_evicted() {
    let vmis = [
        vmi(0, &json!({"phase": "Running"}), None),
        vmi(1, &json!({"phase": "Scheduling"}), None),
        vmi(2, &json!({"phase": "Running", "evacuationNodeName": "n"}), None),
        vmi(3, &json!({"phase": "Running"}), Some("2030-01-01T00:09:59Z")),
        vmi(4, &json!({"phase": "Succeeded"}), None),
    ];
    let deployment = deployment();
    let id = deployment.id();
    let deployed = json!({"phase": "Deployed", "observedDeploymentID": id, "targetDeploymentID": id});
    let kubevirt = kubevirt(&json!({"workloadUpdateMethods": ["Evict"]}), &deployed);
    assert_eq!(evicted(&decide(&observed(&kubevirt, &deployment, &vmis, None))), ["virt-launcher-m0-x"]);
}
