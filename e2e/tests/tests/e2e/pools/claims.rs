//! Claims of the VMs of a pool.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::{Value, json};

use super::{MINUTES, change, pool, scale, wait_numbers};
use crate::data_volumes::with_driver;

/// Returns a pool whose VMs have the blank disk `data-NUMBER`, and a ConfigMap of their own.
pub(crate) fn with_claims(name: &str, fields: &Value) -> Result<Value> {
    let mut pool = pool(name, "Halted", fields)?;
    let vm = pool.pointer_mut("/spec/virtualMachineTemplate/spec").context("no template")?;
    vm["dataVolumeTemplates"] = json!([{
        "metadata": {"name": "data"},
        "spec": {"source": {"blank": {}}, "storage": {
            "storageClassName": "csi", "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
            "resources": {"requests": {"storage": "16Mi"}},
        }},
    }]);
    let spec = &mut vm["template"]["spec"];
    spec["domain"]["devices"] = json!({"disks": [{"name": "data", "disk": {"bus": "virtio"}},
        {"name": "settings", "disk": {"bus": "virtio"}}]});
    spec["volumes"] = json!([{"name": "data", "dataVolume": {"name": "data"}},
        {"name": "settings", "configMap": {"name": "settings"}}]);
    Ok(pool)
}

/// Waits for the claim of a VM and returns its UID.
pub(crate) async fn claim(s: &Story, name: &str) -> Result<Value> {
    let is_bound =
        |claim: &Value| claim["status"]["phase"] == "Bound" && claim["metadata"]["deletionTimestamp"].is_null();
    Ok(s.wait("PersistentVolumeClaim", name, "be bound", MINUTES, is_bound).await?["metadata"]["uid"].clone())
}

/// Deletes a VM of a pool and waits for the next one of this name.
pub(crate) async fn replaced(s: &Story, vm: &str) -> Result<()> {
    let uid = s.get("vm", vm).await?["metadata"]["uid"].clone();
    s.delete("vm", vm).await?;
    s.wait("vm", vm, "come back", MINUTES, |vm| vm["metadata"]["uid"] != uid).await.map(drop)
}

#[test]
fn deleted_vm_of_a_pool_comes_back_with_its_claim() {
    story("pool-claims", async |s| {
        with_driver(s, async |s| {
            let fields = json!({
                "replicas": 2, "nameGeneration": {"appendIndexToConfigMapRefs": true},
                "scaleInStrategy": {"proactive": {
                    "statePreservation": "Offline", "selectionPolicy": {"sortPolicy": "DescendingOrder"},
                }},
            });
            s.apply(&with_claims("box", &fields)?.to_string()).await?;
            wait_numbers(s, "box", &[0, 1]).await?;
            let settings = s.get("vm", "box-1").await?["spec"]["template"]["spec"]["volumes"][1].clone();
            ensure!(settings["configMap"]["name"] == "settings-1", "{settings}");
            let (first, second) = (claim(s, "data-0").await?, claim(s, "data-1").await?);

            replaced(s, "box-0").await?;
            ensure!(claim(s, "data-0").await? == first, "the claim of a deleted VM was made anew");

            scale(s, "box", 1).await?;
            wait_numbers(s, "box", &[0]).await?;
            let kept = s.get("PersistentVolumeClaim", "data-1").await?;
            ensure!(kept["metadata"]["deletionTimestamp"].is_null(), "the claim went with its VM");
            scale(s, "box", 2).await?;
            wait_numbers(s, "box", &[0, 1]).await?;
            ensure!(claim(s, "data-1").await? == second, "the claim of an earlier VM is not used again");

            change(s, "box", json!({"scaleInStrategy": {"proactive": {"statePreservation": "Disabled"}}})).await?;
            replaced(s, "box-0").await?;
            let is_new = |claim: &Value| claim["metadata"]["uid"] != first;
            s.wait("PersistentVolumeClaim", "data-0", "be made anew", MINUTES, is_new).await?;
            preserved_from_now_on(s).await?;
            opportunistic(s).await?;
            s.delete("vmpool", "box").await?;
            s.wait_gone("vmpool", "box", MINUTES).await
        })
        .await
    });
}

/// A change that begins to preserve claims, and takes a VM away, keeps the claim of this VM.
async fn preserved_from_now_on(s: &Story) -> Result<()> {
    let kept = claim(s, "data-1").await?;
    let strategy = json!({"proactive": {"statePreservation": "Offline"}});
    change(s, "box", json!({"replicas": 1, "scaleInStrategy": strategy})).await?;
    wait_numbers(s, "box", &[0]).await?;
    scale(s, "box", 2).await?;
    wait_numbers(s, "box", &[0, 1]).await?;
    ensure!(claim(s, "data-1").await? == kept, "the claim went with its VM");
    Ok(())
}

/// VMs that a user deletes are not replaced while there are too many, and keep their claims.
async fn opportunistic(s: &Story) -> Result<()> {
    let strategy = json!({"proactive": null, "opportunistic": {"statePreservation": "Offline"}});
    change(s, "box", json!({"scaleInStrategy": strategy})).await?;
    let kept = claim(s, "data-1").await?;
    scale(s, "box", 1).await?;
    tokio::time::sleep(super::A_WHILE).await;
    wait_numbers(s, "box", &[0, 1]).await?;
    s.delete("vm", "box-1").await?;
    s.wait_gone("vm", "box-1", MINUTES).await?;
    wait_numbers(s, "box", &[0]).await?;
    ensure!(claim(s, "data-1").await? == kept, "the claim went with its VM");
    Ok(())
}
