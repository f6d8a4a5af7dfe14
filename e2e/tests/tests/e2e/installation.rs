//! Helm and the installation.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, kubeconfig, story_alone};
use http::Request;
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{process::Command, time::Instant};

use crate::manifests;

#[test]
fn uninstalling_is_refused_under_a_running_machine_and_tells_the_way_back() {
    story_alone("uninstall", async |s| {
        s.apply(&manifests::kernel_vmi("busy")).await?;
        let before = s.wait_running("busy").await?;

        let refusal = helm(&["uninstall", "ferrovirt", "-n", "kubevirt"]).await;
        let keep = refused(s, refusal).await;
        // Whatever the refusal says, later stories need the installation.
        let back = helm(&["rollback", "ferrovirt", &revision().await?, "-n", "kubevirt"]).await?;
        ensure!(back.0, "helm rollback: {}", back.1);
        let (keep, revision) = (keep?, revision().await?);
        ensure!(keep.starts_with("helm -n kubevirt rollback ferrovirt "), "{keep:?} is not the way back");
        let (_, status) = helm(&["status", "ferrovirt", "-n", "kubevirt"]).await?;
        ensure!(status.contains("STATUS: deployed"), "revision {revision} is not deployed: {status}");

        let after = s.get("vmi", "busy").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the machine is another one");
        ensure!(after["status"]["phase"] == "Running", "the machine is {}", after["status"]["phase"]);
        Ok(())
    });
}

/// The command that the refusal offers.
async fn refused(s: &Story, refusal: Result<(bool, String)>) -> Result<String> {
    let (uninstalled, said) = refusal?;
    ensure!(!uninstalled, "uninstalled under a running machine: {said}");
    ensure!(said.contains(&format!("{}/busy", s.namespace)), "the machine is not named: {said}");
    let keep = said.split("To keep the installation").nth(1).and_then(|rest| rest.split('`').nth(1));
    Ok(keep.with_context(|| format!("no way back in: {said}"))?.to_owned())
}

/// The newest revision of the release.
async fn revision() -> Result<String> {
    let (_, history) = helm(&["history", "ferrovirt", "-n", "kubevirt", "-o", "json"]).await?;
    let history: serde_json::Value = serde_json::from_str(history.trim()).context("helm history is not JSON")?;
    let newest = history.as_array().and_then(|all| all.iter().filter_map(|one| one["revision"].as_u64()).max());
    Ok(newest.context("no revision")?.to_string())
}

/// Whether Helm succeeded, and what it printed.
async fn helm(arguments: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new("helm");
    command.args(arguments).env("KUBECONFIG", kubeconfig()).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.context("cannot run helm: it must be on the PATH")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn configuration_is_followed_by_each_process_and_the_status_tells_what_is_missing() {
    story_alone("configuration", async |s| {
        let before = installation(s).await?;
        let period = before["spec"]["configuration"]["memBalloonStatsPeriod"].clone();
        let other = if period == 7 { 8 } else { 7 };
        let followed = followed(s, &json!(other)).await;
        let restored = set_period(s, &period).await;
        followed.and(restored.map(|_| ()))?;

        let deployments = s.installation_api("Deployment");
        let replicas = deployments.get("virt-api").await?.data["spec"]["replicas"].clone();
        let scale = async |replicas: &Value| -> Result<()> {
            let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
            deployments.patch("virt-api", &PatchParams::default(), &patch).await.context("scale virt-api")?;
            Ok(())
        };
        scale(&json!(0)).await?;
        let missed = settled(s, "False", "True").await;
        scale(&replicas).await?;
        let missed = missed?;
        // The controller sees the pods go, the API services, or both.
        let why = message(&missed, "Available");
        ensure!(why.contains("virt-api") || why.contains("API services"), "{}", missed["status"]);
        ensure!(missed["status"]["phase"] == "Deployed", "phase {}", missed["status"]["phase"]);
        settled(s, "True", "False").await?;
        Ok(())
    });
}

async fn installation(s: &Story) -> Result<Value> {
    Ok(serde_json::to_value(s.installation_api("KubeVirt").get("kubevirt").await?)?)
}

/// Changes a setting that disturbs nobody; the version of the object that says so.
async fn set_period(s: &Story, period: &Value) -> Result<u64> {
    let patch = Patch::Merge(json!({"spec": {"configuration": {"memBalloonStatsPeriod": period}}}));
    let object = s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &patch).await?;
    Ok(object.resource_version().context("no version")?.parse()?)
}

/// Changes the configuration and waits until each process has it in force.
async fn followed(s: &Story, period: &Value) -> Result<()> {
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
    let version = set_period(s, period).await?;
    let changed = Instant::now();
    for process in processes {
        let path = format!("/api/v1/namespaces/kubevirt/pods/https:{process}:8443/proxy/healthz");
        loop {
            let health: Value = s.client.request(Request::get(&path).body(vec![])?).await.context(path.clone())?;
            let in_force = health["config-resource-version"].as_str().unwrap_or_default();
            if in_force.parse::<u64>().is_ok_and(|in_force| in_force >= version) {
                println!("{process} has the configuration after at most {} ms", changed.elapsed().as_millis());
                break;
            }
            // Two seconds are what is promised; machines may be five times slower than they are thought.
            ensure!(changed.elapsed() < Duration::from_secs(10), "{process} has {in_force}, not {version}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    loop {
        let object = installation(s).await?;
        if object["status"]["observedGeneration"] == object["metadata"]["generation"] {
            println!("its generation is observed after at most {} ms", changed.elapsed().as_millis());
            return Ok(());
        }
        ensure!(changed.elapsed() < Duration::from_secs(20), "the generation is not observed: {}", object["status"]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The installation, as soon as its conditions Available and Degraded are so.
async fn settled(s: &Story, available: &str, degraded: &str) -> Result<Value> {
    let started = Instant::now();
    loop {
        let object = installation(s).await?;
        if condition(&object, "Available") == available && condition(&object, "Degraded") == degraded {
            println!("Available is {available} after {} ms", started.elapsed().as_millis());
            return Ok(object);
        }
        ensure!(
            started.elapsed() < Duration::from_secs(120),
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

fn message<'a>(object: &'a Value, name: &str) -> &'a str {
    find(object, name, "message")
}
