//! A malicious guest agent with endless answers.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use ferrovirt_e2e_tests::{Console, Story, TIMEOUT, is_true, story};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{manifests, virt_handlers};

/// Limits of memory growth in KiB. libvirt buffers an answer in pieces; other VMs use virt-handler, too.
const OF_LIBVIRT: u64 = 48 * 1024;
const OF_LAUNCHER: u64 = 24 * 1024;
const OF_VIRT_HANDLER: u64 = 32 * 1024;

/// A guest agent. Its answers are short for the operating system, 3 MiB for the host name, which libvirt accepts, and more
/// than 10 MiB for the time zone. It counts the blocks of 64 KiB that it has written.
const AGENT: &str = r#"#!/bin/sh
echo $$ >/tmp/pid
for port in /sys/class/virtio-ports/*; do
	grep -q org.qemu.guest_agent.0 "$port/name" && device=/dev/${port##*/}
done
exec 3<>"$device" || exit 1
dd if=/dev/zero bs=65536 count=1 2>/dev/null | tr '\000' x >/tmp/block
long() {
	blocks=0
	while [ $blocks -lt $1 ]; do
		cat /tmp/block >&3 || exit 1
		blocks=$((blocks + 1))
		echo $blocks >$2
	done
}
# Until libvirt has connected, reading ends at once.
while sleep 0.2; do
	while read -r line <&3; do
		echo "$line" >>/tmp/asked
		case $line in
		*guest-sync*)
			id=${line##*:}
			printf '{"return":%s}\n' "${id%%\}*}" >&3
			;;
		*guest-get-osinfo*)
			printf '{"return":{"name":"Small"}}\n' >&3
			;;
		*guest-get-host-name*)
			printf '{"return":{"host-name":"believed","rest":"' >&3
			long 48 /tmp/three
			printf '"}}\n' >&3
			;;
		*guest-get-timezone*)
			printf '{"return":{"zone":"believed","offset":0,"rest":"' >&3
			long 168 /tmp/ten
			printf '"}}\n' >&3
			;;
		*)
			printf '{"return":{}}\n' >&3
			;;
		esac
	done
done
"#;
/// Blocks of the longest answer that libvirt reads in any case: less than 10 MiB.
const TAKEN: u64 = 152;
/// Number of later measurements.
const LOOKS: u32 = 2;

#[test]
fn cve_2026_13322_guest_agent_answers_of_ten_mebibytes_are_ignored_and_do_no_harm() {
    story("cve-agent", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        let before = processes(s).await?;
        start_agent(&mut console, AGENT).await?;
        // The short answer is accepted.
        let brief = |vmi: &Value| vmi["status"]["guestOSInfo"]["name"] == "Small";
        if let Err(error) = s.wait("vmi", "box", "tell its operating system", TIMEOUT, brief).await {
            return Err(error.context(console.run("cat /tmp/message /tmp/asked").await?.0));
        }
        for (file, blocks) in [("three", 48), ("ten", TAKEN)] {
            taken(&mut console, file, blocks).await?;
        }

        // libvirt reads more slowly than the guest writes, and aborts at 10 MiB.
        for _ in 0..LOOKS {
            sleep(Duration::from_secs(3)).await;
            grown(&before, &processes(s).await?)?;
        }
        let vmi = s.get("vmi", "box").await?;
        ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
        ensure!(brief(&vmi), "what was known is lost: {}", vmi["status"]["guestOSInfo"]);
        ensure!(!vmi["status"].to_string().contains("believed"), "the answer was accepted: {}", vmi["status"]);
        virt_handlers::serves(s, "box").await?;

        // After the agent is killed the VMI has no guest agent, and the guest runs on. The writing process keeps the channel open.
        console.run("kill $(cat /tmp/pid); killall cat").await?;
        s.wait("vmi", "box", "lose its agent", TIMEOUT, |vmi| !is_true(vmi, "AgentConnected")).await?;
        let (message, code) = console.run("echo it goes on").await?;
        ensure!(code == 0 && message.contains("it goes on"), "the console: {message}");
        console.leave().await
    });
}

/// Checks that the processes were not restarted and have not grown much.
fn grown(before: &BTreeMap<String, (u64, u64)>, after: &BTreeMap<String, (u64, u64)>) -> Result<()> {
    for (name, (pid, memory)) in before {
        let (pid_after, memory_after) = after.get(name).with_context(|| format!("{name} does not run any more"))?;
        ensure!(pid == pid_after, "{name} was restarted");
        let grown = memory_after.saturating_sub(*memory);
        eprintln!("{name} grew by {grown} KiB");
        let most = match name.as_str() {
            "virt-handler" => OF_VIRT_HANDLER,
            "virt-launcher" => OF_LAUNCHER,
            _ => OF_LIBVIRT,
        };
        ensure!(grown < most, "{name} grew by {grown} KiB");
    }
    Ok(())
}

/// Starts a script as the guest agent of a guest without one.
pub(crate) async fn start_agent(console: &mut Console, script: &str) -> Result<()> {
    // The terminal interprets some characters and limits the length of a line.
    for part in BASE64_STANDARD.encode(script).as_bytes().chunks(256) {
        console.run(&format!("printf %s {} >>/tmp/coded", str::from_utf8(part)?)).await?;
    }
    let (message, code) = console.run("base64 -d /tmp/coded >/tmp/agent && sh -n /tmp/agent").await?;
    ensure!(code == 0, "the agent could not be written: {message}");
    console.run("{ sh /tmp/agent >/tmp/message 2>&1 </dev/null & }").await?;
    Ok(())
}

/// Waits until the agent has written this many blocks of an answer.
async fn taken(console: &mut Console, file: &str, blocks: u64) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while console.run(&format!("test -s /tmp/{file} && test $(cat /tmp/{file}) -ge {blocks}")).await?.1 != 0 {
        if Instant::now() > deadline {
            let (message, _) = console.run(&format!("cat /tmp/{file} /tmp/message /tmp/asked")).await?;
            anyhow::bail!("the answer was not taken up to block {blocks}: {message}");
        }
        sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

/// Returns PID and memory in KiB of the processes that handle answers.
async fn processes(s: &Story) -> Result<BTreeMap<String, (u64, u64)>> {
    let pod = s.launcher_pod("box").await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
    let script = format!(
        "for p in /proc/[0-9]*; do \
           name=$(cat $p/comm); \
           case $name in \
           virt-launcher|libvirtd|virtqemud) grep -q {uid} $p/cgroup || continue ;; \
           virt-handler) ;; \
           *) continue ;; \
           esac; \
           echo $name ${{p#/proc/}} $(grep VmRSS $p/status); \
         done 2>/dev/null; true"
    );
    let mut processes = BTreeMap::new();
    for line in s.on_node(&s.node_of("box").await?, &script).await?.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [name, pid, "VmRSS:", memory, "kB"] = words[..] {
            processes.insert(name.to_owned(), (pid.parse()?, memory.parse()?));
        }
    }
    ensure!(processes.len() == 3, "not all processes were found: {processes:?}");
    Ok(processes)
}
