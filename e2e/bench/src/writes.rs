//! Mutating API calls that Ferrovirt makes for one machine, counted in the test cluster's audit log.

use std::{
    fs::File,
    io::{BufRead, BufReader},
};

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, audit_log};
use serde_json::Value;

use crate::{Figures, start::Machine};

/// Counts the writes about the machine and its pod, events apart. Without an audit log (a cluster that is not ours)
/// there is no figure.
pub async fn measure(story: &Story, machine: &Machine<'_>, figures: &mut Figures) -> Result<()> {
    let path = audit_log();
    let Ok(file) = File::open(&path) else {
        println!("no audit log at {}: API calls are not counted", path.display());
        return Ok(());
    };
    let vmi = story.get("vmi", &machine.name).await?;
    let since = vmi["metadata"]["creationTimestamp"].as_str().context("machine without time of creation")?.to_owned();
    let pod = story.launcher_pod(&machine.name).await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
    let (mut writes, mut events) = (0.0, 0.0);
    for line in BufReader::new(file).lines() {
        let Ok(entry) = serde_json::from_str::<Value>(&line?) else { continue };
        if !by_ferrovirt(&entry) || entry["objectRef"]["namespace"] != story.namespace.as_str() {
            continue;
        }
        if entry["objectRef"]["resource"] == "events" {
            events += 1.0;
        } else if about(&entry, &machine.name, &pod, &since) {
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

fn by_ferrovirt(entry: &Value) -> bool {
    let user = entry["user"]["username"].as_str().unwrap_or_default();
    entry["stage"] == "ResponseComplete"
        && user.starts_with("system:serviceaccount:kubevirt:")
        && matches!(entry["verb"].as_str(), Some("create" | "update" | "patch" | "delete"))
}

/// Whether a write is about the machine or its pod. A pod whose name the server makes has none in the log of its creation:
/// since machines of the benchmark come one after another, one made since the machine was is the machine's.
fn about(entry: &Value, machine: &str, pod: &str, since: &str) -> bool {
    let name = entry["objectRef"]["name"].as_str().unwrap_or_default();
    // Both are RFC 3339 in UTC; the machine's has no fraction.
    let second = |time: &str| time.get(..19).map(str::to_owned);
    let received = entry["requestReceivedTimestamp"].as_str().and_then(second);
    let creates_pod = entry["verb"] == "create" && entry["objectRef"]["resource"] == "pods" && name.is_empty();
    name == machine || name == pod || (creates_pod && received >= second(since))
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
