//! The trace of a start: from `kubectl apply` to the first instruction of the guest, through all processes.

mod picture;

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    CollectedSpan, Collector, Story, TIMEOUT, kubeconfig, own_cluster, repository, skip, story_alone,
};
use kube::api::ListParams;
use serde_json::Value;
use tokio::{
    process::Command,
    time::{Instant, sleep},
};

use crate::manifests;

/// The annotation with the trace context.
const ANNOTATION: &str = "ferrovirt.io/traceparent";
/// File that gets the picture of the trace, relative to the repository.
const PICTURE: &str = "TRACE_PICTURE";
/// Longest time of an upgrade of the installation.
const UPGRADE: &str = "5m";

#[test]
fn the_trace_of_a_start_leads_through_all_processes() {
    story_alone("traces", async |s| {
        let Some(plan) = own_cluster()? else {
            return skip("route from pods");
        };
        ensure!(context_of_a_new_vm(s, "before").await?.is_none(), "an annotation is written while traces are off");
        let collector = Collector::start().await?;
        let endpoint = format!("http://{}:{}", plan.host_address(), collector.port);
        let traced = match upgrade(s, &endpoint).await {
            Ok(()) => trace(s, &collector).await,
            failed => failed,
        };
        // Later stories need the installation as it was, also after a failure.
        upgrade(s, "").await?;
        traced?;
        ensure!(
            context_of_a_new_vm(s, "after").await?.is_none(),
            "an annotation is written after traces were turned off"
        );
        Ok(())
    });
}

async fn trace(s: &Story, collector: &Collector) -> Result<()> {
    // A context of a user is replaced.
    let forged = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let manifest = manifests::kernel_vm("box", "Always");
    let manifest = manifest
        .replace("metadata: {name: box}", &format!("metadata: {{name: box, annotations: {{{ANNOTATION}: {forged}}}}}"));
    ensure!(manifest.contains(forged), "the manifest has another form");
    s.apply(&manifest).await?;
    let vmi = s.wait_running("box").await?;
    let vm = s.get("vm", "box").await?;
    let context = vm["metadata"]["annotations"][ANNOTATION].as_str().context("the VM has no trace context")?;
    ensure!(context != forged, "the context of the user was kept");
    for object in [&vmi, &s.launcher_pod("box").await?] {
        let own = &object["metadata"]["annotations"][ANNOTATION];
        ensure!(own == context, "{} has the context {own}, not {context}", object["kind"]);
    }
    let mut parts = context.split('-').skip(1);
    let (id, root) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let spans = complete(collector, id).await?;
    for span in &spans {
        let milliseconds = span.times.1.saturating_sub(span.times.0) as f64 / 1e6;
        println!("{:16} {:20} {milliseconds:9.1} ms {:?}", span.service, span.name, span.attributes);
    }
    check(&spans, root)?;
    if let Ok(path) = std::env::var(PICTURE) {
        let path = repository().join(path);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&path, picture::draw(&spans)).with_context(|| format!("cannot write {}", path.display()))?;
        println!("the picture is in {}", path.display());
    }
    Ok(())
}

/// Spans of a complete trace: process, name, and the name of the parent.
const EXPECTED: [(&str, &str, &str); 17] = [
    ("virt-api", "review", ""),
    ("virt-api", "review", "review"),
    ("virt-controller", "reconcile", "review"),
    ("virt-controller", "create", "reconcile"),
    ("virt-controller", "patch", "reconcile"),
    ("virt-controller", "schedule pod", "review"),
    ("virt-controller", "start pod", "review"),
    ("virt-handler", "connect", "review"),
    ("virt-handler", "hello", "review"),
    ("virt-handler", "network", "review"),
    ("virt-handler", "sync", "review"),
    ("virt-handler", "write", "review"),
    ("virt-launcher", "start worker", "review"),
    ("virt-launcher", "start libvirt", "review"),
    ("virt-launcher", "prepare", "sync"),
    ("virt-launcher", "create", "sync"),
    ("virt-launcher", "first instruction", "sync"),
];

/// Returns process, name and name of the parent of each span.
fn places(spans: &[CollectedSpan]) -> BTreeSet<(&str, &str, &str)> {
    let names: BTreeMap<&str, &str> = spans.iter().map(|span| (span.id.as_str(), span.name.as_str())).collect();
    spans
        .iter()
        .map(|span| {
            let parent = names.get(span.parent.as_str()).copied().unwrap_or_default();
            (span.service.as_str(), span.name.as_str(), parent)
        })
        .collect()
}

/// Waits until the trace is complete.
async fn complete(collector: &Collector, id: &str) -> Result<Vec<CollectedSpan>> {
    let started = Instant::now();
    loop {
        let spans = collector.trace(id);
        let found = places(&spans);
        let missing: Vec<_> = EXPECTED.iter().filter(|expected| !found.contains(*expected)).collect();
        if missing.is_empty() {
            return Ok(spans);
        }
        ensure!(started.elapsed() < TIMEOUT, "trace {id} lacks {missing:?}; it has {found:?}");
        sleep(Duration::from_millis(250)).await;
    }
}

/// Checks the identities, parents and times of a complete trace.
fn check(spans: &[CollectedSpan], root: &str) -> Result<()> {
    let ids: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).collect();
    ensure!(ids.len() == spans.len(), "spans have the same identity: {spans:#?}");
    let first: Vec<_> = spans.iter().filter(|span| span.parent.is_empty()).collect();
    let [first] = first.as_slice() else { anyhow::bail!("the trace has not one first span: {first:#?}") };
    ensure!(first.id == root, "the first span is {}, not that of the annotation, {root}", first.id);
    ensure!(first.attributes.get("resource").is_some_and(|plural| plural == "virtualmachines"), "{first:#?}");
    for span in spans {
        ensure!(span.parent.is_empty() || ids.contains(span.parent.as_str()), "no parent: {span:#?}");
        ensure!(span.times.0 >= first.times.0 && span.times.1 >= span.times.0, "begins too early: {span:#?}");
        // Other calls are repeated, such as a patch of an object that has changed.
        let must_succeed = ["review", "hello", "network", "sync"].contains(&span.name.as_str());
        ensure!(span.error.is_none() || !must_succeed, "failed: {span:#?}");
    }
    let of = |name: &str| spans.iter().find(|span| span.name == name).with_context(|| format!("no span {name}"));
    let (guest, sync) = (of("first instruction")?, of("sync")?);
    ensure!((sync.times.0..=sync.times.1).contains(&guest.times.0), "not within the sync: {guest:#?}");
    let seconds = guest.times.0.saturating_sub(first.times.0) as f64 / 1e9;
    println!("the guest executes its first instruction {seconds:.3} s after the review of its VM began");
    ensure!(seconds < TIMEOUT.as_secs_f64(), "{seconds} s");
    Ok(())
}

/// Creates a VM that does not start and returns its trace context.
async fn context_of_a_new_vm(s: &Story, name: &str) -> Result<Option<String>> {
    s.apply(&manifests::kernel_vm(name, "Halted")).await?;
    let vm: Value = s.get("vm", name).await?;
    Ok(vm["metadata"]["annotations"][ANNOTATION].as_str().map(str::to_owned))
}

/// Sets the collector of the installation, and waits until all processes use it.
async fn upgrade(s: &Story, endpoint: &str) -> Result<()> {
    let chart = repository().join("charts/ferrovirt");
    let value = format!("tracing.endpoint={endpoint}");
    let mut command = Command::new("helm");
    command
        .args(["upgrade", "ferrovirt"])
        .arg(chart)
        .args(["-n", "kubevirt", "--reuse-values", "--set-string", &value, "--wait", "--timeout", UPGRADE])
        .env("KUBECONFIG", kubeconfig())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = command.output().await.context("cannot run helm: it must be on the PATH")?;
    ensure!(output.status.success(), "helm upgrade: {}", String::from_utf8_lossy(&output.stderr));
    // Helm does not wait for the end of former processes, which still answer requests.
    let started = Instant::now();
    let components = ListParams::default().labels("kubevirt.io in (virt-api,virt-controller,virt-handler)");
    loop {
        let pods = s.installation_api("Pod").list(&components).await?;
        let ending = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count();
        if ending == 0 {
            return Ok(());
        }
        ensure!(started.elapsed() < TIMEOUT, "{ending} pods of the former configuration are still there");
        sleep(Duration::from_millis(250)).await;
    }
}
