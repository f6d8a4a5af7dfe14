//! VMs that follow an upgrade to another launcher without a restart.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, skip, story_alone};
use kube::api::ListParams;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    installation::{COUNT, OUTDATED, choose_debug_image, helm, installation, revision, set_update},
    moves::{MINUTES, alone, console, is_long, two_nodes, vm},
    witness::Witness,
};

#[test]
fn vms_move_to_the_new_launcher() {
    story_alone("workload-updates", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        // The new launcher makes all VMIs outdated.
        if !s.cluster_api("vmi").list(&ListParams::default()).await?.items.is_empty() {
            return skip("no other VMI");
        }
        let strategy = installation(s).await?["spec"]["workloadUpdateStrategy"].clone();
        let result = updated(s).await;
        // Later stories need the default image and strategy, also after a failure.
        set_update(s, &strategy).await?;
        choose_debug_image(s, false).await?;
        result
    });
}

async fn updated(s: &Story) -> Result<()> {
    let names: Vec<String> = (0..if is_long() { 4 } else { 2 }).map(|number| format!("box-{number}")).collect();
    for name in &names {
        s.apply(&vm(name, "Always")).await?;
    }
    let mut guests = vec![];
    for name in &names {
        let vmi = s.wait_running(name).await?;
        let mut guest = console(s, name).await?;
        guests.push((name.clone(), vmi, Witness::start(&mut guest).await?));
        guest.leave().await?;
    }
    set_update(s, &json!({"workloadUpdateMethods": ["LiveMigrate"]})).await?;
    let former = revision().await?;
    choose_debug_image(s, true).await?;
    follow(s, &guests, true).await.context("after helm upgrade")?;
    let (back, said) = helm(&["rollback", "ferrovirt", &former, "-n", "kubevirt", "--timeout", "3m"]).await?;
    ensure!(back, "helm rollback: {said}");
    follow(s, &guests, false).await.context("after helm rollback")
}

/// Waits until the guests go on in pods of the launcher, and none is counted as outdated.
async fn follow(s: &Story, guests: &[(String, Value, Witness)], debug: bool) -> Result<()> {
    for (name, before, witness) in guests {
        let follows = |vmi: &Value| {
            let image = vmi["status"]["launcherContainerImageVersion"].as_str().unwrap_or_default();
            !image.is_empty() && image.ends_with("-debug") == debug && vmi["metadata"]["labels"][OUTDATED].is_null()
        };
        let vmi = s.wait("vmi", name, "have the new launcher", MINUTES, follows).await?;
        ensure!(vmi["metadata"]["uid"] == before["metadata"]["uid"], "{name} was recreated");
        let pod = alone(s, name).await?;
        let image = pod["spec"]["containers"][0]["image"].as_str().unwrap_or_default();
        ensure!(image.ends_with("-debug") == debug, "{name} runs in {image}");
        let mut guest = console(s, name).await?;
        Witness::goes_on(&mut guest, witness).await.with_context(|| name.clone())?;
        guest.leave().await?;
    }
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let count = installation(s).await?["status"][COUNT].clone();
        if count == 0 {
            break;
        }
        ensure!(Instant::now() < deadline, "{count} VMIs are counted as outdated");
        sleep(Duration::from_millis(500)).await;
    }
    let migrations = s.list("vmim", "").await?;
    let updates = |vmim: &Value| !vmim["metadata"]["annotations"]["kubevirt.io/workloadUpdateMigration"].is_null();
    ensure!(!migrations.is_empty() && migrations.iter().all(updates), "{migrations:?}");
    Ok(())
}
