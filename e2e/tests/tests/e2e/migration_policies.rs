//! Limits of migrations, policies, and VMIs that cannot migrate.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT,
    storage::{Backing, Storage},
    story, story_alone,
};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    live_resize::condition,
    manifests,
    moves::{MINUTES, begin, has_ended, is_long, two_nodes, vm, with_claims, with_policy, with_settings},
};

/// Most migrations at once, in the cluster and from a node.
const CLUSTER: usize = 3;
const OUTBOUND: usize = 2;
/// Limit of virt-handler's memory growth in KiB.
const GROWTH: u64 = 32 * 1024;

#[test]
fn policies_and_limits_apply() {
    story_alone("migration-limits", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        let settings = json!({"parallelMigrationsPerCluster": CLUSTER, "parallelOutboundMigrationsPerNode": OUTBOUND});
        let policy =
            json!({"bandwidthPerMigration": "64Mi", "selectors": {"virtualMachineInstanceSelector": {"app": "box-0"}}});
        with_settings(s, settings, async || {
            with_policy(s, policy, async |policy| limited(s, &nodes, policy).await).await
        })
        .await
    });
}

async fn limited(s: &Story, nodes: &[String; 2], policy: &str) -> Result<()> {
    let names: Vec<String> = (0..if is_long() { 10 } else { 4 }).map(|number| format!("box-{number}")).collect();
    for name in &names {
        s.apply(&vm(name, "Always")).await?;
    }
    let mut sources = BTreeMap::new();
    for name in &names {
        let vmi = s.wait_running(name).await?;
        sources.insert(name.clone(), vmi["status"]["nodeName"].as_str().context("no node")?.to_owned());
    }
    let mut memory = vec![];
    for node in nodes {
        memory.push(s.memory(node, "virt-handler").await?);
    }
    let mut migrations = BTreeMap::new();
    for name in &names {
        migrations.insert(begin(s, name).await?, name.clone());
    }
    let deadline = Instant::now() + MINUTES + MINUTES;
    let (mut most, mut most_of_node) = (0, 0);
    loop {
        let all = s.list("vmim", "").await?;
        let active = |vmim: &&Value| {
            !has_ended(vmim) && !["", "Pending"].contains(&vmim["status"]["phase"].as_str().unwrap_or_default())
        };
        let mut of_node = BTreeMap::<&str, usize>::new();
        for vmim in all.iter().filter(active) {
            let vmi =
                migrations.get(vmim["metadata"]["name"].as_str().unwrap_or_default()).context("unknown migration")?;
            *of_node.entry(sources[vmi].as_str()).or_default() += 1;
        }
        most = most.max(of_node.values().sum());
        most_of_node = most_of_node.max(of_node.values().copied().max().unwrap_or_default());
        if all.iter().all(has_ended) {
            let failed: Vec<_> = all.iter().filter(|vmim| vmim["status"]["phase"] != "Succeeded").collect();
            ensure!(failed.is_empty(), "{failed:?}");
            break;
        }
        ensure!(Instant::now() < deadline, "migrations have not ended: {all:?}");
        sleep(Duration::from_millis(100)).await;
    }
    eprintln!("{most} migrations at once, {most_of_node} from a node");
    ensure!(most <= CLUSTER && most_of_node <= OUTBOUND, "{most} migrations at once, {most_of_node} from a node");
    ensure!(most > 1, "one migration after the other");
    for (node, before) in nodes.iter().zip(memory) {
        let after = s.memory(node, "virt-handler").await?;
        eprintln!("{node}: virt-handler had {before} KiB, and has {after} KiB");
        ensure!(after < before + GROWTH, "{node}: virt-handler takes {} KiB more", after - before);
    }
    for name in &names {
        let vmi = s.get("vmi", name).await?;
        let state = &vmi["status"]["migrationState"];
        ensure!(vmi["status"]["nodeName"] != sources[name].as_str(), "{name} has not left {}", sources[name]);
        let named = name == "box-0";
        ensure!((state["migrationPolicyName"] == policy) == named, "{name}: {state}");
        let bandwidth = &state["migrationConfiguration"]["bandwidthPerMigration"];
        ensure!((*bandwidth == "64Mi") == named, "{name}: {state}");
    }
    Ok(())
}

#[test]
fn vmis_that_cannot_migrate_refuse_with_the_reason() {
    story("migration-refused", async |s| {
        let storage = Storage::make(s, "single", Backing::Directory).await?;
        storage.lend(s, async |_| refused(s).await).await
    });
}

async fn refused(s: &Story) -> Result<()> {
    // A bridge on the pod network, and a claim for one node.
    s.apply(&manifests::kernel_vm("bridge", "Always")).await?;
    let with_claim = with_claims(&vm("claim", "Always"), &["single"]);
    s.apply(&with_claim).await?;
    for (name, reason) in [("bridge", "InterfaceNotLiveMigratable"), ("claim", "DisksNotLiveMigratable")] {
        s.wait_running(name).await?;
        let shown = |vmi: &Value| condition(vmi, "LiveMigratable").is_some();
        let vmi = s.wait("vmi", name, "show if it is migratable", TIMEOUT, shown).await?;
        let movable = condition(&vmi, "LiveMigratable").context("no condition")?;
        ensure!(movable["status"] == "False" && movable["reason"] == reason, "{movable}");
        let text = movable["message"].as_str().context("no message")?;
        let Err(refusal) = s.virt(&["migrate", name]).await else { anyhow::bail!("{name} migrates") };
        ensure!(refusal.to_string().contains(text), "{refusal:#} lacks {text:?}");
        let Err(refusal) = begin(s, name).await else { anyhow::bail!("{name} migrates") };
        ensure!(format!("{refusal:#}").contains(reason), "{refusal:#} lacks {reason}");
    }
    Ok(())
}
