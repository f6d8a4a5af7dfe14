//! Objects in reviews with the complete metadata of kube-apiserver.

use serde_json::{Value, json};

fn metadata(name: &str) -> Value {
    json!({
        "name": name, "namespace": "default", "uid": "3f5b9a0e-77aa-4a0b-9a1b-3d1f0c1e2d3c", "generation": 1,
        "creationTimestamp": "2026-01-02T03:04:05Z",
    })
}

fn spec() -> Value {
    json!({
        // Validation runs after defaulting, and some rules depend on defaults.
        "architecture": "amd64",
        "domain": {
            "devices": {
                "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                "interfaces": [{"name": "default", "masquerade": {}}],
            },
            "memory": {"guest": "128Mi"},
        },
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [{"name": "root", "containerDisk": {"image": "registry.example/disk:1"}}],
    })
}

/// Returns a valid VM.
pub(crate) fn vm() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": metadata("vm"),
        "spec": {"runStrategy": "Halted", "template": {"metadata": {"labels": {"app": "a"}}, "spec": spec()}},
    })
}

/// Returns a VM with a disk without volume.
pub(crate) fn impossible_vm() -> Value {
    let mut vm = vm();
    vm["spec"]["template"]["spec"]["domain"]["devices"]["disks"][0]["name"] = json!("other");
    vm
}

/// Returns a valid VMI.
pub(crate) fn vmi() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": metadata("vmi"), "spec": spec(),
    })
}

/// Returns a valid replica set.
pub(crate) fn replica_set() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet", "metadata": metadata("set"),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "a"}},
            "template": {"metadata": {"labels": {"app": "a"}}, "spec": spec()},
        },
    })
}
