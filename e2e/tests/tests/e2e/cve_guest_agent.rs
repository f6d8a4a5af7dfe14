//! A guest in the place of its agent, with answers that do not end.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use ferrovirt_e2e_tests::{PATIENCE, Story, story};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::manifests;

/// Most that a process may grow by it, in KiB: libvirt keeps an answer whole, and nobody else does.
const OF_LAUNCHER: u64 = 24 * 1024;
const OF_VIRT_HANDLER: u64 = 16 * 1024;

/// Answers on the guest agent's channel: what libvirt asks to find the beginning of an answer as it should be, and all else
/// with a text of ten mebibytes.
const AGENT: &str = r#"#!/bin/sh
for port in /sys/class/virtio-ports/*; do
	grep -q org.qemu.guest_agent.0 "$port/name" && device=/dev/${port##*/}
done
exec 3<>"$device" || exit 1
while read -r line <&3; do
	case $line in
	*guest-sync*)
		id=${line##*\"id\":}
		printf '{"return":%s}\n' "${id%%\}*}" >&3
		;;
	*)
		{
			printf '{"return":"'
			dd if=/dev/zero bs=65536 count=160 2>/dev/null | tr '\000' x
			printf '"}\n'
		} >&3
		echo answered >>/tmp/answers
		;;
	esac
done
"#;

#[test]
fn cve_2026_13322_a_guest_agent_that_answers_ten_mebibytes_harms_nobody_and_is_not_believed() {
    story("cve-agent", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        let before = Memory::of(s).await?;
        // The terminal has meanings of its own for some characters, and a longest line.
        for part in BASE64_STANDARD.encode(AGENT).as_bytes().chunks(256) {
            console.run(&format!("printf %s {} >>/tmp/coded", str::from_utf8(part)?)).await?;
        }
        let (said, code) = console.run("base64 -d /tmp/coded >/tmp/agent && sh -n /tmp/agent").await?;
        ensure!(code == 0, "the agent was not written: {said}");
        console.run("{ sh /tmp/agent >/tmp/said 2>&1 </dev/null & }").await?;
        // Twice, so that what is kept of the first answer shows.
        let deadline = Instant::now() + PATIENCE;
        while console.run("test $(wc -l </tmp/answers) -ge 2").await.context("the console")?.1 != 0 {
            ensure!(
                Instant::now() < deadline,
                "nobody asked the agent: {}",
                console.run("cat /tmp/said /tmp/answers").await?.0
            );
            sleep(Duration::from_secs(1)).await;
        }
        let (virt, daemon, handler) = Memory::of(s).await?.grown(&before);
        eprintln!("grown by KiB: virt-launcher {virt}, libvirtd {daemon}, virt-handler {handler}");
        ensure!(virt < OF_LAUNCHER && daemon < OF_LAUNCHER, "virt-launcher grew by {virt} KiB, libvirtd by {daemon}");
        ensure!(handler < OF_VIRT_HANDLER, "virt-handler grew by {handler} KiB");
        let vmi = s.get("vmi", "box").await?;
        ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
        let told = &vmi["status"]["guestOSInfo"];
        ensure!(told.as_object().is_none_or(serde_json::Map::is_empty), "the agent was believed: {told}");

        // When it falls silent the VMI has no agent any more, and is driven as before.
        console
            .run("kill $(pidof sh | tr ' ' '\\n' | while read p; do grep -q agent /proc/$p/cmdline && echo $p; done)")
            .await?;
        s.wait("vmi", "box", "lose its agent", PATIENCE, |vmi| !has_agent(vmi)).await?;
        s.virt(&["pause", "vmi", "box"]).await?;
        s.virt(&["unpause", "vmi", "box"]).await?;
        console.leave().await
    });
}

fn has_agent(vmi: &Value) -> bool {
    let mut conditions = vmi["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "AgentConnected" && condition["status"] == "True")
}

/// Of the processes on the way of an answer, in KiB.
struct Memory {
    launcher: u64,
    daemon: u64,
    handler: u64,
}

impl Memory {
    async fn of(s: &Story) -> Result<Self> {
        let pod = s.launcher_pod("box").await?;
        let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
        Ok(Self {
            launcher: s.memory("virt-launcher", uid).await?,
            daemon: s.memory("libvirtd", uid).await?,
            handler: s.memory("virt-handler", "").await?,
        })
    }

    fn grown(&self, before: &Self) -> (u64, u64, u64) {
        (
            self.launcher.saturating_sub(before.launcher),
            self.daemon.saturating_sub(before.daemon),
            self.handler.saturating_sub(before.handler),
        )
    }
}
