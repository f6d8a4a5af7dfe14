//! Changes of the configuration, and what follows them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT};
use http::Request;
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::installation;

/// Changes a harmless setting and returns the new resource version.
pub(super) async fn set_period(s: &Story, period: &Value) -> Result<u64> {
    let patch = Patch::Merge(json!({"spec": {"configuration": {"memBalloonStatsPeriod": period}}}));
    let object = s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &patch).await?;
    Ok(object.resource_version().context("no version")?.parse()?)
}

/// Changes the configuration and waits until it is in effect in each component.
pub(super) async fn followed(s: &Story, period: &Value) -> Result<()> {
    let version = set_period(s, period).await?;
    in_force(s, version).await?;
    let changed = Instant::now();
    loop {
        let object = installation(s).await?;
        if object["status"]["observedGeneration"] == object["metadata"]["generation"] {
            println!("its generation is observed after at most {} ms", changed.elapsed().as_millis());
            return Ok(());
        }
        ensure!(changed.elapsed() < TIMEOUT, "the generation is not observed: {}", object["status"]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until a version of the configuration, or a later one, is in effect in each component.
pub(crate) async fn in_force(s: &Story, version: u64) -> Result<()> {
    let pods = s.installation_api("Pod");
    let mut processes = vec![];
    for name in ["virt-api", "virt-controller", "virt-handler"] {
        let found = pods.list(&ListParams::default().labels(&format!("kubevirt.io={name}"))).await?;
        let living = found
            .items
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none() && pod.data["status"]["phase"] == "Running");
        let known = processes.len();
        processes.extend(living.map(|pod| pod.name_any()));
        ensure!(processes.len() > known, "there is no {name}");
    }
    let changed = Instant::now();
    for process in processes {
        let path = format!("/api/v1/namespaces/kubevirt/pods/https:{process}:8443/proxy/healthz");
        loop {
            // A busy process can be too late.
            let health = s.client.request::<Value>(Request::get(&path).body(vec![])?).await.unwrap_or_default();
            let in_force = health["config-resource-version"].as_str().unwrap_or_default();
            if in_force.parse::<u64>().is_ok_and(|in_force| in_force >= version) {
                println!("{process} has the configuration after at most {} ms", changed.elapsed().as_millis());
                break;
            }
            // The documented limit is two seconds.
            ensure!(changed.elapsed() < TIMEOUT, "{process} has {in_force}, not {version}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

/// Removes the roles for users from the aggregated roles of the cluster, and adds them again.
pub(super) async fn roles_follow_the_strategy(s: &Story) -> Result<()> {
    let before = installation(s).await?["spec"]["configuration"]["roleAggregationStrategy"].clone();
    let apart = match set_strategy(s, &json!("Manual")).await {
        Ok(()) => aggregated(s, "false").await,
        failed => failed,
    };
    // Users need their rights, also after a failure.
    let restored = set_strategy(s, &before).await;
    apart.and(restored)?;
    aggregated(s, if before == "Manual" { "false" } else { "true" }).await
}

async fn set_strategy(s: &Story, strategy: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"configuration": {"roleAggregationStrategy": strategy}}}));
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until each role has or lacks the aggregation label.
async fn aggregated(s: &Story, wanted: &str) -> Result<()> {
    let roles = s.cluster_api("ClusterRole");
    let started = Instant::now();
    for part in ["admin", "edit", "view"] {
        let name = format!("kubevirt.io:{part}");
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{part}");
        loop {
            let role = roles.get(&name).await?;
            let known = role.labels().get(&label).map(String::as_str);
            if known == Some(wanted) {
                break;
            }
            ensure!(started.elapsed() < TIMEOUT, "{name} has {label} {known:?}, not {wanted}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    Ok(())
}

/// Waits until the component has no pod, not even one that ends.
pub(super) async fn without_pods(s: &Story, component: &str) -> Result<()> {
    let started = Instant::now();
    while !s.pods_of(component).await?.is_empty() {
        ensure!(started.elapsed() < 2 * TIMEOUT, "pods of {component} do not end");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// Waits until the conditions Available and Degraded have these values and returns the installation.
pub(super) async fn settled(s: &Story, available: &str, degraded: &str) -> Result<Value> {
    let started = Instant::now();
    loop {
        let object = installation(s).await?;
        if condition(&object, "Available") == available && condition(&object, "Degraded") == degraded {
            println!("Available is {available} after {} ms", started.elapsed().as_millis());
            return Ok(object);
        }
        ensure!(
            started.elapsed() < 2 * TIMEOUT,
            "Available is not {available}, or Degraded not {degraded}: {}",
            object["status"]
        );
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

fn find<'a>(object: &'a Value, name: &str, field: &str) -> &'a str {
    let conditions = object["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == name);
    found.and_then(|condition| condition[field].as_str()).unwrap_or_default()
}

fn condition<'a>(object: &'a Value, name: &str) -> &'a str {
    find(object, name, "status")
}

pub(super) fn message<'a>(object: &'a Value, name: &str) -> &'a str {
    find(object, name, "message")
}
