//! Migrations of a guest that changes its memory faster than it is copied: they are aborted, or pause the guest, or switch to
//! post-copy, as the settings say.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story, story_alone};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    kills::{During, GUEST, Has, Process, Victim, migration_rows, run_migrations},
    live_resize::{condition, run},
    moves::{CHANGE_MEMORY, MINUTES, alone, arrived, begin, console, ended, slow, two_nodes, vm, with_policy},
    witness::Witness,
};

/// The resource of the device that the target needs.
const USERFAULTFD: &str = "devices.kubevirt.io/userfaultfd";

/// Starts the guest, which changes its memory, and returns its witness.
pub(crate) async fn busy(s: &Story) -> Result<Witness> {
    s.apply(&vm(GUEST, "Always")).await?;
    s.wait_running(GUEST).await?;
    let mut guest = console(s, GUEST).await?;
    let witness = Witness::start(&mut guest).await?;
    run(&mut guest, CHANGE_MEMORY).await?;
    guest.leave().await?;
    Ok(witness)
}

pub(crate) async fn goes_on(s: &Story, witness: &Witness) -> Result<Witness> {
    let mut guest = console(s, GUEST).await?;
    let witness = Witness::goes_on(&mut guest, witness).await?;
    guest.leave().await?;
    Ok(witness)
}

/// Begins a migration and waits until the guest has left before its memory. Returns the names of the migration, and the VMI.
async fn switched(s: &Story) -> Result<(String, Value)> {
    let migration = begin(s, GUEST).await?;
    let uid = s.get("vmim", &migration).await?["metadata"]["uid"].clone();
    let shows = |vmi: &Value| {
        let state = &vmi["status"]["migrationState"];
        state["migrationUid"] == uid && (state["mode"] == "PostCopy" || state["completed"] == true)
    };
    let vmi = s.wait("vmi", GUEST, "switch to post-copy", MINUTES, shows).await?;
    let state = &vmi["status"]["migrationState"];
    ensure!(state["mode"] == "PostCopy", "{state}");
    Ok((migration, vmi))
}

#[test]
fn busy_guest_moves_if_it_may_be_paused_or_switch_to_post_copy() {
    story("post-copy", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        let mut witness = busy(s).await?;
        with_policy(s, slow(5, json!({})), async |_| {
            let migration = ended(s, &begin(s, GUEST).await?).await?;
            let reason = migration["status"]["migrationState"]["failureReason"].as_str().unwrap_or_default();
            ensure!(reason.contains("has been aborted"), "{}", migration["status"]);
            alone(s, GUEST).await.map(drop)
        })
        .await
        .context("without permission")?;
        witness = goes_on(s, &witness).await?;

        with_policy(s, slow(25, json!({"allowWorkloadDisruption": true})), async |_| {
            let before = s.get("vmi", GUEST).await?;
            let vmi = arrived(s, &before, &begin(s, GUEST).await?).await?;
            ensure!(vmi["status"]["migrationState"]["mode"] == "Paused", "{}", vmi["status"]["migrationState"]);
            ensure!(condition(&vmi, "Paused").is_none(), "{}", vmi["status"]["conditions"]);
            Ok(())
        })
        .await
        .context("with a pause")?;
        witness = goes_on(s, &witness).await?;

        with_policy(s, slow(5, json!({"allowPostCopy": true})), async |_| {
            let before = s.get("vmi", GUEST).await?;
            let begun = Instant::now();
            let (migration, _) = switched(s).await?;
            let left = begun.elapsed();
            // It cannot be undone any more.
            s.delete("vmim", &migration).await?;
            let vmi =
                s.wait("vmi", GUEST, "have moved", MINUTES, |vmi| vmi["status"]["migrationState"]["completed"] == true);
            let state = vmi.await?["status"]["migrationState"].clone();
            eprintln!("the guest had left after {left:.1?}, and its memory after {:.1?}", begun.elapsed());
            ensure!(state["failed"] != true && state["mode"] == "PostCopy", "{state}");
            s.wait_gone("vmim", &migration, MINUTES).await?;
            let pod = alone(s, GUEST).await?;
            ensure!(pod["spec"]["nodeName"] != before["status"]["nodeName"], "the VMI is where it was");
            let device = &pod["spec"]["containers"][0]["resources"]["limits"][USERFAULTFD];
            ensure!(device == "1", "{}", pod["spec"]["containers"][0]["resources"]);
            Ok(())
        })
        .await
        .context("with post-copy")?;
        goes_on(s, &witness).await.map(drop)
    });
}

#[test]
fn pod_of_a_user_gets_no_userfaultfd() {
    story("userfaultfd", async |s| {
        let restricted = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, "spec": {
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "c", "image": "x", "securityContext": restricted,
                "resources": {"limits": {(USERFAULTFD): "1"}}}],
        }});
        let refused = s.refused(&pod.to_string()).await?;
        ensure!(refused.contains("only virt-controller makes pods with devices.kubevirt.io/userfaultfd"), "{refused}");
        Ok(())
    });
}

/// Waits until no node offers the device.
async fn not_offered(s: &Story, nodes: &[String]) -> Result<()> {
    let path = format!("jsonpath={{.status.allocatable.{}}}", USERFAULTFD.replace('.', "\\."));
    let deadline = Instant::now() + MINUTES;
    for node in nodes {
        loop {
            let units = s.kubectl(&["get", "node", node, "-o", &path]).await?;
            if ["", "0"].contains(&units.trim()) {
                break;
            }
            ensure!(Instant::now() < deadline, "{node} offers {units} units although nothing permits post-copy");
            sleep(Duration::from_secs(1)).await;
        }
    }
    Ok(())
}

#[test]
fn guest_that_is_lost_in_post_copy_is_started_again() {
    story_alone("post-copy-faults", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        not_offered(s, &nodes).await?;
        busy(s).await?;
        let victims = [Process::VirtHandler, Process::Qemu].map(Victim::Target);
        let rows = migration_rows(&victims, |during, _| during == During::PostCopy);
        run_migrations(s, &nodes, rows, Has::Nothing, |_| slow(5, json!({"allowPostCopy": true}))).await
    });
}
