//! Actions on VMs and VMIs: effects, dry runs, and conflicts.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, condition, is_true, story, story_alone};
use http::Method;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::manifests;

#[test]
fn guest_reboots_by_soft_reboot_and_by_reset() {
    story("reboot", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        let before = s.wait_running("box").await?;
        for action in ["softreboot", "reset"] {
            let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
            console.run("touch /tmp/before").await?;
            console.leave().await?;
            let (code, message) =
                s.call_subresource(&Method::PUT, "virtualmachineinstances/box", action, &json!({})).await?;
            ensure!(code == 200, "{action}: {code} {message}");
            // A file in memory does not survive a reboot.
            let deadline = tokio::time::Instant::now() + 2 * TIMEOUT;
            loop {
                let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
                let gone = console.run("test -e /tmp/before").await.is_ok_and(|(_, code)| code != 0);
                console.leave().await.ok();
                if gone {
                    break;
                }
                ensure!(tokio::time::Instant::now() < deadline, "the guest did not reboot by {action}");
            }
        }
        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "a reboot must keep the VMI");
        ensure!(after["status"]["phase"] == "Running", "the VMI is {}", after["status"]["phase"]);
        Ok(())
    });
}

#[test]
fn dry_runs_change_nothing() {
    story("dryrun", async |s| {
        s.apply(&manifests::kernel_vm("box", "Always")).await?;
        let before = s.wait_running("box").await?;
        for (object, action) in [
            ("virtualmachines/box", "stop"),
            ("virtualmachines/box", "restart"),
            ("virtualmachineinstances/box", "pause"),
        ] {
            // In the body, or in the query as generic clients do.
            for (action, options) in
                [(action.to_owned(), json!({"dryRun": ["All"]})), (format!("{action}?dryRun=All"), json!({}))]
            {
                let (code, message) = s.call_subresource(&Method::PUT, object, &action, &options).await?;
                ensure!(code < 300, "{action}: {code} {message}");
            }
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(condition(&after, "Paused").is_none(), "the VMI was paused");
        let vm = s.get("vm", "box").await?;
        ensure!(vm["spec"]["runStrategy"] == "Always", "the run strategy was changed");
        ensure!(vm["status"]["stateChangeRequests"].is_null(), "a request was recorded: {}", vm["status"]);
        Ok(())
    });
}

#[test]
fn vmi_starts_paused_and_resumes_on_unpause() {
    story("paused", async |s| {
        s.apply(&manifests::kernel_vm("box", "Manual")).await?;
        s.wait("vm", "box", "be Stopped", TIMEOUT, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
        s.virt(&["start", "box", "--paused"]).await?;
        let paused = |vmi: &Value| is_true(vmi, "Paused");
        s.wait("vmi", "box", "be paused", TIMEOUT, paused).await?;
        s.virt(&["unpause", "vm", "box"]).await?;
        s.wait("vmi", "box", "go on", TIMEOUT, |vmi| !paused(vmi)).await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        console.leave().await
    });
}

#[test]
fn wrong_state_is_a_conflict_and_an_unknown_vmi_is_not_found() {
    story("wrong", async |s| {
        s.apply(&manifests::vm("halted", "Halted")).await?;
        s.wait("vm", "halted", "be Stopped", TIMEOUT, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
        for (method, object, subresource, body, codes) in [
            (Method::PUT, "virtualmachines/halted", "stop", json!({}), [409, 409]),
            (Method::PUT, "virtualmachines/halted", "restart", json!({}), [409, 404]),
            (Method::PUT, "virtualmachineinstances/halted", "pause", json!({}), [404, 404]),
            (Method::PUT, "virtualmachineinstances/halted", "freeze", json!({}), [404, 404]),
            (Method::GET, "virtualmachineinstances/halted", "guestosinfo", Value::Null, [404, 500]),
            (Method::GET, "virtualmachineinstances/halted", "console", Value::Null, [404, 400]),
            (Method::PUT, "virtualmachines/none", "start", json!({}), [404, 404]),
            (Method::GET, "virtualmachines/none", "expand-spec", Value::Null, [404, 404]),
            (Method::GET, "virtualmachines/halted", "no-such-subresource", Value::Null, [404, 404]),
            (Method::DELETE, "virtualmachines/halted", "start", Value::Null, [405, 405]),
        ] {
            let (code, status) = s.call_subresource(&method, object, subresource, &body).await?;
            ensure!(codes.contains(&code), "{method} {object}/{subresource}: {code} {status}");
            ensure!(!status.trim().is_empty(), "{method} {object}/{subresource}: {code} without a message");
        }
        Ok(())
    });
}

#[test]
fn object_graph_is_served_while_its_gate_is_on() {
    story_alone("graph", async |s| {
        s.apply(&manifests::vm("box", "Always")).await?;
        s.wait_running("box").await?;
        gates(s, &json!(["ObjectGraph"])).await?;
        let result = graphs(s).await;
        gates(s, &Value::Null).await?;
        result
    });
}

/// Gets both graphs as soon as the gate is in effect.
async fn graphs(s: &Story) -> Result<()> {
    for object in ["virtualmachines/box", "virtualmachineinstances/box"] {
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let (code, graph) = s.call_subresource(&Method::GET, object, "objectgraph", &Value::Null).await?;
            if code == 200 {
                ensure!(graph.contains("virt-launcher-box"), "the pod is not in the graph: {graph}");
                break;
            }
            ensure!(tokio::time::Instant::now() < deadline, "objectgraph: {code} {graph}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
    Ok(())
}

/// Sets the feature gates of the installation.
async fn gates(s: &Story, gates: &Value) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    let installation = s.installation_api("KubeVirt");
    installation.patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await.context("set feature gates")?;
    Ok(())
}
