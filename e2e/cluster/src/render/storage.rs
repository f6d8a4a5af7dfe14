//! The storage driver (`e2e/csi`): its process on each node, and the processes and objects that provision, resize and
//! snapshot its volumes.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{After, Service, flags, text};
use crate::plan::{API_PORT, Node, Plan};

/// Name of the driver.
const DRIVER: &str = "csi.test.ferrovirt.io";
/// Name of the driver's program, which is built with this one.
pub(crate) const PROGRAM: &str = "csi-driver";
/// Name of the default class of volumes and of that of snapshots.
const DEFAULT_CLASS: &str = "csi";
/// The module with the definitions of snapshots, and their folder in it.
pub(crate) const SNAPSHOTS: (&str, &str) = ("github.com/kubernetes-csi/external-snapshotter/client/v8", "config/crd");
/// The definitions.
pub(crate) const DEFINITIONS: [&str; 3] = ["volumesnapshotclasses", "volumesnapshotcontents", "volumesnapshots"];

/// Returns the path of the kubeconfig for provisioner, resizer and snapshotters.
#[must_use]
pub(crate) fn kubeconfig_path(plan: &Plan) -> PathBuf {
    plan.control().join("storage.kubeconfig")
}

/// Returns the command of the driver.
fn driver(plan: &Plan, program: &Path, endpoint: &Path, node: &str) -> Vec<String> {
    flags(
        program.to_path_buf(),
        &[("data", text(&plan.shared().join("csi"))), ("endpoint", text(endpoint)), ("node", node.to_owned())],
    )
}

/// Returns the driver of a node, which registers with kubelet.
#[must_use]
pub(crate) fn node_service(plan: &Plan, node: &Node, program: &Path) -> Service {
    let endpoint = format!("/var/lib/kubelet/plugins/{DRIVER}/csi.sock");
    let mut command = driver(plan, program, Path::new(&endpoint), &node.name);
    // kubelet names the encoded path of the socket as host. With the sign @ it is a host with a user, which HTTP libraries accept.
    command.push(format!("--registration=/var/lib/kubelet/plugins_registry/{DRIVER}@reg.sock"));
    Service { name: PROGRAM.into(), command, log: node.logs.join(format!("{PROGRAM}.log")), after: None }
}

/// Returns the driver beside the API server, and those that call it for objects of the cluster.
#[must_use]
pub(crate) fn control_services(plan: &Plan, bin: &Path, program: &Path) -> Vec<Service> {
    let socket = plan.control().join("csi.sock");
    let kubeconfig = ("kubeconfig", text(&kubeconfig_path(plan)));
    let of_driver = [kubeconfig.clone(), ("csi-address", text(&socket)), ("timeout", "5m".to_owned())];
    let retries = [("retry-interval-start", "500ms".to_owned()), ("retry-interval-max", "10s".to_owned())];
    let api = || Some(After::Tcp((plan.control_address(), API_PORT).into()));
    let service = |name: &str, command: Vec<String>, after: Option<After>| Service {
        name: name.into(),
        command,
        log: plan.logs().join(format!("{name}.log")),
        after,
    };
    let sidecar = |name: &str, more: &[(&str, String)]| service(name, flags(bin.join(name), more), api());
    let of_driver = [&of_driver[..], &retries[..]].concat();
    let no_groups = ("feature-gates", "CSIVolumeGroupSnapshot=false".to_owned());
    vec![
        service(PROGRAM, driver(plan, program, &socket, "control"), None),
        sidecar("csi-provisioner", &of_driver),
        sidecar("csi-resizer", &of_driver),
        sidecar("csi-snapshotter", &[&of_driver[..], std::slice::from_ref(&no_groups)].concat()),
        sidecar("snapshot-controller", &[kubeconfig, no_groups]),
    ]
}

/// Returns the rules for the user of provisioner, resizer and snapshotters.
#[must_use]
pub(crate) fn rules() -> Value {
    let read = ["get", "list", "watch"];
    let change = ["get", "list", "watch", "create", "update", "patch", "delete"];
    let update = ["get", "list", "watch", "update", "patch"];
    json!([
        {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": change},
        {"apiGroups": [""], "resources": ["persistentvolumeclaims", "persistentvolumeclaims/status"], "verbs": update},
        {"apiGroups": [""], "resources": ["nodes", "pods", "namespaces"], "verbs": read},
        {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": change},
        {
            "apiGroups": ["storage.k8s.io"],
            "resources": ["storageclasses", "csinodes", "volumeattachments", "volumeattributesclasses"],
            "verbs": read,
        },
        {
            "apiGroups": ["snapshot.storage.k8s.io"],
            "resources": [
                "volumesnapshots", "volumesnapshots/status", "volumesnapshotcontents", "volumesnapshotcontents/status",
                "volumesnapshotclasses",
            ],
            "verbs": change,
        },
    ])
}

/// Returns the driver's object and its storage classes.
#[must_use]
pub(crate) fn objects() -> Vec<Value> {
    let class = |name: &str, mode: &str, parameters: Value| {
        json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": name,
                "annotations": {"storageclass.kubernetes.io/is-default-class": (name == DEFAULT_CLASS).to_string()},
            },
            "provisioner": DRIVER,
            "volumeBindingMode": mode,
            "allowVolumeExpansion": true,
            "parameters": parameters,
        })
    };
    vec![
        json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIDriver",
            "metadata": {"name": DRIVER},
            "spec": {"attachRequired": false, "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent"]},
        }),
        class(DEFAULT_CLASS, "Immediate", json!({})),
        class("csi-late", "WaitForFirstConsumer", json!({})),
        class("csi-node", "WaitForFirstConsumer", json!({"reach": "node"})),
        class("csi-ext4", "Immediate", json!({"files": "ext4"})),
        class("csi-no-snapshots", "Immediate", json!({"snapshots": "false"})),
    ]
}

/// Renders the class of snapshots. Its definition is one of [`DEFINITIONS`].
#[must_use]
pub(crate) fn snapshot_class() -> String {
    json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotClass",
        "metadata": {
            "name": DEFAULT_CLASS,
            "annotations": {"snapshot.storage.kubernetes.io/is-default-class": "true"},
        },
        "driver": DRIVER,
        "deletionPolicy": "Delete",
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processes_of_the_driver_use_one_folder() {
        let plan = Plan::new(PathBuf::from("/src"), 0).unwrap();
        let program = Path::new("/bin/csi-driver");
        let node = node_service(&plan, &plan.node(2), program).command;
        let control = control_services(&plan, Path::new("/bin"), program);
        for command in [&node, &control[0].command] {
            assert!(command.contains(&"--data=/src/build/cluster/shared/csi".to_owned()), "{command:?}");
        }
        assert!(node.contains(&"--node=node-2".to_owned()));
        let address = "--csi-address=/src/build/cluster/control/csi.sock".to_owned();
        assert!(control[0].command.contains(&address.replace("csi-address", "endpoint")));
        assert_eq!(control.iter().filter(|service| service.command.contains(&address)).count(), 3);
    }

    #[test]
    fn one_class_is_the_default() {
        let objects = objects();
        let classes = objects.iter().filter(|object| object["kind"] == "StorageClass");
        let annotation = "storageclass.kubernetes.io/is-default-class";
        let defaults: Vec<_> = classes.filter(|class| class["metadata"]["annotations"][annotation] == "true").collect();
        assert_eq!(defaults.len(), 1);
        assert_eq!(defaults[0]["metadata"]["name"], DEFAULT_CLASS);
    }
}
