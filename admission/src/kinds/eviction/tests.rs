use api::config::ClusterConfig;

use super::*;
use crate::{
    context::{Lookups, Selection},
    registry::{Evaluation, Review},
};

fn vmi(strategy: Value, status: Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "ns", "uid": "u"},
        "spec": {"evictionStrategy": strategy, "domain": {"devices": {}}},
        "status": status,
    }))
    .unwrap()
}

fn migratable() -> Value {
    json!([{"type": "LiveMigratable", "status": "True"}])
}

#[test]
fn eviction_strategy_decides() {
    let at_node = |conditions: Value| json!({"nodeName": "n1", "conditions": conditions});
    let stays = |text: &str| Verdict::Refuse(text.to_owned());
    let cannot = stays("VMI m is configured with an eviction strategy but is not live-migratable");
    for (strategy, status, want) in [
        (json!("None"), at_node(migratable()), Verdict::Evict),
        (json!("Pray"), at_node(migratable()), Verdict::Evict),
        (Value::Null, at_node(migratable()), Verdict::Evict),
        (json!("LiveMigrate"), at_node(json!([])), cannot.clone()),
        (json!("LiveMigrate"), at_node(json!([{"type": "LiveMigratable", "status": "False"}])), cannot),
        (json!("LiveMigrate"), at_node(migratable()), Verdict::Mark),
        (json!("LiveMigrateIfPossible"), at_node(json!([])), Verdict::Evict),
        (json!("LiveMigrateIfPossible"), at_node(migratable()), Verdict::Mark),
        (json!("External"), at_node(json!([])), Verdict::Mark),
        (
            json!("External"),
            json!({"nodeName": "n1", "evacuationNodeName": "n1"}),
            stays("Evacuation in progress: Eviction triggered evacuation of VMI \"ns/m\""),
        ),
        // The mark of a node that the VMI has left.
        (json!("External"), json!({"nodeName": "n1", "evacuationNodeName": "n0"}), Verdict::Mark),
        // The target pod of a migration.
        (
            json!("LiveMigrate"),
            json!({"nodeName": "n2", "evacuationNodeName": "n2", "conditions": migratable()}),
            stays("Evacuation in progress: Eviction triggered evacuation of VMI \"ns/m\""),
        ),
        (
            json!("LiveMigrate"),
            json!({"nodeName": "n2", "conditions": migratable()}),
            stays("Eviction request for target Pod"),
        ),
        (json!("External"), json!({"nodeName": "n2"}), stays("Eviction request for target Pod")),
        (json!("External"), json!({}), stays("Eviction request for target Pod")),
    ] {
        assert_eq!(
            decide(&vmi(strategy.clone(), status.clone()), "n1", &EvictionStrategy::None),
            want,
            "{strategy} {status}"
        );
    }
    let without_strategy = vmi(Value::Null, at_node(migratable()));
    assert_eq!(decide(&without_strategy, "n1", &EvictionStrategy::LiveMigrate), Verdict::Mark);
}

/// A cluster with at most one pod, its owner and one VMI.
struct Cluster {
    pod: LookupResult,
    owner: LookupResult,
    vmi: LookupResult,
    patch_error: Option<&'static str>,
    patches: Vec<(Value, bool)>,
}

fn object(object: Value) -> LookupResult {
    LookupResult::Object(Some(object))
}

fn failed(message: &str) -> LookupResult {
    LookupResult::Failed { code: 500, message: message.to_owned() }
}

/// Returns a launcher pod with changes to its owner reference.
fn launcher_pod(owner: Value, phase: &str) -> Value {
    let mut reference = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "m", "uid": "u", "controller": true,
    });
    json_patch::merge(&mut reference, &owner);
    json!({
        "metadata": {
            "name": "virt-launcher-m-x", "namespace": "ns", "uid": "p", "labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"kubevirt.io/domain": "m"},
            "ownerReferences": [reference],
        },
        "spec": {"nodeName": "n1", "containers": []},
        "status": {"phase": phase},
    })
}

fn running_launcher() -> Value {
    launcher_pod(json!({}), "Running")
}

fn hotplug_pod() -> Value {
    json!({
        "metadata": {
            "name": "hp-volume-x", "namespace": "ns", "labels": {"kubevirt.io": "hotplug-disk"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "virt-launcher-m-x", "uid": "p", "controller": true},
            ],
        },
    })
}

impl Cluster {
    fn new(pod: Value, vmi: Value) -> Self {
        Self {
            pod: object(pod),
            owner: object(running_launcher()),
            vmi: object(vmi),
            patch_error: None,
            patches: vec![],
        }
    }

    /// Returns code and message of the refusal; `None` if the eviction is allowed.
    fn evict(&mut self, eviction: &Value, dry_run: bool) -> Option<(u16, String)> {
        let name = match &self.pod {
            LookupResult::Object(Some(pod)) => pod["metadata"]["name"].as_str().unwrap().to_owned(),
            _ => "p".to_owned(),
        };
        let body = json!({"request": {
            "uid": "u", "operation": "CREATE", "namespace": "ns", "name": name, "subResource": "eviction",
            "resource": {"group": "", "version": "v1", "resource": "pods"}, "object": eviction, "dryRun": dry_run,
        }});
        let review = Review::parse("/pod-eviction-validate", body.to_string().as_bytes()).unwrap();
        let mut lookups = Lookups::new();
        loop {
            match review.evaluate(&ClusterConfig::default(), "kubevirt", &lookups) {
                Ok(Evaluation { review: mut result, effects }) => {
                    for effect in effects {
                        assert_eq!((effect.plural, effect.name.as_str()), (VMIS, "m"));
                        self.patches.push((json!(effect.patch), effect.dry_run));
                        if let Some(error) = self.patch_error {
                            result = review.effect_failed(&effect, error, result);
                        }
                    }
                    assert_eq!(result.response.allowed, result.response.status.is_none());
                    return result.response.status.map(|status| (status.code, status.message));
                }
                Err(queries) => {
                    for query in queries {
                        let result = self.read(&query, &name);
                        lookups.insert(query, result);
                    }
                }
            }
        }
    }

    fn read(&self, query: &ObjectQuery, pod: &str) -> LookupResult {
        match &query.selection {
            Selection::Get { name } if query.plural == "pods" && name == pod => self.pod.clone(),
            Selection::Get { .. } if query.plural == "pods" => self.owner.clone(),
            Selection::Get { .. } => self.vmi.clone(),
            other => panic!("unexpected query {other:?}"),
        }
    }
}

fn plain_vmi(strategy: &str, conditions: Value) -> Value {
    serde_json::to_value(vmi(json!(strategy), json!({"nodeName": "n1", "conditions": conditions}))).unwrap()
}

#[test]
fn other_pods_are_evicted() {
    let other = |metadata: Value| json!({"metadata": metadata});
    for pod in [
        other(json!({"name": "virt-launcher-web", "namespace": "ns"})),
        other(json!({"name": "p", "namespace": "ns", "labels": {"kubevirt.io": "virt-api"}})),
        launcher_pod(json!({"kind": "ReplicaSet"}), "Running"),
        launcher_pod(json!({"apiVersion": "example.org/v1"}), "Running"),
        launcher_pod(json!({"controller": null}), "Running"),
        launcher_pod(json!({}), "Succeeded"),
        launcher_pod(json!({}), "Failed"),
    ] {
        let mut cluster = Cluster::new(pod.clone(), Value::Null);
        cluster.vmi = failed("no VMI is read");
        assert_eq!(cluster.evict(&json!({}), false), None, "{pod}");
    }
    let mut cluster = Cluster::new(Value::Null, Value::Null);
    cluster.pod = LookupResult::Object(None);
    assert_eq!(cluster.evict(&json!({}), false), None);
}

#[test]
fn pod_that_cannot_be_read_stays() {
    let mut cluster = Cluster::new(Value::Null, Value::Null);
    cluster.pod = failed("no answer");
    let want = "kubevirt failed getting the pod: no answer".to_owned();
    assert_eq!(cluster.evict(&json!({}), false), Some((429, want)));
}

#[test]
fn launchers_are_evicted_by_the_strategy_of_their_vmi() {
    for (strategy, conditions, want) in [
        ("None", json!([]), None),
        ("LiveMigrateIfPossible", json!([]), None),
        (
            "LiveMigrate",
            json!([]),
            Some((429, "VMI m is configured with an eviction strategy but is not live-migratable".to_owned())),
        ),
    ] {
        let mut cluster = Cluster::new(running_launcher(), plain_vmi(strategy, conditions));
        assert_eq!(cluster.evict(&json!({}), false), want, "{strategy}");
        assert!(cluster.patches.is_empty());
    }
}

#[test]
fn launcher_stays_while_its_vmi_cannot_be_read() {
    let mut cluster = Cluster::new(running_launcher(), Value::Null);
    cluster.vmi = failed("no answer");
    let want = "kubevirt failed getting the vmi: no answer".to_owned();
    assert_eq!(cluster.evict(&json!({}), false), Some((429, want)));
}

#[test]
fn vmi_that_does_not_exist_blocks_no_drain() {
    let held = || plain_vmi("LiveMigrate", json!([]));
    let mut other = held();
    other["metadata"]["uid"] = json!("another");
    for vmi in [LookupResult::Object(None), object(other)] {
        let mut cluster = Cluster::new(running_launcher(), Value::Null);
        cluster.vmi = vmi.clone();
        assert_eq!(cluster.evict(&json!({}), false), None, "{vmi:?}");
    }
    for owner in [json!({"uid": "another"}), json!({"uid": ""})] {
        assert_eq!(
            Cluster::new(launcher_pod(owner.clone(), "Running"), held()).evict(&json!({}), false),
            None,
            "{owner}"
        );
    }
    assert!(Cluster::new(running_launcher(), held()).evict(&json!({}), false).is_some());
}

#[test]
fn launcher_is_recognized_without_label_and_annotation() {
    let mut bare = running_launcher();
    bare["metadata"]["labels"] = json!({});
    bare["metadata"]["annotations"] = json!({"kubevirt.io/domain": "other"});
    let refusal = "VMI m is configured with an eviction strategy but is not live-migratable".to_owned();
    assert_eq!(Cluster::new(bare, plain_vmi("LiveMigrate", json!([]))).evict(&json!({}), false), Some((429, refusal)));
}

#[test]
fn migratable_vmi_is_marked_for_evacuation() {
    let here = json!({"op": "test", "path": "/status/nodeName", "value": "n1"});
    let mark = json!({"op": "add", "path": "/status/evacuationNodeName", "value": "n1"});
    let descheduler = json!({"metadata": {"annotations": {"requested-by": "sigs.k8s.io/descheduler"}}});
    let whole =
        json!({"op": "add", "path": "/metadata/annotations", "value": {"kubevirt.io/eviction-source": "descheduler"}});
    for (eviction, dry_run, want) in [
        (json!({}), false, (json!([here, mark]), false)),
        (json!({}), true, (json!([here, mark]), true)),
        (json!({"deleteOptions": {"dryRun": ["All"]}}), false, (json!([here, mark]), true)),
        (descheduler.clone(), false, (json!([here, mark, whole]), false)),
    ] {
        let mut cluster = Cluster::new(running_launcher(), plain_vmi("LiveMigrate", migratable()));
        let refusal = (429, "Eviction triggered evacuation of VMI \"ns/m\"".to_owned());
        assert_eq!(cluster.evict(&eviction, dry_run), Some(refusal));
        assert_eq!(cluster.patches, [want]);
    }

    let mut annotated = plain_vmi("LiveMigrate", migratable());
    annotated["metadata"]["annotations"] = json!({"a": "b"});
    let mut cluster = Cluster::new(running_launcher(), annotated);
    cluster.evict(&descheduler, false);
    assert_eq!(
        cluster.patches[0].0[2],
        json!({"op": "add", "path": "/metadata/annotations/kubevirt.io~1eviction-source", "value": "descheduler"})
    );

    let mut cluster = Cluster::new(running_launcher(), plain_vmi("LiveMigrate", migratable()));
    cluster.patch_error = Some("conflict");
    let refusal = (429, "kubevirt failed marking the vmi for eviction: conflict".to_owned());
    assert_eq!(cluster.evict(&json!({}), false), Some(refusal));

    let mut cluster = Cluster::new(running_launcher(), plain_vmi("LiveMigrate", migratable()));
    let refusal = cluster.evict(&json!({"metadata": 3}), false).unwrap();
    assert!(refusal.1.starts_with("failed to parse the eviction object: "), "{}", refusal.1);
    assert!(cluster.patches.is_empty());
}

#[test]
fn hotplug_pods_stay_while_their_launcher_runs() {
    let vmi = || plain_vmi("None", json!([]));
    let mut cluster = Cluster::new(hotplug_pod(), vmi());
    let refusal = "cannot evict hotplug pod: hp-volume-x associated with running vmi: m in namespace ns";
    assert_eq!(cluster.evict(&json!({}), false), Some((429, refusal.to_owned())));

    let mut cluster = Cluster::new(hotplug_pod(), vmi());
    cluster.owner = failed("no answer");
    let refusal = "failed getting owner for hotplug pod: no answer";
    assert_eq!(cluster.evict(&json!({}), false), Some((429, refusal.to_owned())));

    let mut cluster = Cluster::new(hotplug_pod(), vmi());
    cluster.vmi = failed("no answer");
    let refusal = "kubevirt failed getting the vmi: no answer";
    assert_eq!(cluster.evict(&json!({}), false), Some((429, refusal.to_owned())));

    let mut unowned = hotplug_pod();
    unowned["metadata"]["ownerReferences"] = json!([]);
    assert_eq!(Cluster::new(unowned, vmi()).evict(&json!({}), false), None);
    let mut of_another = hotplug_pod();
    of_another["metadata"]["ownerReferences"][0]["uid"] = json!("another");
    assert_eq!(Cluster::new(of_another, vmi()).evict(&json!({}), false), None);
    for owner in [
        LookupResult::Object(None),
        object(json!({"metadata": {"name": "virt-launcher-m-x"}})),
        object(launcher_pod(json!({"kind": "Invented"}), "Running")),
        object(launcher_pod(json!({"uid": "another"}), "Running")),
        object(launcher_pod(json!({}), "Succeeded")),
    ] {
        let mut cluster = Cluster::new(hotplug_pod(), vmi());
        cluster.owner = owner.clone();
        assert_eq!(cluster.evict(&json!({}), false), None, "{owner:?}");
    }
    let mut cluster = Cluster::new(hotplug_pod(), vmi());
    cluster.vmi = LookupResult::Object(None);
    assert_eq!(cluster.evict(&json!({}), false), None);
}
