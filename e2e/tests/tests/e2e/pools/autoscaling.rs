//! A pool that is scaled by a metric.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{ExternalMetric, Story, own_cluster, skip, story};
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::{MINUTES, pool, wait_numbers};

/// Name of the API that serves the metric.
const API: &str = "v1beta1.external.metrics.k8s.io";

#[test]
fn pool_is_scaled_by_an_autoscaler() {
    story("pool-autoscaler", async |s| {
        let Some(plan) = own_cluster()? else {
            return skip("route from the API server to this host");
        };
        let metric = ExternalMetric::serve().await?;
        let address = plan.host_address().to_string();
        let served = serve(s, &address, metric.port).await;
        let scaled = match served {
            Ok(()) => scaled(s, &metric).await,
            failed => failed,
        };
        // Without its server the API would disturb other stories.
        let removed = s.cluster_api("APIService").delete(API, &DeleteParams::background()).await;
        scaled?;
        removed.map(drop).context("cannot remove the API of the metric")
    });
}

/// Makes the metric an API of the cluster.
async fn serve(s: &Story, address: &str, port: u16) -> Result<()> {
    let api = json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API},
        "spec": {
            "group": "external.metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": true,
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
    let deadline = tokio::time::Instant::now() + MINUTES;
    loop {
        let api = serde_json::to_value(s.cluster_api("APIService").get(API).await?)?;
        if crate::data_volumes::condition(&api, "Available")["status"] == "True" {
            return Ok(());
        }
        ensure!(tokio::time::Instant::now() < deadline, "the API of the metric is not available: {}", api["status"]);
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
}

/// The autoscaler multiplies the number of ready pods of the pool by the metric, so that it must find them by the pool's selector.
async fn scaled(s: &Story, metric: &ExternalMetric) -> Result<()> {
    let strategy = json!({"proactive": {"selectionPolicy": {"sortPolicy": "DescendingOrder"}}});
    s.apply(&pool("box", "Always", &json!({"replicas": 1, "scaleInStrategy": strategy}))?.to_string()).await?;
    s.wait_running("box-0").await?;
    metric.set(2);
    s.apply(
        "
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: box}
spec:
  scaleTargetRef: {apiVersion: pool.kubevirt.io/v1beta1, kind: VirtualMachinePool, name: box}
  minReplicas: 1
  maxReplicas: 2
  metrics: [{type: External, external: {metric: {name: load}, target: {type: Value, value: '1'}}}]
  behavior: {scaleDown: {stabilizationWindowSeconds: 0}}
",
    )
    .await?;
    wait_numbers(s, "box", &[0, 1]).await?;
    s.wait_running("box-1").await?;
    let is_active = |hpa: &Value| crate::data_volumes::condition(hpa, "ScalingActive")["status"] == "True";
    s.wait("HorizontalPodAutoscaler", "box", "see the pool", MINUTES, is_active).await?;
    metric.set(0);
    wait_numbers(s, "box", &[0]).await
}
