//! Invalid input: clear errors, and no stuck objects.

use anyhow::ensure;
use ferrovirt_e2e_tests::{TIMEOUT, story};
use serde_json::Value;

use crate::manifests;

#[test]
fn unknown_image_is_reported_and_the_vm_can_be_deleted() {
    story("image", async |s| {
        let manifest = manifests::vm("box", "Always").replace("guests/tiny:devel", "guests/no-such-image:devel");
        s.apply(&manifest).await?;
        let reported =
            |vm: &Value| matches!(vm["status"]["printableStatus"].as_str(), Some("ErrImagePull" | "ImagePullBackOff"));
        s.wait("vm", "box", "report that its image cannot be pulled", TIMEOUT, reported).await?;
        let synchronized = |vmi: &Value| {
            vmi["status"]["conditions"].as_array().is_some_and(|conditions| {
                conditions.iter().any(|c| {
                    c["type"] == "Synchronized"
                        && c["status"] == "False"
                        && matches!(c["reason"].as_str(), Some("ErrImagePull" | "ImagePullBackOff"))
                })
            })
        };
        s.wait("vmi", "box", "say why", TIMEOUT, synchronized).await?;
        s.delete("vm", "box").await?;
        s.wait_gone("vm", "box", TIMEOUT).await?;
        s.wait_gone("vmi", "box", TIMEOUT).await
    });
}

#[test]
fn image_without_a_disk_is_reported() {
    story("nodisk", async |s| {
        let manifest = manifests::vm("box", "Always").replace("guests/tiny:devel", "toolbox:devel");
        s.apply(&manifest).await?;
        let message = s.wait_event("box", "SyncFailed", TIMEOUT).await?;
        ensure!(message.contains("disk"), "{message}");
        s.delete("vm", "box").await?;
        s.wait_gone("vmi", "box", TIMEOUT).await
    });
}

#[test]
fn invalid_vms_are_refused_with_the_field_named() {
    story("refusals", async |s| {
        let good = manifests::masqueraded("box", "Halted");
        for (from, to, expected) in [
            ("guest: 128Mi", "guest: '0'", "memory"),
            ("guest: 128Mi", "guest: -1Gi", "memory"),
            ("- {name: root, disk: {bus: virtio}}", "- {name: rooot, disk: {bus: virtio}}", "disks[0].name"),
            ("- {name: root, disk: {bus: virtio}}", "- {name: root, disk: {bus: floppy}}", "bus"),
            ("- {name: default, masquerade: {}}", "- {name: other, masquerade: {}}", "interfaces[0].name"),
            ("- {name: default, masquerade: {}}", "- {name: default, sriov: {}}", "sriov"),
            ("runStrategy: Halted", "runStrategy: Sometimes", "runStrategy"),
            ("runStrategy: Halted", "runStrategy: Halted\n  running: true", "mutually exclusive"),
            ("image: 'ferrovirt.io/guests/tiny:devel'", "image: ''", "image"),
            ("runStrategy: Halted", "runStrategy: Halted\n  runStrategie: Always", "runStrategie"),
            ("memory: {guest: 128Mi}", "memory: {guest: 129Mi, hugepages: {pageSize: 2Mi}}", "hugepages"),
        ] {
            ensure!(good.contains(from), "the manifest has no {from:?}");
            let message = s.refused(&good.replacen(from, to, 1)).await?;
            ensure!(message.contains(expected), "{to:?} is refused without naming {expected:?}: {message}");
        }
        // No refused object exists.
        ensure!(s.list("vm", "").await?.is_empty(), "a refused VM exists");
        s.apply(&good).await
    });
}

#[test]
fn vm_larger_than_any_node_is_unschedulable() {
    story("huge", async |s| {
        let huge = "resources: {requests: {memory: 1Ei, cpu: 1M}}";
        s.apply(&manifests::vm("box", "Always").replace("memory: {guest: 128Mi}", huge)).await?;
        s.wait("vm", "box", "be unschedulable", TIMEOUT, |vm| vm["status"]["printableStatus"] == "ErrorUnschedulable")
            .await?;
        s.delete("vm", "box").await?;
        s.wait_gone("vmi", "box", TIMEOUT).await
    });
}

#[test]
fn namespace_quota_applies_to_vmis() {
    story("quota", async |s| {
        s.apply(
            "
apiVersion: v1
kind: ResourceQuota
metadata: {name: small}
spec: {hard: {requests.memory: 64Mi}}
",
        )
        .await?;
        let used = |quota: &Value| quota["status"]["hard"].is_object();
        s.wait("ResourceQuota", "small", "be in force", TIMEOUT, used).await?;
        s.apply(&manifests::vm("box", "Always")).await?;
        let message = s.wait_event("box", "FailedCreate", TIMEOUT).await?;
        ensure!(message.contains("quota"), "{message}");
        // The VM starts when the quota allows it.
        s.delete("ResourceQuota", "small").await?;
        s.wait_running("box").await?;
        Ok(())
    });
}
