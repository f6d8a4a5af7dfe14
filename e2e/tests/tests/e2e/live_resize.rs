//! vCPUs and memory of a running VM.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
pub(crate) use ferrovirt_e2e_tests::condition;
use ferrovirt_e2e_tests::{Story, TIMEOUT, story, story_large};
use serde_json::Value;

pub(crate) use crate::hotplug::run;
use crate::{cve_guest_agent::start_agent, manifests, processors::despite_aborts};

pub(crate) const MINUTES: Duration = Duration::from_secs(300);

/// Makes the guest use memory as soon as it is plugged, in a way in which it can give it back.
pub(crate) const READY: &str = "dmesg -n 1; echo online_movable > /sys/devices/system/memory/auto_online_blocks; \
     modprobe -qa virtio_mem virtio_pci; cat /sys/devices/system/memory/auto_online_blocks";

/// Returns a VM with 1 GiB of memory and these settings of its size.
pub(crate) fn vm(name: &str, cpu: &str, max_guest: &str) -> String {
    manifests::kernel_vm(name, "Once")
        .replace("memory: {guest: 128Mi}", &format!("cpu: {{{cpu}}}\n        memory: {{guest: 1Gi{max_guest}}}"))
}

/// Returns a script that waits until the guest's memory in MiB is in a range.
pub(crate) fn memory_between(least: u32, most: u32) -> String {
    format!(
        "for i in $(seq 100); do m=$(awk '/MemTotal/ {{print int($2 / 1024)}}' /proc/meminfo); \
         [ $m -ge {least} ] && [ $m -lt {most} ] && break; sleep 1; done; echo $m; [ $m -ge {least} ] && [ $m -lt {most} ]"
    )
}

/// Returns a script that waits until the firmware shows this number of vCPUs as present, and prints the number.
///
/// Linux does not use them under software emulation: since 6.12.75 only the guests of known hypervisors have processors that
/// can be added (commit "x86/acpi/boot: Correct acpi_is_processor_usable() check again").
pub(crate) fn processors(expected: u32) -> String {
    format!(
        "for i in $(seq 100); do n=$(cat /sys/bus/acpi/devices/LNXCPU:*/status | grep -cx 15); \
         [ $n = {expected} ] && break; sleep 1; done; echo $n"
    )
}

/// Returns the resources of container compute.
async fn resources(s: &Story, vmi: &str) -> Result<Value> {
    let pod = s.launcher_pod(vmi).await?;
    let containers = pod["spec"]["containers"].as_array().context("pod without containers")?;
    let compute = containers.iter().find(|container| container["name"] == "compute").context("no container compute")?;
    Ok(compute["resources"].clone())
}

async fn ensure_no_restart_is_required(s: &Story) -> Result<()> {
    let vm = s.get("vm", "box").await?;
    let restart = condition(&vm, "RestartRequired").or(condition(&vm, "Failure"));
    ensure!(restart.is_none(), "{restart:?}");
    Ok(())
}

#[test]
fn running_guest_gets_vcpus_and_memory_and_gives_memory_back() {
    story_large("live-resize", async |s| {
        despite_aborts(s, "box", async || {
            s.apply(&vm("box", "sockets: 1", "")).await?;
            grown_and_shrunk(s).await
        })
        .await
    });
}

async fn grown_and_shrunk(s: &Story) -> Result<()> {
    let vmi = s.wait_running("box").await?;
    let domain = &vmi["spec"]["domain"];
    ensure!(domain["cpu"]["maxSockets"] == 4 && domain["memory"]["maxGuest"] == "4Gi", "defaults: {domain}");
    let uid = s.launcher_pod("box").await?["metadata"]["uid"].clone();
    let first = resources(s, "box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    ensure!(run(&mut console, READY).await?.ends_with("online_movable"), "the guest keeps new memory offline");
    ensure!(run(&mut console, &processors(1)).await? == "1", "the guest has several processors");
    run(&mut console, &memory_between(800, 1024)).await?;

    // A second socket.
    let said = s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
    ensure!(said.contains("the guest of VM box is offered the size"), "{said}");
    let vmi = s.get("vmi", "box").await?;
    ensure!(vmi["status"]["currentCPUTopology"]["sockets"] == 2, "{}", vmi["status"]);
    ensure!(condition(&vmi, "HotVCPUChange").is_none(), "{}", vmi["status"]["conditions"]);
    ensure!(run(&mut console, &processors(2)).await? == "2", "the guest has not got the processor");
    ensure_no_restart_is_required(s).await?;

    // More memory, and less.
    s.virt(&["set", "memory", "box", "--guest=2Gi", "--wait"]).await?;
    run(&mut console, &memory_between(1700, 2048)).await?;
    let has = |guest: &'static str| {
        move |vmi: &Value| {
            let memory = &vmi["status"]["memory"];
            memory["guestCurrent"] == guest && memory["guestRequested"] == guest
        }
    };
    let has_grown = |vmi: &Value| has("2Gi")(vmi) && condition(vmi, "HotMemoryChange").is_none();
    let vmi = s.wait("vmi", "box", "show 2Gi and no change in progress", MINUTES, has_grown).await?;
    ensure!(vmi["status"]["memory"]["guestAtBoot"] == "1Gi", "{}", vmi["status"]["memory"]);
    let grown = resources(s, "box").await?;
    ensure!(grown["requests"]["memory"] != first["requests"]["memory"], "{first} {grown}");
    ensure!(grown["requests"]["cpu"] == "200m", "{grown}");
    s.virt(&["set", "memory", "box", "--guest=1Gi", "--wait"]).await?;
    run(&mut console, &memory_between(800, 1024)).await?;
    s.wait("vmi", "box", "show 1Gi", MINUTES, has("1Gi")).await?;
    let gone = |vmi: &Value| condition(vmi, "HotMemoryChange").is_none();
    s.wait("vmi", "box", "have no change in progress", MINUTES, gone).await?;
    // Of the growth the second vCPU is left.
    let mebibytes = |resources: &Value| -> Option<u64> {
        resources["requests"]["memory"].as_str()?.strip_suffix("Mi")?.parse().ok()
    };
    let shrunk = resources(s, "box").await?;
    let left = mebibytes(&shrunk).zip(mebibytes(&first)).map(|(shrunk, first)| shrunk.saturating_sub(first));
    ensure!(left == Some(8), "the pod has {shrunk}, it had {first}");
    ensure_no_restart_is_required(s).await?;

    // What is not live.
    let Err(refused) = s.virt(&["set", "cpu", "box", "--sockets=1", "--wait"]).await else {
        anyhow::bail!("a running guest has given a processor back")
    };
    ensure!(refused.to_string().contains("Reduction of CPU socket count requires a restart"), "{refused:#}");
    s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
    s.wait("vm", "box", "need no restart", MINUTES, |vm| condition(vm, "RestartRequired").is_none()).await?;
    ensure!(run(&mut console, &processors(2)).await? == "2", "the guest has lost a processor");
    console.leave().await?;
    ensure!(s.launcher_pod("box").await?["metadata"]["uid"] == uid, "the launcher pod was replaced");
    Ok(())
}

/// A guest agent that reports a second processor as used once the file `/tmp/second` says so.
const AGENT: &str = r#"#!/bin/sh
for port in /sys/class/virtio-ports/*; do
	grep -q org.qemu.guest_agent.0 "$port/name" && device=/dev/${port##*/}
done
exec 3<>"$device" || exit 1
# Until libvirt has connected, reading ends at once.
while sleep 0.2; do
	while read -r line <&3; do
		case $line in
		*guest-sync*)
			id=${line##*:}
			printf '{"return":%s}\n' "${id%%\}*}" >&3
			;;
		*guest-get-vcpus*)
			printf '{"return":[{"logical-id":0,"online":true},{"logical-id":1,"online":%s}]}\n' "$(cat /tmp/second)" >&3
			;;
		*)
			printf '{"return":{}}\n' >&3
			;;
		esac
	done
done
"#;

#[test]
fn processor_that_the_guest_does_not_use_is_reported_until_it_does() {
    story("live-resize-taken", async |s| {
        despite_aborts(s, "box", async || {
            s.apply(&vm("box", "sockets: 1", "")).await?;
            s.wait_running("box").await?;
            let mut console = s.console("box")?;
            console.login("root", "ferrovirt").await?;
            run(&mut console, "echo false >/tmp/second").await?;
            start_agent(&mut console, AGENT).await?;
            let online = |status: &'static str| {
                move |object: &Value| condition(object, ONLINE).is_some_and(|online| online["status"] == status)
            };
            s.wait("vmi", "box", "connect its guest agent", TIMEOUT, |vmi| condition(vmi, "AgentConnected").is_some())
                .await?;
            let deadline = tokio::time::Instant::now() + MINUTES;
            loop {
                let Err(late) = s.virt(&["set", "cpu", "box", "--sockets=2", "--wait", "--timeout=30"]).await else {
                    anyhow::bail!("the guest uses one processor")
                };
                let texts = ["the guest uses 1 of 2 vCPUs", "offered, not taken by the guest"];
                if texts.iter().all(|text| late.to_string().contains(text)) {
                    break;
                }
                ensure!(tokio::time::Instant::now() < deadline, "not {texts:?}, but {late:#}");
            }
            let vm = s.wait("vm", "box", "show what the guest does not use", TIMEOUT, online("False")).await?;
            ensure!(condition(&vm, ONLINE).is_some_and(|c| c["reason"] == "OfferedNotTaken"), "{}", vm["status"]);
            run(&mut console, "echo true >/tmp/second").await?;
            let said = s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
            ensure!(said.contains("the guest of VM box has the size"), "{said}");
            s.wait("vmi", "box", "show that the guest uses its vCPUs", TIMEOUT, online("True")).await?;
            console.leave().await
        })
        .await
    });
}

/// Condition that shows if the guest uses its vCPUs.
const ONLINE: &str = "GuestVCPUsOnline";

#[test]
fn growth_that_does_not_fit_leaves_the_vm_as_it_was_and_says_so() {
    story("live-resize-refused", async |s| {
        // More than the node has; the processors that QEMU emulates can address it.
        s.apply(&vm("box", "sockets: 1", ", maxGuest: 512Gi")).await?;
        s.wait_running("box").await?;
        let first = resources(s, "box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        run(&mut console, READY).await?;

        // The node. From Kubernetes 1.36 on the API server refuses what the kubelet of an earlier version calls infeasible.
        let Err(refused) = s.virt(&["set", "memory", "box", "--guest=500Gi", "--wait"]).await else {
            anyhow::bail!("the node has 500 GiB")
        };
        let text = refused.to_string().to_lowercase();
        let reason = if text.contains("node didn't have enough allocatable resources: memory") {
            "PodResizeRefused"
        } else if text.contains("node didn't have enough capacity: memory") {
            "PodResizeInfeasible"
        } else {
            anyhow::bail!("{refused:#}")
        };
        let vmi = s.get("vmi", "box").await?;
        let held = condition(&vmi, "HotMemoryChange").context("no condition HotMemoryChange")?;
        ensure!(held["reason"] == reason && held["status"] == "True", "{held}");
        ensure!(vmi["status"]["memory"]["guestRequested"] == "1Gi", "{}", vmi["status"]["memory"]);
        s.wait("vm", "box", "show the reason", TIMEOUT, |vm| {
            condition(vm, "HotMemoryChange").is_some_and(|held| held["reason"] == reason)
        })
        .await?;
        s.wait_event("box", reason, TIMEOUT).await?;
        run(&mut console, &memory_between(800, 1024)).await?;
        // Taken back.
        s.virt(&["set", "memory", "box", "--guest=1Gi", "--wait"]).await?;
        let vmi = s.get("vmi", "box").await?;
        ensure!(condition(&vmi, "HotMemoryChange").is_none(), "{}", vmi["status"]["conditions"]);
        let taken_back = resources(s, "box").await?;
        ensure!(taken_back["requests"] == first["requests"], "{first} {taken_back}");

        // The quota of the namespace.
        s.apply(
            "
apiVersion: v1
kind: ResourceQuota
metadata: {name: small}
spec: {hard: {requests.cpu: 150m}}
",
        )
        .await?;
        let used = |quota: &Value| quota["status"]["used"]["requests.cpu"] == "100m";
        s.wait("ResourceQuota", "small", "count the pod", TIMEOUT, used).await?;
        s.virt(&["set", "cpu", "box", "--sockets=2"]).await?;
        let vmi = s
            .wait("vmi", "box", "show the refusal", MINUTES, |vmi| {
                condition(vmi, "HotVCPUChange").is_some_and(|held| held["reason"] == "PodResizeRefused")
            })
            .await?;
        let message = condition(&vmi, "HotVCPUChange").map(|held| held["message"].to_string()).unwrap_or_default();
        ensure!(message.contains("quota"), "{message}");
        s.wait_event("box", "PodResizeRefused", TIMEOUT).await?;
        ensure!(vmi["status"]["currentCPUTopology"]["sockets"] == 1, "{}", vmi["status"]);
        ensure!(run(&mut console, &processors(1)).await? == "1", "the guest has got a processor");
        // The change follows when the quota allows it.
        s.delete("ResourceQuota", "small").await?;
        s.wait("vmi", "box", "have two sockets", MINUTES, |vmi| {
            vmi["status"]["currentCPUTopology"]["sockets"] == 2 && condition(vmi, "HotVCPUChange").is_none()
        })
        .await?;
        ensure!(run(&mut console, &processors(2)).await? == "2", "the guest has not got the processor");
        console.leave().await?;
        ensure_no_restart_is_required(s).await
    });
}
