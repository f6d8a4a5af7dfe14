//! Hibernated VMs: the guest continues where it was.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep};

use crate::{
    data_volumes::{MINUTES, condition, kernel_vm, storage, with_driver},
    hotplug::run,
    manifests,
    moves::console,
};

const BOOT: &str = "cat /proc/sys/kernel/random/boot_id";
/// A process that counts in its memory, and its last number in a file of the guest's memory.
const COUNT: &str = "(n=0; while :; do n=$((n+1)); echo $n > /tmp/count; sleep 1; done) > /dev/null 2>&1 & \
                     echo $! > /tmp/counter; sleep 3; cat /tmp/count";

#[test]
fn hibernated_guest_continues_where_it_was() {
    story("hibernate", async |s| with_driver(s, continued).await);
}

/// Returns the hibernation of a VM.
pub(crate) fn hibernation(vm: &Value) -> &Value {
    &vm["status"]["hibernation"]
}

/// Waits until nothing is left of a hibernation.
pub(crate) async fn wait_over(s: &Story, vm: &str) -> Result<()> {
    let is_over = |vm: &Value| hibernation(vm).is_null() && vm["status"]["operation"].is_null();
    s.wait("vm", vm, "have no saved memory", MINUTES, is_over).await.map(drop)
}

async fn continued(s: &Story) -> Result<()> {
    let blank = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Block", 16));
    s.apply(&kernel_vm("box", "Always", &blank)).await?;
    s.wait_running("box").await?;
    let mut guest = console(s, "box").await?;
    let boot = run(&mut guest, BOOT).await?;
    let counted: u32 = run(&mut guest, COUNT).await?.parse()?;
    run(&mut guest, "printf kept | dd of=/dev/vda conv=fsync").await?;
    guest.leave().await?;

    let said = s.virt(&["hibernate", "box", "--wait"]).await?;
    ensure!(said.contains("VM box is hibernated in claim hibernation-of-box-"), "{said}");
    s.wait_gone("vmi", "box", MINUTES).await?;
    for pod in s.list("pod", "kubevirt.io=virt-launcher").await? {
        s.wait_gone("pod", pod["metadata"]["name"].as_str().unwrap_or_default(), MINUTES).await?;
    }
    // The run strategy starts nothing.
    sleep(Duration::from_secs(10)).await;
    let vm = s.wait("vm", "box", "be stopped", MINUTES, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
    ensure!(vm["spec"]["runStrategy"] == "Always", "{vm}");
    ensure!(condition(&vm, "Hibernated")["status"] == "True", "{}", vm["status"]);
    ensure!(vm["status"]["operation"]["operation"] == "Hibernation", "{}", vm["status"]);
    ensure!(s.api("vmi").get_opt("box").await?.is_none(), "it was started");
    let pods = s.list("pod", "kubevirt.io=virt-launcher").await?;
    ensure!(pods.is_empty(), "{pods:?}");
    let claim = hibernation(&vm)["claimName"].as_str().context("no claim")?.to_owned();
    let refused = s.virt(&["hibernate", "box"]).await.err().context("it is hibernated twice")?.to_string();
    ensure!(refused.contains("hibernated already"), "{refused}");

    s.virt(&["start", "box"]).await?;
    s.wait_running("box").await?;
    wait_over(s, "box").await?;
    s.wait_gone("PersistentVolumeClaim", &claim, MINUTES).await?;
    let mut guest = console(s, "box").await?;
    ensure!(run(&mut guest, BOOT).await? == boot, "the guest has booted");
    let now: u32 = run(&mut guest, "sleep 2; kill -0 $(cat /tmp/counter) && cat /tmp/count").await?.parse()?;
    ensure!(now > counted, "{counted} and then {now}");
    ensure!(run(&mut guest, "head -c 4 /dev/vda").await? == "kept", "the disk has changed");
    guest.leave().await?;
    let vmi = s.get("vmi", "box").await?;
    ensure!(!vmi["spec"]["volumes"].to_string().contains(&claim) && vmi["status"]["hibernation"].is_null(), "{vmi}");
    continued_paused(s, &boot, now).await?;
    discarded(s, &boot).await?;
    refused_by_name(s).await
}

/// A guest that is restored paused continues when it is unpaused.
async fn continued_paused(s: &Story, boot: &str, counted: u32) -> Result<()> {
    s.virt(&["hibernate", "box", "--wait"]).await?;
    s.virt(&["start", "box", "--paused", "--wait"]).await?;
    let is_paused = |vmi: &Value| condition(vmi, "Paused")["reason"] == "PausedByUser";
    s.wait("vmi", "box", "be Paused", MINUTES, is_paused).await?;
    wait_over(s, "box").await?;
    let vmi = s.get("vmi", "box").await?;
    ensure!(is_paused(&vmi), "the guest runs: {}", vmi["status"]);
    s.virt(&["unpause", "vm", "box"]).await?;
    let mut guest = console(s, "box").await?;
    ensure!(run(&mut guest, BOOT).await? == *boot, "the guest has booted");
    let now: u32 = run(&mut guest, "sleep 2; kill -0 $(cat /tmp/counter) && cat /tmp/count").await?.parse()?;
    ensure!(now > counted, "{counted} and then {now}");
    guest.leave().await
}

/// Saved memory that is not wanted is removed, and the guest boots.
async fn discarded(s: &Story, boot: &str) -> Result<()> {
    s.virt(&["hibernate", "box", "--wait"]).await?;
    s.virt(&["start", "box", "--discard", "--wait"]).await?;
    s.wait_running("box").await?;
    wait_over(s, "box").await?;
    let mut guest = console(s, "box").await?;
    ensure!(run(&mut guest, BOOT).await? != *boot, "the guest was resumed");
    guest.leave().await?;
    let refused = s.virt(&["hibernate", "box", "--discard"]).await.err().context("nothing is discarded")?.to_string();
    ensure!(refused.contains("VM is not hibernated"), "{refused}");
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", MINUTES).await
}

async fn refused_by_name(s: &Story) -> Result<()> {
    s.apply(&manifests::vm("disk", "Always")).await?;
    s.wait_running("disk").await?;
    let refused = s.virt(&["hibernate", "disk"]).await.err().context("a container disk is hibernated")?.to_string();
    ensure!(refused.contains("volume root, whose content does not outlive the pod"), "{refused}");
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "small"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": {"requests": {"storage": "1Mi"}}},
    });
    s.apply(&claim.to_string()).await?;
    s.apply(&manifests::kernel_vm("plain", "Always")).await?;
    s.wait_running("plain").await?;
    for (claim, expected) in [("none", "not found"), ("small", "pvc must have")] {
        let refused = s.virt(&["hibernate", "plain", &format!("--claim={claim}")]).await.err();
        let refused = refused.context("the claim is accepted")?.to_string();
        ensure!(refused.contains(expected), "{refused}");
    }
    let vm = s.get("vm", "plain").await?;
    ensure!(hibernation(&vm).is_null() && vm["status"]["operation"].is_null(), "{}", vm["status"]);
    for vm in ["disk", "plain"] {
        s.delete("vm", vm).await?;
        s.wait_gone("vmi", vm, MINUTES).await?;
    }
    Ok(())
}
