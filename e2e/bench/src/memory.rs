//! Memory of each process of a launcher pod and of the control processes.

use anyhow::{Context, Result, bail};
use ferrovirt_e2e_tests::Story;
use serde_json::Value;

use crate::{Figures, start::StartedVmi};

/// Prints one line per process: pod UID or "-", program; in KiB RSS, PSS, private pages that differ from files, and PSS without the
/// guest's memory (the mapping of 128 MiB) and without code that QEMU has translated.
pub(crate) const LIST: &str = r#"
for p in /proc/[0-9]*; do
  name=$(cat $p/comm 2>/dev/null) || continue
  case "$name" in virt-*|libvirtd|virtqemud|qemu-system*|swtpm|passt) ;; *) continue ;; esac
  pod=$(grep -o 'pod[0-9a-f]\{8\}[-_][0-9a-f_-]*' $p/cgroup | head -n 1)
  rss=$(grep -s '^Rss:' $p/smaps_rollup | tr -cd 0-9)
  pss=$(grep -s '^Pss:' $p/smaps_rollup | tr -cd 0-9)
  private=$(grep -s '^Private_Dirty:' $p/smaps_rollup | tr -cd 0-9)
  own=$(awk '/^[0-9a-f]+-/ { code = $2 ~ /^rwx/ } /^Size:/ { guest = $2 == 131072 } /^Pss:/ && !code && !guest { sum += $2 }
    END { print sum + 0 }' $p/smaps 2>/dev/null)
  echo "${pod:--} $name ${rss:-0} ${pss:-0} ${private:-0} ${own:-0}"
done
"#;

struct Process {
    pod: String,
    program: String,
    rss: f64,
    pss: f64,
    private: f64,
    own: f64,
}

impl Process {
    /// Returns true if the process is of the pod with this UID.
    fn is_of(&self, uid: &str) -> bool {
        self.pod.contains(uid) || self.pod.contains(&uid.replace('-', "_"))
    }
}

/// Reads the memory of the VMI's processes and of the control processes on its node.
pub(crate) async fn measure(story: &Story, vmi: &StartedVmi<'_>, figures: &mut Figures) -> Result<()> {
    let pod = story.launcher_pod(&vmi.name).await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
    let listing = story.on_node(&story.node_of(&vmi.name).await?, LIST).await?;
    let processes = parse(&listing)?;
    let (mut outside, mut qemu, mut private) = (0.0, 0.0, 0.0);
    for process in processes.iter().filter(|process| process.is_of(uid)) {
        let role = match process.program.as_str() {
            program if program.starts_with("qemu-system") => {
                qemu += process.pss;
                "qemu"
            }
            other => {
                outside += process.pss;
                private += process.private;
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
    figures.insert("outside_qemu_private_mib".into(), private);
    let overhead = overhead(&pod)?;
    figures.insert("overhead_mib".into(), overhead);
    figures.insert("overhead_used_over_requested".into(), used(&listing, uid)? / overhead);
    for daemon in ["virt-api", "virt-controller", "virt-handler"] {
        // The figure is the maximum over all replicas.
        let largest = processes.iter().filter(|p| p.program == daemon).map(|p| p.rss).reduce(f64::max);
        if let Some(rss) = largest {
            figures.insert(format!("{}_rss_mib", daemon.replace('-', "_")), rss);
        }
    }
    Ok(())
}

/// Returns the PSS of a pod's processes in MiB, without the guest's memory and translated code.
pub(crate) fn used(listing: &str, uid: &str) -> Result<f64> {
    let processes = parse(listing)?;
    Ok(processes.iter().filter(|process| process.is_of(uid)).map(|process| process.own).sum())
}

/// Returns the memory that a launcher pod requests beside the guest's, without that for translated code.
pub(crate) fn overhead(pod: &Value) -> Result<f64> {
    let text = pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str();
    let bytes: i64 = text.context("pod without its overhead")?.parse()?;
    let command = pod["spec"]["containers"][0]["command"].as_array().context("pod without command")?;
    let code = if command.iter().any(|word| word == "--allow-emulation") { api::overhead::EMULATION } else { 0 };
    Ok((bytes - code) as f64 / (1024.0 * 1024.0))
}

fn parse(listing: &str) -> Result<Vec<Process>> {
    let mib = |kib: &str| kib.parse::<f64>().map(|kib| kib / 1024.0);
    listing
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [pod, program, rss, pss, private, own] = words[..] else { bail!("not a process: {line:?}") };
            Ok(Process {
                pod: pod.into(),
                program: program.into(),
                rss: mib(rss)?,
                pss: mib(pss)?,
                private: mib(private)?,
                own: mib(own)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Process, overhead, parse, used};

    #[test]
    fn listing_is_read_in_mib() {
        let processes = parse("podab-cd virt-launcher 2048 1024 3072 4096\n- virt-api 1024 512 0 0\n").unwrap();
        assert_eq!(processes.len(), 2);
        let Process { rss, pss, private, own, .. } = &processes[0];
        assert_eq!([rss, pss, private, own].map(|mib| mib.round() as i64), [2, 1, 3, 4]);
        assert!(parse("what").is_err());
        assert_eq!(used("podab_cd virt-launcher 0 0 0 4096\npodef qemu-system 0 0 0 2048", "ab-cd").unwrap(), 4.0);
    }

    #[test]
    fn overhead_is_without_translated_code() {
        let pod = |option: &str, mebibytes: i64| {
            json!({
                "metadata": {"annotations": {"kubevirt.io/memory-overhead-bytes": (mebibytes << 20).to_string()}},
                "spec": {"containers": [{"command": ["/usr/bin/virt-launcher-monitor", option]}]},
            })
        };
        for pod in [pod("--name", 120), pod("--allow-emulation", 168)] {
            assert_eq!(overhead(&pod).unwrap().round() as i64, 120, "{pod}");
        }
    }
}
