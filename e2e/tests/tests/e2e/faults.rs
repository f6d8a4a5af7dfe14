//! Recovery from failures of components.

use std::time::Duration;

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::{story, story_alone};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};

use crate::manifests;

type Pods = Api<k8s_openapi::api::core::v1::Pod>;

#[test]
fn vmi_runs_while_virt_handler_is_replaced() {
    story_alone("handler", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        let before = s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        console.run("echo kept > /tmp/mark").await?;

        let agents: Pods = Api::namespaced(s.client.clone(), "kubevirt");
        let labels = ListParams::default().labels("kubevirt.io=virt-handler");
        for pod in agents.list(&labels).await? {
            agents.delete(&pod.metadata.name.unwrap_or_default(), &DeleteParams::default().grace_period(0)).await?;
        }
        let end = console.wait_end(Duration::from_secs(15)).await?;
        ensure!(!end.status.success(), "a console without virt-handler must end with an error");

        let mut console = s.reopen_console("box", "root", "story").await?;
        let (mark, _) = console.run("cat /tmp/mark").await?;
        ensure!(mark.contains("kept"), "the guest is another one: {mark:?}");
        console.leave().await?;
        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        // The new virt-handler manages the VMI.
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", Duration::from_secs(60)).await
    });
}

#[test]
fn killed_qemu_fails_the_vmi_and_run_strategy_always_restarts_it() {
    story("qemu", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        let first = s.wait_running("box").await?;
        let pod = s.launcher_pod("box").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        s.kill_in_launcher(&pod, "qemu-system-x86").await?;
        let uid = first["metadata"]["uid"].clone();
        s.wait("vmi", "box", "be Running anew", Duration::from_secs(120), |vmi| {
            vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
        })
        .await?;
        Ok(())
    });
}

#[test]
fn second_controller_leads_after_the_first() {
    story_alone("leader", async |s| {
        let pods: Pods = Api::namespaced(s.client.clone(), "kubevirt");
        let labels = ListParams::default().labels("kubevirt.io=virt-controller");
        for pod in pods.list(&labels).await? {
            pods.delete(&pod.metadata.name.unwrap_or_default(), &DeleteParams::default().grace_period(0)).await?;
        }
        // The next leader creates the VMI.
        s.apply(&manifests::kernel_vmi("later")).await?;
        s.wait_running("later").await?;
        Ok(())
    });
}
