//! Evictions with strategy External: a drain requests evacuation, and a user can cancel it.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Story, condition, connect_without_retries, is_true, story};
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{EvictParams, PostParams},
};
use serde_json::{Value, json};

use crate::manifests;

const MINUTE: Duration = Duration::from_secs(120);

/// Requests an eviction as a drain does and returns the reason of the refusal.
async fn drain(s: &Story, pod: &str, dry_run: bool) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(connect_without_retries().await?, &s.namespace);
    let post_options = PostParams { dry_run, ..PostParams::default() };
    match pods.evict(pod, &EvictParams { post_options, ..EvictParams::default() }).await {
        Err(kube::Error::Api(status)) if status.code == 429 => Ok(status.message.clone()),
        Err(error) => Err(error).context("the eviction was not answered"),
        Ok(_) => bail!("{pod} was evicted"),
    }
}

fn requested(vmi: &Value) -> bool {
    is_true(vmi, "EvictionRequested")
}

fn in_progress(pod: &Value) -> bool {
    pod["metadata"]["annotations"]["descheduler.alpha.kubernetes.io/eviction-in-progress"] == "true"
}

/// Waits until VMI and pod report the evacuation from `node`.
async fn leaves(s: &Story, pod: &str, node: &Value) -> Result<()> {
    s.wait("vmi", "box", "be marked", MINUTE, |vmi| vmi["status"]["evacuationNodeName"] == *node && requested(vmi))
        .await?;
    s.wait("Pod", pod, "be marked", MINUTE, in_progress).await?;
    Ok(())
}

/// Waits until neither reports an evacuation.
async fn stays(s: &Story, pod: &str) -> Result<()> {
    let unmarked = |vmi: &Value| vmi["status"]["evacuationNodeName"].is_null() && !requested(vmi);
    s.wait("vmi", "box", "be no longer marked", MINUTE, unmarked).await?;
    s.wait("Pod", pod, "be no longer marked", MINUTE, |pod| !in_progress(pod)).await?;
    Ok(())
}

#[test]
fn requested_evacuation_can_be_cancelled() {
    story("evacuation", async |s| {
        let grace = "      terminationGracePeriodSeconds: 0\n";
        let strategy = format!("{grace}      evictionStrategy: External\n");
        s.apply(&manifests::kernel_vm("box", "Always").replace(grace, &strategy)).await?;
        let before = s.wait_running("box").await?;
        let node = &before["status"]["nodeName"];
        let pod = s.launcher_pod("box").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
        let asked = format!("Eviction triggered evacuation of VMI \"{}/box\"", s.namespace);

        let message = drain(s, pod, true).await?;
        ensure!(message.contains(&asked), "{message}");
        ensure!(s.get("vmi", "box").await?["status"]["evacuationNodeName"].is_null(), "a dry run marked the VMI");

        let message = drain(s, pod, false).await?;
        ensure!(message.contains(&asked) && !message.contains("in progress"), "{message}");
        leaves(s, pod, node).await?;
        let message = drain(s, pod, false).await?;
        ensure!(message.contains(&format!("Evacuation in progress: {asked}")), "{message}");

        // A dry run, and another node: no effect.
        s.virt(&["evacuate-cancel", "vm", "box", "--dry-run"]).await?;
        let other = json!({"evacuationNodeName": "another-node"});
        let (code, message) =
            s.call_subresource(&Method::PUT, "virtualmachineinstances/box", "evacuate/cancel", &other).await?;
        ensure!(code == 500, "{code} {message}");
        leaves(s, pod, node).await?;

        let message = s.virt(&["evacuate-cancel", "vm", "box"]).await?;
        ensure!(message == format!("VM {}/box was canceled evacuation\n", s.namespace), "{message:?}");
        stays(s, pod).await?;

        // The drain repeats the request until it is cancelled for all VMIs of the node.
        drain(s, pod, false).await?;
        leaves(s, pod, node).await?;
        let message = s.virt(&["evacuate-cancel", "node", node.as_str().context("no node")?]).await?;
        ensure!(message.contains(&format!("VMI {}/box was canceled evacuation\n", s.namespace)), "{message:?}");
        stays(s, pod).await?;

        // A VMI with strategy LiveMigrate stays, since it cannot migrate.
        let strategy = format!("{grace}      evictionStrategy: LiveMigrate\n");
        s.apply(&manifests::kernel_vm("fixed", "Always").replace(grace, &strategy)).await?;
        s.wait_running("fixed").await?;
        let is_known = |vmi: &Value| condition(vmi, "LiveMigratable").is_some();
        s.wait("vmi", "fixed", "show if it can migrate", MINUTE, is_known).await?;
        let pod = s.launcher_pod("fixed").await?;
        let message = drain(s, pod["metadata"]["name"].as_str().context("pod without name")?, false).await?;
        let expected = "VMI fixed is configured with an eviction strategy but is not live-migratable";
        ensure!(message.contains(expected), "{message}");

        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(after["status"]["phase"] == "Running", "the VMI is {}", after["status"]["phase"]);
        Ok(())
    });
}
