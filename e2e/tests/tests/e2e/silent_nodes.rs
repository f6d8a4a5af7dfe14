//! Nodes that fall silent while a VM migrates: the migration ends within its limit and gives up its place, and one guest runs in the
//! end. `docs/design/migration.md` shows all cases.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Node, Story,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story_alone,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    kills::{GUEST, sample, signal},
    live_resize::run,
    migration_faults::{STOP_DAEMON, one_lives, prepare},
    moves::{
        MINUTES, begin, console, ended, has_ended, is_long, migrate, two_nodes, vm, while_cordoned, with_claims,
        with_policy, with_settings,
    },
    post_copy::{CHANGE_MEMORY, slow},
    virt_handlers,
    witness::{Witness, written},
};

/// Stops kubelet of a node for some seconds, with a script at the begin and one at the end. The node is silent on return.
async fn silence(node: &Node, seconds: u64, begin: &str, end: &str) -> Result<()> {
    let [stop, proceed] = ["STOP", "CONT"].map(|sent| signal("kubelet", "", sent));
    // The command itself runs by kubelet.
    let script =
        format!("( sleep 1; {stop}; {begin}; sleep {seconds}; {end}; {proceed} ) </dev/null >/dev/null 2>&1 &");
    node.run(&script).await?;
    sleep(Duration::from_secs(2)).await;
    Ok(())
}

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
        let is_stuck = |vmim: &Value| vmim["status"]["phase"] == self.phase;
        let migration;
        if self.phase == "Scheduling" {
            silence(target, self.limit, "true", "true").await?;
            migration = begin(s, GUEST).await?;
            s.kubectl(&["annotate", "vmim", &migration, "kubevirt.io/migrationPendingPodTimeoutSeconds=15"]).await?;
            s.wait("vmim", &migration, "be stuck", MINUTES, is_stuck).await?;
        } else {
            target.run(STOP_DAEMON).await?;
            migration = begin(s, GUEST).await?;
            s.wait("vmim", &migration, "be stuck", MINUTES, is_stuck).await?;
            let [stop, proceed] = ["STOP", "CONT"].map(|sent| signal("virt-handler", "", sent));
            let proceed = format!("{proceed}; {}", signal("libvirtd", "", "CONT"));
            silence(target, self.limit, &stop, &proceed).await?;
        }
        let stuck = Instant::now();
        let next = begin(s, "next").await?;
        let waits = |vmim: &Value| vmim["status"]["phase"] == "Pending";
        let waiting = s.wait("vmim", &next, "wait for a place", MINUTES, waits).await?;
        ensure!(targets(s, &waiting).await?.is_empty(), "two migrations have a place");

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
}

/// Returns the target pods of a migration.
async fn targets(s: &Story, migration: &Value) -> Result<Vec<Value>> {
    let job = migration["metadata"]["uid"].as_str().context("migration without UID")?;
    s.list("Pod", &format!("kubevirt.io/migrationJobUID={job}")).await
}

/// Seconds for which the source's node is silent: in post-copy the target waits for it twice for a minute.
const LOST_SECONDS: u64 = 170;

/// The step of a migration with post-copy at which the source's node is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// libvirt's daemon of the target is stopped.
    PreparingTarget,
    /// The source's virt-handler is stopped.
    TargetReady,
    /// Data flows slowly.
    Copying,
    /// The guest has left before its memory.
    PostCopy,
    /// The VMI is the target's.
    Moved,
}

const STEPS: [Step; 5] = [Step::PreparingTarget, Step::TargetReady, Step::Copying, Step::PostCopy, Step::Moved];

#[test]
fn one_guest_runs_at_whatever_step_of_its_migration_the_source_node_is_lost() {
    story_alone("lost-source", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        let Some(storage) = Storage::make_for_many(s, "data", Backing::Directory).await? else { return Ok(()) };
        let result = lost(s, &storage, &nodes).await;
        let gone = delete_vmis_after(s, &result).await;
        storage.remove(s).await?;
        result.and(gone)
    });
}

async fn lost(s: &Story, storage: &Storage, nodes: &[String; 2]) -> Result<()> {
    let image = format!("{0}/disk.img && chown 107:107 {0}/disk.img", storage.directory);
    on_host(s, &storage.node, &format!("truncate -s 8M {image}")).await?;
    s.apply(&with_claims(&vm(GUEST, "Always"), &["data"])).await?;
    s.wait_running(GUEST).await?;
    busy(s).await?;
    for step in sample(STEPS.into_iter(), STEPS.len())? {
        let source = s.node_of(GUEST).await?;
        let target = nodes.iter().find(|node| **node != source).context("no other node")?;
        let ends = [s.enter_node(&source).await?, s.enter_node(target).await?];
        let seconds = if step == Step::Copying { 900 } else { 5 };
        let settings = slow(seconds, json!({"allowPostCopy": true}));
        let outcome = with_policy(s, settings, async |_| step.run(s, &ends, target).await).await;
        for node in ends {
            node.leave().await?;
        }
        outcome.with_context(|| format!("the source node was lost in {step:?}"))?;
    }
    Ok(())
}

/// Starts the witnesses in a new guest, which changes its memory.
async fn busy(s: &Story) -> Result<()> {
    prepare(s).await?;
    let mut guest = console(s, GUEST).await?;
    run(&mut guest, CHANGE_MEMORY).await?;
    guest.leave().await
}

impl Step {
    async fn run(self, s: &Story, ends: &[Node; 2], target: &str) -> Result<()> {
        let former = s.get("vmi", GUEST).await?;
        let mut guest = console(s, GUEST).await?;
        let (witness, records) = (Witness::look(&mut guest).await?, written(&mut guest, 0).await?);
        guest.leave().await?;
        let handlers = virt_handlers::restarts(s).await?;
        let [source_node, target_node] = ends;
        match self {
            Self::PreparingTarget => drop(target_node.run(STOP_DAEMON).await?),
            Self::TargetReady => drop(source_node.run(&signal("virt-handler", "", "STOP")).await?),
            Self::Copying | Self::PostCopy | Self::Moved => {}
        }
        let migration = begin(s, GUEST).await?;
        self.reached(s, &migration, target).await?;
        silence(source_node, LOST_SECONDS, &signal("virt-handler", "", "KILL"), "true").await?;
        let (now, vmi) = (s.get("vmim", &migration).await?, s.get("vmi", GUEST).await?);
        let state = &vmi["status"]["migrationState"];
        eprintln!("{self:?}: the source is lost, the migration is {}, {state}", now["status"]["phase"]);
        let has_left = state["mode"] == "PostCopy";
        ensure!(has_left || !matches!(self, Self::PostCopy), "the loss missed: {state}");
        ensure!(!has_left || matches!(self, Self::PostCopy | Self::Moved), "the loss missed: {state}");
        if self == Self::PreparingTarget {
            target_node.run(&format!("{}; true", signal("libvirtd", "", "CONT"))).await?;
        }
        if self == Self::PostCopy {
            return restarted(s, ends, &former, &migration).await;
        }
        // virt-handler of the source starts again when its kubelet goes on.
        back(s, &handlers).await?;
        let migration = ended(s, &migration).await?;
        let vmi = s.get("vmi", GUEST).await?;
        ensure!(vmi["metadata"]["uid"] == former["metadata"]["uid"], "the VMI was recreated");
        ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]);
        let has_moved = vmi["status"]["nodeName"] == target;
        ensure!(
            has_moved == (migration["status"]["phase"] == "Succeeded"),
            "moved: {has_moved}; {}",
            migration["status"]
        );
        one_lives(s, [source_node, target_node]).await?;
        let mut guest = console(s, GUEST).await?;
        Witness::goes_on(&mut guest, &witness).await?;
        written(&mut guest, records).await?;
        guest.leave().await?;
        virt_handlers::serves(s, GUEST).await
    }

    /// Waits for the step.
    async fn reached(self, s: &Story, migration: &str, target: &str) -> Result<()> {
        let uid = s.get("vmim", migration).await?["metadata"]["uid"].clone();
        let is_in = |phase: &'static str| move |vmim: &Value| vmim["status"]["phase"] == phase || has_ended(vmim);
        let shows = |vmi: &Value| {
            let state = &vmi["status"]["migrationState"];
            let is_at =
                if self == Self::Moved { vmi["status"]["nodeName"] == target } else { state["mode"] == "PostCopy" };
            state["migrationUid"] == uid && (is_at || state["completed"] == true)
        };
        let what = format!("be in {self:?}");
        match self {
            Self::PreparingTarget => s.wait("vmim", migration, &what, MINUTES, is_in("PreparingTarget")).await,
            Self::TargetReady => s.wait("vmim", migration, &what, MINUTES, is_in("TargetReady")).await,
            Self::Copying => s.wait("vmim", migration, &what, MINUTES, is_in("Running")).await,
            Self::PostCopy | Self::Moved => s.wait("vmi", GUEST, &what, MINUTES, shows).await,
        }
        .map(drop)
    }
}

/// Waits until the target has given the guest up, and another one runs after the node is back.
async fn restarted(s: &Story, ends: &[Node; 2], former: &Value, migration: &str) -> Result<()> {
    let failed = s.wait("vmi", GUEST, "fail", MINUTES, |now| now["status"]["phase"] == "Failed").await?;
    let (uid, status) = (&failed["metadata"]["uid"], &failed["status"]);
    ensure!(*uid == former["metadata"]["uid"] && status["reason"] == "LostInPostCopy", "{uid} {status}");
    ensure!(status["migrationState"]["failed"] == true, "{}", status["migrationState"]);
    // Once the node is back and its pod is gone.
    let is_new = |now: &Value| now["metadata"]["uid"] != *uid && now["status"]["phase"] == "Running";
    let wait = Duration::from_secs(LOST_SECONDS) + MINUTES;
    s.wait("vmi", GUEST, "be started again", wait, is_new).await?;
    s.wait_gone("vmim", migration, MINUTES).await?;
    let [source, target] = ends;
    one_lives(s, [source, target]).await?;
    let mut guest = console(s, GUEST).await?;
    run(&mut guest, "modprobe -qa virtio_blk; true").await?;
    // A copy of the former guest would have noted the other one.
    let noted = run(&mut guest, "head -c 1024 /dev/vda | tail -c 512 | tr -d '\\0'").await?;
    ensure!(!noted.contains("overlap"), "two copies of the guest have written");
    guest.leave().await?;
    busy(s).await
}

/// Waits until a virt-handler that was killed is started again, and all of them are ready.
async fn back(s: &Story, before: &[(Option<String>, i32)]) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(LOST_SECONDS) + MINUTES;
    loop {
        match virt_handlers::restarts(s).await {
            Ok(now) if now != before => return Ok(()),
            outcome => ensure!(Instant::now() < deadline, "virt-handler is not started again: {outcome:?}"),
        }
        sleep(Duration::from_millis(500)).await;
    }
}
