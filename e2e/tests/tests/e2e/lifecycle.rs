//! Start, stop, restart, pause, delete.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, condition, is_true, story};
use serde_json::Value;

use crate::manifests;

const MINUTE: Duration = Duration::from_secs(120);

/// Returns libvirt's answer to a command about the domain, from virsh in the pod.
async fn in_libvirt(s: &Story, vmi: &str, command: &str) -> Result<String> {
    let uri = "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock";
    let pod = s.launcher_pod(vmi).await?;
    let name = pod["metadata"]["name"].as_str().context("pod without name")?;
    s.exec(name, &["virsh", "-c", uri, command, &format!("{}_{vmi}", s.namespace)]).await
}

#[test]
fn user_starts_stops_and_restarts_a_vm() {
    story("lifecycle", async |s| {
        s.apply(&manifests::vm("box", "Halted")).await?;
        s.wait("vm", "box", "be Stopped", MINUTE, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
        ensure!(s.get("vmi", "box").await.is_err(), "a halted VM has no VMI");

        let message = s.virt(&["start", "box"]).await?;
        ensure!(message.contains("VM box was scheduled to start"), "{message}");
        let first = s.wait_running("box").await?;
        let refused = s.virt(&["start", "box"]).await.err().map(|e| e.to_string()).unwrap_or_default();
        ensure!(refused.contains("VM is already running"), "a second start says so, not {refused:?}");

        let said = s.virt(&["restart", "box", "--wait"]).await?;
        ensure!(said.contains("VM box runs on node "), "{said}");
        let second = s.get("vmi", "box").await?;
        ensure!(second["metadata"]["uid"] != first["metadata"]["uid"], "the VMI was not replaced");
        ensure!(is_true(&second, "Ready"), "{}", second["status"]);

        let said = s.virt(&["stop", "box", "--wait"]).await?;
        ensure!(said.ends_with("VM box is stopped\n"), "{said}");
        ensure!(s.get("vmi", "box").await.is_err(), "a stopped VM has no VMI");
        let refused = s.virt(&["vnc", "box", "--screenshot=-"]).await.err().map(|error| error.to_string());
        let refused = refused.unwrap_or_default();
        ensure!(refused.contains("VM box is stopped; start it with: kubectl virt start box"), "{refused}");
        s.wait("vm", "box", "be Stopped", MINUTE, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
        let vm = s.get("vm", "box").await?;
        ensure!(vm["spec"]["runStrategy"] == "Halted", "{}", vm["spec"]["runStrategy"]);
        ensure!(vm["status"]["nodeName"].is_null() && vm["status"]["ipAddress"].is_null(), "{}", vm["status"]);
        // Each component is named as the manager of the fields that it wrote.
        let entries = vm["metadata"]["managedFields"].as_array().context("no managers")?;
        let managers: Vec<&str> = entries.iter().filter_map(|entry| entry["manager"].as_str()).collect();
        let named = |name: &str| managers.contains(&name);
        ensure!(named("virt-api") && named("virt-controller") && !named("unknown"), "managers: {managers:?}");
        Ok(())
    });
}

#[test]
fn paused_guest_stops_and_resumes() {
    story("pause", async |s| {
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;

        s.virt(&["pause", "vm", "box"]).await?;
        let paused = |vmi: &Value| condition(vmi, "Paused").is_some_and(|c| c["reason"] == "PausedByUser");
        s.wait("vmi", "box", "be Paused", MINUTE, paused).await?;
        s.wait("vm", "box", "show Paused", MINUTE, |vm| vm["status"]["printableStatus"] == "Paused").await?;
        let refused = s.virt(&["pause", "vm", "box"]).await.err().map(|e| e.to_string()).unwrap_or_default();
        ensure!(refused.contains("already paused"), "{refused:?}");
        console.send("echo still-$((40+2))\n").await?;
        ensure!(console.expect("still-42", Duration::from_secs(3)).await.is_err(), "a paused guest answers");
        let state = in_libvirt(s, "box", "domstate").await?;
        ensure!(state.trim() == "paused", "libvirt says {state:?}");

        s.virt(&["unpause", "vm", "box"]).await?;
        console.expect("still-42", MINUTE).await?;
        s.wait("vmi", "box", "be Ready", MINUTE, |vmi| condition(vmi, "Paused").is_none() && is_true(vmi, "Ready"))
            .await?;
        console.leave().await
    });
}

#[test]
fn deleted_vm_is_shut_down_by_acpi_and_leaves_nothing_on_its_node() {
    story("delete", async |s| {
        s.apply(&manifests::masqueraded("box", "Always")).await?;
        s.wait_running("box").await?;
        let pod = s.launcher_pod("box").await?;
        let pod_uid = pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned();
        let pod_name = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        let vmi = s.get("vmi", "box").await?;
        let vmi_uid = vmi["metadata"]["uid"].as_str().context("no uid")?.to_owned();
        let node = s.node_of("box").await?;
        let held = vmi["metadata"]["finalizers"].to_string();
        for name in ["kubevirt.io/virtualMachineControllerFinalize", "kubevirt.io/foregroundDeleteVirtualMachine"] {
            ensure!(held.contains(name), "{name} is not among the finalizers {held}");
        }
        let mut console = s.console("box")?;
        console.login("root", "story").await?;

        s.delete("vm", "box").await?;
        // Only a guest that shuts down prints this.
        console.expect("Power down", MINUTE).await?;
        console.wait_end(MINUTE).await?;
        s.wait_gone("vm", "box", MINUTE).await?;
        s.wait_gone("vmi", "box", MINUTE).await?;
        s.wait_gone("Pod", &pod_name, MINUTE).await?;
        let message = s.wait_event("box", "Deleted", MINUTE).await?;
        ensure!(message == "Signaled Deletion", "{message}");

        // kubelet removes a pod's directory after the pod.
        let search = format!(
            "for i in $(seq 120); do \
               left=$(find /host/var/lib/kubelet/pods /host/var/run/kubevirt /host/var/run/kubevirt-private -maxdepth 6 \
                      2>/dev/null | grep -e {pod_uid} -e {vmi_uid}); \
               [ -z \"$left\" ] && break; sleep 1; \
             done; echo \"$left\""
        );
        let left = s.on_node(&node, &search).await?;
        ensure!(left.trim().is_empty(), "files are left on the node: {left}");
        let links = s.on_node(&node, "ip -o link | grep -e k6t- -e ' tap'; true").await?;
        ensure!(links.trim().is_empty(), "links are left on the node: {links}");
        Ok(())
    });
}

#[test]
fn powered_off_guest_of_run_strategy_manual_stays_off() {
    story("poweroff", async |s| {
        s.apply(&manifests::kernel_vm("box", "Manual")).await?;
        s.virt(&["start", "box"]).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        console.send("poweroff\n").await?;
        s.wait("vmi", "box", "have Succeeded", MINUTE, |vmi| vmi["status"]["phase"] == "Succeeded").await?;
        s.wait("vm", "box", "be Stopped", MINUTE, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
        Ok(())
    });
}

#[test]
fn powered_off_guest_of_run_strategy_always_is_restarted() {
    story("always", async |s| {
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        let first = s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        console.send("poweroff\n").await?;
        let uid = first["metadata"]["uid"].clone();
        s.wait("vmi", "box", "be Running anew", MINUTE * 2, |vmi| {
            vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
        })
        .await?;
        Ok(())
    });
}
