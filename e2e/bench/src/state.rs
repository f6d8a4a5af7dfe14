//! Measures the cost of kept state and of file systems: the start of a VM with a TPM and UEFI variables that are kept against one with
//! variables alone that are not, and the memory of swtpm and virtiofsd. A first start, which makes the claim and the TPM, is not measured.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::Story;

use crate::{
    Figures,
    actions::{act, running, startable},
    add_medians,
};

const CONFIGURATION: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {color: blue}
";
/// Time in which the processes settle after the guest has booted.
const SETTLE: Duration = Duration::from_secs(10);

/// Measures all and reports the medians.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    story.apply(CONFIGURATION).await?;
    story.apply(&vm("plain", false, "", "")).await?;
    let shared = "filesystems: [{name: settings, virtiofs: {}}], tpm: {persistent: true}, ";
    let volume = "\n      - {name: settings, configMap: {name: settings}}";
    story.apply(&vm("shared", true, shared, volume)).await?;
    story.apply(&vm("kept", true, "tpm: {persistent: true}, ", "")).await?;
    for name in ["plain", "kept"] {
        start_and_stop(story, name).await?;
    }
    let (mut plain, mut kept) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        plain.push(start_and_stop(story, "plain").await?);
        kept.push(start_and_stop(story, "kept").await?);
    }
    add_medians(figures, [("start_without_state_s", plain), ("start_with_state_s", kept)])?;
    act(story, "shared", &["start", "shared"], "vmi", running).await?;
    tokio::time::sleep(SETTLE).await;
    for program in ["swtpm", "virtiofsd"] {
        figures.insert(format!("{program}_pss_mib"), memory(story, "shared", program).await?);
    }
    for name in ["plain", "shared", "kept"] {
        story.delete("vm", name).await?;
    }
    Ok(())
}

/// Returns a VM that boots by UEFI. `kept`: its variables are.
fn vm(name: &str, kept: bool, devices: &str, volume: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: Manual
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {{guest: 256Mi}}
        features: {{smm: {{}}}}
        firmware: {{bootloader: {{efi: {{secureBoot: true, persistent: {kept}}}}}}}
        devices: {{{devices}disks: [{{name: root, disk: {{bus: virtio}}}}]}}
      volumes:
      - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny-signed:devel', imagePullPolicy: IfNotPresent}}}}{volume}
"
    )
}

/// Starts and stops a VM. Returns the seconds from the command to phase Running.
async fn start_and_stop(story: &Story, vm: &str) -> Result<f64> {
    let started = act(story, vm, &["start", vm], "vmi", running).await?;
    act(story, vm, &["stop", vm], "vm", |vm| vm["status"]["printableStatus"] == "Stopped").await?;
    startable(story, vm).await?;
    Ok(started)
}

/// Returns the memory of a program of the VM's launcher pod, without that of the guest, which virtiofsd shares.
async fn memory(story: &Story, vm: &str, program: &str) -> Result<f64> {
    let pod = story.launcher_pod(vm).await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without UID")?.replace('-', "[-_]");
    let script = format!(
        "for p in /proc/[0-9]*; do grep -qsx {program} $p/comm && grep -qs 'pod{uid}' $p/cgroup \
         && grep -E '^Pss_(Anon|File):' $p/smaps_rollup; done; true"
    );
    let found = story.on_node(&story.node_of(vm).await?, &script).await?;
    let sizes = found.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    let sizes: Vec<f64> = sizes.collect();
    ensure!(!sizes.is_empty(), "{program} of VM {vm} does not run");
    Ok(sizes.into_iter().sum::<f64>() / 1024.0)
}
