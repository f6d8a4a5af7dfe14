//! The cost of events: the number of objects that lookups visit must not grow with the cluster.

use std::sync::Arc;

use api::config::ClusterConfig;
use clap::Parser;
use daemon::config::ConfigHandle;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Namespace, Node, PersistentVolumeClaim, Pod, ResourceQuota},
    policy::v1::PodDisruptionBudget,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::{
    options::Options,
    resources::{Resource, needs},
    runtime::{Answers, Kind, Metrics},
};

/// VMIs on each node.
const PER_NODE: usize = 10;

struct Cluster {
    caches: Arc<Caches>,
    controllers: Vec<Arc<dyn Run>>,
}

fn object<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

fn metadata(name: &str, version: usize) -> Value {
    json!({"name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": version.to_string()})
}

fn owned(mut metadata: Value, kind: &str, owner: &str) -> Value {
    metadata["ownerReferences"] = json!([{
        "apiVersion": "kubevirt.io/v1", "kind": kind, "name": owner, "uid": format!("uid-{owner}"), "controller": true,
    }]);
    metadata
}

fn template(number: usize) -> Value {
    json!({
        "domain": {"devices": {"autoattachVSOCK": true}, "cpu": {"features": [{"name": "invtsc", "policy": "require"}]}},
        "networks": [{"name": "lan", "multus": {"networkName": format!("net-{number}")}}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": format!("claim-{number}")}}],
    })
}

fn vm(number: usize, version: usize) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": metadata(&format!("m-{number}"), version),
        "spec": {
            "runStrategy": "Always",
            "instancetype": {"name": format!("type-{number}"), "kind": "VirtualMachineInstancetype"},
            "template": {"spec": template(number)},
        },
    })
}

fn vmi(number: usize, version: usize, phase: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": owned(metadata(&format!("m-{number}"), version), "VirtualMachine", &format!("m-{number}")),
        "spec": template(number),
        "status": {
            "phase": phase, "nodeName": format!("node-{}", number / PER_NODE), "VSOCKCID": 1000 + number,
            "topologyHints": {"tscFrequency": 2_000_000_000},
        },
    })
}

/// A VMI without a controller that a replica set may select.
fn orphan(number: usize, version: usize) -> Value {
    let mut vmi = vmi(number, version, "Running");
    vmi["metadata"] = metadata(&format!("o-{number}"), version);
    vmi["metadata"]["labels"] = json!({"set": format!("set-{number}")});
    vmi
}

fn replica_set(number: usize, version: usize) -> Value {
    let labels = json!({"set": format!("set-{number}")});
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": metadata(&format!("set-{number}"), version),
        "spec": {
            "replicas": 1, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"domain": {"devices": {}}}},
        },
    })
}

fn pool(number: usize, version: usize) -> Value {
    let labels = json!({"pool": format!("pool-{number}")});
    let vm = json!({"template": {"spec": {"domain": {"devices": {}}}}});
    json!({
        "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool",
        "metadata": metadata(&format!("pool-{number}"), version),
        "spec": {
            "replicas": 1, "selector": {"matchLabels": labels},
            "scaleInStrategy": {"proactive": {"statePreservation": "Offline"}},
            "virtualMachineTemplate": {"metadata": {"labels": labels}, "spec": vm},
        },
    })
}

/// The VM of a pool. From its second version on it is deleted and waits for its disks to be detached.
fn vm_of_pool(number: usize, version: usize) -> Value {
    let mut vm = vm(number, version);
    vm["metadata"] = metadata(&format!("pool-{number}-0"), version);
    vm["metadata"]["labels"] = json!({"pool": format!("pool-{number}")});
    vm["metadata"]["finalizers"] = json!(["pool.kubevirt.io/finalizer"]);
    vm["metadata"]["deletionTimestamp"] = json!((version > 1).then_some("2030-01-01T00:00:00Z"));
    vm["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool", "name": format!("pool-{number}"),
        "uid": format!("uid-pool-{number}"), "controller": true,
    }]);
    vm["spec"]["template"]["spec"]["volumes"] =
        json!([{"name": "data", "dataVolume": {"name": format!("claim-{number}")}}]);
    vm
}

fn pod(number: usize, version: usize) -> Value {
    let metadata = metadata(&format!("p-{number}"), version);
    let mut metadata = owned(metadata, "VirtualMachineInstance", &format!("m-{number}"));
    metadata["labels"] = json!({"kubevirt.io": "virt-launcher"});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": format!("node-{}", number / PER_NODE), "containers": []}, "status": {"phase": "Running"},
    })
}

fn migration(number: usize, version: usize, phase: &str) -> Value {
    let mut metadata = metadata(&format!("g-{number}"), version);
    metadata["creationTimestamp"] = json!(format!("2030-01-01T00:{:02}:{:02}Z", number / 60, number % 60));
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration", "metadata": metadata, "spec": {"vmiName": format!("m-{number}")},
        "status": {"phase": phase},
    })
}

/// A restore of a VM, or a clone of it, that waits for its snapshot.
fn copy(number: usize, version: usize, kind: &str) -> Value {
    let vm = |name: String| json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name});
    let name = format!("{}-{number}", kind.to_lowercase());
    let (group, spec) = match kind {
        "VirtualMachineRestore" => {
            let snapshot = format!("snapshot-{number}");
            ("snapshot", json!({"target": vm(format!("m-{number}")), "virtualMachineSnapshotName": snapshot}))
        }
        _ => ("clone", json!({"source": vm(format!("m-{number}")), "target": vm(format!("copy-{number}"))})),
    };
    json!({
        "apiVersion": format!("{group}.kubevirt.io/v1beta1"), "kind": kind, "metadata": metadata(&name, version), "spec": spec,
    })
}

/// A VM that a snapshot holds.
fn held_vm(number: usize, version: usize) -> Value {
    let mut vm = vm(number, version);
    vm["metadata"] = metadata(&format!("held-{number}"), version);
    vm["spec"]["runStrategy"] = json!("Halted");
    let lease = json!({"operation": "Snapshot", "name": format!("held-{number}"), "uid": format!("uid-held-{number}")});
    vm["status"] = json!({"operation": lease});
    vm
}

fn snapshot(number: usize, version: usize) -> Value {
    let name = format!("held-{number}");
    json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshot", "metadata": metadata(&name, version),
        "spec": {"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name}},
        "status": {"phase": "InProgress", "virtualMachineSnapshotContentName": format!("content-{number}")},
    })
}

fn snapshot_content(number: usize, version: usize) -> Value {
    let claim = json!({"metadata": {"name": format!("claim-{number}"), "namespace": "n"}, "spec": {}});
    let volume =
        json!({"volumeName": "data", "persistentVolumeClaim": claim, "volumeSnapshotName": format!("vs-{number}")});
    json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshotContent",
        "metadata": metadata(&format!("content-{number}"), version),
        "spec": {
            "virtualMachineSnapshotName": format!("held-{number}"), "source": {"virtualMachine": {"metadata": {}}},
            "volumeBackups": [volume],
        },
    })
}

fn node(number: usize, version: usize) -> Value {
    json!({"metadata": {
        "name": format!("node-{number}"), "uid": format!("uid-node-{number}"), "resourceVersion": version.to_string(),
        "annotations": {"kubevirt.io/heartbeat": "2999-01-01T00:00:00Z"},
        "labels": {
            "kubevirt.io/schedulable": "true", "cpu-timer.node.kubevirt.io/tsc-frequency": "2000000000",
        },
    }})
}

fn claim(number: usize, version: usize, phase: &str) -> Value {
    json!({"metadata": metadata(&format!("claim-{number}"), version), "spec": {}, "status": {"phase": phase}})
}

fn data_volume(number: usize, version: usize) -> Value {
    json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": metadata(&format!("claim-{number}"), version),
        "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "1Mi"}}}},
        "status": {"phase": "Succeeded"},
    })
}

fn data_source(number: usize, version: usize) -> Value {
    let pvc = json!({"namespace": "n", "name": format!("claim-{number}")});
    json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataSource", "metadata": metadata(&format!("claim-{number}"), version),
        "spec": {"source": {"pvc": pvc}},
    })
}

fn instancetype(number: usize, version: usize) -> Value {
    json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineInstancetype",
        "metadata": metadata(&format!("type-{number}"), version), "spec": {"cpu": {"guest": 1}, "memory": {"guest": "1Gi"}},
    })
}

fn revision(number: usize, version: usize) -> Value {
    let mut metadata = metadata(&format!("revision-{number}"), version);
    metadata["labels"] = json!({"instancetype.kubevirt.io/object-kind": "VirtualMachineInstancetype"});
    json!({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": metadata, "revision": 1})
}

fn put_instancetype(caches: &Caches, number: usize, version: usize) {
    let kind = api::instancetype::MatchedKind::Instancetype;
    let object: api::instancetype::VirtualMachineInstancetype = object(&instancetype(number, version));
    caches.instancetypes(kind).observe(crate::resources::instancetypes::CachedInstancetype::new(kind, object));
}

/// A cluster with `size` VMs, VMIs and so on.
fn cluster(size: usize) -> Cluster {
    let caches = Arc::new(Caches::default());
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    let setup = Setup {
        caches: caches.clone(),
        config: ConfigHandle::fixed(ClusterConfig::default()),
        metrics,
        options: Options::parse_from(["virt-controller", "--launcher-image", "launcher:1"]),
    };
    let controllers = controllers(&setup);
    controllers.iter().for_each(|controller| controller.watch());
    for number in 0..size {
        caches.written(Kind::VirtualMachine, vm(number, 1));
        caches.written(Kind::Instance, vmi(number, 1, "Running"));
        caches.written(Kind::Instance, orphan(number, 1));
        caches.written(Kind::ReplicaSet, replica_set(number, 1));
        caches.written(Kind::Pool, pool(number, 1));
        caches.written(Kind::VirtualMachine, vm_of_pool(number, 1));
        caches.written(Kind::VirtualMachine, vm_of_pool(number, 2));
        caches.written(Kind::Migration, migration(number, 1, "Pending"));
        caches.written(Kind::VirtualMachine, held_vm(number, 1));
        caches.written(Kind::VmSnapshot, snapshot(number, 1));
        caches.written(Kind::VmSnapshotContent, snapshot_content(number, 1));
        caches.written(Kind::VmRestore, copy(number, 1, "VirtualMachineRestore"));
        caches.written(Kind::VmClone, copy(number, 1, "VirtualMachineClone"));
        caches.written(Kind::Pod, pod(number, 1));
        caches.written(Kind::ControllerRevision, revision(number, 1));
        caches.claims.observe(object::<PersistentVolumeClaim>(&claim(number, 1, "Pending")).into());
        caches.written(Kind::DataVolume, data_volume(number, 1));
        caches.written(Kind::DataSource, data_source(number, 1));
        put_instancetype(&caches, number, 1);
        if number.is_multiple_of(PER_NODE) {
            caches.nodes.observe(object::<Node>(&node(number / PER_NODE, 1)).into());
        }
    }
    controllers.iter().for_each(|controller| controller.open_empty());
    Cluster { caches, controllers }
}

impl Cluster {
    /// Returns the number of objects visited by an event and by the reconciles that it causes, and the number of these.
    fn cost(&self, event: impl Fn(&Caches)) -> (usize, usize) {
        let before = self.caches.visited();
        event(&self.caches);
        let reconciles = self.controllers.iter().map(|controller| controller.observe_queued()).sum();
        (self.caches.visited() - before, reconciles)
    }

    fn costs(&self) -> Vec<(&'static str, (usize, usize))> {
        vec![
            ("VM changed", self.cost(|caches| caches.written(Kind::VirtualMachine, vm(0, 2)))),
            ("VMI changed", self.cost(|caches| caches.written(Kind::Instance, vmi(0, 2, "Running")))),
            ("VMI ended", self.cost(|caches| caches.written(Kind::Instance, vmi(1, 2, "Failed")))),
            ("VMI started", self.cost(|caches| caches.written(Kind::Instance, vmi(1, 3, "Pending")))),
            ("VMI deleted", self.cost(|caches| caches.deleted(Kind::Instance, Some("n"), "m-2", Some("uid-m-2")))),
            ("VMI without controller", self.cost(|caches| caches.written(Kind::Instance, orphan(0, 2)))),
            ("migration", self.cost(|caches| caches.written(Kind::Migration, migration(0, 2, "Scheduling")))),
            ("migration ended", self.cost(|caches| caches.written(Kind::Migration, migration(3, 2, "Failed")))),
            ("VM of a snapshot", self.cost(|caches| caches.written(Kind::VirtualMachine, held_vm(0, 2)))),
            ("snapshot", self.cost(|caches| caches.written(Kind::VmSnapshot, snapshot(0, 2)))),
            ("content", self.cost(|caches| caches.written(Kind::VmSnapshotContent, snapshot_content(0, 2)))),
            ("restore", self.cost(|caches| caches.written(Kind::VmRestore, copy(0, 2, "VirtualMachineRestore")))),
            ("clone", self.cost(|caches| caches.written(Kind::VmClone, copy(0, 2, "VirtualMachineClone")))),
            ("replica set", self.cost(|caches| caches.written(Kind::ReplicaSet, replica_set(0, 2)))),
            ("pool", self.cost(|caches| caches.written(Kind::Pool, pool(0, 2)))),
            ("VM of a pool", self.cost(|caches| caches.written(Kind::VirtualMachine, vm_of_pool(0, 3)))),
            ("pod", self.cost(|caches| caches.written(Kind::Pod, pod(0, 2)))),
            ("pod of a pending VMI", self.cost(|caches| caches.written(Kind::Pod, pod(1, 2)))),
            (
                "claim",
                self.cost(|caches| {
                    caches.claims.observe(object::<PersistentVolumeClaim>(&claim(0, 2, "Bound")).into());
                }),
            ),
            ("DataVolume", self.cost(|caches| caches.written(Kind::DataVolume, data_volume(0, 2)))),
            ("DataSource", self.cost(|caches| caches.written(Kind::DataSource, data_source(0, 2)))),
            ("instance type", self.cost(|caches| put_instancetype(caches, 0, 2))),
            ("copy", self.cost(|caches| caches.written(Kind::ControllerRevision, revision(0, 2)))),
            ("heartbeat", self.cost(|caches| caches.nodes.observe(object::<Node>(&node(0, 2)).into()))),
            (
                "node went silent",
                self.cost(|caches| {
                    let mut node = node(0, 3);
                    node["metadata"]["annotations"] = json!({"kubevirt.io/heartbeat": "2000-01-01T00:00:00Z"});
                    caches.nodes.observe(object::<Node>(&node).into());
                }),
            ),
            ("virt-handler", self.cost(|caches| caches.handlers.observe(object::<Pod>(&pod(0, 3)).into()))),
            (
                "namespace",
                self.cost(|caches| {
                    let namespace = json!({"metadata": {"name": "n", "resourceVersion": "2"}});
                    caches.namespaces.observe(object::<Namespace>(&namespace).into());
                }),
            ),
            (
                "quota",
                self.cost(|caches| {
                    caches.quotas.observe(object::<ResourceQuota>(&json!({"metadata": metadata("q", 2)})).into());
                }),
            ),
            (
                "DaemonSet",
                self.cost(|caches| {
                    let set = json!({"metadata": metadata("virt-handler", 2)});
                    caches.daemon_sets.observe(object::<DaemonSet>(&set).into());
                }),
            ),
        ]
    }
}

#[tokio::test]
async fn event_costs_the_same_in_a_cluster_of_any_size() {
    let (small, large) = (cluster(30), cluster(600));
    let costs = small.costs();
    assert_eq!(costs, large.costs());
    for (event, (visited, reconciles)) in costs {
        assert!(visited < 200 && reconciles < 20, "{event}: {visited} objects, {reconciles} reconciles");
    }
    // The test would pass if nothing were queued.
    assert!(small.cost(|caches| caches.written(Kind::VirtualMachine, vm(0, 9))).1 > 0);
    assert!(small.cost(|caches| caches.written(Kind::DataVolume, data_volume(0, 9))).1 > 0);
}

#[tokio::test]
async fn controllers_need_the_caches_that_they_read() {
    let cluster = cluster(30);
    let budget = json!({"metadata": owned(metadata("budget", 1), "VirtualMachineInstance", "m-0")});
    cluster.caches.budgets.observe(object::<PodDisruptionBudget>(&budget).into());
    let metadata = json!({"name": "kubevirt", "namespace": "kubevirt", "uid": "k", "resourceVersion": "1"});
    let methods = json!({"workloadUpdateMethods": ["LiveMigrate", "Evict"]});
    let spec = json!({"workloadUpdateStrategy": methods, "uninstallStrategy": "RemoveWorkloads"});
    cluster.caches.kubevirts.observe(object(&json!({"metadata": metadata, "spec": spec, "status": {}})));
    let metadata = json!({"name": "csr", "uid": "c", "resourceVersion": "1"});
    let request = json!({"metadata": metadata, "spec": {"request": "", "signerName": "ferrovirt.io/node"}});
    cluster.caches.requests.observe(object(&request));
    let mut unneeded = Vec::new();
    for controller in &cluster.controllers {
        let name = controller.open();
        let _ = cluster.caches.take_read();
        assert!(controller.observe_queued() > 0, "{name}");
        let read = cluster.caches.take_read().into_iter();
        unneeded.extend(read.filter(|read| !controller.needs().contains(needs(&[*read]))).map(|read| (name, read)));
    }
    // Their changes wake the controllers, and nothing is done as long as they are missing.
    let expected = [
        ("certificates", Resource::ApiServices),
        ("certificates", Resource::MutatingWebhooks),
        ("certificates", Resource::ValidatingWebhooks),
        ("kubevirt", Resource::Roles),
    ];
    assert_eq!(unneeded, expected);
}
