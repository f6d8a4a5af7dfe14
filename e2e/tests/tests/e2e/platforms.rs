//! KubeVirt objects as platforms write them, and the settings in them that components follow.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    installation::{in_force, installation},
    manifests,
};

/// Specs in the parts that matter here, with the fields that have no effect.
const PLATFORMS: &str = include_str!("../../../../admission/tests/platforms.json");
/// Label of the nodes for VMIs.
const LABEL: &str = "ferrovirt.io/e2e-workloads";

#[test]
fn objects_of_platforms_are_accepted_and_say_what_has_no_effect() {
    story_alone("platforms", async |s| {
        let platforms: Vec<Value> = serde_json::from_str(PLATFORMS)?;
        for row in &platforms {
            warned(s, row).await.with_context(|| row["platform"].to_string())?;
        }
        let before = installation(s).await?;
        let (former, ignored) = (before["spec"].clone(), shown(&before));
        let listed = listed(s, platforms.last().context("no platform")?).await;
        // Later stories need the former object, also after a failure.
        restore(s, &former).await?;
        listed?;
        condition(s, |message| message == ignored).await
    });
}

/// Applies the spec of a platform in a dry run, and reads the warnings of kubectl.
async fn warned(s: &Story, row: &Value) -> Result<()> {
    let patch = json!({"spec": row["spec"]});
    let command =
        format!("kubectl patch kubevirt kubevirt --namespace=kubevirt --type=merge --dry-run=server -p={patch}");
    let (accepted, output) = s.command_line(&command, "").await?;
    ensure!(accepted, "{output}");
    for field in row["ignored"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        ensure!(output.contains(&format!("Warning: {field} has no effect: ")), "no warning about {field}: {output}");
    }
    Ok(())
}

/// Stores the spec of a platform, and reads the condition.
async fn listed(s: &Story, row: &Value) -> Result<()> {
    change(s, &row["spec"]).await?;
    for field in row["ignored"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        condition(s, |message| message.contains(&format!("{field}: "))).await?;
    }
    Ok(())
}

/// Changes the spec of the object, and returns the new version.
async fn change(s: &Story, spec: &Value) -> Result<u64> {
    let patch = Patch::Merge(json!({"spec": spec}));
    let object = s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &patch).await;
    let version = object.context("change the object")?.metadata.resource_version;
    Ok(version.context("no version")?.parse()?)
}

/// Restores the spec of the object.
async fn restore(s: &Story, former: &Value) -> Result<()> {
    let patch = json!([{"op": "replace", "path": "/spec", "value": former}]);
    let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
    s.installation_api("KubeVirt")
        .patch("kubevirt", &PatchParams::default(), &patch)
        .await
        .context("restore the object")?;
    Ok(())
}

/// Returns the message of the condition `SettingsIgnored`, which is empty without the condition.
fn shown(object: &Value) -> String {
    let shown = ferrovirt_e2e_tests::condition(object, "SettingsIgnored");
    shown.and_then(|shown| shown["message"].as_str()).unwrap_or_default().to_owned()
}

/// Waits for a message of the condition.
async fn condition(s: &Story, is_met: impl Fn(&str) -> bool) -> Result<()> {
    let started = Instant::now();
    loop {
        let message = shown(&installation(s).await?);
        if is_met(&message) {
            return Ok(());
        }
        ensure!(started.elapsed() < TIMEOUT, "SettingsIgnored: {message:?}");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

#[test]
fn placement_of_workloads_and_limits_of_requests_are_followed() {
    story_alone("workload-placement", async |s| {
        let (node, _) = s.one_node().await?;
        let former = installation(s).await?["spec"].clone();
        let followed = followed(s, &node).await;
        label(s, &node, &Value::Null).await?;
        restore(s, &former).await?;
        followed
    });
}

async fn followed(s: &Story, node: &str) -> Result<()> {
    let limit = json!({"restClient": {"rateLimiter": {"tokenBucketRateLimiter": {"qps": 500, "burst": 1000}}}});
    let version = change(
        s,
        &json!({
            "workloads": {"nodePlacement": {"nodeSelector": {LABEL: "true"}}},
            "configuration": {"apiConfiguration": limit, "controllerConfiguration": limit, "handlerConfiguration": limit},
        }),
    )
    .await?;
    // A VM that was started before would run.
    in_force(s, version).await?;
    s.apply(&manifests::kernel_vm("placed", "Always")).await?;
    let unschedulable = |vm: &Value| vm["status"]["printableStatus"] == "ErrorUnschedulable";
    s.wait("vm", "placed", "be unschedulable", TIMEOUT, unschedulable).await?;
    label(s, node, &json!("true")).await?;
    let running = s.wait_running("placed").await?;
    ensure!(running["status"]["nodeName"] == node, "it runs on {}", running["status"]["nodeName"]);
    for component in ["virt-api", "virt-controller", "virt-handler"] {
        let started = Instant::now();
        let name = "kubevirt_rest_client_rate_limiter_duration_seconds_count";
        while !s.metrics(component).await?.iter().any(|line| line.starts_with(name)) {
            ensure!(started.elapsed() < TIMEOUT, "{component} has no {name}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    Ok(())
}

async fn label(s: &Story, node: &str, value: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"labels": {LABEL: value}}}));
    s.cluster_api("Node").patch_metadata(node, &PatchParams::default(), &patch).await.context("label the node")?;
    Ok(())
}
