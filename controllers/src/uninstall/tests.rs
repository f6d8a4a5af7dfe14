//! Tests of the end of the KubeVirt object.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

/// Seconds after the deletion of the KubeVirt object.
fn later(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_893_456_000 + seconds).unwrap()
}

const REMOVE: &str = "RemoveWorkloads";
const BLOCK: &str = "BlockUninstallIfWorkloadsExist";

fn kubevirt(strategy: &str, held: bool, deleted: bool) -> KubeVirt {
    let mut finalizers = vec!["example.com/other"];
    finalizers.extend(held.then_some(finalizer::KUBEVIRT));
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {
            "name": "kubevirt", "namespace": "kubevirt", "resourceVersion": "1", "finalizers": finalizers,
            "deletionTimestamp": deleted.then_some("2030-01-01T00:00:00Z"),
        },
        "spec": {"uninstallStrategy": strategy},
    }))
    .unwrap()
}

/// Returns the finalizers that a decision sets, and the deletions as `kind name`.
fn done(decision: Decision) -> (Option<Value>, Vec<String>) {
    let (mut finalizers, mut deleted) = (None, Vec::new());
    for effect in decision.effects {
        match effect {
            Effect::Patch { kind: Kind::KubeVirt, patch, resource_version: Some(_), .. } => {
                finalizers = Some(patch["metadata"]["finalizers"].clone());
            }
            Effect::Delete { kind, name, uid: Some(_), options, .. } => {
                assert!(options.independent && options.failure.is_some());
                deleted.push(format!("{} {name}", kind.kind()));
            }
            other => panic!("{other:?}"),
        }
    }
    (finalizers, deleted)
}

#[test]
fn finalizer_is_set_while_workloads_need_it() {
    let counts = |vmis, vms, replica_sets| Counts { vmis, vms, replica_sets };
    // strategy, workloads, finalizer is set, object is deleted; finalizer is set afterwards
    for (strategy, counts, held, deleted, after) in [
        ("", counts(0, 0, 0), false, false, false),
        ("", counts(0, 0, 0), true, false, false),
        ("", counts(0, 3, 1), false, false, false),
        ("", counts(1, 0, 0), false, false, true),
        ("", counts(1, 0, 0), true, false, true),
        (BLOCK, counts(0, 1, 0), false, false, true),
        (BLOCK, counts(0, 0, 1), false, false, true),
        (REMOVE, counts(0, 1, 0), false, false, true),
        (REMOVE, counts(0, 0, 0), true, false, false),
        // The object is deleted although VMIs exist: a VM started meanwhile, or the webhook was not there.
        ("", counts(1, 1, 0), true, true, true),
        ("", counts(0, 1, 0), true, true, false),
        (BLOCK, counts(0, 1, 1), true, true, false),
        // Too late.
        ("", counts(1, 1, 0), false, true, false),
        (REMOVE, counts(1, 1, 0), false, true, false),
    ] {
        let case = format!("{strategy:?} {counts:?} {held} {deleted}");
        let (set, removed) = done(decide(&kubevirt(strategy, held, deleted), counts, &Workloads::default(), later(9)));
        let mut finalizers = vec!["example.com/other"];
        finalizers.extend(after.then_some(finalizer::KUBEVIRT));
        assert_eq!(set, (held != after).then(|| json!(finalizers)), "{case}");
        assert_eq!(removed, Vec::<String>::new(), "{case}");
    }
}

/// An object: `deleting` with these finalizers, controlled by the object with the UID `owner`.
fn object<T: DeserializeOwned>(
    kind: &str,
    name: &str,
    spec: &Value,
    finalizers: Option<&[&str]>,
    owner: &str,
) -> Arc<T> {
    let owners = json!([{
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "o", "uid": owner, "controller": true,
    }]);
    Arc::new(
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": kind, "spec": spec,
            "metadata": {
                "name": name, "namespace": "n", "uid": name, "finalizers": finalizers.unwrap_or_default(),
                "deletionTimestamp": finalizers.map(|_| "2030-01-01T00:00:00Z"),
                "ownerReferences": if owner.is_empty() { json!([]) } else { owners },
            },
        }))
        .unwrap(),
    )
}

fn vm(name: &str, deleting: Option<&[&str]>) -> Arc<VirtualMachine> {
    object("VirtualMachine", name, &json!({"template": {"spec": {"domain": {"devices": {}}}}}), deleting, "")
}

fn vmi(name: &str, deleting: Option<&[&str]>, owner: &str) -> Arc<VirtualMachineInstance> {
    object("VirtualMachineInstance", name, &json!({"domain": {"devices": {}}}), deleting, owner)
}

fn set(name: &str) -> Arc<VirtualMachineInstanceReplicaSet> {
    let spec = json!({"selector": {}, "template": {"spec": {"domain": {"devices": {}}}}});
    object("VirtualMachineInstanceReplicaSet", name, &spec, None, "")
}

fn pool(name: &str, deleting: Option<&[&str]>) -> Arc<VirtualMachinePool> {
    object("VirtualMachinePool", name, &json!({"selector": {}, "virtualMachineTemplate": {}}), deleting, "")
}

/// A VM that a pool controls.
fn vm_of_pool(name: &str, owner: &str) -> Arc<VirtualMachine> {
    let spec = json!({"template": {"spec": {"domain": {"devices": {}}}}});
    object("VirtualMachine", name, &spec, None, owner)
}

fn migration(name: &str, phase: &str) -> Arc<VirtualMachineInstanceMigration> {
    let migration: Arc<VirtualMachineInstanceMigration> =
        object("VirtualMachineInstanceMigration", name, &json!({"vmiName": "a"}), None, "");
    let mut value = serde_json::to_value(&*migration).unwrap();
    value["status"] = json!({"phase": phase});
    Arc::new(serde_json::from_value(value).unwrap())
}

#[test]
fn workloads_are_removed_and_then_the_finalizer() {
    let released = Some(json!(["example.com/other"]));
    let ours: &[&str] = &["kubevirt.io/virtualMachineControllerFinalize"];
    let pools: &[&str] = &["pool.kubevirt.io/finalizer"];
    let foreign: &[&str] = &["example.com/finalizer"];
    for (workloads, deleted, finalizers) in [
        (Workloads::default(), vec![], released.clone()),
        (
            Workloads {
                vms: vec![vm("a", None), vm("b", Some(ours))],
                vmis: vec![
                    vmi("a", None, "a"),
                    vmi("of-set", None, "set"),
                    vmi("lonely", None, ""),
                    vmi("orphan", None, "gone"),
                    vmi("ending", Some(&["kubevirt.io/foregroundDeleteVirtualMachine"]), ""),
                ],
                replica_sets: vec![set("set")],
                migrations: vec![migration("over", "Succeeded"), migration("running", "Running")],
                ..Workloads::default()
            },
            vec![
                "VirtualMachine a",
                "VirtualMachineInstanceReplicaSet set",
                "VirtualMachineInstance lonely",
                "VirtualMachineInstance orphan",
                "VirtualMachineInstanceMigration over",
            ],
            None,
        ),
        (Workloads { vms: vec![vm("b", Some(ours))], ..Workloads::default() }, vec![], None),
        // A pool would make its VMs again.
        (
            Workloads { pools: vec![pool("p", None)], vms: vec![vm_of_pool("p-0", "p")], ..Workloads::default() },
            vec!["VirtualMachinePool p"],
            None,
        ),
        (Workloads { pools: vec![pool("p", Some(pools))], ..Workloads::default() }, vec![], None),
        (Workloads { migrations: vec![migration("m", "Running")], ..Workloads::default() }, vec![], None),
        // Others are responsible for the rest.
        (Workloads { vms: vec![vm("b", Some(foreign))], ..Workloads::default() }, vec![], released.clone()),
    ] {
        let decision = decide(&kubevirt(REMOVE, true, true), Counts::default(), &workloads, later(9));
        assert_eq!(decision.wake_after, (!deleted.is_empty()).then_some(RETRY), "{workloads:?}");
        let (set, removed) = done(decision);
        assert_eq!(
            (removed, set),
            (deleted.iter().map(|text| (*text).to_owned()).collect(), finalizers),
            "{workloads:?}"
        );
    }
}

#[test]
fn workloads_are_deleted_when_the_policy_permits_it() {
    let workloads = Workloads { vms: vec![vm("a", None)], ..Workloads::default() };
    for (seconds, deletions, wait) in [(0, 0, 2), (1, 0, 1), (2, 1, 5), (9, 1, 5), (-9, 0, 2)] {
        let decision = decide(&kubevirt(REMOVE, true, true), Counts::default(), &workloads, later(seconds));
        assert_eq!(
            (decision.effects.len(), decision.wake_after),
            (deletions, Some(Duration::from_secs(wait))),
            "{seconds}"
        );
    }
}
