//! Run strategies that distinguish a shutdown from a failure.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::Value;

use crate::manifests;

const MINUTES: Duration = Duration::from_secs(240);
/// Time in which a forbidden restart would begin.
const NOTHING_HAPPENS: Duration = Duration::from_secs(8);

/// Returns a VM that boots a kernel image.
fn kernel_vm(name: &str, run_strategy: &str) -> Result<String> {
    let instance: Value = serde_saphyr::from_str(&manifests::kernel_vmi(name))?;
    let vm = serde_json::json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": name},
        "spec": {"runStrategy": run_strategy, "template": {"spec": instance["spec"]}},
    });
    Ok(vm.to_string())
}

async fn kill(s: &Story, vmi: &str) -> Result<()> {
    let pod = s.launcher_pod(vmi).await?;
    s.kill_in_launcher(pod["metadata"]["name"].as_str().context("pod without name")?, "qemu-system-x86").await
}

async fn power_off(s: &Story, vmi: &str) -> Result<()> {
    let mut console = s.console(vmi)?;
    console.login("root", "ferrovirt").await?;
    console.send("poweroff\n").await?;
    // The console stays open until the guest has read the input.
    console.expect("Power down", MINUTES).await?;
    Ok(())
}

fn stopped(vm: &Value) -> bool {
    vm["status"]["printableStatus"] == "Stopped"
}

#[test]
fn rerun_on_failure_restarts_a_failed_guest_and_no_guest_that_was_shut_down() {
    story("rerun", async |s| {
        s.apply(&kernel_vm("box", "RerunOnFailure")?).await?;
        let first = s.wait_running("box").await?;
        kill(s, "box").await?;
        let uid = first["metadata"]["uid"].clone();
        s.wait("vmi", "box", "be Running anew", MINUTES, |vmi| {
            vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
        })
        .await?;

        power_off(s, "box").await?;
        s.wait("vm", "box", "be Stopped", MINUTES, stopped).await?;
        s.wait_gone("vmi", "box", MINUTES).await?;
        tokio::time::sleep(NOTHING_HAPPENS).await;
        ensure!(s.list("vmi", "").await?.is_empty(), "a guest that was shut down runs again");
        ensure!(s.get("vm", "box").await?["spec"]["runStrategy"] == "RerunOnFailure", "the strategy was changed");

        // A user can start and stop it.
        s.virt(&["start", "box"]).await?;
        s.wait_running("box").await?;
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", MINUTES).await?;
        s.wait("vm", "box", "be Stopped", MINUTES, stopped).await?;
        Ok(())
    });
}

#[test]
fn once_starts_a_guest_only_once() {
    story("once", async |s| {
        for name in ["failed", "done"] {
            s.apply(&kernel_vm(name, "Once")?).await?;
        }
        let mut ends = Vec::new();
        for (name, phase) in [("failed", "Failed"), ("done", "Succeeded")] {
            s.wait_running(name).await?;
            if name == "failed" {
                kill(s, name).await?
            } else {
                power_off(s, name).await?
            };
            let ended = s.wait("vmi", name, "have ended", MINUTES, |vmi| vmi["status"]["phase"] == phase).await?;
            s.wait("vm", name, "be Stopped", MINUTES, stopped).await?;
            ends.push((name, ended["metadata"]["uid"].clone()));
        }
        tokio::time::sleep(NOTHING_HAPPENS).await;
        for (name, uid) in ends {
            let now = s.get("vmi", name).await?;
            ensure!(now["metadata"]["uid"] == uid, "the VM {name} was started a second time");
        }
        let refused = s.virt(&["start", "done"]).await.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(refused.contains("Once does not support manual start requests"), "{refused:?}");
        Ok(())
    });
}
