//! Calls to the API server, from the test cluster's audit log: those of Ferrovirt, and writes of everybody. There are no such figures
//! on another cluster.

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

    /// Returns the logged calls whose lines contain a text.
    fn lines_with(&self, text: &str) -> Result<impl Iterator<Item = Value>> {
        let mut file = File::open(&self.path).with_context(|| format!("no audit log at {}", self.path.display()))?;
        file.seek(SeekFrom::Start(self.begin))?;
        let lines = BufReader::new(file).lines().map_while(Result::ok).filter(move |line| line.contains(text));
        Ok(lines.filter_map(|line| serde_json::from_str(&line).ok()))
    }

    /// Returns the completed calls of Ferrovirt's service accounts.
    fn calls(&self) -> Result<impl Iterator<Item = Value>> {
        Ok(self.lines_with(ACCOUNT)?.filter(by_ferrovirt))
    }

    /// Counts the writes of everybody in a namespace, or in the whole cluster for an empty name. Prints those of each user as
    /// `count ÷ divisor`.
    pub(crate) fn writes(&self, namespace: &str, divisor: f64) -> Result<Writes> {
        let (mut writes, mut printed) = (Writes::default(), BTreeMap::<String, f64>::new());
        for call in self.lines_with(namespace)?.filter(is_stored) {
            if !namespace.is_empty() && call["objectRef"]["namespace"] != namespace {
                continue;
            }
            writes.add(&call);
            *printed.entry(kind(&call)).or_default() += 1.0;
        }
        for (call, count) in printed {
            println!("  {:8.2} × {call}", count / divisor);
        }
        Ok(writes)
    }

    /// Returns the number of writes other than leases and heartbeats, and prints them.
    pub(crate) fn writes_at_rest(&self) -> Result<f64> {
        let writes = self.calls()?.filter(|call| is_write(call) && !is_upkeep(call));
        Ok(writes.inspect(|call| println!("  at rest: {}", describe(call))).count() as f64)
    }
}

/// Numbers of completed writes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Writes {
    /// By Ferrovirt, without Events.
    pub own: f64,
    /// Events by Ferrovirt.
    pub own_events: f64,
    /// By everybody, without Events.
    pub all: f64,
    /// Events by everybody.
    pub all_events: f64,
}

impl Writes {
    fn add(&mut self, call: &Value) {
        let (own, all) = match call["objectRef"]["resource"].as_str() {
            Some("events") => (&mut self.own_events, &mut self.all_events),
            _ => (&mut self.own, &mut self.all),
        };
        *all += 1.0;
        if by_ferrovirt(call) {
            *own += 1.0;
        }
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
    let minutes = REST.as_secs_f64() / 60.0;
    let everybody = log.writes("", minutes)?;
    figures.insert("writes_of_all_at_rest_per_min".into(), everybody.all / minutes);
    figures.insert("events_of_all_at_rest_per_min".into(), everybody.all_events / minutes);
    Ok(())
}

fn sum(calls: &BTreeMap<String, f64>) -> f64 {
    calls.values().sum()
}

/// Returns the last part of the name of a call's user, also by impersonation.
fn user(call: &Value) -> &str {
    let name = [&call["impersonatedUser"], &call["user"]].into_iter().find_map(|user| user["username"].as_str());
    name.and_then(|name| name.rsplit(':').next()).unwrap_or_default()
}

/// Returns verb, resource and user of a call, and the program if the administrator's rights are used by several.
fn kind(call: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &call["objectRef"];
    let subresource = object["subresource"].as_str().map(|name| format!("/{name}")).unwrap_or_default();
    let agent = text(&call["userAgent"]);
    let program = agent.split(['/', ' ']).next().unwrap_or_default();
    format!("{} {}{subresource} by {} ({program})", text(&call["verb"]), text(&object["resource"]), user(call))
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

/// Returns true for completed writes that the API server stores, unlike new tokens and streams to pods.
fn is_stored(call: &Value) -> bool {
    let is_stream = matches!(
        call["objectRef"]["subresource"].as_str(),
        Some("token" | "exec" | "attach" | "portforward" | "proxy")
    );
    is_write(call) && !is_stream && call["stage"] == "ResponseComplete"
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
    fn writes_of_everybody_are_those_that_are_stored() {
        let call = |user: &str, verb: &str, resource: &str, subresource: Value| {
            json!({"verb": verb, "stage": "ResponseComplete", "user": {"username": user}, "userAgent": "kwok/v0.7 (linux)",
                "objectRef": {"resource": resource, "subresource": subresource}})
        };
        let controller = format!("{ACCOUNT}kubevirt-controller");
        let calls = [
            call(&controller, "create", "pods", Value::Null),
            call(&controller, "create", "events", Value::Null),
            call("system:kube-scheduler", "create", "pods", json!("binding")),
            call("system:kube-scheduler", "create", "events", Value::Null),
            call("kubernetes-admin", "patch", "pods", json!("status")),
            call("kubernetes-admin", "create", "pods", json!("exec")),
            call("system:node:a", "create", "serviceaccounts", json!("token")),
            call("kubernetes-admin", "get", "pods", Value::Null),
        ];
        let mut writes = Writes::default();
        calls.iter().filter(|call| is_stored(call)).for_each(|call| writes.add(call));
        assert_eq!(writes, Writes { own: 1.0, own_events: 1.0, all: 3.0, all_events: 2.0 });
        assert_eq!(kind(&calls[4]), "patch pods/status by kubernetes-admin (kwok)");
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
