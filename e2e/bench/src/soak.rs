//! Memory of the launcher pod of a tiny VM that is used for a long time: rounds of console output, pictures of the display, pauses, and
//! migrations between two nodes. Without the guest's memory and translated code it must stay within what the pod requests beside them.
//!
//! Two figures, each the largest one of all samples, compared with the request: the PSS of the pod's processes, and the memory of its
//! cgroup that the kernel cannot drop. The latter needs cgroup v2.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, is_true};
use serde_json::{Value, json};

use crate::{Figures, actions::act, memory};

/// Pictures of the display in a round.
const PICTURES: usize = 3;
/// Time limit of a migration.
const TIMEOUT: Duration = Duration::from_secs(180);
const VM: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: soak}
spec:
  runStrategy: Always
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {guest: 128Mi}
        firmware:
          kernelBoot:
            kernelArgs: console=ttyS0 quiet
            container:
              image: ferrovirt.io/guests/tiny-kernel:devel
              imagePullPolicy: IfNotPresent
              kernelPath: /boot/vmlinuz
              initrdPath: /boot/initrd
        devices: {interfaces: [{name: default, masquerade: {}}]}
      networks: [{name: default, pod: {}}]
";

/// Prints the memory in KiB that the cgroup of a pod cannot drop, without the guest's memory (the mapping of 128 MiB) and without code
/// that QEMU has translated. Prints nothing without cgroup v2.
const GROUP: &str = r#"
for d in $(find /host/sys/fs/cgroup -type d -name '*podGLOB*' 2>/dev/null); do
  [ -e $d/memory.current ] || continue
  apart=0
  for p in $(grep -ls '^qemu-system' /proc/[0-9]*/comm); do
    grep -qs 'podPATTERN' ${p%comm}cgroup || continue
    kib=$(awk '/^[0-9a-f]+-/ { code = $2 ~ /^rwx/ } /^Size:/ { guest = $2 == 131072 } /^Rss:/ && (code || guest) { sum += $2 }
      END { print sum + 0 }' ${p%comm}smaps 2>/dev/null)
    apart=$((apart + ${kib:-0}))
  done
  awk -v apart=$apart '$1 == "anon" || $1 == "shmem" || $1 == "kernel" { sum += $2 }
    END { printf "group %d\n", sum / 1024 - apart }' $d/memory.stat
  break
done
true
"#;

/// Uses the VM until `duration` is over, for one round at least.
pub(crate) async fn measure(story: &Story, duration: Duration, figures: &mut Figures) -> Result<()> {
    let moves = story.takers().await?.len() >= 2;
    if !moves {
        println!("migrations need two nodes: the guest is not moved");
    }
    story.apply(VM).await?;
    story.wait_running("soak").await?;
    story.console("soak")?.login("root", "ferrovirt").await?;
    let (end, mut round) = (Instant::now() + duration, 0_u32);
    while round == 0 || Instant::now() < end {
        for step in ["rest", "console", "display", "pause", "migration"] {
            match step {
                "console" => print_in_guest(&mut story.reopen_console("soak", "root", "ferrovirt").await?).await?,
                "display" => look(story).await?,
                "pause" => pause(story).await?,
                "migration" if moves => migrate(story, &format!("soak-{round}")).await?,
                _ => {}
            }
            let sample = sample(story).await?;
            println!("  round {round}, after {step}: {sample:?}");
            sample.add(figures);
        }
        round += 1;
    }
    figures.insert("soak_rounds".into(), round.into());
    story.delete("vm", "soak").await?;
    story.wait_gone("vmi", "soak", Duration::from_secs(120)).await
}

async fn print_in_guest(console: &mut Console) -> Result<()> {
    console.output("seq 1 5000").await.map(drop)
}

async fn look(story: &Story) -> Result<()> {
    for _ in 0..PICTURES {
        story.virt(&["vnc", "soak", "--screenshot", "/dev/null"]).await?;
    }
    Ok(())
}

async fn pause(story: &Story) -> Result<()> {
    act(story, "soak", &["pause", "vm", "soak"], "vmi", |vmi| is_true(vmi, "Paused")).await?;
    act(story, "soak", &["unpause", "vm", "soak"], "vmi", |vmi| !is_true(vmi, "Paused")).await.map(drop)
}

async fn migrate(story: &Story, name: &str) -> Result<()> {
    let migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration", "metadata": {"name": name},
        "spec": {"vmiName": "soak"},
    });
    story.apply(&migration.to_string()).await?;
    let ended = |vmim: &Value| ["Succeeded", "Failed"].contains(&vmim["status"]["phase"].as_str().unwrap_or_default());
    let end = story.wait("vmim", name, "end", TIMEOUT, ended).await?;
    ensure!(end["status"]["phase"] == "Succeeded", "{}", end["status"]);
    story.delete("vmim", name).await
}

/// Memory of the launcher pod in MiB.
#[derive(Debug)]
struct Sample {
    /// Requested beside the guest's.
    requested: f64,
    /// PSS of its processes.
    processes: f64,
    /// The memory that its cgroup cannot drop, if that is known.
    group: Option<f64>,
}

impl Sample {
    /// Raises the figures to those of the sample.
    fn add(&self, figures: &mut Figures) {
        for (name, used) in
            [("soak_used_over_requested", Some(self.processes)), ("soak_cgroup_over_requested", self.group)]
        {
            if let Some(used) = used {
                let largest = figures.entry(name.into()).or_default();
                *largest = largest.max(used / self.requested);
            }
        }
    }
}

async fn sample(story: &Story) -> Result<Sample> {
    let pod = story.launcher_pod("soak").await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
    let node = pod["spec"]["nodeName"].as_str().context("pod without node")?;
    // The kubelet's driver decides what stands between the parts of the UID.
    let group = GROUP.replace("GLOB", &uid.replace('-', "?")).replace("PATTERN", &uid.replace('-', "."));
    let listing = story.on_node(node, &format!("{}{group}", memory::LIST)).await?;
    let (group, processes) = split(&listing)?;
    Ok(Sample { requested: memory::overhead(&pod)?, processes: memory::used(&processes, uid)?, group })
}

/// Separates the line about the cgroup, in MiB, from those about processes.
fn split(listing: &str) -> Result<(Option<f64>, String)> {
    let (groups, processes): (Vec<&str>, Vec<&str>) = listing.lines().partition(|line| line.starts_with("group "));
    let group = groups.first().and_then(|line| line.strip_prefix("group "));
    let group = group.map(|kib| kib.parse::<f64>().map(|kib| kib / 1024.0)).transpose()?;
    Ok((group, processes.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_sample_counts() {
        let mut figures = Figures::new();
        for (processes, group) in [(60.0, None), (90.0, Some(48.0)), (30.0, Some(24.0))] {
            Sample { requested: 120.0, processes, group }.add(&mut figures);
        }
        assert_eq!((figures["soak_used_over_requested"], figures["soak_cgroup_over_requested"]), (0.75, 0.4));
    }

    #[test]
    fn the_cgroup_is_a_line_of_its_own() {
        let processes = "podab-cd virt-launcher 2048 1024 3072 4096";
        assert_eq!(split(&format!("{processes}\ngroup 2048\n")).unwrap(), (Some(2.0), processes.to_owned()));
        assert_eq!(split(processes).unwrap(), (None, processes.to_owned()));
        assert!(split("group many\n").is_err());
    }
}
