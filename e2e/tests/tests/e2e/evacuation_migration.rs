//! Nodes that are drained: their VMs migrate, by the eviction API and by the taint for drains.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use serde_json::Value;

use crate::moves::{MINUTES, alone, console, is_long, two_nodes, vm, while_cordoned, with_spec};
use crate::witness::Witness;

/// The key of the taint by default.
const TAINT: &str = "kubevirt.io/drain";

#[test]
fn drained_node_is_left_by_all_vms() {
    story_alone("drain", async |s| {
        let Some([node, other]) = two_nodes(s).await? else { return Ok(()) };
        let result = drained(s, &node, &other).await;
        // Later stories need both nodes, also after a failure.
        for name in [&node, &other] {
            s.kubectl(&["uncordon", name]).await?;
            s.kubectl(&["taint", "node", name, &format!("{TAINT}:NoSchedule-")]).await.ok();
        }
        result
    });
}

async fn drained(s: &Story, node: &str, other: &str) -> Result<()> {
    let movers: Vec<String> = (0..if is_long() { 8 } else { 2 }).map(|number| format!("live-{number}")).collect();
    let one = |name: &str, strategy: &str| with_spec(&vm(name, "Always"), &format!("evictionStrategy: {strategy}"));
    let witnesses = while_cordoned(s, other, async || {
        for name in &movers {
            s.apply(&one(name, "LiveMigrate")).await?;
        }
        s.apply(&one("possible", "LiveMigrateIfPossible")).await?;
        s.apply(&one("none", "None")).await?;
        let mut witnesses = vec![];
        for name in movers.iter().map(String::as_str).chain(["possible"]) {
            let vmi = s.wait_running(name).await?;
            ensure!(vmi["status"]["nodeName"] == node, "{name} runs on {}", vmi["status"]["nodeName"]);
            let mut guest = console(s, name).await?;
            witnesses.push((name.to_owned(), vmi, Witness::start(&mut guest).await?));
            guest.leave().await?;
        }
        s.wait_running("none").await?;
        Ok(witnesses)
    })
    .await?;
    let first = s.get("vmi", "none").await?;

    let pods = "--pod-selector=kubevirt.io=virt-launcher";
    let said = s.kubectl(&["drain", node, pods, "--delete-emptydir-data", "--force", "--timeout=300s"]).await?;
    eprintln!("{said}");
    at(s, &witnesses, other).await.context("after the drain")?;
    // The VM without strategy was shut down and runs elsewhere.
    let is_new =
        |vmi: &Value| vmi["metadata"]["uid"] != first["metadata"]["uid"] && vmi["status"]["phase"] == "Running";
    let vmi = s.wait("vmi", "none", "run elsewhere", MINUTES, is_new).await?;
    ensure!(vmi["status"]["nodeName"] == other, "it runs on {}", vmi["status"]["nodeName"]);

    // Back, by the taint. The VM without strategy stays.
    s.kubectl(&["uncordon", node]).await?;
    s.kubectl(&["taint", "node", other, &format!("{TAINT}=:NoSchedule")]).await?;
    at(s, &witnesses, node).await.context("after the taint")?;
    let stayed = s.get("vmi", "none").await?;
    ensure!(stayed["metadata"]["uid"] == vmi["metadata"]["uid"], "the VM without strategy was restarted");
    Ok(())
}

/// Waits until the guests go on at a node.
async fn at(s: &Story, witnesses: &[(String, Value, Witness)], node: &str) -> Result<()> {
    for (name, before, witness) in witnesses {
        let there = |vmi: &Value| {
            vmi["status"]["nodeName"] == node
                && vmi["status"]["evacuationNodeName"].is_null()
                && vmi["status"]["migrationState"]["completed"] == true
        };
        let vmi = s.wait("vmi", name, &format!("be at {node}"), MINUTES, there).await?;
        ensure!(vmi["metadata"]["uid"] == before["metadata"]["uid"], "{name} was recreated");
        alone(s, name).await?;
        let mut guest = console(s, name).await?;
        Witness::goes_on(&mut guest, witness).await.with_context(|| name.clone())?;
        guest.leave().await?;
    }
    let migrations = s.list("vmim", "").await?;
    let evacuates = |vmim: &Value| !vmim["metadata"]["annotations"]["kubevirt.io/evacuationMigration"].is_null();
    ensure!(migrations.iter().all(evacuates), "migrations of others: {migrations:?}");
    Ok(())
}
