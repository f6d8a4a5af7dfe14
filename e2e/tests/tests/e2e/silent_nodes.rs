//! Nodes that fall silent while a VM migrates: the migration ends within its limit and gives up its place, and one guest runs in the
//! end. `docs/design/migration.md` shows all cases.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Node, Story, signal, story_alone};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    kills::{During, GUEST, Has, Process, Victim, in_guest, migration_rows, run_migrations, silence, stop_daemon, uid},
    migration_faults::with_shared_disk,
    moves::{
        CHANGE_MEMORY, MINUTES, alone, begin, console, ended, has_ended, is_long, migrate, slow, two_nodes, vm,
        while_cordoned, with_settings,
    },
    rows::chosen,
    witness::Witness,
};

/// A phase of a migration in which the target's node falls silent.
struct Stuck {
    phase: &'static str,
    /// Seconds until the migration has to have failed.
    limit: u64,
    /// Part of the event.
    reason: &'static str,
}

const STUCK: [Stuck; 2] = [
    // The pod is pending for 15 s, by an annotation of the migration, and its end counts for another minute at most.
    Stuck { phase: "Scheduling", limit: 75, reason: "target pod" },
    Stuck { phase: "PreparingTarget", limit: 330, reason: "did not prepare the target within 300 seconds" },
];

/// A busy host can be too late to stop the target's libvirtd before it has prepared. The migration is repeated then.
const ATTEMPTS: usize = 6;

#[test]
fn migration_to_a_silent_node_fails_and_gives_up_its_place() {
    story_alone("silent-target", async |s| {
        let Some([source, target]) = two_nodes(s).await? else { return Ok(()) };
        let witness = while_cordoned(s, &target, async || {
            for name in [GUEST, "next"] {
                s.apply(&vm(name, "Always")).await?;
                s.wait_running(name).await?;
            }
            let mut guest = console(s, GUEST).await?;
            let witness = Witness::start(&mut guest).await?;
            guest.leave().await?;
            Ok(witness)
        })
        .await?;
        let node = s.enter_node(&target).await?;
        // The second one takes more than five minutes.
        let rows = if is_long() { &STUCK[..] } else { &STUCK[..1] };
        let result = with_settings(s, json!({"parallelMigrationsPerCluster": 1}), async || {
            for row in rows {
                row.run(s, &source, &node, &witness).await.with_context(|| format!("silent in {}", row.phase))?;
            }
            Ok(())
        })
        .await;
        node.leave().await?;
        result
    });
}

impl Stuck {
    async fn run(&self, s: &Story, source: &str, target: &Node, witness: &Witness) -> Result<()> {
        let before = s.get("vmi", GUEST).await?;
        let migration = if self.phase == "Scheduling" {
            silence(target, self.limit, "true", "true").await?;
            let migration = begin(s, GUEST).await?;
            s.kubectl(&["annotate", "vmim", &migration, "kubevirt.io/migrationPendingPodTimeoutSeconds=15"]).await?;
            let is_stuck = |vmim: &Value| vmim["status"]["phase"] == self.phase;
            s.wait("vmim", &migration, "be stuck", MINUTES, is_stuck).await?;
            migration
        } else {
            self.silent_before_it_is_prepared(s, source, target).await?
        };
        let stuck = Instant::now();
        let next = begin(s, "next").await?;
        let waits = |vmim: &Value| vmim["status"]["phase"] == "Pending";
        let waiting = s.wait("vmim", &next, "wait for a place", MINUTES, waits).await?;
        let targets = s.list("Pod", &format!("kubevirt.io/migrationJobUID={}", uid(&waiting)?)).await?;
        ensure!(targets.is_empty(), "two migrations have a place");

        let within = Duration::from_secs(self.limit);
        let failed = s.wait("vmim", &migration, "fail", within, has_ended).await?;
        ensure!(failed["status"]["phase"] == "Failed", "{}", failed["status"]);
        let said = s.wait_event(&migration, "FailedMigration", MINUTES).await?;
        ensure!(said.contains(self.reason), "{said}");
        eprintln!("{}: failed after {:.0?}: {said}", self.phase, stuck.elapsed());
        let has_place = |vmim: &Value| !waits(vmim);
        s.wait("vmim", &next, "have the place", MINUTES, has_place).await?;

        // The guest goes on where it is, also while the target is silent.
        let vmi = s.get("vmi", GUEST).await?;
        ensure!(vmi["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(vmi["status"]["nodeName"] == source, "it is at {}", vmi["status"]["nodeName"]);
        let mut guest = console(s, GUEST).await?;
        Witness::goes_on(&mut guest, witness).await?;
        guest.leave().await?;
        // The other one gets to the target, once that is back, and returns.
        let next = ended(s, &next).await?;
        ensure!(next["status"]["phase"] == "Succeeded", "{}", next["status"]);
        migrate(s, "next").await.map(drop)
    }

    /// Begins a migration and silences the target in `PreparingTarget`. Returns the migration.
    async fn silent_before_it_is_prepared(&self, s: &Story, source: &str, target: &Node) -> Result<String> {
        let [stop, proceed] = ["STOP", "CONT"].map(|sent| signal("virt-handler", "", sent));
        let proceed = format!("{proceed}; {}", signal("libvirtd", "", "CONT"));
        for _ in 0..ATTEMPTS {
            target.run(&stop_daemon()).await?;
            let migration = begin(s, GUEST).await?;
            let is_under_way = |vmim: &Value| {
                let phase = vmim["status"]["phase"].as_str().unwrap_or_default();
                [self.phase, "TargetReady", "Running"].contains(&phase) || has_ended(vmim)
            };
            s.wait("vmim", &migration, "be stuck", MINUTES, is_under_way).await?;
            // From here on virt-handler reports nothing.
            target.run(&stop).await?;
            let vmi = s.get("vmi", GUEST).await;
            let is_prepared = |vmi: &Value| !vmi["status"]["migrationState"]["targetNodeAddress"].is_null();
            if vmi.as_ref().is_ok_and(|vmi| !is_prepared(vmi)) {
                silence(target, self.limit, "true", &proceed).await?;
                return Ok(migration);
            }
            target.run(&format!("{proceed}; true")).await?;
            vmi?;
            eprintln!("{}: missed", self.phase);
            // This cancels a migration that runs.
            s.delete("vmim", &migration).await?;
            s.wait_gone("vmim", &migration, MINUTES).await?;
            alone(s, GUEST).await?;
            if s.node_of(GUEST).await? != source {
                migrate(s, GUEST).await?;
            }
        }
        bail!("missed {ATTEMPTS} times")
    }
}

#[test]
fn one_guest_runs_at_whatever_step_of_its_migration_the_source_node_is_lost() {
    use During::{Pending, Running, Scheduling, Switchover};
    story_alone("lost-source", async |s| {
        with_shared_disk(s, async |nodes| {
            in_guest(s, CHANGE_MEMORY).await?;
            let is_step = |during, _| !matches!(during, Pending | Scheduling | Switchover);
            let rows = migration_rows(&[Victim::Source(Process::Node)], is_step);
            let policy = |during: During| slow(if during == Running { 900 } else { 5 }, json!({"allowPostCopy": true}));
            let every = rows.len();
            run_migrations(s, nodes, chosen(rows, every)?, Has::Disk, policy).await
        })
        .await
    });
}
