//! File systems that never answer, mounted where virt-handler looks into launcher pods.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{PATIENCE, Story, story_alone};
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::manifests;

/// VMs whose pods hang: as many as virt-handler has threads for its tasks.
const HANGING: [&str; 2] = ["first", "second"];
/// Ends what [`hold`] does.
const RELEASE: &str = "for p in /proc/[0-9]*; do \
        case \"$(tr '\\0' ' ' <$p/cmdline 2>/dev/null)\" in 'sleep 98765 ') kill -9 ${p#/proc/};; esac; \
    done";

#[test]
fn pods_that_hang_make_only_their_own_vmis_wait() {
    story_alone("hanging", async |s| {
        let mut uids = Vec::new();
        for name in HANGING.iter().chain(&["other"]) {
            s.apply(&manifests::kernel_vmi(name)).await?;
        }
        for name in HANGING.iter().chain(&["other"]) {
            s.wait_running(name).await?;
        }
        for name in HANGING {
            let pod = s.launcher_pod(name).await?;
            uids.push(pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned());
        }
        let restarts = restarts(s).await?;
        let script = hold(&uids);
        let held = s.on_node(&script);
        let told = async {
            let told = while_they_hang(s, restarts).await;
            // Whatever came of it, nothing may stay mounted.
            let released = s.on_node(RELEASE).await;
            told.and(released.map(drop))
        };
        let (held, told) = tokio::join!(held, told);
        told?;
        held.context("the file systems were not mounted, or not unmounted")?;
        // The VMIs go on where they were.
        for name in HANGING {
            s.console_again(name, "root", "ferrovirt").await?.leave().await?;
        }
        Ok(())
    });
}

/// A script that mounts a file system that nobody serves on `/dev` of launchers' containers, kills virt-handler, which has
/// to look at its launchers anew, and holds the file systems until it is released.
fn hold(uids: &[String]) -> String {
    let uids = uids.join(" ");
    format!(
        "set -e; pids=; \
         for uid in {uids}; do for p in /proc/[0-9]*; do \
           if grep -qs $uid $p/cgroup && [ \"$(cat $p/comm)\" = virt-launcher ]; then pids=\"$pids ${{p#/proc/}}\"; fi; \
         done; done; \
         for pid in $pids; do \
           cp $(command -v busybox) /proc/$pid/root/run/kubevirt/sockets/busybox; \
           (exec 3<>/dev/fuse; \
            nsenter -t $pid -m -- /run/kubevirt/sockets/busybox mount -t fuse \
              -o fd=3,rootmode=40000,user_id=0,group_id=0 hang /dev; \
            exec sleep 98765) & \
         done; \
         for pid in $pids; do \
           for look in $(seq 50); do grep -q ' /dev .* - fuse ' /proc/$pid/mountinfo && break; sleep 0.2; done; \
           grep -q ' /dev .* - fuse ' /proc/$pid/mountinfo; \
         done; \
         killall -9 virt-handler; \
         wait; \
         for pid in $pids; do \
           nsenter -t $pid -m -- /run/kubevirt/sockets/busybox umount -l /dev; \
           rm /proc/$pid/root/run/kubevirt/sockets/busybox; \
         done"
    )
}

async fn while_they_hang(s: &Story, before: i32) -> Result<()> {
    // Killed once by the script, and not again.
    let deadline = Instant::now() + PATIENCE;
    while !(restarts(s).await? > before && is_ready(&handler(s).await?)) {
        ensure!(Instant::now() < deadline, "virt-handler is not ready beside pods that hang");
        sleep(Duration::from_millis(500)).await;
    }
    for name in HANGING {
        let said = s.wait_event(name, "SyncFailed", PATIENCE).await?;
        ensure!(said.contains("/dev of the container is on a file system of type fuse"), "{name}: {said}");
    }
    let mut console = s.console_again("other", "root", "ferrovirt").await?;
    s.apply(&manifests::kernel_vmi("third")).await?;
    s.wait_running("third").await?;
    let mut third = s.console("third")?;
    third.login("root", "ferrovirt").await?;
    third.leave().await?;
    let (answer, _) = console.run("echo $((6 * 7))").await?;
    ensure!(answer.trim() == "42", "the console does not answer: {answer:?}");
    console.leave().await?;
    let name = handler(s).await?.metadata.name.unwrap_or_default();
    let path = format!("/api/v1/namespaces/kubevirt/pods/https:{name}:8443/proxy/healthz");
    let health = s.call(&Method::GET, &path, &Value::Null).await?;
    ensure!(health.code == 200, "{} {}", health.code, health.said());
    let after = restarts(s).await?;
    ensure!(after == before + 1, "virt-handler was restarted {} times", after - before);
    Ok(())
}

/// virt-handler of the story's node.
async fn handler(s: &Story) -> Result<Pod> {
    let node = s.get("vmi", "other").await?["status"]["nodeName"].clone();
    let mut pods = s.pods_of("virt-handler").await?.into_iter();
    let here = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == node.as_str();
    pods.find(here).context("no virt-handler")
}

async fn restarts(s: &Story) -> Result<i32> {
    let status = handler(s).await?.status.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    Ok(containers.iter().map(|container| container.restart_count).sum())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
