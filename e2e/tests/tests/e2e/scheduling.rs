//! Placement of VMIs on nodes.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::manifests;

#[test]
fn node_selector_excludes_nodes_and_the_vmi_runs_where_it_permits() {
    story("selector", async |s| {
        let label = format!("ferrovirt.test/{}", s.namespace);
        let grace = "      terminationGracePeriodSeconds: 0\n";
        let selector = format!("{grace}      nodeSelector: {{{label}: chosen}}\n");
        s.apply(&manifests::kernel_vm("box", "Always").replace(grace, &selector)).await?;

        // No node has the label, however many there are.
        let unschedulable = |vm: &Value| vm["status"]["printableStatus"] == "ErrorUnschedulable";
        s.wait("vm", "box", "be unschedulable", TIMEOUT, unschedulable).await?;
        let vmi = s.get("vmi", "box").await?;
        ensure!(vmi["status"]["phase"] == "Scheduling", "the VMI is {}", vmi["status"]["phase"]);
        ensure!(vmi["status"]["nodeName"].is_null(), "the VMI is on node {}", vmi["status"]["nodeName"]);
        let reason = scheduled(&vmi).context("the VMI does not report that it is not scheduled")?;
        ensure!(reason["status"] == "False" && reason["reason"] == "Unschedulable", "{reason}");
        let message = reason["message"].as_str().unwrap_or_default();
        ensure!(message.contains("node affinity/selector"), "the VMI does not report its selector: {message:?}");

        // An administrator labels one node; the others remain excluded.
        let (node, _) = s.one_node().await?;
        set_label(s, &node, &label, &json!("chosen")).await?;
        let result = runs_on(s, &node).await;
        set_label(s, &node, &label, &Value::Null).await?;
        result
    });
}

/// Waits until the VMI runs, on this node.
async fn runs_on(s: &Story, node: &str) -> Result<()> {
    // The scheduler may delay the next attempt.
    let running = |vmi: &Value| vmi["status"]["phase"] == "Running";
    let vmi = s.wait("vmi", "box", "be Running", TIMEOUT, running).await?;
    ensure!(vmi["status"]["nodeName"] == node, "the VMI is on node {}, not {node}", vmi["status"]["nodeName"]);
    let failed = scheduled(&vmi).filter(|condition| condition["status"] == "False");
    ensure!(failed.is_none(), "a running VMI reports that it is not scheduled: {failed:?}");
    s.wait("vm", "box", "be Running", TIMEOUT, |vm| vm["status"]["printableStatus"] == "Running").await?;
    Ok(())
}

fn scheduled(vmi: &Value) -> Option<&Value> {
    vmi["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "PodScheduled")
}

/// Sets a label of a node; null removes it.
async fn set_label(s: &Story, node: &str, label: &str, value: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"labels": {label: value}}}));
    let patched = s.cluster_api("Node").patch(node, &PatchParams::default(), &patch).await;
    patched.map(drop).with_context(|| format!("label node {node}"))
}
