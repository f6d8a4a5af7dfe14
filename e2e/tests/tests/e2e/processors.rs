//! Guests with several processors under software emulation.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story_large};
use serde_json::Value;

use crate::manifests;

/// Assertion that fails in QEMU 10.0 under emulation when several processors run while PCI devices are set up (QEMU issue
/// 1921).
const ASSERTION: &str = "section_index < d->map.sections_nb";
/// Limits the starts of one VM that QEMU aborts this way.
const STARTS: usize = 5;

const INSTANCE_TYPE: &str = "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: twin}
spec: {cpu: {guest: 2}, memory: {guest: 192Mi}}
---
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachinePreference
metadata: {name: compact}
spec: {cpu: {preferredCPUTopology: cores}}
";

/// Returns a VM that leaves processors and memory to its instance type, and the topology to its preference.
fn typed_vm(name: &str) -> String {
    manifests::kernel_vm(name, "Once").replace("        memory: {guest: 128Mi}\n", "").replace(
        "  runStrategy: Once\n",
        "  runStrategy: Once
  instancetype: {kind: VirtualMachineInstancetype, name: twin}
  preference: {kind: VirtualMachinePreference, name: compact}
",
    )
}

#[test]
fn guest_runs_on_the_processors_and_memory_of_its_instance_type() {
    // On a busy host QEMU aborts more often.
    story_large("processors", async |s| {
        s.apply(INSTANCE_TYPE).await?;
        despite_aborts(s, "box", async || {
            s.apply(&typed_vm("box")).await?;
            let vmi = s.wait_running("box").await?;
            let cpu = &vmi["spec"]["domain"]["cpu"];
            ensure!(cpu["cores"] == 2 && cpu["sockets"] == 1, "the VMI has the topology {cpu}");
            shape(s, "box").await
        })
        .await
    });
}

/// Checks processors, topology and memory as the guest sees them.
async fn shape(s: &Story, vmi: &str) -> Result<()> {
    let mut console = s.console(vmi)?;
    console.login("root", "ferrovirt").await?;
    let (count, _) = console.run("nproc").await?;
    ensure!(count.trim() == "2", "the guest has {count:?} processors");
    // One line a processor: socket and core.
    let list = "for t in /sys/devices/system/cpu/cpu[0-9]*/topology; do \
        echo $(cat $t/physical_package_id $t/core_id); done";
    let (topology, _) = console.run(list).await?;
    ensure!(topology.lines().eq(["0 0", "0 1"]), "the guest has the topology {topology:?}");
    // A program on each; field 39 is the processor on which it runs.
    let (used, _) = console.run("for mask in 1 2; do taskset $mask cut -d' ' -f39 /proc/self/stat; done").await?;
    ensure!(used.lines().eq(["0", "1"]), "programs run on the processors {used:?}");
    let (memory, _) = console.run("awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo").await?;
    // The kernel reserves a part.
    let megabytes: u32 = memory.trim().parse()?;
    ensure!((130..192).contains(&megabytes), "the guest has {megabytes} MiB");
    console.leave().await
}

/// Runs an attempt that starts a VM, again if QEMU aborts by issue 1921, and prints the number of aborts. Other failures are
/// errors.
pub(crate) async fn despite_aborts(s: &Story, vm: &str, attempt: impl AsyncFn() -> Result<()>) -> Result<()> {
    let mut aborts = 0;
    loop {
        let Err(error) = attempt().await else { break };
        if !aborted(s, vm).await? {
            return Err(error);
        }
        aborts += 1;
        ensure!(aborts < STARTS, "QEMU aborted {aborts} times by its issue 1921, the last time after: {error:#}");
        s.delete("vm", vm).await?;
        s.wait_gone("vm", vm, TIMEOUT).await?;
        s.wait_gone("vmi", vm, TIMEOUT).await?;
    }
    eprintln!("QEMU aborted {aborts} times by its issue 1921");
    Ok(())
}

/// Returns true if the VMI has failed because QEMU aborted by issue 1921.
async fn aborted(s: &Story, vmi: &str) -> Result<bool> {
    let failed = |vmi: &Value| vmi["status"]["phase"] == "Failed";
    if s.wait("vmi", vmi, "have failed", Duration::from_secs(60), failed).await.is_err() {
        return Ok(false);
    }
    let pod = s.launcher_pod(vmi).await?;
    let log = s.log(pod["metadata"]["name"].as_str().context("pod without name")?, "compute").await?;
    Ok(log.contains(ASSERTION))
}
