//! Generations of VMs and their VMIs, and start failures.

use std::time::Duration;

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::{Story, is_true, story};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::manifests;

const MINUTES: Duration = Duration::from_secs(240);

async fn change(s: &Story, patch: &Value) -> anyhow::Result<()> {
    s.api("vm").patch("box", &PatchParams::default(), &Patch::Merge(patch)).await.context("change the VM")?;
    Ok(())
}

fn asks_for_restart(vm: &Value) -> bool {
    is_true(vm, "RestartRequired")
}

/// Waits until the VM's status has `desired` as its generation, and VM and VMI report `observed` for the VMI.
async fn wait_generations(s: &Story, desired: i64, observed: i64) -> anyhow::Result<()> {
    s.wait("vm", "box", &format!("be at {desired} and show {observed}"), MINUTES, |vm| {
        vm["status"]["desiredGeneration"] == desired && vm["status"]["observedGeneration"] == observed
    })
    .await?;
    s.wait("vmi", "box", &format!("reflect {observed}"), MINUTES, |vmi| {
        vmi["metadata"]["annotations"]["kubevirt.io/vm-generation"].as_str() == Some(observed.to_string().as_str())
    })
    .await?;
    Ok(())
}

#[test]
fn status_reports_which_generation_a_vmi_reflects() {
    story("generations", async |s| {
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        let vmi = s.wait_running("box").await?;
        let uid = s.get("vm", "box").await?["metadata"]["uid"].as_str().context("VM without uid")?.to_owned();
        wait_generations(s, 1, 1).await?;
        let first = format!("revision-start-vm-{uid}-1");
        ensure!(vmi["status"]["virtualMachineRevisionName"] == first, "{}", vmi["status"]);
        let revision = s.get("ControllerRevision", &first).await?;
        ensure!(revision["revision"] == 1, "{revision}");
        let mut kept = revision["data"]["spec"].clone();
        if let Some(domain) = kept["template"]["spec"]["domain"].as_object_mut() {
            // Clients in Go write it for an empty value.
            domain.retain(|name, value| name != "resources" || *value != json!({}));
        }
        ensure!(kept == s.get("vm", "box").await?["spec"], "{revision}");
        let node = vmi["status"]["nodeName"].clone();
        let pod = s.launcher_pod("box").await?["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        s.wait("Pod", &pod, "bear the name of its node", MINUTES, |pod| {
            pod["metadata"]["labels"]["kubevirt.io/nodeName"] == node
        })
        .await?;

        change(s, &json!({"spec": {"runStrategy": "RerunOnFailure"}})).await?;
        wait_generations(s, 2, 2).await?;
        change(s, &json!({"spec": {"template": {"metadata": {"labels": {"tier": "web"}}}}})).await?;
        wait_generations(s, 3, 2).await?;
        change(s, &json!({"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}}})).await?;
        s.wait("vmi", "box", "take the node selector over", MINUTES, |vmi| {
            vmi["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux"
        })
        .await?;
        wait_generations(s, 4, 2).await?;
        ensure!(!asks_for_restart(&s.get("vm", "box").await?), "a node selector asks for a restart");
        change(s, &json!({"spec": {"template": {"spec": {"hostname": "other"}}}})).await?;
        s.wait("vm", "box", "ask for a restart", MINUTES, asks_for_restart).await?;
        wait_generations(s, 5, 2).await?;

        s.virt(&["restart", "box"]).await?;
        let former = vmi["metadata"]["uid"].clone();
        let vmi = s
            .wait("vmi", "box", "be Running anew", MINUTES, |vmi| {
                vmi["metadata"]["uid"] != former && vmi["status"]["phase"] == "Running"
            })
            .await?;
        wait_generations(s, 5, 5).await?;
        ensure!(vmi["metadata"]["labels"]["tier"] == "web", "{}", vmi["metadata"]);
        ensure!(!asks_for_restart(&s.get("vm", "box").await?), "still asks for a restart");
        let second = format!("revision-start-vm-{uid}-5");
        ensure!(vmi["status"]["virtualMachineRevisionName"] == second, "{}", vmi["status"]);
        ensure!(s.get("ControllerRevision", &second).await?["revision"] == 5, "revision of the second start");
        s.wait_gone("ControllerRevision", &first, MINUTES).await
    });
}

#[test]
fn failed_starts_are_retried_at_growing_intervals_until_the_vm_is_stopped_or_repaired() {
    story("crash-loop", async |s| {
        let annotation = "kubevirt.io/func-test-virt-launcher-fail-fast";
        let failing = manifests::kernel_vm("box", "Always")
            .replace("metadata: {labels: {app: box}}", &format!("metadata: {{annotations: {{{annotation}: ''}}}}"));
        s.apply(&failing).await?;
        let looping = |count: i64| {
            move |vm: &Value| {
                vm["status"]["printableStatus"] == "CrashLoopBackOff"
                    && vm["status"]["startFailure"]["consecutiveFailCount"].as_i64().unwrap_or_default() >= count
                    && vm["status"]["startFailure"]["retryAfterTimestamp"].is_string()
            }
        };
        let vm = s.wait("vm", "box", "be in a crash loop", MINUTES, looping(1)).await?;
        let failed = vm["status"]["startFailure"]["lastFailedVMIUID"].clone();
        let again = |vm: &Value| looping(2)(vm) && vm["status"]["startFailure"]["lastFailedVMIUID"] != failed;
        s.wait("vm", "box", "have failed again", MINUTES, again).await?;

        s.virt(&["stop", "box"]).await?;
        s.wait("vm", "box", "be Stopped", MINUTES, |vm| {
            vm["status"]["printableStatus"] == "Stopped" && vm["status"]["startFailure"].is_null()
        })
        .await?;
        s.wait_gone("vmi", "box", MINUTES).await?;

        change(s, &json!({"spec": {"template": {"metadata": {"annotations": {annotation: null}}}}})).await?;
        s.virt(&["start", "box"]).await?;
        s.wait_running("box").await?;
        let vm = s.wait("vm", "box", "be Running", MINUTES, |vm| vm["status"]["printableStatus"] == "Running").await?;
        ensure!(vm["status"]["startFailure"].is_null(), "{}", vm["status"]);
        Ok(())
    });
}
