//! Nodes that KWOK simulates.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, is_true, kubeconfig, repository};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Map, Value, json};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep},
};

/// Label, taint and node selector of simulated nodes.
pub(super) const SIMULATED: &str = "ferrovirt.io/simulated";
/// Pods of a simulated node.
const PODS_PER_NODE: usize = 250;
/// Stages of nodes, and of pods as kubelet shows them: KWOK's own would open readiness gates, which virt-controller does.
/// Stages from a file replace all of KWOK's own. KWOK renews the leases of the nodes. A pod runs 0.6 s after it is bound, the
/// time that kubelet needs for a bare pod in `make bench`.
const STAGES: &str = r#"
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: node-ready}
spec:
  resourceRef: {apiGroup: v1, kind: Node}
  selector:
    matchExpressions:
    - {key: '.status.conditions.[] | select(.type == "Ready") | .status', operator: NotIn, values: ["True"]}
  next:
    statusTemplate: |
      conditions:
      {{ range NodeConditions }}
      - type: {{ .type | Quote }}
        status: {{ .status | Quote }}
        reason: {{ .reason | Quote }}
        message: {{ .message | Quote }}
        lastHeartbeatTime: {{ Now | Quote }}
        lastTransitionTime: {{ Now | Quote }}
      {{ end }}
      addresses:
      - {type: InternalIP, address: {{ NodeIP | Quote }}}
      - {type: Hostname, address: {{ NodeName | Quote }}}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-running}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
    - {key: .status.podIP, operator: DoesNotExist}
  delay: {durationMilliseconds: 600}
  next:
    statusTemplate: |
      phase: Running
      startTime: {{ Now | Quote }}
      hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
      podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
      conditions:
      {{ range $type := list "Initialized" "ContainersReady" }}
      - {type: {{ $type }}, status: "True", lastTransitionTime: {{ Now | Quote }}}
      {{ end }}
      - {type: Ready, status: {{ if .spec.readinessGates }}"False"{{ else }}"True"{{ end }}, lastTransitionTime: {{ Now | Quote }}}
      containerStatuses:
      {{ range .spec.containers }}
      - name: {{ .name | Quote }}
        image: {{ .image | Quote }}
        ready: true
        restartCount: 0
        state: {running: {startedAt: {{ Now | Quote }}}}
      {{ end }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-ready}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
    - key: '.status.conditions.[] | select(.type == "kubevirt.io/virtual-machine-unpaused") | .status'
      operator: In
      values: ["True"]
    - key: '.status.conditions.[] | select(.type == "Ready") | .status'
      operator: In
      values: ["False"]
  next:
    statusTemplate: |
      conditions:
      - {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-delete}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: Exists}
  next: {delete: true}
"#;

/// Simulated nodes. KWOK ends with this value. After a failure the next start removes the nodes.
pub(super) struct Nodes {
    /// Names of the nodes.
    pub(super) names: Vec<String>,
    _kwok: Child,
}

impl Nodes {
    /// Starts KWOK and creates nodes for this number of pods.
    pub(super) async fn start(story: &Story, kwok: &str, pods: usize) -> Result<Self> {
        let api = story.cluster_api("Node");
        let simulated = ListParams::default().labels(SIMULATED);
        api.delete_collection(&DeleteParams::default(), &simulated).await.context("cannot remove earlier nodes")?;
        let build = repository().join("build");
        let (log, stages) = (build.join("kwok.log"), build.join("kwok-stages.yaml"));
        std::fs::write(&stages, STAGES).with_context(|| format!("cannot write {}", stages.display()))?;
        let log = std::fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = Command::new(kwok)
            .args(["--manage-all-nodes=false", "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"])
            .args(["--node-lease-duration-seconds=40", "--kubeconfig"])
            .arg(kubeconfig())
            .arg("--config")
            .arg(stages)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start KWOK ({kwok})"))?;
        let labels = product_labels(story).await?;
        // virt-handler's DaemonSet has a pod on each node, too.
        let count = pods.div_ceil(PODS_PER_NODE - 10);
        let names: Vec<String> = (0..count).map(|n| format!("scale-{n:02}")).collect();
        for name in &names {
            let node = serde_json::from_value(node(name, &labels))?;
            api.create(&PostParams::default(), &node).await.with_context(|| format!("cannot create node {name}"))?;
            let status = json!({"status": {"capacity": capacity(), "allocatable": capacity()}});
            api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        }
        for name in &names {
            wait_ready(story, name).await?;
        }
        Ok(Self { names, _kwok: child })
    }

    /// Removes the nodes and waits until virt-handler's pods on them are deleted, so that the installation can be removed.
    pub(super) async fn remove(self, story: &Story) -> Result<()> {
        let simulated = ListParams::default().labels(SIMULATED);
        story.cluster_api("Node").delete_collection(&DeleteParams::default(), &simulated).await?;
        let handlers = ListParams::default().labels("kubevirt.io=virt-handler");
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let pods = story.installation_api("Pod").list(&handlers).await?;
            let node = |pod: &DynamicObject| pod.data["spec"]["nodeName"].as_str().map(str::to_owned);
            if !pods.iter().filter_map(node).any(|node| self.names.contains(&node)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "pods of virt-handler remain on simulated nodes");
            sleep(Duration::from_secs(1)).await;
        }
    }
}

/// Returns the labels of virt-handler on the real node.
async fn product_labels(story: &Story) -> Result<Map<String, Value>> {
    let nodes = story.cluster_api("Node").list(&ListParams::default().labels("kubevirt.io/schedulable=true")).await?;
    let labels = nodes.items.into_iter().next().context("no node has a virt-handler")?.metadata.labels;
    let labels = labels.unwrap_or_default().into_iter().filter(|(key, _)| key.contains("kubevirt.io/"));
    Ok(labels.map(|(key, value)| (key, Value::String(value))).collect())
}

fn node(name: &str, labels: &Map<String, Value>) -> Value {
    let mut labels = labels.clone();
    for (key, value) in [
        (SIMULATED, "true"),
        ("kubernetes.io/hostname", name),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
    ] {
        labels.insert(key.to_owned(), json!(value));
    }
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "spec": {"taints": [{"key": SIMULATED, "effect": "NoSchedule"}]},
    })
}

fn capacity() -> Value {
    json!({
        "cpu": "256", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": PODS_PER_NODE.to_string(),
        "devices.kubevirt.io/kvm": "1000", "devices.kubevirt.io/tun": "1000", "devices.kubevirt.io/vhost-net": "1000",
    })
}

async fn wait_ready(story: &Story, name: &str) -> Result<()> {
    let api = story.cluster_api("Node");
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let node = serde_json::to_value(api.get(name).await?)?;
        if is_ready(&node) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "node {name} is not ready after {TIMEOUT:?}: {}", node["status"]);
        sleep(Duration::from_millis(500)).await;
    }
}

fn is_ready(node: &Value) -> bool {
    is_true(node, "Ready") && node["status"]["allocatable"]["devices.kubevirt.io/tun"].is_string()
}
