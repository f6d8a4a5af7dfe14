//! Calls of Ferrovirt to the API server, from the test cluster's audit log. There are no such figures on another cluster.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Seek, SeekFrom},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, audit_log};
use serde_json::Value;

use crate::{Figures, start::StartedVmi};

/// Time in which requests at rest are counted.
const REST: Duration = Duration::from_secs(120);
/// Service accounts of the processes.
const ACCOUNT: &str = "system:serviceaccount:kubevirt:";

/// The audit log from a moment on.
pub(crate) struct AuditLog {
    path: PathBuf,
    begin: u64,
}

impl AuditLog {
    /// Returns the log from now on.
    pub(crate) fn from_now() -> Result<Self> {
        let path = audit_log();
        let begin = path.metadata().with_context(|| format!("no audit log at {}", path.display()))?.len();
        Ok(Self { path, begin })
    }

    /// Returns the completed calls of Ferrovirt's service accounts.
    fn calls(&self) -> Result<impl Iterator<Item = Value>> {
        let mut file = File::open(&self.path).with_context(|| format!("no audit log at {}", self.path.display()))?;
        file.seek(SeekFrom::Start(self.begin))?;
        let lines = BufReader::new(file).lines().map_while(Result::ok).filter(|line| line.contains(ACCOUNT));
        Ok(lines.filter_map(|line| serde_json::from_str(&line).ok()).filter(by_ferrovirt))
    }

    /// Returns the number of writes in a namespace, without events.
    pub(crate) fn writes_in(&self, namespace: &str) -> Result<f64> {
        let own = |call: &Value| {
            is_write(call) && call["objectRef"]["namespace"] == namespace && call["objectRef"]["resource"] != "events"
        };
        Ok(self.calls()?.filter(own).count() as f64)
    }

    /// Returns the number of writes other than leases and heartbeats, and prints them.
    pub(crate) fn writes_at_rest(&self) -> Result<f64> {
        let writes = self.calls()?.filter(|call| is_write(call) && !is_upkeep(call));
        Ok(writes.inspect(|call| println!("  at rest: {}", describe(call))).count() as f64)
    }
}

/// Counts the writes to the VMI and its pod, without events.
pub(crate) async fn measure(story: &Story, vmi: &StartedVmi<'_>, figures: &mut Figures) -> Result<()> {
    let log = AuditLog { path: audit_log(), begin: 0 };
    if !log.path.exists() {
        println!("no audit log at {}: API calls are not counted", log.path.display());
        return Ok(());
    }
    let object = story.get("vmi", &vmi.name).await?;
    let since = object["metadata"]["creationTimestamp"].as_str().context("VMI without creation time")?.to_owned();
    let pod = story.launcher_pod(&vmi.name).await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
    let (mut writes, mut events) = (0.0, 0.0);
    for call in log.calls()?.filter(|call| is_write(call) && call["objectRef"]["namespace"] == *story.namespace) {
        if call["objectRef"]["resource"] == "events" {
            events += 1.0;
        } else if about(&call, &vmi.name, &pod, &since) {
            println!("  {}", describe(&call));
            writes += 1.0;
        }
    }
    figures.insert("mutating_calls_per_vmi".into(), writes);
    figures.insert("events_of_bench_namespace".into(), events);
    Ok(())
}

/// Counts the requests per minute of each process while nothing happens, leases and heartbeats included. Of several replicas
/// the busiest counts.
pub(crate) async fn measure_rest(figures: &mut Figures) -> Result<()> {
    let Ok(log) = AuditLog::from_now() else { return Ok(()) };
    tokio::time::sleep(REST).await;
    let mut pods = BTreeMap::<String, BTreeMap<String, f64>>::new();
    for call in log.calls()? {
        let pod = call["user"]["extra"]["authentication.kubernetes.io/pod-name"][0].as_str().unwrap_or_default();
        *pods.entry(pod.to_owned()).or_default().entry(describe(&call)).or_default() += 1.0;
    }
    for process in ["virt-api", "virt-controller", "virt-handler"] {
        let of_process = pods.iter().filter(|(pod, _)| pod.starts_with(process));
        let busiest = of_process.map(|(_, calls)| calls).max_by(|a, b| sum(a).total_cmp(&sum(b)));
        for (call, count) in busiest.into_iter().flatten() {
            println!("  {process} at rest: {count} × {call}");
        }
        let per_minute = busiest.map_or(0.0, sum) * 60.0 / REST.as_secs_f64();
        figures.insert(format!("{}_requests_at_rest_per_min", process.replace('-', "_")), per_minute);
    }
    figures.insert("writes_at_rest".into(), log.writes_at_rest()?);
    Ok(())
}

fn sum(calls: &BTreeMap<String, f64>) -> f64 {
    calls.values().sum()
}

fn describe(call: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &call["objectRef"];
    let subresource = object["subresource"].as_str().map(|name| format!("/{name}")).unwrap_or_default();
    let user = text(&call["user"]["username"]);
    format!(
        "{} {} {}{subresource} by {}: {}",
        text(&call["verb"]),
        text(&object["resource"]),
        text(&object["name"]),
        user.rsplit(':').next().unwrap_or_default(),
        call["responseStatus"]["code"]
    )
}

/// Returns true for completed calls of a service account of Ferrovirt, also by impersonation. A watch completes when it ends, so its
/// start counts.
fn by_ferrovirt(call: &Value) -> bool {
    let acted = [&call["impersonatedUser"], &call["user"]].into_iter().find_map(|user| user["username"].as_str());
    let stage = if call["verb"] == "watch" { "ResponseStarted" } else { "ResponseComplete" };
    acted.unwrap_or_default().starts_with(ACCOUNT) && call["stage"] == stage
}

fn is_write(call: &Value) -> bool {
    let resource = call["objectRef"]["resource"].as_str().unwrap_or_default();
    matches!(call["verb"].as_str(), Some("create" | "update" | "patch" | "delete")) && !resource.ends_with("reviews")
}

/// Returns true for a write to a lease, and for the heartbeat of a virt-handler.
fn is_upkeep(call: &Value) -> bool {
    match call["objectRef"]["resource"].as_str() {
        Some("leases") => true,
        Some("nodes") => describe(call).contains("by kubevirt-handler") || call.get("impersonatedUser").is_some(),
        _ => false,
    }
}

/// Returns true for writes to the VMI or its pod. The log entry of a pod's creation has no name if the server generates it. VMIs of
/// the benchmark are created one after another, so a pod that is created after the VMI belongs to it.
fn about(call: &Value, vmi: &str, pod: &str, since: &str) -> bool {
    let name = call["objectRef"]["name"].as_str().unwrap_or_default();
    // Both are RFC 3339 in UTC; the creation time has no fraction.
    let second = |time: &str| time.get(..19).map(str::to_owned);
    let received = call["requestReceivedTimestamp"].as_str().and_then(second);
    let creates_pod = call["verb"] == "create" && call["objectRef"]["resource"] == "pods" && name.is_empty();
    name == vmi || name == pod || (creates_pod && received >= second(since))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_completed_calls_of_ferrovirt_count() {
        let call =
            |user: &str, verb: &str, stage: &str| json!({"user": {"username": user}, "verb": verb, "stage": stage});
        let controller = "system:serviceaccount:kubevirt:kubevirt-controller";
        assert!(by_ferrovirt(&call(controller, "patch", "ResponseComplete")));
        assert!(by_ferrovirt(&call(controller, "watch", "ResponseStarted")));
        assert!(!by_ferrovirt(&call(controller, "watch", "ResponseComplete")));
        assert!(!by_ferrovirt(&call("system:node:a", "patch", "ResponseComplete")));
        let mut impersonated = call("admin", "patch", "ResponseComplete");
        impersonated["impersonatedUser"] = json!({"username": controller});
        assert!(by_ferrovirt(&impersonated));
    }

    #[test]
    fn leases_and_heartbeats_are_upkeep_and_reads_are_no_writes() {
        let call = |verb: &str, resource: &str, account: &str| {
            json!({"verb": verb, "objectRef": {"resource": resource},
                "user": {"username": format!("{ACCOUNT}{account}")}})
        };
        for (verb, resource, account, write, upkeep) in [
            ("patch", "leases", "kubevirt-controller", true, true),
            ("patch", "nodes", "kubevirt-handler", true, true),
            ("patch", "nodes", "kubevirt-controller", true, false),
            ("create", "events", "kubevirt-controller", true, false),
            ("create", "subjectaccessreviews", "kubevirt-apiserver", false, false),
            ("list", "pods", "kubevirt-controller", false, false),
        ] {
            let call = call(verb, resource, account);
            assert_eq!((is_write(&call), is_upkeep(&call)), (write, upkeep), "{verb} {resource} {account}");
        }
    }

    #[test]
    fn writes_to_the_vmi_and_its_pod_are_found() {
        let about = |call| about(&call, "vmi", "virt-launcher-vmi-abc", "2026-01-02T03:04:05Z");
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
