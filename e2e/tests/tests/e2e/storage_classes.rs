//! Claims of the test cluster's storage driver: bound, used, expanded, copied, and failures that storage has.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, own_cluster, skip, storage::delete_vmis_after, story};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{
    hotplug::{HELPERS, run, wait_phase},
    manifests,
};

const MINUTES: Duration = Duration::from_secs(240);
/// Sectors of 512 bytes of the disks after the expansion to 32 MiB. The image in a file system leaves room for its overhead.
const GROWN: [(&str, u64); 2] = [("FILES", 61440), ("BLOCK", 65536)];

/// Applies a claim of a class. `more` are further fields of its spec.
async fn claim(s: &Story, name: &str, class: &str, mode: &str, mebibytes: u32, more: &str) -> Result<()> {
    s.apply(&format!(
        "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec:
  storageClassName: {class}
  volumeMode: {mode}
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: {mebibytes}Mi}}}}
{more}"
    ))
    .await
}

async fn wait_bound(s: &Story, claim: &str) -> Result<()> {
    let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
    s.wait("PersistentVolumeClaim", claim, "be bound", MINUTES, is_bound).await.map(drop)
}

/// Deletes the snapshots and claims, and waits until the driver has deleted their volumes.
async fn remove(s: &Story) -> Result<()> {
    let claims = s.list("PersistentVolumeClaim", "").await?;
    for kind in ["VolumeSnapshot", "PersistentVolumeClaim"] {
        for object in s.list(kind, "").await? {
            s.delete(kind, object["metadata"]["name"].as_str().unwrap_or_default()).await?;
        }
    }
    let volumes = s.cluster_api("PersistentVolume");
    let deadline = Instant::now() + MINUTES;
    for claim in claims {
        let Some(name) = claim["spec"]["volumeName"].as_str() else { continue };
        while let Some(volume) = volumes.get_opt(name).await? {
            ensure!(Instant::now() < deadline, "volume {name} is left: {}", volume.data);
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
    Ok(())
}

#[test]
fn claims_are_used_expanded_and_copied() {
    story("storage-classes", async |s| {
        if own_cluster()?.is_none() {
            return skip("the test cluster's storage driver");
        }
        let result = used(s).await;
        let gone = delete_vmis_after(s, &result).await;
        let removed = remove(s).await;
        result.and(gone).and(removed)
    });
}

async fn used(s: &Story) -> Result<()> {
    claim(s, "files", "csi", "Filesystem", 16, "").await?;
    claim(s, "block", "csi", "Block", 16, "").await?;
    claim(s, "late", "csi-late", "Block", 16, "").await?;
    let disk = |name: &str, serial: &str| format!("{{name: {name}, serial: {serial}, disk: {{bus: virtio}}}}");
    let volume = |name: &str| format!("{{name: {name}, persistentVolumeClaim: {{claimName: {name}}}}}");
    let devices = format!("devices: {{disks: [{}, {}]}}\n", disk("files", "FILES"), disk("block", "BLOCK"));
    let volumes = format!("Seconds: 0\n      volumes: [{}, {}]\n", volume("files"), volume("block"));
    s.apply(
        &manifests::kernel_vm("box", "Always").replace("devices: {}\n", &devices).replace("Seconds: 0\n", &volumes),
    )
    .await?;
    s.wait_running("box").await?;
    for name in ["files", "block"] {
        wait_bound(s, name).await?;
    }
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    for (serial, _) in GROWN {
        run(&mut console, &format!("echo kept-{serial} | dd of=$(disk {serial}) bs=512 conv=sync,fsync")).await?;
    }
    expanded(s, &mut console).await?;
    copied(s, &mut console).await?;

    // Bound by the pod that plugs it in.
    let late = s.get("PersistentVolumeClaim", "late").await?;
    ensure!(late["status"]["phase"] == "Pending", "bound before its first use: {}", late["status"]);
    s.virt(&["addvolume", "box", "--volume-name=late", "--serial=LATE"]).await?;
    wait_phase(s, "late", "Ready").await?;
    run(&mut console, "comes LATE").await?;
    console.leave().await
}

/// Expands the claims of a running guest.
async fn expanded(s: &Story, console: &mut Console) -> Result<()> {
    let more = json!({"spec": {"resources": {"requests": {"storage": "32Mi"}}}});
    for name in ["files", "block"] {
        let api = s.api("PersistentVolumeClaim");
        api.patch(name, &PatchParams::default(), &Patch::Merge(&more)).await?;
        let has_grown = |claim: &Value| claim["status"]["capacity"]["storage"] == "32Mi";
        s.wait("PersistentVolumeClaim", name, "grow", MINUTES, has_grown).await?;
    }
    for (serial, sectors) in GROWN {
        let size = format!("d=$(disk {serial}); d=/sys/block/${{d##*/}}/size");
        let wait = format!("{size}; for i in $(seq 120); do [ $(cat $d) = {sectors} ] && break; sleep 1; done; cat $d");
        let seen = run(console, &wait).await?;
        ensure!(seen == sectors.to_string(), "disk {serial} has {seen} sectors after its claim has grown");
    }
    Ok(())
}

/// Makes claims from snapshots of those in use, and plugs them into the guest.
async fn copied(s: &Story, console: &mut Console) -> Result<()> {
    for (name, mode, serial) in [("files", "Filesystem", "FILES"), ("block", "Block", "BLOCK")] {
        s.apply(&format!(
            "
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {{name: {name}}}
spec: {{source: {{persistentVolumeClaimName: {name}}}}}
"
        ))
        .await?;
        let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
        s.wait("VolumeSnapshot", name, "be ready", MINUTES, is_ready).await?;
        let source =
            format!("  dataSource: {{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: {name}}}\n");
        let copy = format!("copy-of-{name}");
        claim(s, &copy, "csi", mode, 32, &source).await?;
        wait_bound(s, &copy).await?;
        s.virt(&["addvolume", "box", &format!("--volume-name={copy}"), &format!("--serial=C{serial}")]).await?;
        wait_phase(s, &copy, "Ready").await?;
        run(console, &format!("comes C{serial}")).await?;
        let data = run(console, &format!("head -c 10 $(disk C{serial})")).await?;
        ensure!(data == format!("kept-{serial}"), "the copy of {name} holds {data:?}");
    }
    Ok(())
}

#[test]
fn failures_of_a_storage_class_are_seen_at_the_claim() {
    story("storage-faults", async |s| {
        if own_cluster()?.is_none() {
            return skip("the test cluster's storage driver");
        }
        let mut classes = Vec::new();
        let result = failed(s, &mut classes).await;
        let removed = remove(s).await;
        for class in classes {
            s.cluster_api("StorageClass").delete(&class, &DeleteParams::background()).await?;
        }
        result.and(removed)
    });
}

async fn failed(s: &Story, classes: &mut Vec<String>) -> Result<()> {
    for (name, fault, message) in
        [("refused", "create=refused", "refused: Create"), ("full", "create=full", "no space left: Create")]
    {
        let class = format!("{}-{name}", s.namespace);
        let object = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": class},
            "provisioner": "csi.test.ferrovirt.io", "parameters": {"faults": fault},
        });
        s.cluster_api("StorageClass").create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        classes.push(class.clone());
        claim(s, name, &class, "Filesystem", 16, "").await?;
        let event = s.wait_event(name, "ProvisioningFailed", MINUTES).await?;
        ensure!(event.contains(message), "{event}");
    }
    claim(s, "no-snapshots", "csi-no-snapshots", "Filesystem", 16, "").await?;
    wait_bound(s, "no-snapshots").await?;
    s.apply(
        "
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: no-snapshots}
spec: {source: {persistentVolumeClaimName: no-snapshots}}
",
    )
    .await?;
    let has_failed = |snapshot: &Value| {
        snapshot["status"]["error"]["message"].as_str().is_some_and(|text| text.contains("snapshots=false"))
    };
    s.wait("VolumeSnapshot", "no-snapshots", "fail", MINUTES, has_failed).await.map(drop)
}
