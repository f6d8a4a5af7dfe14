//! CPU time and memory of the leading virt-controller, read on its node.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::Story;

/// Prints CPU time and PID of the virt-controller that has used most CPU time.
const FIND: &str = r#"
for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = virt-controller ] || continue
  set -- $(cut -d ')' -f 2 $p/stat)
  echo "$((${12} + ${13})) ${p#/proc/}"
done | sort -n | tail -n 1
"#;

/// The leading virt-controller.
pub(super) struct Controller<'a> {
    story: &'a Story,
    node: String,
    pid: u32,
}

impl<'a> Controller<'a> {
    /// Finds the process: standbys only keep their caches current and use less CPU time.
    pub(super) async fn leader(story: &'a Story) -> Result<Self> {
        let mut busiest = None;
        for node in story.nodes_of("virt-controller").await? {
            let found = story.on_node(&node, FIND).await?;
            let Some((ticks, pid)) = found.trim().split_once(' ') else { continue };
            busiest = busiest.max(Some((ticks.parse::<u64>()?, pid.parse()?, node)));
        }
        let (_, pid, node) = busiest.context("no virt-controller runs on the nodes of its pods")?;
        Ok(Self { story, node, pid })
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
