//! The importer beside CDI, of which a stand-in has the definition and the habit to show the state of every DataVolume.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{
    MINUTES, condition, data_volume, ensure_disk, http, release, server, storage, wait_phase, wait_served, with_driver,
};
use crate::kills::kill_leader;

const DEFINITION: &str = "cdis.cdi.kubevirt.io";
/// Time in which the importer begins with a DataVolume, if it does.
const BEGIN: Duration = Duration::from_secs(4);

#[test]
fn importer_begins_nothing_beside_cdi_and_finishes_what_it_began() {
    story_alone("dv-cdi", async |s| with_driver(s, steps_back).await);
}

async fn steps_back(s: &Story) -> Result<()> {
    server(s).await?;
    let held = "disk.raw?hold=50&row=cdi";
    s.apply(data_volume("held", &fields(held)).trim_end_matches("---\n")).await?;
    wait_served(s, &format!("held /{held}")).await?;
    wait_phase(s, "held", "ImportInProgress").await?;
    install(s).await?;
    let outcome = beside(s).await;
    s.cluster_api("CustomResourceDefinition").delete(DEFINITION, &DeleteParams::background()).await?;
    outcome?;
    // Nobody else carries it out any more.
    wait_phase(s, "later", "Succeeded").await?;
    ensure_disk(s, "held").await?;
    ensure_disk(s, "later").await
}

fn fields(file: &str) -> String {
    format!("{}, storage: {}", http(file, ""), storage("csi", "Block", 16))
}

/// Creates the definition of CDI.
async fn install(s: &Story) -> Result<()> {
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": DEFINITION},
        "spec": {
            "group": "cdi.kubevirt.io", "scope": "Cluster",
            "names": {"plural": "cdis", "singular": "cdi", "kind": "CDI", "listKind": "CDIList"},
            "versions": [{"name": "v1beta1", "served": true, "storage": true, "schema": schema}],
        },
    });
    let created = s.cluster_api("CustomResourceDefinition");
    created.create(&PostParams::default(), &serde_json::from_value(definition)?).await.map(drop).context("create CDI")
}

async fn beside(s: &Story) -> Result<()> {
    wait_stepped_back(s).await?;
    // CDI finds no annotation of a pod of its own at the claim.
    let shown = json!([{"type": "Running", "status": "False"}]);
    let change = Patch::Merge(json!({"status": {"conditions": shown}}));
    s.api("DataVolume").patch_status("held", &PatchParams::default(), &change).await?;
    tokio::time::sleep(BEGIN).await;
    let volume = s.get("DataVolume", "held").await?;
    ensure!(condition(&volume, "Running")["status"] == "False", "both write the status: {}", volume["status"]);

    // CDI is there before the importer.
    kill_leader(s).await?;
    s.apply(data_volume("later", &fields("disk.qcow2")).trim_end_matches("---\n")).await?;
    release(s).await?;
    let is_released = |volume: &Value| {
        let annotations = &volume["metadata"]["annotations"];
        volume["status"]["phase"] == "Succeeded"
            && annotations["ferrovirt.io/import"].is_null()
            && annotations["cdi.kubevirt.io/storage.prePopulated"].is_null()
    };
    s.wait("DataVolume", "held", "be finished and left to CDI", MINUTES, is_released).await?;
    let claim = s.get("PersistentVolumeClaim", "held").await?;
    let annotations = &claim["metadata"]["annotations"];
    ensure!(annotations["cdi.kubevirt.io/storage.populatedFor"] == "held", "{annotations}");
    tokio::time::sleep(BEGIN).await;
    ensure_not_begun(s, "later").await
}

/// Waits until virt-controller has seen the definition: it begins nothing.
async fn wait_stepped_back(s: &Story) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let blank = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Block", 1));
        s.apply(data_volume("probe", &blank).trim_end_matches("---\n")).await?;
        tokio::time::sleep(BEGIN).await;
        let seen = ensure_not_begun(s, "probe").await;
        s.delete("DataVolume", "probe").await?;
        s.wait_gone("DataVolume", "probe", MINUTES).await?;
        match seen {
            Ok(()) => return Ok(()),
            Err(error) => ensure!(Instant::now() < deadline, "{error:#}"),
        }
        s.wait_gone("PersistentVolumeClaim", "probe", MINUTES).await?;
    }
}

async fn ensure_not_begun(s: &Story, name: &str) -> Result<()> {
    let volume = s.get("DataVolume", name).await?;
    ensure!(
        volume["status"]["phase"].as_str().unwrap_or_default().is_empty(),
        "{name} has begun: {}",
        volume["status"]
    );
    let claim = s.api("PersistentVolumeClaim").get_opt(name).await?;
    ensure!(claim.is_none(), "{name} has a claim");
    Ok(())
}
