//! The leading virt-controller: its CPU time and memory, read on its node, and the time after its end by `kill -9` until
//! virt-controller writes again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT};
use k8s_openapi::api::{apps::v1::Deployment, coordination::v1::Lease};
use kube::Api;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{Figures, add_medians};

/// Prints PID and pod name of each virt-controller.
const FIND: &str = r#"
for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = virt-controller ] || continue
  echo "${p#/proc/} $(tr '\0' '\n' < $p/environ | sed -n 's/^POD_NAME=//p')"
done
"#;
/// Lease of the leader; its holder is the name of the pod.
const LEASE: &str = "virt-controller";
/// Ends of a leader that are measured.
const KILLS: usize = 3;
/// Time limit until virt-controller writes again.
const WRITE_LIMIT: Duration = Duration::from_secs(120);
/// Pause between two looks for that write.
const PAUSE: Duration = Duration::from_millis(50);

/// Measures the time without a leader, with few VMIs in the cluster.
pub(crate) async fn measure(story: &Story, figures: &mut Figures) -> Result<()> {
    let spec = json!({
        "startStrategy": "Paused", "terminationGracePeriodSeconds": 0,
        "domain": {
            "memory": {"guest": "32Mi"},
            "devices": {"autoattachGraphicsDevice": false, "autoattachPodInterface": false},
        },
    });
    let mut times = Vec::new();
    for kill in 0..KILLS {
        times.push(killed_to_write(story, &format!("after-kill-{kill}"), &spec).await?);
    }
    add_medians(figures, [("leader_killed_to_write_s", times)])
}

/// Kills the leader and returns the seconds until virt-controller has created the pod of a VMI with this spec, which is created
/// right after. Waits until all replicas are ready again.
pub(crate) async fn killed_to_write(story: &Story, name: &str, spec: &Value) -> Result<f64> {
    let vmi = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": name},
        "spec": spec});
    let leader = Controller::leader(story).await?;
    let node = story.enter_node(&leader.node).await?;
    let killed = Instant::now();
    let ended = node.run(&format!("kill -9 {}", leader.pid)).await;
    node.leave().await?;
    ended.with_context(|| format!("kill virt-controller on {}", leader.node))?;
    story.apply(&vmi.to_string()).await?;
    let vmi = story.get("vmi", name).await?;
    while story.launcher_pods(&vmi).await?.is_empty() {
        ensure!(killed.elapsed() < WRITE_LIMIT, "virt-controller creates no pod after the end of its leader");
        sleep(PAUSE).await;
    }
    let seconds = killed.elapsed().as_secs_f64();
    println!("  leader {} killed: next write after {seconds:.2} s", leader.pid);
    story.wait_running(name).await?;
    story.delete("vmi", name).await?;
    story.wait_gone("vmi", name, TIMEOUT).await?;
    wait_replicas(story).await?;
    Ok(seconds)
}

/// Waits until all replicas of virt-controller are ready.
async fn wait_replicas(story: &Story) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(story.client.clone(), "kubevirt");
    let started = Instant::now();
    loop {
        let deployment = deployments.get("virt-controller").await?;
        let wanted = deployment.spec.and_then(|spec| spec.replicas).unwrap_or(1);
        let ready = deployment.status.and_then(|status| status.ready_replicas).unwrap_or_default();
        if ready == wanted {
            return Ok(());
        }
        ensure!(started.elapsed() < TIMEOUT, "{ready} of {wanted} virt-controllers are ready");
        sleep(Duration::from_secs(1)).await;
    }
}

/// The leading virt-controller.
pub(crate) struct Controller<'a> {
    story: &'a Story,
    node: String,
    pid: u32,
}

impl<'a> Controller<'a> {
    /// Finds the process of the pod that holds the lease.
    pub(crate) async fn leader(story: &'a Story) -> Result<Self> {
        let leases: Api<Lease> = Api::namespaced(story.client.clone(), "kubevirt");
        let lease = leases.get(LEASE).await.context("cannot read the lease of virt-controller")?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity).context("no virt-controller leads")?;
        for node in story.nodes_of("virt-controller").await? {
            let found = story.on_node(&node, FIND).await?;
            let leads = |line: &str| line.split_once(' ').filter(|(_, pod)| *pod == holder)?.0.parse().ok();
            if let Some(pid) = found.lines().find_map(leads) {
                return Ok(Self { story, node, pid });
            }
        }
        bail!("{holder}, which leads, runs on no node")
    }

    /// Returns the CPU time of all threads since the process started.
    pub(crate) async fn cpu(&self) -> Result<Duration> {
        let text = self.story.on_node(&self.node, &format!("cat /proc/{}/task/*/schedstat", self.pid)).await?;
        let nanoseconds = text.lines().filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()).sum();
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Returns the resident memory in KiB.
    pub(crate) async fn rss_kib(&self) -> Result<f64> {
        let text = self.story.on_node(&self.node, &format!("cat /proc/{}/status", self.pid)).await?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        line.trim().trim_end_matches("kB").trim().parse().context("VmRSS is not a number")
    }

    /// Fails if another process leads now, since the figures would be those of two processes.
    pub(crate) async fn check(&self) -> Result<()> {
        let now = Self::leader(self.story).await?;
        let same = (&now.node, now.pid) == (&self.node, self.pid);
        ensure!(same, "another virt-controller leads now: process {} instead of {}", now.pid, self.pid);
        Ok(())
    }
}
