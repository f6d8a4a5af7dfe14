//! CPUs of the host for the vCPUs of one VMI. kubelet gives them to pods where its CPU manager is static: on one node of a cluster
//! that was brought up with `--static-cpus`.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, condition, skip, storage::on_host, story_alone};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    manifests,
    moves::{alone, migrate},
};

/// Names of threads of vCPU 0 under both kinds of virtualization begin with this.
const VCPU: &str = "CPU 0/";

#[test]
fn vcpu_runs_on_its_own_cpu_and_missing_cpus_are_named() {
    story_alone("dedicated", async |s| {
        set_gates(s, &json!(["CPUManager"])).await?;
        let result = async {
            let nodes = static_nodes(s).await?;
            if nodes.is_empty() {
                waits(s, 1, "no node offers dedicated CPUs (kubelet's static CPU manager policy)").await?;
                return skip("a node with a static CPU manager");
            }
            for node in &nodes {
                label(s, node).await?;
            }
            s.apply(&pinned(1)).await?;
            let vmi = s.wait_running("box").await?;
            runs_alone(s, &vmi, &nodes).await?;
            if nodes.len() > 1 {
                let after = migrate(s, "box").await?;
                ensure!(!after["status"]["migrationState"]["targetCPUSet"].is_null(), "{}", after["status"]);
                runs_alone(s, &after, &nodes).await?;
            }
            delete(s).await?;
            waits(s, 512, "Insufficient cpu").await
        }
        .await;
        set_gates(s, &Value::Null).await?;
        result
    });
}

async fn set_gates(s: &Story, gates: &Value) -> Result<()> {
    let configuration = json!({"developerConfiguration": {"featureGates": gates}});
    let patch = Patch::Merge(json!({"spec": {"configuration": configuration}}));
    let installation = s.installation_api("KubeVirt");
    installation.patch("kubevirt", &PatchParams::default(), &patch).await.context("set feature gates")?;
    Ok(())
}

/// Returns the nodes whose kubelets have a static CPU manager.
pub(crate) async fn static_nodes(s: &Story) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for node in s.cluster_api("Node").list(&ListParams::default()).await?.items {
        if state(s, &node.name_any()).await?["policyName"] == "static" {
            found.push(node.name_any());
        }
    }
    Ok(found)
}

/// Returns the state of a node's CPU manager.
async fn state(s: &Story, node: &str) -> Result<Value> {
    let text = on_host(s, node, "cat /var/lib/kubelet/cpu_manager_state").await?;
    serde_json::from_str(&text).with_context(|| format!("read the state of the CPU manager: {text}"))
}

/// Waits for the label of a node with a static CPU manager.
pub(crate) async fn label(s: &Story, node: &str) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let found = s.cluster_api("Node").get(node).await?;
        if found.labels().get("kubevirt.io/cpumanager").is_some_and(|value| value == "true") {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the node has the labels {:?}", found.labels());
        sleep(Duration::from_millis(500)).await;
    }
}

/// Returns a VM that can migrate.
fn pinned(cores: u32) -> String {
    let cpu = format!("{{cores: {cores}, dedicatedCpuPlacement: true}}");
    let domain = format!("devices: {{autoattachPodInterface: false}}\n        cpu: {cpu}");
    manifests::kernel_vm("box", "Always").replace("devices: {}", &domain)
}

/// Checks a guest on its node: the thread of its vCPU may use the CPU that kubelet gave the container, and no other.
async fn runs_alone(s: &Story, vmi: &Value, nodes: &[String]) -> Result<()> {
    let node = vmi["status"]["nodeName"].as_str().context("VMI without node")?;
    ensure!(nodes.iter().any(|known| known == node), "the VMI is on node {node}");
    ensure!(vmi["status"]["qosClass"] == "Guaranteed", "the pod is {}", vmi["status"]["qosClass"]);
    let pod = alone(s, "box").await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without UID")?;
    let given = state(s, node).await?["entries"][uid]["compute"].clone();
    let given = given.as_str().context("kubelet gave the container no CPU")?;
    // Other guests run on the node as well.
    let threads = format!(
        "for thread in /proc/[0-9]*/task/[0-9]*; do grep -q {uid} $thread/cgroup || continue; \
         read -r name < $thread/comm && case \"$name\" in \"{VCPU}\"*) \
         grep Cpus_allowed_list $thread/status;; esac; done 2>/dev/null; true"
    );
    let affinity = on_host(s, node, &threads).await?;
    let affinity: Vec<&str> = affinity.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    ensure!(affinity == [given], "vCPU 0 may use the CPUs {affinity:?}, and the container has {given}");
    let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
    let (count, _) = console.run("nproc").await?;
    ensure!(count.trim() == "1", "the guest has {count:?} processors");
    console.leave().await
}

/// Checks that the VMI names the reason why no node can run it.
async fn waits(s: &Story, cores: u32, reason: &str) -> Result<()> {
    // virt-api sees the new configuration with a delay.
    s.apply(&pinned(cores)).await?;
    let says = |vmi: &Value| {
        let message = condition(vmi, "PodScheduled").and_then(|scheduled| scheduled["message"].as_str());
        message.is_some_and(|message| message.contains(reason))
    };
    s.wait("vmi", "box", reason, TIMEOUT, says).await?;
    delete(s).await
}

async fn delete(s: &Story) -> Result<()> {
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", TIMEOUT).await
}
