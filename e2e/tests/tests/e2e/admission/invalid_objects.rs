//! Invalid objects of other kinds.

use anyhow::ensure;
use ferrovirt_e2e_tests::story;
use serde_json::{Value, json};

use super::plain;

/// Invalid objects of other kinds, each with the field in the refusal.
fn wrong_objects() -> Vec<(&'static str, &'static str, Value, &'static str)> {
    let kubevirt = "kubevirt.io/v1";
    let mut template = plain()["spec"]["template"].take();
    template["metadata"]["labels"] = json!({"app": "a"});
    let vm = json!({"runStrategy": "Halted", "template": template});
    let selector = |app: &str| json!({"matchLabels": {"app": app}});
    let pool = |change: Value| {
        let mut pool = json!({
            "selector": selector("a"), "virtualMachineTemplate": {"metadata": {"labels": {"app": "a"}}, "spec": vm},
        });
        json_patch::merge(&mut pool, &change);
        pool
    };
    let reference = |group: &str, kind: &str| json!({"apiGroup": group, "kind": kind, "name": "a"});
    vec![
        (kubevirt, "VirtualMachineInstance", json!({"domain": {"devices": {}}}), "spec.domain.memory.guest"),
        (
            kubevirt,
            "VirtualMachineInstance",
            json!({"domain": {"devices": {}, "memory": {"guest": "much"}}}),
            "spec.domain.memory.guest",
        ),
        (
            kubevirt,
            "VirtualMachineInstance",
            json!({"domain": {"devices": {}, "resources": {"requests": {"memory": "much"}, "limits": {"cpu": "1"}}}}),
            "spec.domain.resources.requests.memory",
        ),
        (
            kubevirt,
            "VirtualMachineInstanceReplicaSet",
            json!({"selector": selector("b"), "template": template}),
            "spec.selector",
        ),
        (
            kubevirt,
            "VirtualMachineInstancePreset",
            json!({"selector": selector("a"), "domain": {"devices": {"disks": [{"name": "a", "disk": {"bus": "ide"}}]}}}),
            "spec.domain.devices.disks[0].disk.bus",
        ),
        (kubevirt, "VirtualMachineInstanceMigration", json!({"vmiName": ""}), "spec.vmiName"),
        (
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachineInstancetype",
            json!({"cpu": {"guest": 1}, "memory": {"guest": "1Gi", "overcommitPercent": 101}}),
            "spec.memory.overcommitPercent",
        ),
        (
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachinePreference",
            json!({"cpu": {"preferredCPUTopology": "wide"}}),
            "spec.cpu.preferredCPUTopology",
        ),
        ("pool.kubevirt.io/v1beta1", "VirtualMachinePool", pool(json!({"maxUnavailable": "5"})), "spec.maxUnavailable"),
        (
            "pool.kubevirt.io/v1beta1",
            "VirtualMachinePool",
            pool(json!({"virtualMachineTemplate": {"spec": {"template": {"spec": {"hostname": "Db_0"}}}}})),
            "spec.virtualMachineTemplate.spec.template.spec.hostname",
        ),
        (
            "clone.kubevirt.io/v1beta1",
            "VirtualMachineClone",
            json!({"source": reference("apps", "Deployment")}),
            "spec.Source.Kind",
        ),
        (
            "snapshot.kubevirt.io/v1beta1",
            "VirtualMachineSnapshot",
            json!({"source": {"kind": "VirtualMachine", "name": "a"}}),
            "spec.source.apiGroup",
        ),
        (
            "snapshot.kubevirt.io/v1beta1",
            "VirtualMachineRestore",
            json!({"target": reference("apps", "Deployment"), "virtualMachineSnapshotName": "a"}),
            "spec.target.apiGroup",
        ),
        (
            "export.kubevirt.io/v1",
            "VirtualMachineExport",
            json!({"source": reference("apps", "Deployment")}),
            "spec.source.kind",
        ),
    ]
}

#[test]
fn invalid_objects_of_other_kinds_are_refused_with_the_field_named() {
    story("wrong-kinds", async |s| {
        for (version, kind, spec, field) in wrong_objects() {
            let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}, "spec": spec});
            let message = s.refused(&object.to_string()).await?;
            ensure!(message.contains(field), "{object} is refused without naming {field}: {message}");
            // Fields that the user did not write are not reported.
            ensure!(!message.contains("status."), "{object}: {message}");
        }
        Ok(())
    });
}
