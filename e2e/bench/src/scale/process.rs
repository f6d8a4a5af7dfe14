//! CPU time and memory of the leading virt-controller, read on its node.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::Story;

/// Prints the PID of the virt-controller that has used most CPU time. Standbys only keep their caches current.
const FIND: &str = r#"
for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = virt-controller ] || continue
  set -- $(cut -d ')' -f 2 $p/stat)
  echo "$((${12} + ${13})) ${p#/proc/}"
done | sort -n | tail -n 1 | cut -d ' ' -f 2
"#;

/// The leading virt-controller.
pub(super) struct Controller<'a> {
    story: &'a Story,
    pid: String,
}

impl<'a> Controller<'a> {
    /// Finds the process.
    pub(super) async fn leader(story: &'a Story) -> Result<Self> {
        let pid = story.on_node(FIND).await?.trim().to_owned();
        ensure!(!pid.is_empty(), "no virt-controller runs on the node");
        Ok(Self { story, pid })
    }

    /// Returns the CPU time of all threads since the process started.
    pub(super) async fn cpu(&self) -> Result<Duration> {
        let text = self.story.on_node(&format!("cat /proc/{}/task/*/schedstat", self.pid)).await?;
        let nanoseconds = text.lines().filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()).sum();
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Returns the resident memory in KiB.
    pub(super) async fn rss_kib(&self) -> Result<f64> {
        let text = self.story.on_node(&format!("cat /proc/{}/status", self.pid)).await?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        line.trim().trim_end_matches("kB").trim().parse().context("VmRSS is not a number")
    }

    /// Fails if another process leads now, since the figures would be those of two processes.
    pub(super) async fn check(&self) -> Result<()> {
        let now = Self::leader(self.story).await?.pid;
        ensure!(now == self.pid, "another virt-controller leads now: process {now} instead of {}", self.pid);
        Ok(())
    }
}
