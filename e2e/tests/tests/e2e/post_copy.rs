//! Migrations of a guest that changes its memory faster than it is copied: they are aborted, or pause the guest, or switch to
//! post-copy, as the settings say.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story, story_alone};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    kills::signal,
    live_resize::{condition, run},
    moves::{MINUTES, alone, arrived, begin, console, ended, two_nodes, vm, with_policy},
    witness::Witness,
};

/// The resource of the device that the target needs.
const USERFAULTFD: &str = "devices.kubevirt.io/userfaultfd";
/// Changes 16 MiB of memory again and again, which no migration of the story can follow.
pub(crate) const CHANGE_MEMORY: &str = "head -c 16777216 /dev/urandom >/source; \
     { while :; do cat /source >/changing; done >/dev/null 2>&1 & }";

/// A limit of the bandwidth below the rate of the changes, with a time limit of this many seconds.
pub(crate) fn slow(seconds: u64, further: Value) -> Value {
    let mut settings = json!({"bandwidthPerMigration": "4Mi", "completionTimeoutPerGiB": seconds});
    if let (Some(settings), Some(further)) = (settings.as_object_mut(), further.as_object()) {
        settings.extend(further.clone());
    }
    settings
}

/// Starts the guest, which changes its memory, and returns its witness.
async fn busy(s: &Story) -> Result<Witness> {
    s.apply(&vm("box", "Always")).await?;
    s.wait_running("box").await?;
    let mut guest = console(s, "box").await?;
    let witness = Witness::start(&mut guest).await?;
    run(&mut guest, CHANGE_MEMORY).await?;
    guest.leave().await?;
    Ok(witness)
}

async fn goes_on(s: &Story, witness: &Witness) -> Result<Witness> {
    let mut guest = console(s, "box").await?;
    let witness = Witness::goes_on(&mut guest, witness).await?;
    guest.leave().await?;
    Ok(witness)
}

/// Begins a migration and waits until the guest has left before its memory. Returns the names of the migration, and the VMI.
async fn switched(s: &Story) -> Result<(String, Value)> {
    let migration = begin(s, "box").await?;
    let uid = s.get("vmim", &migration).await?["metadata"]["uid"].clone();
    let shows = |vmi: &Value| {
        let state = &vmi["status"]["migrationState"];
        state["migrationUid"] == uid && (state["mode"] == "PostCopy" || state["completed"] == true)
    };
    let vmi = s.wait("vmi", "box", "switch to post-copy", MINUTES, shows).await?;
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
            let migration = ended(s, &begin(s, "box").await?).await?;
            let reason = migration["status"]["migrationState"]["failureReason"].as_str().unwrap_or_default();
            ensure!(reason.contains("has been aborted"), "{}", migration["status"]);
            alone(s, "box").await.map(drop)
        })
        .await
        .context("without permission")?;
        witness = goes_on(s, &witness).await?;

        with_policy(s, slow(25, json!({"allowWorkloadDisruption": true})), async |_| {
            let before = s.get("vmi", "box").await?;
            let vmi = arrived(s, &before, &begin(s, "box").await?).await?;
            ensure!(vmi["status"]["migrationState"]["mode"] == "Paused", "{}", vmi["status"]["migrationState"]);
            ensure!(condition(&vmi, "Paused").is_none(), "{}", vmi["status"]["conditions"]);
            Ok(())
        })
        .await
        .context("with a pause")?;
        witness = goes_on(s, &witness).await?;

        with_policy(s, slow(5, json!({"allowPostCopy": true})), async |_| {
            let before = s.get("vmi", "box").await?;
            let begun = Instant::now();
            let (migration, _) = switched(s).await?;
            let left = begun.elapsed();
            // It cannot be undone any more.
            s.virt(&["migrate-cancel", "box"]).await?;
            let vmi =
                s.wait("vmi", "box", "have moved", MINUTES, |vmi| vmi["status"]["migrationState"]["completed"] == true);
            let state = vmi.await?["status"]["migrationState"].clone();
            eprintln!("the guest had left after {left:.1?}, and its memory after {:.1?}", begun.elapsed());
            ensure!(state["failed"] != true && state["mode"] == "PostCopy", "{state}");
            s.wait_gone("vmim", &migration, MINUTES).await?;
            let pod = alone(s, "box").await?;
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
        with_policy(s, slow(5, json!({"allowPostCopy": true})), async |_| {
            for program in ["virt-handler", "qemu-system-x86_64"] {
                lost(s, program).await.with_context(|| format!("{program} killed"))?;
                // The new guest has memory to lose, too.
                let mut guest = console(s, "box").await?;
                run(&mut guest, CHANGE_MEMORY).await?;
                guest.leave().await?;
            }
            Ok(())
        })
        .await
    });
}

/// Kills a program at the target while the guest is in post-copy.
async fn lost(s: &Story, program: &str) -> Result<()> {
    let (migration, vmi) = switched(s).await?;
    let pods = s.launcher_pods(&vmi).await?;
    let target = pods.iter().find(|pod| pod["metadata"]["name"] == vmi["status"]["migrationState"]["targetPod"]);
    let uid = target.and_then(|pod| pod["metadata"]["uid"].as_str()).context("no target pod")?;
    kill(s, &vmi, "targetNode", program, if program == "virt-handler" { "" } else { uid }).await?;
    let is_new = |now: &Value| now["metadata"]["uid"] != vmi["metadata"]["uid"] && now["status"]["phase"] == "Running";
    s.wait("vmi", "box", "be started again", MINUTES, is_new).await?;
    // The migration goes with its VMI.
    s.wait_gone("vmim", &migration, MINUTES).await?;
    alone(s, "box").await.map(drop)
}

/// Kills a program at an end of the migration.
async fn kill(s: &Story, vmi: &Value, end: &str, program: &str, pod: &str) -> Result<()> {
    let state = &vmi["status"]["migrationState"];
    let node = s.enter_node(state[end].as_str().context("no node")?).await?;
    let killed = node.run(&signal(program, pod, "KILL")).await;
    node.leave().await?;
    killed.with_context(|| format!("kill {program}"))?;
    let now = s.get("vmi", "box").await?;
    let state = &now["status"]["migrationState"];
    ensure!(now["metadata"]["uid"] == vmi["metadata"]["uid"] && state["completed"] != true, "the kill missed: {state}");
    eprintln!("{end}: killed {program} in post-copy");
    Ok(())
}
