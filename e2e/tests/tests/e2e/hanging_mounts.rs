//! Hanging file systems in launcher pods where virt-handler reads.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Node, Story, TIMEOUT, story_alone};
use tokio::time::{Duration, Instant, sleep};

use crate::{manifests, virt_handlers};

/// Number of VMs with hanging pods: the number of virt-handler's threads.
const HANGING: [&str; 2] = ["first", "second"];

#[test]
fn hanging_pods_delay_only_their_own_vmis() {
    story_alone("hanging", async |s| {
        let (node, hostname) = s.one_node().await?;
        for name in HANGING {
            s.apply(&manifests::kernel_vmi_on(&hostname, name)).await?;
        }
        let mut pods = Vec::new();
        for name in HANGING {
            s.wait_running(name).await?;
            let pod = s.launcher_pod(name).await?;
            pods.push(pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned());
        }
        let node = s.enter_node(&node).await?;
        let result = while_pods_hang(s, &node, &hostname, &pods).await;
        // Removing the pod ends the hanging mounts, also after a failure.
        let left = node.leave().await;
        result?;
        left?;
        Ok(())
    });
}

async fn while_pods_hang(s: &Story, node: &Node, hostname: &str, pods: &[String]) -> Result<()> {
    mount(node, pods).await?;
    // A new virt-handler prepares the devices of all launchers.
    virt_handlers::replace(s).await?;
    let restarts = virt_handlers::restarts(s).await?;
    for name in HANGING {
        virt_handlers::refuse(s, name, "/dev of the container is on a file system of type fuse").await?;
    }
    s.apply(&manifests::kernel_vmi_on(hostname, "third")).await?;
    s.wait_running("third").await?;
    let mut console = s.console("third")?;
    console.login("root", "ferrovirt").await?;
    let (answer, _) = console.run("echo $((6 * 7))").await?;
    ensure!(answer.trim() == "42", "the console does not answer: {answer:?}");
    console.leave().await?;
    virt_handlers::serves(s, "third").await?;
    // The hanging VMIs are still not managed.
    for name in HANGING {
        virt_handlers::refuse(s, name, "fuse").await?;
    }
    ensure!(virt_handlers::restarts(s).await? == restarts, "virt-handler was restarted");

    node.run("killall hanging-mount; while pidof hanging-mount; do sleep 0.1; done").await?;
    for name in HANGING {
        virt_handlers::serves(s, name).await.with_context(|| format!("{name}, whose pod does not hang any more"))?;
    }
    ensure!(virt_handlers::restarts(s).await? == restarts, "virt-handler was restarted");
    Ok(())
}

/// Mounts a hanging file system on `/dev` of the launchers' containers.
async fn mount(node: &Node, pods: &[String]) -> Result<()> {
    let script = format!(
        "set -e; pids=; \
         for uid in {}; do \
           for p in /proc/[0-9]*; do \
             if grep -qs $uid $p/cgroup && [ \"$(cat $p/comm)\" = virt-launcher ]; then pids=\"$pids ${{p#/proc/}}\"; break; fi; \
           done; \
         done; \
         hanging-mount $pids >/tmp/mounted 2>&1 </dev/null &",
        pods.join(" ")
    );
    node.run(&script).await?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let message = node.run("cat /tmp/mounted").await?;
        if message.lines().filter(|line| line.starts_with("mounted")).count() == pods.len() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline && !message.contains("Error"), "the file systems are not mounted: {message}");
        sleep(Duration::from_millis(250)).await;
    }
}
