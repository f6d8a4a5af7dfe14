//! A storm of VMs while they are divided among the replicas of virt-controller, after one while they are not.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, kubeconfig, repository};
use tokio::{process::Command, time::sleep};

use super::load::Load;
use crate::Figures;

/// Time in which the replicas divide the shards: 15 s until one that is new counts, and 30 s for which a shard is held at least.
const DIVISION: Duration = Duration::from_secs(60);

/// Measures storms of this number of VMs, and leaves the installation without shards.
pub(super) async fn measure(story: &Story, vms: &Load, count: usize, shards: u32, figures: &mut Figures) -> Result<()> {
    println!("storm of {count} VMs, not divided");
    let whole = storm(vms, count).await?;
    println!("storm of {count} VMs, in {shards} shards");
    let divided = async {
        set_shards(story, shards).await?;
        sleep(DIVISION).await;
        storm(vms, count).await
    };
    let divided = divided.await;
    set_shards(story, 1).await?;
    let divided = divided?;
    figures.insert("storm_vms_per_s".into(), whole);
    figures.insert(format!("storm_vms_per_s_in_{shards}_shards"), divided);
    figures.insert(format!("storm_in_{shards}_shards_over_whole"), divided / whole);
    Ok(())
}

/// Creates VMs at once and returns how many became Running per second.
async fn storm(vms: &Load, count: usize) -> Result<f64> {
    let rate = vms.create(0..count, f64::INFINITY).await.context("storm of VMs")?.rate()?;
    vms.delete().await.context("deletion of the VMs of a storm")?;
    Ok(rate)
}

/// Sets the number of shards and waits until all replicas have it.
async fn set_shards(story: &Story, shards: u32) -> Result<()> {
    let mut command = Command::new("helm");
    command
        .args(["upgrade", "ferrovirt"])
        .arg(repository().join("charts/ferrovirt"))
        .args(["-n", "kubevirt", "--reuse-values", "--set", &format!("virtController.shards={shards}")])
        .args(["--wait", "--timeout", "5m"])
        .env("KUBECONFIG", kubeconfig())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = command.output().await.context("cannot run helm: it must be on the PATH")?;
    ensure!(output.status.success(), "helm upgrade: {}", String::from_utf8_lossy(&output.stderr));
    story.components_are_ready().await
}
