//! File systems that never answer, mounted where virt-handler looks into launcher pods.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Node, PATIENCE, Story, story_alone};
use tokio::time::{Duration, Instant, sleep};

use crate::{manifests, virt_handlers};

/// VMs whose pods hang: as many as virt-handler has threads for its tasks.
const HANGING: [&str; 2] = ["first", "second"];

#[test]
fn pods_that_hang_make_only_their_own_vmis_wait() {
    story_alone("hanging", async |s| {
        for name in HANGING {
            s.apply(&manifests::kernel_vmi(name)).await?;
        }
        let mut pods = Vec::new();
        for name in HANGING {
            s.wait_running(name).await?;
            let pod = s.launcher_pod(name).await?;
            pods.push(pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned());
        }
        let node = s.enter_node().await?;
        let told = while_pods_hang(s, &node, &pods).await;
        // Whatever came of it: with the pod goes what holds the file systems, and they hang no longer.
        let left = node.leave().await;
        told?;
        left?;
        Ok(())
    });
}

async fn while_pods_hang(s: &Story, node: &Node, pods: &[String]) -> Result<()> {
    mount(node, pods).await?;
    // A new virt-handler gives all launchers their devices.
    virt_handlers::replace(s).await?;
    let restarts = virt_handlers::restarts(s).await?;
    for name in HANGING {
        virt_handlers::refuse(s, name, "/dev of the container is on a file system of type fuse").await?;
    }
    s.apply(&manifests::kernel_vmi("third")).await?;
    s.wait_running("third").await?;
    let mut console = s.console("third")?;
    console.login("root", "ferrovirt").await?;
    let (answer, _) = console.run("echo $((6 * 7))").await?;
    ensure!(answer.trim() == "42", "the console does not answer: {answer:?}");
    console.leave().await?;
    virt_handlers::serves(s, "third").await?;
    // Not even now do the others go on.
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

/// Lets `/dev` of launchers' containers hang.
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
    let deadline = Instant::now() + PATIENCE;
    loop {
        let said = node.run("cat /tmp/mounted").await?;
        if said.lines().filter(|line| line.starts_with("mounted")).count() == pods.len() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline && !said.contains("Error"), "the file systems are not mounted: {said}");
        sleep(Duration::from_millis(250)).await;
    }
}
