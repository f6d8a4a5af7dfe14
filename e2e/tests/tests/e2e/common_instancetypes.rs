//! Instance types and preferences that the installation brings along.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story, story_alone};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::manifests;

const TYPES: &str = "VirtualMachineClusterInstancetype";
const PREFERENCES: &str = "VirtualMachineClusterPreference";
/// Label of the common ones.
const BUNDLE: &str = "instancetype.kubevirt.io/common-instancetypes-version";
/// Annotation of those that virt-controller keeps.
const WRITTEN: &str = "ferrovirt.io/written-content";

/// Returns a VM that leaves its size and devices to a common instance type and preference.
fn sized(name: &str, run_strategy: &str, instancetype: &str, preference: &str) -> String {
    manifests::vm(name, run_strategy)
        .replace("        memory: {guest: 128Mi}\n", "")
        .replace("{name: root, disk: {bus: virtio}}", "{name: root, disk: {}}")
        .replace(
            &format!("  runStrategy: {run_strategy}\n"),
            &format!(
                "  runStrategy: {run_strategy}\n  instancetype: {{name: {instancetype}}}\n  preference: {{name: {preference}}}\n"
            ),
        )
}

async fn names(s: &Story, kind: &str) -> Result<Vec<String>> {
    let found = s.cluster_api(kind).list(&ListParams::default().labels(BUNDLE)).await?;
    Ok(found.items.iter().map(ResourceExt::name_any).collect())
}

#[test]
fn vm_of_a_common_instance_type_and_preference_boots() {
    story("common-instancetypes", async |s| {
        // A new installation creates them last.
        number(s, TYPES, 65).await?;
        number(s, PREFERENCES, 54).await?;
        let listed = s.kubectl(&["get", "vmclusterinstancetype", "-l", BUNDLE, "-o", "name"]).await?;
        ensure!(listed.lines().count() == 65, "{listed}");
        let listed = s.kubectl(&["get", "vmcp", "-l", BUNDLE, "-o", "name"]).await?;
        ensure!(listed.lines().count() == 54, "{listed}");

        s.apply(&sized("box", "Always", "u1.nano", "alpine")).await?;
        let vmi = s.wait_running("box").await?;
        let domain = &vmi["spec"]["domain"];
        ensure!(domain["memory"]["guest"] == "512Mi", "{}", domain["memory"]);
        ensure!(domain["devices"]["disks"][0]["disk"]["bus"] == "virtio", "{}", domain["devices"]);
        let annotations = &vmi["metadata"]["annotations"];
        ensure!(annotations["kubevirt.io/cluster-instancetype-name"] == "u1.nano", "{annotations}");
        ensure!(annotations["kubevirt.io/cluster-preference-name"] == "alpine", "{annotations}");
        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        let (megabytes, _) = console.run("awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo").await?;
        ensure!((400..512).contains(&megabytes.trim().parse::<u32>()?), "the guest has {megabytes} MiB");
        console.leave().await?;
        Ok(())
    });
}

#[test]
fn vms_of_all_common_instance_types_and_preferences_are_accepted_or_refused_by_field() {
    story("common-instancetypes-all", async |s| {
        number(s, PREFERENCES, 54).await?;
        let mut accepted = 0;
        let types = names(s, TYPES).await?.into_iter().map(|name| (name, "linux".to_owned()));
        // The size has enough for each preference.
        let preferences = names(s, PREFERENCES).await?.into_iter().map(|name| ("u1.2xlarge".to_owned(), name));
        for (instancetype, preference) in types.chain(preferences) {
            match s.dry_run(&sized("box", "Halted", &instancetype, &preference)).await {
                Ok(_) => accepted += 1,
                Err(error) => {
                    let message = format!("{error:#}");
                    let is_named = message.contains("is not supported yet") || message.contains("architecture");
                    ensure!(is_named, "{instancetype} {preference}: {message}");
                }
            }
        }
        println!("{accepted} of 119 are accepted");
        // U and O, and Linux without an architecture of its own, at least.
        ensure!(accepted >= 19 + 20, "only {accepted} are accepted");
        Ok(())
    });
}

#[test]
fn common_instance_types_follow_the_configuration_and_edits_survive() {
    story_alone("common-instancetypes-switch", async |s| {
        let followed = followed(s).await;
        // Later stories need them.
        deploy(s, &Value::Null).await?;
        for name in ["u1.8xlarge", "u1.4xlarge"] {
            let _ = s.cluster_api(TYPES).delete(name, &DeleteParams::default()).await;
        }
        number(s, TYPES, 65).await?;
        followed
    });
}

async fn followed(s: &Story) -> Result<()> {
    let types = s.cluster_api(TYPES);
    let change = |patch: Value| (PatchParams::default(), Patch::Merge(patch));
    let (params, patch) = change(json!({"spec": {"memory": {"guest": "100Gi"}}}));
    types.patch("u1.8xlarge", &params, &patch).await?;
    // This one is taken over by a user.
    let (params, patch) = change(json!({"metadata": {"annotations": {WRITTEN: null}}}));
    types.patch("u1.4xlarge", &params, &patch).await?;
    types.delete("u1.2xlarge", &DeleteParams::default()).await?;
    number(s, TYPES, 65).await?;
    // A new leader reads all of them.
    s.kill_component("virt-controller").await?;
    types.delete("u1.xlarge", &DeleteParams::default()).await?;
    number(s, TYPES, 65).await?;
    let edited = types.get("u1.8xlarge").await?;
    ensure!(edited.data["spec"]["memory"]["guest"] == "100Gi", "{}", edited.data["spec"]);

    deploy(s, &json!({"enabled": false})).await?;
    number(s, TYPES, 1).await?;
    ensure!(names(s, TYPES).await? == ["u1.4xlarge"], "{:?}", names(s, TYPES).await?);
    deploy(s, &Value::Null).await?;
    number(s, TYPES, 65).await
}

/// Sets `commonInstancetypesDeployment`.
async fn deploy(s: &Story, value: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"configuration": {"commonInstancetypesDeployment": value}}}));
    let installation = s.installation_api("KubeVirt");
    installation.patch("kubevirt", &PatchParams::default(), &patch).await.context("set the configuration")?;
    Ok(())
}

/// Waits until there is this number of common objects of a kind.
async fn number(s: &Story, kind: &str, wanted: usize) -> Result<()> {
    let started = Instant::now();
    loop {
        let found = names(s, kind).await?;
        if found.len() == wanted {
            println!("{wanted} objects of kind {kind} after {} ms", started.elapsed().as_millis());
            return Ok(());
        }
        ensure!(started.elapsed() < 2 * TIMEOUT, "{} of kind {kind} instead of {wanted}: {found:?}", found.len());
        sleep(Duration::from_millis(100)).await;
    }
}
