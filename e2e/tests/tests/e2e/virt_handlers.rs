//! Steps of stories that disturb virt-handler.

use std::time::Duration;

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, condition, webhook::is_ready};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use serde_json::Value;
use tokio::time::{Instant, sleep};

/// Waits until a running VMI reports why virt-handler does not manage it.
pub(crate) async fn refuse(s: &Story, vmi: &str, why: &str) -> Result<()> {
    let says = |vmi: &Value| {
        let message = condition(vmi, "Synchronized").and_then(|shown| shown["message"].as_str());
        message.is_some_and(|message| message.contains(why))
    };
    let vmi = s.wait("vmi", vmi, &format!("say that {why:?}"), TIMEOUT, says).await?;
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    Ok(())
}

/// Pauses and resumes a VMI, which virt-handler and launcher carry out.
pub(crate) async fn serves(s: &Story, vmi: &str) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while let Err(error) = s.virt(&["pause", "vmi", vmi]).await {
        // The answer to a former request came too late.
        if error.to_string().contains("already paused") {
            break;
        }
        ensure!(Instant::now() < deadline, "it is not paused: {error:#}");
        sleep(Duration::from_secs(1)).await;
    }
    s.virt(&["unpause", "vmi", vmi]).await.map(drop)
}

fn pods(s: &Story) -> Api<Pod> {
    Api::namespaced(s.client.clone(), "kubevirt")
}

async fn list(s: &Story) -> Result<Vec<Pod>> {
    Ok(pods(s).list(&ListParams::default().labels("kubevirt.io=virt-handler")).await?.items)
}

/// Replaces all virt-handlers. A new one dials all launchers of its node.
pub(crate) async fn replace(s: &Story) -> Result<()> {
    let former: Vec<Pod> = list(s).await?;
    for pod in &former {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        pods(s).delete(name, &DeleteParams::default().grace_period(0)).await?;
    }
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let pods = list(s).await?;
        let new = pods.iter().filter(|pod| former.iter().all(|known| known.metadata.uid != pod.metadata.uid));
        if new.filter(|pod| is_ready(pod)).count() == former.len() && pods.len() == former.len() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "virt-handler does not come back");
        sleep(Duration::from_millis(500)).await;
    }
}

/// Waits until all virt-handlers are ready, and returns them with their restarts.
pub(crate) async fn restarts(s: &Story) -> Result<Vec<(Option<String>, i32)>> {
    let deadline = Instant::now() + TIMEOUT;
    while !list(s).await?.iter().all(is_ready) {
        ensure!(Instant::now() < deadline, "virt-handler is not ready");
        sleep(Duration::from_millis(500)).await;
    }
    let mut restarts = Vec::new();
    for pod in list(s).await? {
        let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        restarts.push((pod.metadata.uid, statuses.iter().map(|status| status.restart_count).sum()));
    }
    Ok(restarts)
}
