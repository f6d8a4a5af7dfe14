//! Measures the drain of a node with small VMs, by `kubectl drain` of the launcher pods.
//!
//! The guests have no disk: their firmware runs. kubectl repeats a refused eviction every five seconds, so the time of the command
//! is up to that longer than the time until all VMs are on the other node.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, is_true};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::Figures;

/// Time limit of the starts, and of the drain.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Pause between two looks at the VMIs.
const PAUSE: Duration = Duration::from_millis(250);
/// Label of the VMs.
const LABEL: &str = "app=drained";

/// Measures one drain of a node with `count` VMs. Does nothing on one node.
pub(crate) async fn measure(story: &Story, count: usize, figures: &mut Figures) -> Result<()> {
    let takers = story.takers().await?;
    let [(node, _), (other, _), ..] = &takers[..] else {
        println!("a drain needs two nodes: not measured");
        return Ok(());
    };
    let names: Vec<String> = (0..count).map(|number| format!("drained-{number}")).collect();
    let measured = drain(story, &names, node, other, figures).await;
    for name in [node, other] {
        story.kubectl(&["uncordon", name]).await?;
    }
    for name in &names {
        if story.api("vm").get_opt(name).await?.is_some() {
            story.delete("vm", name).await?;
        }
    }
    for name in &names {
        story.wait_gone("vmi", name, TIMEOUT).await?;
    }
    measured
}

async fn drain(story: &Story, names: &[String], node: &str, other: &str, figures: &mut Figures) -> Result<()> {
    story.kubectl(&["cordon", other]).await?;
    for name in names {
        story.apply(&manifest(name).to_string()).await?;
    }
    until(story, names.len(), |vmi| runs_on(vmi, node) && is_true(vmi, "LiveMigratable")).await.context("starts")?;
    story.kubectl(&["uncordon", other]).await?;
    let began = Instant::now();
    let pods = "--pod-selector=kubevirt.io=virt-launcher";
    let limit = format!("--timeout={}s", TIMEOUT.as_secs());
    let command = async {
        story.kubectl(&["drain", node, pods, "--delete-emptydir-data", "--force", &limit]).await?;
        Ok::<_, anyhow::Error>(began.elapsed())
    };
    let moved = async {
        until(story, names.len(), |vmi| runs_on(vmi, other)).await.context("migrations")?;
        Ok::<_, anyhow::Error>(began.elapsed())
    };
    let (command, moved) = tokio::try_join!(command, moved)?;
    println!("  {} VMs moved after {moved:.2?}, kubectl drain took {command:.2?}", names.len());
    figures.insert("drain_s".into(), command.as_secs_f64());
    figures.insert("drain_all_moved_s".into(), moved.as_secs_f64());
    Ok(())
}

fn manifest(name: &str) -> Value {
    let labels = json!({"app": "drained"});
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": name},
        "spec": {"runStrategy": "Always", "template": {"metadata": {"labels": labels}, "spec": {
            "evictionStrategy": "LiveMigrate", "terminationGracePeriodSeconds": 0,
            "domain": {
                "memory": {"guest": "32Mi"},
                "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "overcommitGuestOverhead": true},
                "devices": {"autoattachGraphicsDevice": false,
                    "interfaces": [{"name": "default", "masquerade": {}}]},
            },
            "networks": [{"name": "default", "pod": {}}],
        }}},
    })
}

/// Returns true if the VMI runs on the node and no migration is under way.
fn runs_on(vmi: &Value, node: &str) -> bool {
    let state = &vmi["status"]["migrationState"];
    let moves = !state.is_null() && state["completed"] != true;
    vmi["status"]["phase"] == "Running" && vmi["status"]["nodeName"] == node && !moves
}

/// Waits until `count` VMIs satisfy the condition.
async fn until(story: &Story, count: usize, condition: impl Fn(&Value) -> bool) -> Result<()> {
    let began = Instant::now();
    loop {
        let vmis = story.list("vmi", LABEL).await?;
        let found = vmis.iter().filter(|vmi| condition(vmi)).count();
        if found == count {
            return Ok(());
        }
        ensure!(began.elapsed() < TIMEOUT, "{found} of {count} VMIs after {TIMEOUT:?}");
        sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmi_has_moved_when_its_migration_is_complete() {
        let vmi = |node: &str, state: Value| {
            let status = json!({"phase": "Running", "nodeName": node, "migrationState": state});
            json!({"status": status})
        };
        for (vmi, expected) in [
            (vmi("b", json!({"completed": true})), true),
            (vmi("b", Value::Null), true),
            (vmi("b", json!({"startTimestamp": "now"})), false),
            (vmi("a", json!({"completed": true})), false),
            (json!({"status": {"phase": "Failed", "nodeName": "b"}}), false),
        ] {
            assert_eq!(runs_on(&vmi, "b"), expected, "{vmi}");
        }
    }
}
