//! CPU time and memory of the leading virt-controller, read on its node.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::Story;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;

/// Prints PID and pod name of each virt-controller.
const FIND: &str = r#"
for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = virt-controller ] || continue
  echo "${p#/proc/} $(tr '\0' '\n' < $p/environ | sed -n 's/^POD_NAME=//p')"
done
"#;
/// Lease of the leader; its holder is the name of the pod.
const LEASE: &str = "virt-controller";

/// The leading virt-controller.
pub(super) struct Controller<'a> {
    story: &'a Story,
    node: String,
    pid: u32,
}

impl<'a> Controller<'a> {
    /// Finds the process of the pod that holds the lease.
    pub(super) async fn leader(story: &'a Story) -> Result<Self> {
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
    pub(super) async fn cpu(&self) -> Result<Duration> {
        let text = self.story.on_node(&self.node, &format!("cat /proc/{}/task/*/schedstat", self.pid)).await?;
        let nanoseconds = text.lines().filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()).sum();
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Returns the resident memory in KiB.
    pub(super) async fn rss_kib(&self) -> Result<f64> {
        let text = self.story.on_node(&self.node, &format!("cat /proc/{}/status", self.pid)).await?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        line.trim().trim_end_matches("kB").trim().parse().context("VmRSS is not a number")
    }

    /// Fails if another process leads now, since the figures would be those of two processes.
    pub(super) async fn check(&self) -> Result<()> {
        let now = Self::leader(self.story).await?;
        let same = (&now.node, now.pid) == (&self.node, self.pid);
        ensure!(same, "another virt-controller leads now: process {} instead of {}", now.pid, self.pid);
        Ok(())
    }
}
