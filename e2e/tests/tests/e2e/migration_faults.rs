//! Processes that are killed while a VM migrates: see [`kills`](crate::kills).

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, signal,
    storage::{Backing, Storage, delete_vmis, on_host},
    story, story_alone,
};
use serde_json::{Value, json};

use crate::{
    kills::{During, GUEST, Has, MINUTES, Process, Victim, migration_rows, one_pod, prepare, run_migrations, uid},
    moves::{alone, begin, console, ended, has_ended, two_nodes, vm, with_claims, with_policy},
    rows::chosen,
    witness::Witness,
};

/// A sample has every so many rows of the table.
const SAMPLE: usize = 23;

const VICTIMS: &[Victim] = &[
    Victim::Leader,
    Victim::Source(Process::VirtHandler),
    Victim::Target(Process::VirtHandler),
    Victim::Source(Process::Worker),
    Victim::Target(Process::Worker),
    Victim::Source(Process::Libvirtd),
    Victim::Target(Process::Libvirtd),
    Victim::Source(Process::Qemu),
    Victim::Target(Process::Qemu),
    Victim::Source(Process::Kubelet),
    Victim::Target(Process::Kubelet),
    Victim::TargetPod,
];

/// Returns true if the victim exists in the phase. The pod is deleted in three phases.
fn exists(during: During, victim: Victim) -> bool {
    use During::{Moved, Pending, PostCopy, PreparingTarget, Running, Scheduling, Switchover};
    match victim {
        _ if matches!(during, PostCopy | Moved) => false,
        Victim::Target(Process::Worker | Process::Libvirtd) => !matches!(during, Pending | Scheduling),
        Victim::Source(Process::Qemu) => during != Switchover,
        Victim::Target(Process::Qemu) => matches!(during, Running | Switchover),
        Victim::TargetPod => matches!(during, Scheduling | PreparingTarget | Running),
        _ => true,
    }
}

#[test]
fn table_has_sixty_rows() {
    assert_eq!(migration_rows(VICTIMS, exists).len(), 60);
}

#[test]
fn one_guest_lives_whatever_is_killed_during_its_migration() {
    story_alone("migration-faults", async |s| {
        with_shared_disk(s, async |nodes| {
            let rows = chosen(migration_rows(VICTIMS, exists), SAMPLE)?;
            run_migrations(s, nodes, rows, Has::Disk, |_| json!({"bandwidthPerMigration": "24Mi"})).await
        })
        .await
    });
}

/// Runs a body with two nodes and the guest, which writes to a claim that both nodes share.
pub(crate) async fn with_shared_disk(s: &Story, body: impl AsyncFnOnce(&[String; 2]) -> Result<()>) -> Result<()> {
    let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
    let Some(storage) = Storage::make_for_many(s, "data", Backing::Directory).await? else { return Ok(()) };
    let outcome = storage.lend(s, async |storage| {
        let image = format!("{0}/disk.img && chown 107:107 {0}/disk.img", storage.directory);
        on_host(s, &storage.node, &format!("truncate -s 8M {image}")).await?;
        s.apply(&with_claims(&vm(GUEST, "Always"), &["data"])).await?;
        s.wait_running(GUEST).await?;
        prepare(s).await?;
        body(&nodes).await
    });
    outcome.await
}

#[test]
fn migration_to_a_daemon_that_does_not_answer_ends() {
    story("migration-dead-peer", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        s.apply(&vm(GUEST, "Always")).await?;
        s.wait_running(GUEST).await?;
        let mut guest = console(s, GUEST).await?;
        let witness = Witness::start(&mut guest).await?;
        guest.leave().await?;
        let before = s.get("vmi", GUEST).await?;
        let result = with_policy(s, json!({"bandwidthPerMigration": "2Mi"}), async |_| dead_peer(s).await).await;
        result?;
        let after = s.get("vmi", GUEST).await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(after["status"]["nodeName"] == before["status"]["nodeName"], "the VMI is elsewhere");
        alone(s, GUEST).await?;
        let mut guest = console(s, GUEST).await?;
        Witness::goes_on(&mut guest, &witness).await?;
        guest.leave().await?;
        delete_vmis(s).await
    });
}

/// Stops the target's libvirtd while data flows, without an end of its connections, and waits for the end of the migration.
async fn dead_peer(s: &Story) -> Result<()> {
    let migration = begin(s, GUEST).await?;
    let runs = |vmim: &Value| vmim["status"]["phase"] == "Running" || has_ended(vmim);
    let running = s.wait("vmim", &migration, "be running", MINUTES, runs).await?;
    ensure!(!has_ended(&running), "the stop missed: the migration is {}", running["status"]);
    let pod = one_pod(s, &format!("kubevirt.io/migrationJobUID={}", uid(&running)?)).await?;
    let node = s.enter_node(pod["spec"]["nodeName"].as_str().context("pod without node")?).await?;
    let stopped = node.run(&signal("libvirtd", &uid(&pod)?, "STOP")).await;
    node.leave().await?;
    stopped.context("stop libvirtd")?;
    let migration = ended(s, &migration).await?;
    ensure!(migration["status"]["phase"] == "Failed", "{}", migration["status"]);
    let reason = migration["status"]["migrationState"]["failureReason"].as_str().unwrap_or_default().to_owned();
    // The keepalive of libvirt ends it, long before the limits of migrations do.
    ensure!(!reason.is_empty() && !reason.contains("has been aborted"), "reason {reason:?}: {}", migration["status"]);
    eprintln!("the migration failed: {reason}");
    Ok(())
}
