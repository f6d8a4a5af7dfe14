//! Profiles of the components.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use daemon::profiler::pprof::Profile;
use ferrovirt_e2e_tests::{Story, TIMEOUT, story_alone};
use http::Method;
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use prost::Message;
use serde_json::{Value, json};
use tokio::time::Instant;

const GET: Method = Method::GET;
const GROUP: &str = "/apis/subresources.kubevirt.io/v1";
const COMPONENTS: [&str; 3] = ["virt-api", "virt-controller", "virt-handler"];

#[test]
fn only_an_administrator_profiles_components() {
    story_alone("profiles", async |s| {
        let before = allow(s, &json!(true)).await?;
        let done = allowed_and_then_not(s).await;
        // The former configuration is restored, also after a failure.
        allow(s, &before).await?;
        done
    });
}

async fn allowed_and_then_not(s: &Story) -> Result<()> {
    profiled(s).await?;
    ensure!(samplers(s).await? == 0, "what samples is still there");
    ask_until(s, "start", 200).await?;
    ensure!(samplers(s).await? > 0, "nothing samples virt-handler");
    allow(s, &json!(false)).await?;
    ask_until(s, "start", 403).await?;
    let asked = Instant::now();
    while samplers(s).await? > 0 {
        ensure!(asked.elapsed() < TIMEOUT, "components are sampled that nobody may profile");
    }
    Ok(())
}

/// Returns the number of processes on all nodes that sample another one.
async fn samplers(s: &Story) -> Result<usize> {
    // The brackets keep the pattern from matching itself.
    let script =
        "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null | grep '[s]ample-parent' || true; done";
    let mut count = 0;
    for node in s.nodes_of("virt-handler").await? {
        count += s.on_node(&node, script).await?.lines().count();
    }
    Ok(count)
}

async fn profiled(s: &Story) -> Result<()> {
    ask_until(s, "start", 200).await?;
    // virt-api is busy until a number of calls, since a stalled host does no work in any time.
    let (work, mut calls) = (Instant::now(), 0);
    while calls < 500 || work.elapsed().as_secs() < 3 {
        s.call(&GET, &format!("{GROUP}/version"), &Value::Null).await?;
        calls += 1;
    }
    let stopped = ask(s, "stop", &Value::Null).await?;
    ensure!(stopped.0 == 200, "stop: {stopped:?}");

    let profiles = pages(s).await?;
    for component in COMPONENTS {
        let pods =
            s.installation_api("Pod").list(&ListParams::default().labels(&format!("kubevirt.io={component}"))).await?;
        ensure!(!pods.items.is_empty(), "there is no {component}");
        for pod in pods.items.iter().map(ResourceExt::name_any) {
            let profile = profiles.get(&pod).with_context(|| format!("no profile of {pod}"))?;
            let files: Vec<_> = profile.mapping.iter().map(|mapping| text(profile, mapping.filename)).collect();
            ensure!(files.iter().any(|file| file.ends_with(component)), "{pod} has {files:?}");
            println!("{pod}: {} stacks", profile.sample.len());
        }
    }
    let own = profiles.iter().filter(|(pod, _)| pod.starts_with("virt-api")).flat_map(|(_, profile)| &profile.sample);
    let deepest = own.map(|sample| sample.location_id.len()).max().unwrap_or_default();
    ensure!(deepest > 8, "the deepest stack of virt-api has {deepest} frames");

    let some = ask(s, "dump", &json!({"labelSelector": "kubevirt.io=virt-handler"})).await?;
    let some: Value = serde_json::from_str(&some.1).with_context(|| some.1.clone())?;
    let pods = some["componentResults"].as_object().context("no results")?;
    ensure!(!pods.is_empty() && pods.keys().all(|pod| pod.starts_with("virt-handler")), "{:?}", pods.keys());
    for (body, code) in
        [(json!({"labelSelector": "kubevirt.io=none"}), 204), (json!({"labelSelector": "("}), 400), (json!([]), 400)]
    {
        let answer = ask(s, "dump", &body).await?;
        ensure!(answer.0 == code, "{body}: {answer:?}");
    }
    not_past_the_api_server(s, profiles.keys()).await
}

/// Checks that components serve profiles only to virt-api's certificate, and virt-api only through kube-apiserver.
async fn not_past_the_api_server(s: &Story, pods: impl Iterator<Item = &String>) -> Result<()> {
    for pod in pods {
        let proxy = format!("/api/v1/namespaces/kubevirt/pods/https:{pod}:8443/proxy");
        let mut paths = vec!["/start-profiler".to_owned(), "/stop-profiler".into(), "/dump-profiler".into()];
        if pod.starts_with("virt-api") {
            paths.extend(["start", "stop", "dump"].map(|action| format!("{GROUP}/{action}-cluster-profiler")));
        }
        for path in paths {
            let answer = s.call(&GET, &format!("{proxy}{path}"), &Value::Null).await?;
            ensure!(answer.code == 401, "{pod} {path}: {} {}", answer.code, answer.message());
        }
    }
    Ok(())
}

/// Gets every profile, two pods at a time.
async fn pages(s: &Story) -> Result<BTreeMap<String, Profile>> {
    let mut profiles = BTreeMap::new();
    let mut token = String::new();
    loop {
        let (code, answer) = ask(s, "dump", &json!({"pageSize": 2, "continue": token})).await?;
        ensure!(code == 200, "dump: {code} {answer}");
        let page: Value = serde_json::from_str(&answer)?;
        let results = page["componentResults"].as_object().context("no results")?;
        ensure!(results.len() <= 2, "{} pods are on the page", results.len());
        for (pod, result) in results {
            let data = result["pprofData"]["cpu"].as_str().with_context(|| format!("no profile of {pod}: {result}"))?;
            let profile = Profile::decode(STANDARD.decode(data)?.as_slice()).with_context(|| pod.clone())?;
            profiles.insert(pod.clone(), profile);
        }
        token = page["continue"].as_str().unwrap_or_default().to_owned();
        if token.is_empty() {
            return Ok(profiles);
        }
    }
}

async fn ask(s: &Story, action: &str, body: &Value) -> Result<(u16, String)> {
    let answer = s.call(&GET, &format!("{GROUP}/{action}-cluster-profiler"), body).await?;
    Ok((answer.code, answer.text()))
}

/// Repeats a call until the configuration is in effect in all components.
async fn ask_until(s: &Story, action: &str, code: u16) -> Result<()> {
    let asked = Instant::now();
    loop {
        let answer = ask(s, action, &Value::Null).await?;
        if answer.0 == code {
            return Ok(());
        }
        ensure!(asked.elapsed() < TIMEOUT, "{action}: {answer:?}");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

/// Enables or disables profiles and returns the former setting.
async fn allow(s: &Story, allowed: &Value) -> Result<Value> {
    let installation = s.installation_api("KubeVirt");
    let developer =
        |object: &Value| object["spec"]["configuration"]["developerConfiguration"]["clusterProfiler"].clone();
    let before = developer(&serde_json::to_value(installation.get("kubevirt").await?)?);
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"clusterProfiler": allowed}}}});
    installation.patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await.context("allow profiles")?;
    Ok(before)
}

fn text(profile: &Profile, index: i64) -> &str {
    usize::try_from(index).ok().and_then(|index| profile.string_table.get(index)).map_or("", String::as_str)
}
