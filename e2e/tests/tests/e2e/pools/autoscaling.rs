//! Pools that are scaled by a metric, and by the load of their guests.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{ExternalMetric, MetricsServer, Story, own_cluster, skip, story};
use http::Method;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{MINUTES, pool, wait_numbers};

/// Groups of the APIs that serve metrics.
const EXTERNAL: &str = "external.metrics.k8s.io";
const RESOURCES: &str = "metrics.k8s.io";
/// Version of both.
const VERSION: &str = "v1beta1";
/// Part of a processor that each VM requests, and the load in percent of it beyond which the pool grows.
const REQUESTED: &str = "500m";
const LOAD: u32 = 40;
/// Part of a processor in nanoseconds per second that a guest at rest does not use up.
const AT_REST: u64 = 100_000_000;

#[test]
fn pool_is_scaled_by_an_autoscaler() {
    story("pool-autoscaler", async |s| {
        let Some(plan) = own_cluster()? else {
            return skip("route from the API server to this host");
        };
        let metric = ExternalMetric::serve().await?;
        let address = plan.host_address().to_string();
        with_api(s, EXTERNAL, &address, metric.port, async || scaled(s, &metric).await).await
    });
}

#[test]
fn pool_is_scaled_by_the_load_of_its_guests() {
    story("pool-load", async |s| {
        let Some(plan) = own_cluster()? else {
            return skip("route from the API server to this host");
        };
        let Some(server) = MetricsServer::start(&plan)? else {
            skips::skip("metrics-server");
            return Ok(());
        };
        let address = plan.host_address().to_string();
        with_api(s, RESOURCES, &address, server.port, async || scaled_by_load(s).await).await
    });
}

/// Makes the server of a port an API of the cluster while `body` runs.
async fn with_api(
    s: &Story,
    group: &str,
    address: &str,
    port: u16,
    body: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let served = serve(s, group, address, port).await;
    let done = match served {
        Ok(()) => body().await,
        failed => failed,
    };
    // Without its server the API would disturb other stories.
    let removed = s.cluster_api("APIService").delete(&format!("{VERSION}.{group}"), &DeleteParams::background()).await;
    done?;
    removed.map(drop).context("cannot remove the API of metrics")
}

async fn serve(s: &Story, group: &str, address: &str, port: u16) -> Result<()> {
    let name = format!("{VERSION}.{group}");
    let api = json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": name},
        "spec": {
            "group": group, "version": VERSION, "insecureSkipTLSVerify": true,
            "groupPriorityMinimum": 100, "versionPriority": 100,
            "service": {"namespace": s.namespace, "name": "metrics", "port": 443},
        },
    });
    s.apply(&format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: metrics}}
spec: {{ports: [{{name: https, port: 443, targetPort: {port}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: metrics, labels: {{kubernetes.io/service-name: metrics}}}}
addressType: IPv4
ports: [{{name: https, port: {port}}}]
endpoints: [{{addresses: [{address}], conditions: {{ready: true}}}}]
"
    ))
    .await?;
    s.cluster_api("APIService").create(&PostParams::default(), &serde_json::from_value(api)?).await?;
    let deadline = Instant::now() + MINUTES;
    loop {
        let api = serde_json::to_value(s.cluster_api("APIService").get(&name).await?)?;
        if crate::data_volumes::condition(&api, "Available")["status"] == "True" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the API of metrics is not available: {}", api["status"]);
        sleep(Duration::from_millis(500)).await;
    }
}

/// Returns an autoscaler of pool `box` from one VM to two, by this metric.
fn autoscaler(metric: &Value) -> String {
    json!({
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "box"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool", "name": "box"},
            "minReplicas": 1, "maxReplicas": 2, "metrics": [metric],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    })
    .to_string()
}

/// Returns a pool of one VM, which deletes the newest first.
fn pool_of_one(request: Option<&str>) -> Result<String> {
    let strategy = json!({"proactive": {"selectionPolicy": {"sortPolicy": "DescendingOrder"}}});
    let mut fields = json!({"replicas": 1, "scaleInStrategy": strategy});
    if let Some(cpu) = request {
        let domain = json!({"resources": {"requests": {"cpu": cpu}}});
        fields["virtualMachineTemplate"] = json!({"spec": {"template": {"spec": {"domain": domain}}}});
    }
    Ok(pool("box", "Always", &fields)?.to_string())
}

/// Waits until the autoscaler has found the pods of the pool and their metric.
async fn wait_active(s: &Story) -> Result<Value> {
    let is_active = |hpa: &Value| crate::data_volumes::condition(hpa, "ScalingActive")["status"] == "True";
    s.wait("HorizontalPodAutoscaler", "box", "see the pool", MINUTES, is_active).await
}

/// The autoscaler multiplies the number of ready pods of the pool by the metric, so that it must find them by the pool's selector.
async fn scaled(s: &Story, metric: &ExternalMetric) -> Result<()> {
    s.apply(&pool_of_one(None)?).await?;
    s.wait_running("box-0").await?;
    metric.set(2);
    let load = json!({"metric": {"name": "load"}, "target": {"type": "Value", "value": "1"}});
    s.apply(&autoscaler(&json!({"type": "External", "external": load}))).await?;
    wait_numbers(s, "box", &[0, 1]).await?;
    s.wait_running("box-1").await?;
    wait_active(s).await?;
    metric.set(0);
    wait_numbers(s, "box", &[0]).await
}

/// metrics-server measures the containers of the launcher pods, in which the vCPUs run.
async fn scaled_by_load(s: &Story) -> Result<()> {
    s.apply(&pool_of_one(Some(REQUESTED))?).await?;
    s.wait_running("box-0").await?;
    let mut guest = s.reopen_console("box-0", "root", "ferrovirt").await?;
    wait_at_rest(s).await?;
    let target = json!({"type": "Utilization", "averageUtilization": LOAD});
    s.apply(&autoscaler(&json!({"type": "Resource", "resource": {"name": "cpu", "target": target}}))).await?;
    let hpa = wait_active(s).await?;
    ensure!(hpa["status"]["currentMetrics"][0]["resource"]["name"] == "cpu", "{}", hpa["status"]);
    wait_numbers(s, "box", &[0]).await?;

    guest.run("(while :; do :; done) >/dev/null 2>&1 & echo $! >/load").await?;
    wait_numbers(s, "box", &[0, 1]).await?;
    s.wait_running("box-1").await?;
    s.wait_event("box", "SuccessfulRescale", MINUTES).await?;
    guest.run("kill $(cat /load)").await?;
    wait_numbers(s, "box", &[0]).await?;
    guest.leave().await
}

/// Waits until the load of the first VM is known and low, which it is not while the guest boots.
async fn wait_at_rest(s: &Story) -> Result<()> {
    let path = format!("/apis/{RESOURCES}/{VERSION}/namespaces/{}/pods", s.namespace);
    let deadline = Instant::now() + MINUTES;
    loop {
        let answer = s.call(&Method::GET, &path, &Value::Null).await?;
        let pods = answer.json();
        let used = pods["items"][0]["containers"][0]["usage"]["cpu"].as_str().and_then(nanoseconds);
        if used.is_some_and(|used| used < AT_REST) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no load of a guest at rest: {} {pods}", answer.code);
        sleep(Duration::from_secs(1)).await;
    }
}

/// Parses the load as metrics-server prints it: in billionths of a processor, or 0.
fn nanoseconds(load: &str) -> Option<u64> {
    load.strip_suffix('n').unwrap_or(load).parse().ok()
}
