//! Connections without credentials from the pod network do not disturb the installation.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, is_true, skip, story_alone};
use kube::api::ListParams;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::manifests;

/// Default duration of the attack in seconds, and the variable that changes it.
const SECONDS: &str = "FLOOD_SECONDS";
const DEFAULT_SECONDS: u64 = 30;
/// A failed probe is reported after its time limit.
const REPORTED: Duration = Duration::from_secs(3);

#[test]
fn silent_connections_and_stalled_reviews_do_not_affect_the_installation() {
    story_alone("silent", async |s| {
        let seconds = std::env::var(SECONDS).ok().map(|text| text.parse()).transpose().context(SECONDS)?;
        let duration = Duration::from_secs(seconds.unwrap_or(DEFAULT_SECONDS));
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        s.wait_running("box").await?;
        settled(s).await?;
        let pods = pods(s).await?;
        let failures = failed_probes(s, &pods).await?;
        let Some(flood) = s.flood("attacker").await? else {
            return skip("route to pods");
        };
        let outcome = use_the_cluster(s, Instant::now() + duration).await;
        let extent = flood.stop()?;
        println!("{extent:?}");
        let uses = outcome?;
        println!("{uses} VMs were created, paused and deleted meanwhile");
        extent.check()?;
        sleep(REPORTED).await;
        let (pods_after, failures_after) = (self::pods(s).await?, failed_probes(s, &pods).await?);
        ensure!(failures == failures_after, "probes failed: before {failures:#?}, after {failures_after:#?}");
        ensure!(pods == pods_after, "pods restarted or were not ready: before {pods:#?}, after {pods_after:#?}");
        Ok(())
    });
}

/// Creates and deletes VMs, and pauses and resumes a VMI, which uses virt-api, virt-handler and their connection.
async fn use_the_cluster(s: &Story, until: Instant) -> Result<usize> {
    let mut uses = 0;
    while Instant::now() < until {
        let name = format!("vm-{uses}");
        s.apply(&manifests::kernel_vm(&name, "Halted")).await.with_context(|| format!("use {uses}"))?;
        s.delete("vm", &name).await?;
        for (action, paused) in [("pause", true), ("unpause", false)] {
            s.virt(&[action, "vmi", "box"]).await.with_context(|| format!("use {uses}"))?;
            s.wait("vmi", "box", action, TIMEOUT, |vmi| is_true(vmi, "Paused") == paused).await?;
        }
        uses += 1;
        sleep(Duration::from_millis(250)).await;
    }
    Ok(uses)
}

/// Selects the pods of the installation.
const INSTALLATION: &str = "kubevirt.io in (virt-api,virt-controller,virt-handler)";

/// Waits until all pods of the installation are ready and none is being deleted, as those that an earlier story replaced.
async fn settled(s: &Story) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let selected = ListParams::default().labels(INSTALLATION);
    loop {
        let listed = s.installation_api("Pod").list(&selected).await?;
        let ends = listed.iter().any(|pod| pod.metadata.deletion_timestamp.is_some());
        if !ends && pods(s).await?.values().all(|(_, since)| since[0] == "True") {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "a pod of the installation is deleted and remains, or is not ready");
        sleep(Duration::from_secs(1)).await;
    }
}

/// Restarts and start of readiness of pods.
type Pods = BTreeMap<String, (i64, Value)>;

/// Returns the installation's pods.
async fn pods(s: &Story) -> Result<Pods> {
    let pods = s.installation_api("Pod").list(&ListParams::default().labels(INSTALLATION)).await?;
    let described = pods.items.into_iter().map(|pod| {
        let status = &pod.data["status"];
        let containers = status["containerStatuses"].as_array().cloned().unwrap_or_default();
        let restarts = containers.iter().filter_map(|container| container["restartCount"].as_i64()).sum();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready").unwrap_or_default();
        let since = serde_json::json!([ready["status"], ready["lastTransitionTime"]]);
        (pod.metadata.name.unwrap_or_default(), (restarts, since))
    });
    Ok(described.collect())
}

/// Returns the failed probes of these pods with their counts.
async fn failed_probes(s: &Story, pods: &Pods) -> Result<BTreeMap<String, i64>> {
    let events = s.installation_api("Event").list(&ListParams::default()).await?;
    let unhealthy = events.items.into_iter().filter(|event| {
        let of_a_pod = event.data["involvedObject"]["name"].as_str().is_some_and(|name| pods.contains_key(name));
        of_a_pod && event.data["reason"] == "Unhealthy"
    });
    let described = unhealthy.map(|event| {
        let text = format!("{}: {}", event.metadata.name.unwrap_or_default(), event.data["message"]);
        (text, event.data["count"].as_i64().unwrap_or(1))
    });
    Ok(described.collect())
}
