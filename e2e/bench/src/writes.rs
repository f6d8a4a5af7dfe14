//! Mutating API calls of Ferrovirt for one VMI, counted in the test cluster's audit log.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, audit_log};
use serde_json::Value;

use crate::{Figures, start::StartedVmi};

/// Counts the writes to the VMI and its pod, without events. There is no figure without an audit log (another cluster).
pub(crate) async fn measure(story: &Story, vmi: &StartedVmi<'_>, figures: &mut Figures) -> Result<()> {
    let path = audit_log();
    let Ok(file) = File::open(&path) else {
        println!("no audit log at {}: API calls are not counted", path.display());
        return Ok(());
    };
    let object = story.get("vmi", &vmi.name).await?;
    let since = object["metadata"]["creationTimestamp"].as_str().context("VMI without creation time")?.to_owned();
    let pod = story.launcher_pod(&vmi.name).await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
    let (mut writes, mut events) = (0.0, 0.0);
    for line in BufReader::new(file).lines() {
        let Ok(entry) = serde_json::from_str::<Value>(&line?) else { continue };
        if !by_ferrovirt(&entry) || entry["objectRef"]["namespace"] != story.namespace.as_str() {
            continue;
        }
        if entry["objectRef"]["resource"] == "events" {
            events += 1.0;
        } else if about(&entry, &vmi.name, &pod, &since) {
            println!(
                "  {} {} {}{} by {}: {}",
                entry["verb"].as_str().unwrap_or_default(),
                entry["objectRef"]["resource"].as_str().unwrap_or_default(),
                entry["objectRef"]["name"].as_str().unwrap_or_default(),
                entry["objectRef"]["subresource"].as_str().map(|s| format!("/{s}")).unwrap_or_default(),
                entry["user"]["username"].as_str().unwrap_or_default().rsplit(':').next().unwrap_or_default(),
                entry["responseStatus"]["code"]
            );
            writes += 1.0;
        }
    }
    figures.insert("mutating_calls_per_vmi".into(), writes);
    figures.insert("events_of_bench_namespace".into(), events);
    Ok(())
}

/// Numbers of mutating calls of Ferrovirt's service accounts since the cluster started, leases, nodes and events apart.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    /// In all namespaces.
    pub(crate) all: f64,
    /// In the namespace of the benchmark.
    pub(crate) own: f64,
}

/// Counts the writes of all components. Calls with an impersonated service account count as its own.
pub(crate) fn of_ferrovirt(path: &Path, namespace: &str) -> Result<Count> {
    let file = File::open(path).with_context(|| format!("no audit log at {}", path.display()))?;
    let mut count = Count::default();
    for line in BufReader::new(file).lines() {
        let Ok(entry) = serde_json::from_str::<Value>(&line?) else { continue };
        let resource = entry["objectRef"]["resource"].as_str().unwrap_or_default();
        if !by_ferrovirt(&entry) || matches!(resource, "events" | "leases" | "nodes") || resource.ends_with("reviews") {
            continue;
        }
        count.all += 1.0;
        if entry["objectRef"]["namespace"] == namespace {
            count.own += 1.0;
        }
    }
    Ok(count)
}

fn by_ferrovirt(entry: &Value) -> bool {
    let acted = [&entry["impersonatedUser"], &entry["user"]].into_iter().find_map(|user| user["username"].as_str());
    let user = acted.unwrap_or_default();
    entry["stage"] == "ResponseComplete"
        && user.starts_with("system:serviceaccount:kubevirt:")
        && matches!(entry["verb"].as_str(), Some("create" | "update" | "patch" | "delete"))
}

/// Returns true for writes to the VMI or its pod. The log entry of a pod's creation has no name if the server generates it. VMIs of
/// the benchmark are created one after another, so a pod that is created after the VMI belongs to it.
fn about(entry: &Value, vmi: &str, pod: &str, since: &str) -> bool {
    let name = entry["objectRef"]["name"].as_str().unwrap_or_default();
    // Both are RFC 3339 in UTC; the creation time has no fraction.
    let second = |time: &str| time.get(..19).map(str::to_owned);
    let received = entry["requestReceivedTimestamp"].as_str().and_then(second);
    let creates_pod = entry["verb"] == "create" && entry["objectRef"]["resource"] == "pods" && name.is_empty();
    name == vmi || name == pod || (creates_pod && received >= second(since))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{about, by_ferrovirt};

    #[test]
    fn only_completed_writes_of_ferrovirt_count() {
        let entry =
            |user: &str, verb: &str, stage: &str| json!({"user": {"username": user}, "verb": verb, "stage": stage});
        let controller = "system:serviceaccount:kubevirt:kubevirt-controller";
        assert!(by_ferrovirt(&entry(controller, "patch", "ResponseComplete")));
        assert!(!by_ferrovirt(&entry(controller, "get", "ResponseComplete")));
        assert!(!by_ferrovirt(&entry(controller, "patch", "RequestReceived")));
        assert!(!by_ferrovirt(&entry("system:node:a", "patch", "ResponseComplete")));
        let about = |entry| about(&entry, "vmi", "virt-launcher-vmi-abc", "2026-01-02T03:04:05Z");
        assert!(about(json!({"objectRef": {"name": "vmi"}})));
        assert!(!about(json!({"objectRef": {"name": "other"}})));
        let creation = |time: &str| {
            json!({"verb": "create", "objectRef": {"resource": "pods"},
            "requestReceivedTimestamp": time})
        };
        assert!(about(creation("2026-01-02T03:04:05.125000Z")));
        assert!(!about(creation("2026-01-02T03:04:04.925000Z")));
    }
}
