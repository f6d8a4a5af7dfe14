//! DataVolumes that clone claims and snapshots, and the right to do so.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::Value;

use super::{
    MINUTES, condition, contents, data_volume, ensure_disk, http, kernel_vm, server, storage, wait_phase, with_driver,
    with_namespace,
};
use crate::hotplug::{HELPERS, run};

/// Classes of sources: their claims are cloned by the driver, or copied.
const CLASSES: [&str; 2] = ["csi", "csi-no-snapshots"];
const MODES: [&str; 2] = ["Filesystem", "Block"];

/// Returns the name of the source of a class and mode.
fn golden(class: &str, mode: &str) -> String {
    format!("golden-{class}-{}", mode.to_lowercase())
}

/// Imports a source for each class and mode.
async fn import(s: &Story) -> Result<()> {
    server(s).await?;
    let mut manifest = String::new();
    for (class, mode) in all() {
        let fields = format!("{}, storage: {}", http("disk.qcow2", ""), storage(class, mode, 24));
        manifest.push_str(&data_volume(&golden(class, mode), &fields));
    }
    s.apply(manifest.trim_end_matches("---\n")).await?;
    for (class, mode) in all() {
        wait_phase(s, &golden(class, mode), "Succeeded").await?;
    }
    Ok(())
}

fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    CLASSES.iter().flat_map(|class| MODES.iter().map(|mode| (*class, *mode)))
}

/// Clones each source into a namespace, with the size of the source and with more, and checks the clones.
async fn clone_all(s: &Story, from: &str) -> Result<()> {
    let (mut manifest, mut names) = (String::new(), Vec::new());
    for (class, mode) in all() {
        let source = golden(class, mode);
        let same = format!("{{storageClassName: {class}, volumeMode: {mode}, accessModes: [ReadWriteOnce]}}");
        for (size, storage) in [("same", same), ("larger", storage(class, mode, 48))] {
            let name = format!("{size}-{source}");
            let fields = format!("source: {{pvc: {{namespace: {from}, name: {source}}}}}, storage: {storage}");
            manifest.push_str(&data_volume(&name, &fields));
            names.push(name);
        }
    }
    s.apply(manifest.trim_end_matches("---\n")).await?;
    for name in &names {
        wait_phase(s, name, "Succeeded").await?;
        let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
        let claim = s.wait("PersistentVolumeClaim", name, "be bound", MINUTES, is_bound).await?;
        let owner = &claim["metadata"]["ownerReferences"][0];
        ensure!(owner["kind"] == "DataVolume" && owner["name"] == name.as_str(), "{}", claim["metadata"]);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (name, content) in names.iter().zip(contents(s, &names).await?) {
        ensure!(content.sum == super::SHA256 && content.further == 0, "{name}: {content:?}");
    }
    Ok(())
}

#[test]
fn claims_are_cloned_by_the_storage_or_copied_also_across_namespaces() {
    story("dv-clones", async |s| {
        with_driver(s, async |s| {
            import(s).await?;
            clone_all(s, &s.namespace).await?;
            with_namespace(s, "dv-clones", async |other| clone_all(other, &s.namespace).await).await?;
            // No temporary claims are left beside the sources.
            for claim in s.list("PersistentVolumeClaim", "").await? {
                let name = claim["metadata"]["name"].as_str().unwrap_or_default();
                if !name.contains("golden-") {
                    s.wait_gone("PersistentVolumeClaim", name, MINUTES).await?;
                }
            }
            Ok(())
        })
        .await
    });
}

#[test]
fn snapshots_and_busy_sources_are_cloned_when_they_may_be() {
    story("dv-snapshots", async |s| with_driver(s, snapshots).await);
}

async fn snapshots(s: &Story) -> Result<()> {
    server(s).await?;
    let fields = format!("{}, storage: {}", http("disk.raw", ""), storage("csi", "Block", 16));
    s.apply(&data_volume("golden", &fields)).await?;
    // A clone is asked for before its source exists.
    let clone = format!(
        "source: {{snapshot: {{namespace: {}, name: golden}}}}, storage: {}",
        s.namespace,
        storage("csi", "Block", 32)
    );
    s.apply(&data_volume("early", &clone)).await?;
    wait_phase(s, "golden", "Succeeded").await?;
    s.apply(
        "
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: golden}
spec: {source: {persistentVolumeClaimName: golden}}
",
    )
    .await?;
    wait_phase(s, "early", "Succeeded").await?;
    ensure_disk(s, "early").await?;

    // A source that a VM writes is not cloned, and who uses it is named.
    s.apply(
        &crate::manifests::kernel_vm("user", "Always")
            .replace("devices: {}\n", "devices: {disks: [{name: data, disk: {bus: virtio}}]}\n")
            .replace(
                "Seconds: 0\n",
                "Seconds: 0\n      volumes: [{name: data, persistentVolumeClaim: {claimName: golden}}]\n",
            ),
    )
    .await?;
    s.wait_running("user").await?;
    let fields = format!(
        "source: {{pvc: {{namespace: {}, name: golden}}}}, storage: {}",
        s.namespace,
        storage("csi", "Block", 16)
    );
    s.apply(&data_volume("patient", &fields)).await?;
    let event = s.wait_event("patient", "CloneSourceInUse", MINUTES).await?;
    ensure!(event.contains("virt-launcher-user") && event.contains("golden"), "{event}");
    s.virt(&["stop", "user"]).await?;
    wait_phase(s, "patient", "Succeeded").await?;
    ensure_disk(s, "patient").await
}

#[test]
fn snapshots_are_cloned_on_a_class_that_waits_for_the_first_consumer() {
    story("dv-late", async |s| with_driver(s, late).await);
}

async fn late(s: &Story) -> Result<()> {
    server(s).await?;
    let mut manifest = String::new();
    for mode in MODES {
        let fields = format!("{}, storage: {}", http("disk.raw", ""), storage("csi", mode, 24));
        manifest.push_str(&data_volume(&golden("csi", mode), &fields));
    }
    s.apply(manifest.trim_end_matches("---\n")).await?;
    for mode in MODES {
        let name = golden("csi", mode);
        wait_phase(s, &name, "Succeeded").await?;
        s.apply(&format!(
            "{{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {{name: {name}}}, \
             spec: {{source: {{persistentVolumeClaimName: {name}}}}}}}"
        ))
        .await?;
    }
    with_namespace(s, "dv-late", async |other| clone_late(other, &s.namespace, "{}").await).await?;
    // Neither the temporary claims nor their pods are left.
    for (kind, labels) in [("Pod", super::IMPORT_PODS), ("PersistentVolumeClaim", "cdi.kubevirt.io/OwnedByUID")] {
        for object in s.list(kind, labels).await? {
            s.wait_gone(kind, object["metadata"]["name"].as_str().unwrap_or_default(), MINUTES).await?;
        }
    }
    // In its own namespace the VM is the first consumer, unless the disk is wanted at once.
    clone_late(s, &s.namespace, "{cdi.kubevirt.io/storage.bind.immediate.requested: ''}").await
}

/// Clones the snapshot of each mode and checks the disks.
async fn clone_late(s: &Story, from: &str, annotations: &str) -> Result<()> {
    for mode in MODES {
        let (name, source) = (format!("late-{}", mode.to_lowercase()), golden("csi", mode));
        s.apply(&format!(
            "{{apiVersion: cdi.kubevirt.io/v1beta1, kind: DataVolume, metadata: {{name: {name}, annotations: {annotations}}}, \
             spec: {{source: {{snapshot: {{namespace: {from}, name: {source}}}}}, storage: {}}}}}",
            storage("csi-late", mode, 32)
        ))
        .await?;
    }
    for mode in MODES {
        let name = format!("late-{}", mode.to_lowercase());
        wait_phase(s, &name, "Succeeded").await?;
        ensure_disk(s, &name).await?;
    }
    Ok(())
}

#[test]
fn vm_clones_a_data_source_of_another_namespace_when_its_account_has_the_right() {
    story("dv-right", async |s| {
        with_driver(s, async |s| {
            server(s).await?;
            with_namespace(s, "dv-right", async |other| right(s, other).await).await
        })
        .await
    });
}

/// A VM of the other namespace clones the golden image of this one.
async fn right(s: &Story, other: &Story) -> Result<()> {
    let fields = format!("{}, storage: {}", http("disk.qcow2", ""), storage("csi", "Block", 16));
    s.apply(&data_volume("golden", &fields)).await?;
    s.apply(&format!(
        "
apiVersion: cdi.kubevirt.io/v1beta1
kind: DataSource
metadata: {{name: image}}
spec: {{source: {{pvc: {{namespace: {}, name: golden}}}}}}
",
        s.namespace
    ))
    .await?;
    let is_ready = |source: &Value| condition(source, "Ready")["status"] == "True";
    s.wait("DataSource", "image", "be ready", MINUTES, is_ready).await?;

    let fields = format!(
        "sourceRef: {{kind: DataSource, namespace: {}, name: image}}, storage: {{storageClassName: csi, volumeMode: Block}}",
        s.namespace
    );
    other.apply(&kernel_vm("heir", "Always", &fields)).await?;
    let is_denied = |vm: &Value| {
        condition(vm, "Failure")["message"].as_str().is_some_and(|text| {
            let account = format!("system:serviceaccount:{}:default", other.namespace);
            text.contains(&account) && text.contains(&format!("clone source namespace {}", s.namespace))
        })
    };
    other.wait("vm", "heir", "be denied", MINUTES, is_denied).await?;
    other.wait_event("heir", "UnauthorizedDataVolumeCreate", MINUTES).await?;
    ensure!(other.list("DataVolume", "").await?.is_empty(), "a denied clone exists");

    s.apply(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: cloner}}
rules: [{{apiGroups: [cdi.kubevirt.io], resources: [datavolumes/source], verbs: [create]}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: cloner}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: cloner}}
subjects: [{{kind: ServiceAccount, namespace: {}, name: default}}]
",
        other.namespace
    ))
    .await?;
    other.wait("vmi", "heir", "run", MINUTES, |vmi| vmi["status"]["phase"] == "Running").await?;
    let mut guest = other.reopen_console("heir", "root", "ferrovirt").await?;
    run(&mut guest, HELPERS).await?;
    let last = run(&mut guest, "dd if=$(disk DATA) bs=1M skip=15 2>/dev/null | head -c 8").await?;
    ensure!(last == "block 15", "{last:?}");
    guest.leave().await?;
    other.delete("vm", "heir").await?;
    other.wait_gone("vm", "heir", MINUTES).await
}
