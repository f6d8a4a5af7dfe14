//! Memory of each process of a launcher pod and of the control processes.

use anyhow::{Context, Result, bail};
use ferrovirt_e2e_tests::Story;

use crate::{Figures, start::StartedVmi};

/// Prints one line per process: pod UID or "-", program, RSS and PSS in KiB.
const LIST: &str = r#"
for p in /proc/[0-9]*; do
  name=$(cat $p/comm 2>/dev/null) || continue
  case "$name" in virt-*|libvirtd|virtqemud|qemu-system*|swtpm|passt) ;; *) continue ;; esac
  pod=$(grep -o 'pod[0-9a-f]\{8\}[-_][0-9a-f_-]*' $p/cgroup | head -n 1)
  rss=$(grep -s '^Rss:' $p/smaps_rollup | tr -cd 0-9)
  pss=$(grep -s '^Pss:' $p/smaps_rollup | tr -cd 0-9)
  echo "${pod:--} $name ${rss:-0} ${pss:-0}"
done
"#;

struct Process {
    pod: String,
    program: String,
    rss: f64,
    pss: f64,
}

/// Reads the memory of the VMI's processes and of the control processes on its node.
pub(crate) async fn measure(story: &Story, vmi: &StartedVmi<'_>, figures: &mut Figures) -> Result<()> {
    let pod = story.launcher_pod(&vmi.name).await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
    let listing = story.on_node(&story.node_of(&vmi.name).await?, LIST).await?;
    let processes = parse(&listing)?;
    let (mut outside, mut qemu) = (0.0, 0.0);
    for process in processes.iter().filter(|p| p.pod.contains(uid) || p.pod.contains(&uid.replace('-', "_"))) {
        let role = match process.program.as_str() {
            program if program.starts_with("qemu-system") => {
                qemu += process.pss;
                "qemu"
            }
            other => {
                outside += process.pss;
                match other {
                    "virt-launcher" => "launcher_worker",
                    "virt-launcher-m" => "launcher_supervisor",
                    "libvirtd" | "virtqemud" => "libvirtd",
                    _ => "other",
                }
            }
        };
        *figures.entry(format!("{role}_rss_mib")).or_default() += process.rss;
        *figures.entry(format!("{role}_pss_mib")).or_default() += process.pss;
    }
    if outside == 0.0 || qemu == 0.0 {
        bail!("no processes of pod {uid} in:\n{listing}");
    }
    figures.insert("outside_qemu_pss_mib".into(), outside);
    for daemon in ["virt-api", "virt-controller", "virt-handler"] {
        // The figure is the maximum over all replicas.
        let largest = processes.iter().filter(|p| p.program == daemon).map(|p| p.rss).reduce(f64::max);
        if let Some(rss) = largest {
            figures.insert(format!("{}_rss_mib", daemon.replace('-', "_")), rss);
        }
    }
    Ok(())
}

fn parse(listing: &str) -> Result<Vec<Process>> {
    let mib = |kib: &str| kib.parse::<f64>().map(|kib| kib / 1024.0);
    listing
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [pod, program, rss, pss] = words[..] else { bail!("not a process: {line:?}") };
            Ok(Process { pod: pod.into(), program: program.into(), rss: mib(rss)?, pss: mib(pss)? })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn listing_is_read_in_mib() {
        let processes = parse("podab-cd virt-launcher 2048 1024\n- virt-api 1024 512\n").unwrap();
        assert_eq!(processes.len(), 2);
        assert!((processes[0].rss - 2.0).abs() < f64::EPSILON && (processes[0].pss - 1.0).abs() < f64::EPSILON);
        assert!(parse("what").is_err());
    }
}
