//! Faults during a migration: in the end one guest lives, at the node of the VMI, unless it was killed: then the VM starts another.
//! The guest can write to a claim that both nodes share, and notices a second copy of itself.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Node, Story};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep};

use super::{
    Ends, Faults, GUEST, Holder, MINUTES, Phase, Process, Row, Victim, all, in_guest,
    processes::{LOST_SECONDS, living},
    run_row, started_again, started_again_within, uid,
};
use crate::{
    live_resize::{condition, run},
    moves::{CHANGE_MEMORY, alone, begin, console, ended, has_ended, with_policy},
    state::{has_state, restart, write_variable},
    virt_handlers,
    witness::{Witness, write_alone, written},
};

/// A busy host can be too late to stop what holds a migration in its phase. A row is repeated then.
const ATTEMPTS: usize = 6;

/// A step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum During {
    Pending,
    Scheduling,
    PreparingTarget,
    TargetReady,
    /// Data flows slowly.
    Running,
    /// The source's QEMU has ended.
    Switchover,
    /// The guest has left before its memory.
    PostCopy,
    /// The VMI is the target's.
    Moved,
}

const PHASES: &[Phase<During>] = &[
    Phase::new("Pending", Holder::Quota, During::Pending, |seen| {
        phase(seen) == "Pending" && condition(seen, "migrationRejectedByResourceQuota").is_some()
    }),
    Phase::new("Scheduling", Holder::Cordon, During::Scheduling, |seen| phase(seen) == "Scheduling"),
    Phase::new("PreparingTarget", Holder::TargetLibvirtd, During::PreparingTarget, |seen| {
        phase(seen) == "PreparingTarget"
    }),
    Phase::new("TargetReady", Holder::VirtHandler, During::TargetReady, |seen| phase(seen) == "TargetReady"),
    Phase::new("Running", Holder::Nothing, During::Running, |seen| phase(seen) == "Running"),
    Phase::new("Switchover", Holder::Nothing, During::Switchover, |seen| {
        ["Running", "Succeeded"].contains(&phase(seen))
    }),
    Phase::new("PostCopy", Holder::Nothing, During::PostCopy, |seen| {
        of_vmi(seen)["migrationUid"] == seen["metadata"]["uid"] && of_vmi(seen)["mode"] == "PostCopy"
    }),
    Phase::new("Moved", Holder::Nothing, During::Moved, |seen| {
        let (state, node) = (of_vmi(seen), &seen["vmi"]["status"]["nodeName"]);
        let is_at_target = state["targetNode"].is_string() && state["targetNode"] == *node;
        state["migrationUid"] == seen["metadata"]["uid"] && (is_at_target || state["completed"] == true)
    }),
];

/// Returns the phase of a migration.
fn phase(migration: &Value) -> &str {
    migration["status"]["phase"].as_str().unwrap_or_default()
}

/// Returns the state of a migration in its VMI.
fn of_vmi(migration: &Value) -> &Value {
    &migration["vmi"]["status"]["migrationState"]
}

/// Returns each phase with each victim that exists in it.
pub(crate) fn migration_rows(victims: &[Victim], exists: impl Fn(During, Victim) -> bool) -> Vec<Row<During>> {
    let mut rows = all(PHASES, victims);
    rows.retain(|row| exists(row.phase.change, row.victim));
    rows
}

/// State of the guest beside its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Has {
    Nothing,
    /// The disk of [`prepare`].
    Disk,
    /// A TPM and UEFI with the state of [`write_state`](crate::state::write_state), and a further variable in each row.
    State,
}

/// Runs rows between two nodes, each with the policy for its phase.
pub(crate) async fn run_migrations(
    s: &Story,
    nodes: &[String; 2],
    rows: Vec<Row<During>>,
    has: Has,
    policy: impl Fn(During) -> Value,
) -> Result<()> {
    let mut faults = Migrations { migration: String::new(), has, seen: None, variables: 0, handlers: vec![] };
    let count = rows.len();
    for (number, row) in (1..).zip(rows) {
        let mut attempts = 0;
        while !faults.run(s, nodes, row, policy(row.phase.change)).await.with_context(|| row.to_string())? {
            attempts += 1;
            ensure!(attempts < ATTEMPTS, "{row}: missed {attempts} times");
        }
        if has == Has::State && (row.phase.change == During::Switchover || number == count) {
            faults.starts_with_state(s).await.with_context(|| format!("start after {row}"))?;
        }
    }
    Ok(())
}

struct Migrations {
    /// Name of the last one.
    migration: String,
    has: Has,
    /// The witness, and the number of its records on the disk.
    seen: Option<(Witness, u64)>,
    /// Number of the variables of UEFI that the rows have made. The last one has it as its name.
    variables: usize,
    /// Restarts of virt-handlers before a node is lost.
    handlers: Vec<(Option<String>, i32)>,
}

impl Migrations {
    async fn run(&mut self, s: &Story, nodes: &[String; 2], row: Row<During>, policy: Value) -> Result<bool> {
        let source = s.node_of(GUEST).await?;
        let name = nodes.iter().find(|node| **node != source).context("no other node")?;
        let [source, target] = [s.enter_node(&source).await?, s.enter_node(name).await?];
        let outcome =
            with_policy(s, policy, async |_| run_row(&Ends::of(s, &source, &target, name).await?, self, row).await)
                .await;
        source.leave().await?;
        target.leave().await?;
        outcome
    }

    /// Returns the name of the last variable of UEFI.
    fn variable(&self) -> String {
        format!("Kept{}", self.variables)
    }

    /// Starts the VM again, and checks its state. The firmware of a guest that has moved reads its memory: only another start shows that
    /// the claim has the variables.
    async fn starts_with_state(&self, s: &Story) -> Result<()> {
        restart(s, GUEST).await?;
        has_state(s, GUEST, &self.variable()).await
    }

    /// Waits until the target has given the guest up in post-copy, and another one runs.
    async fn lost_in_post_copy(&self, ends: &Ends<'_>, row: Row<During>, former: &Value) -> Result<()> {
        let s = ends.story;
        let mut within = MINUTES;
        if row.victim == Victim::Source(Process::Node) {
            let failed = s.wait("vmi", GUEST, "fail", MINUTES, |now| now["status"]["phase"] == "Failed").await?;
            let (uid, status) = (&failed["metadata"]["uid"], &failed["status"]);
            ensure!(*uid == former["metadata"]["uid"] && status["reason"] == "LostInPostCopy", "{uid} {status}");
            ensure!(status["migrationState"]["failed"] == true, "{}", status["migrationState"]);
            // Once the node is back and its pod is gone.
            within += Duration::from_secs(LOST_SECONDS);
        }
        started_again_within(s, former, within).await?;
        // The migration goes with its VMI.
        s.wait_gone("vmim", &self.migration, MINUTES).await?;
        one_lives(s, [ends.source, ends.target]).await?;
        if self.has == Has::Disk {
            let note = "modprobe -qa virtio_blk; head -c 1024 /dev/vda | tail -c 512 | tr -d '\\0'";
            // A copy of the former guest would have noted the other one.
            ensure!(!in_guest(s, note).await?.contains("overlap"), "two copies of the guest have written");
            prepare(s).await?;
        }
        in_guest(s, CHANGE_MEMORY).await.map(drop)
    }

    /// Waits until all virt-handlers are ready, and that of a lost node is started again.
    async fn handlers_are_ready(&self, s: &Story) -> Result<()> {
        let lost = if self.handlers.is_empty() { 0 } else { LOST_SECONDS };
        let deadline = Instant::now() + Duration::from_secs(lost) + MINUTES;
        loop {
            match virt_handlers::restarts(s).await {
                Ok(now) if now != self.handlers => return Ok(()),
                outcome => ensure!(Instant::now() < deadline, "virt-handlers are not ready again: {outcome:?}"),
            }
            sleep(Duration::from_millis(500)).await;
        }
    }
}

impl Faults for Migrations {
    type Change = During;

    async fn prepare(&mut self, s: &Story, row: Row<During>) -> Result<()> {
        let is_node = row.victim == Victim::Source(Process::Node);
        self.handlers = if is_node { virt_handlers::restarts(s).await? } else { vec![] };
        Ok(())
    }

    async fn change(&mut self, s: &Story, _: During) -> Result<()> {
        self.migration = begin(s, GUEST).await?;
        Ok(())
    }

    /// Returns the migration, with its VMI as a field.
    async fn state(&self, s: &Story) -> Result<Value> {
        let mut migration = s.get("vmim", &self.migration).await?;
        migration["vmi"] = s.get("vmi", GUEST).await?;
        Ok(migration)
    }

    fn is_missed(&self, row: Row<During>, state: &Value) -> Result<bool> {
        ensure!(!has_ended(state), "the kill missed: the migration is {}", state["status"]);
        Ok(match row.phase.change {
            During::PreparingTarget => ["TargetReady", "Running"].contains(&phase(state)),
            During::TargetReady => phase(state) == "Running",
            _ => false,
        })
    }

    async fn undo(&mut self, s: &Story) -> Result<()> {
        // This cancels a migration that runs.
        s.delete("vmim", &self.migration).await?;
        s.wait_gone("vmim", &self.migration, MINUTES).await?;
        alone(s, GUEST).await.map(drop)
    }

    async fn kill(&mut self, ends: &Ends<'_>, row: Row<During>, state: &Value) -> Result<bool> {
        if row.phase.change == During::Switchover {
            let process = match row.victim {
                Victim::Source(process @ (Process::Worker | Process::Libvirtd)) => Some(process),
                _ => None,
            };
            let is_killed = ends.kill_after_qemu(process).await?;
            let now = self.state(ends.story).await?;
            ensure!((row.phase.is_held)(&now), "the kill missed: the migration is {}", now["status"]);
            if process.is_some() {
                return Ok(is_killed);
            }
        }
        ends.kill(row.victim, state).await.map(|()| true)
    }

    fn check(&self, row: Row<During>, before: &Value, after: &Value) -> Result<()> {
        let (during, state) = (row.phase.change, of_vmi(after));
        eprintln!(
            "{row}, the migration was {} and is {}, the VMI is at {}, mode {}",
            phase(before),
            phase(after),
            after["vmi"]["status"]["nodeName"],
            state["mode"]
        );
        let is_post_copy = state["mode"] == "PostCopy";
        ensure!(is_post_copy || during != During::PostCopy, "the kill missed: {state}");
        ensure!(!is_post_copy || matches!(during, During::PostCopy | During::Moved), "the kill missed: {state}");
        if during == During::PostCopy {
            let is_same = after["vmi"]["metadata"]["uid"] == before["vmi"]["metadata"]["uid"];
            ensure!(is_same && state["completed"] != true, "the kill missed: {state}");
        }
        Ok(())
    }

    fn is_lost(&self, row: Row<During>) -> bool {
        row.kills_guest()
            || row.phase.change == During::PostCopy
            || (row.phase.change == During::Switchover && row.victim == Victim::Target(Process::Qemu))
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<During>, former: &Value) -> Result<()> {
        let s = ends.story;
        if row.phase.change == During::PostCopy {
            return self.lost_in_post_copy(ends, row, former).await;
        }
        if row.victim == Victim::Source(Process::Node) {
            self.handlers_are_ready(s).await?;
        }
        let migration = ended(s, &self.migration).await?;
        let phase = phase(&migration);
        let is_fatal = row.kills_guest() || row.victim == Victim::TargetPod;
        ensure!(phase == "Failed" || !is_fatal, "the migration has {phase}");
        if self.is_lost(row) {
            started_again(s, former).await?;
        } else {
            let vmi = s.get("vmi", GUEST).await?;
            ensure!(vmi["metadata"]["uid"] == former["metadata"]["uid"], "the VMI was recreated");
            ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
            let node = &vmi["status"]["nodeName"];
            let has_left = *node != former["status"]["nodeName"];
            ensure!(has_left == (phase == "Succeeded"), "it is at {node}, and the migration: {}", migration["status"]);
        }
        one_lives(s, [ends.source, ends.target]).await?;
        match self.has {
            Has::Disk if self.is_lost(row) => prepare(s).await?,
            Has::State => has_state(s, GUEST, &self.variable()).await?,
            Has::Disk | Has::Nothing => {}
        }
        let unmarked = |vmi: &Value| vmi["metadata"]["labels"]["kubevirt.io/migrationTargetNodeName"].is_null();
        s.wait("vmi", GUEST, "have no target", MINUTES, unmarked).await?;
        let left = s.list("vmim", "").await?;
        let open: Vec<_> = left.iter().filter(|one| !has_ended(one)).map(|one| &one["metadata"]["name"]).collect();
        ensure!(open.is_empty(), "migrations that have not ended: {open:?}");
        // The next row needs all virt-handlers.
        self.handlers_are_ready(s).await?;
        // Pause and resume reach the guest.
        virt_handlers::serves(s, GUEST).await
    }

    async fn look(&mut self, guest: &mut Console) -> Result<()> {
        match self.has {
            Has::Nothing => {}
            Has::Disk => self.seen = Some((Witness::look(guest).await?, written(guest, 0).await?)),
            Has::State => {
                self.variables += 1;
                write_variable(guest, &self.variable()).await?;
            }
        }
        Ok(())
    }

    async fn goes_on(&mut self, guest: &mut Console) -> Result<()> {
        if let Some((witness, records)) = &self.seen {
            Witness::goes_on(guest, witness).await?;
            written(guest, *records).await?;
        }
        Ok(())
    }
}

/// Starts the witnesses in a new guest, which has a disk.
pub(crate) async fn prepare(s: &Story) -> Result<()> {
    let mut guest = console(s, GUEST).await?;
    run(&mut guest, "modprobe -qa virtio_blk; true").await?;
    Witness::start(&mut guest).await?;
    write_alone(&mut guest, "/dev/vda").await?;
    guest.leave().await
}

/// Waits until one pod and one QEMU of the VMI are left on these nodes, at the node of the VMI.
async fn one_lives(s: &Story, nodes: [&Node; 2]) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let pod = alone(s, GUEST).await?;
        let vmi = s.get("vmi", GUEST).await?;
        let mut found = vec![];
        for (number, node) in nodes.into_iter().enumerate() {
            for pod in s.launcher_pods(&vmi).await? {
                let lives = node.run(&living("qemu-system-x86_64", &uid(&pod)?)).await?;
                found.extend(lives.lines().map(|_| (number, pod["metadata"]["uid"].clone())));
            }
        }
        let is_one = matches!(found.as_slice(), [(_, of)] if *of == pod["metadata"]["uid"]);
        if is_one && pod["spec"]["nodeName"] == vmi["status"]["nodeName"] {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "QEMU lives {} times: {found:?}", found.len());
        sleep(Duration::from_millis(500)).await;
    }
}
