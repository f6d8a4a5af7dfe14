//! Faults during a change of a running VMI.
//!
//! A row of a table is a phase of a change and a victim: the [`Holder`] keeps the change in its phase, the victim is killed, and the
//! change continues. A kill that missed the phase is a failure. The guest is the witness: it is restarted if QEMU was killed, and else
//! not. A feature has a table of phases and implements [`Faults`]; `docs/extending.md` shows an example.

mod migrations;
mod processes;

use std::fmt::{self, Display};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Node, Story};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep};

use self::{
    Process::{Kubelet, Libvirtd, Qemu, Swtpm, VirtHandler, Worker},
    Victim::{AttachmentPod, Leader, Source},
};
pub(crate) use self::{
    migrations::{During, Has, migration_rows, prepare, run_migrations},
    processes::{ATTACHMENT_POD, Ends, Holder, Process, Victim, kill_leader, one_pod, silence, stop_daemon},
};
use crate::{live_resize::run, moves::console, rows::chosen};

/// Time for a step of a change, under emulation and while a process of Kubernetes starts again.
pub(crate) const MINUTES: Duration = Duration::from_secs(300);
/// The VMI of the rows.
pub(crate) const GUEST: &str = "guest";
/// A sample has every so many rows of a table.
const SAMPLE: usize = 5;

/// Victims of a change on one node.
pub(crate) const VICTIMS: &[Victim] =
    &[Source(VirtHandler), Source(Worker), Source(Libvirtd), Leader, Source(Kubelet), Source(Qemu)];
/// Victims of a change with an attachment pod.
pub(crate) const VICTIMS_OF_ATTACHMENTS: &[Victim] =
    &[Source(VirtHandler), Source(Worker), Source(Libvirtd), AttachmentPod, Leader, Source(Kubelet), Source(Qemu)];

/// A phase of a change.
pub(crate) struct Phase<C> {
    name: &'static str,
    holder: Holder,
    pub(crate) change: C,
    /// Returns true for the state of the change while it is in the phase.
    is_held: fn(&Value) -> bool,
}

impl<C: Copy> Phase<C> {
    pub(crate) const fn new(name: &'static str, holder: Holder, change: C, is_held: fn(&Value) -> bool) -> Self {
        Self { name, holder, change, is_held }
    }
}

/// A victim that is killed in a phase.
#[derive(Clone, Copy)]
pub(crate) struct Row<C: 'static> {
    pub(crate) phase: &'static Phase<C>,
    pub(crate) victim: Victim,
}

impl<C: 'static> Row<C> {
    /// Returns true if the guest's own QEMU is killed, or what it needs.
    pub(crate) fn kills_guest(&self) -> bool {
        matches!(self.victim, Source(Qemu | Swtpm))
    }

    /// Returns true if the state is that of the phase.
    pub(crate) fn is_held(&self, state: &Value) -> bool {
        (self.phase.is_held)(state)
    }

    /// Returns true if the change may leave the phase with the kill: a killed process does not hold it any more. Without its pod, a volume
    /// that the guest does not have falls back to an earlier phase. Without QEMU the VMI ends.
    pub(crate) fn may_leave(&self) -> bool {
        self.phase.holder.is(self.victim) || self.victim == AttachmentPod || self.kills_guest()
    }
}

impl<C: 'static> Display for Row<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} killed during {}", self.victim, self.phase.name)
    }
}

/// Returns each phase with each victim.
pub(crate) fn all<C>(phases: &'static [Phase<C>], victims: &[Victim]) -> Vec<Row<C>> {
    phases.iter().flat_map(|phase| victims.iter().map(move |&victim| Row { phase, victim })).collect()
}

/// Returns the rows of [`all`] for this run.
pub(crate) fn table<C>(phases: &'static [Phase<C>], victims: &[Victim]) -> Result<Vec<Row<C>>> {
    chosen(all(phases, victims), SAMPLE)
}

/// A feature whose changes are disturbed.
pub(crate) trait Faults {
    type Change: Copy + 'static;

    /// Brings the guest into the state before the change.
    async fn prepare(&mut self, _s: &Story, _row: Row<Self::Change>) -> Result<()> {
        Ok(())
    }

    /// Begins the change.
    async fn change(&mut self, s: &Story, change: Self::Change) -> Result<()>;

    /// Returns the object that shows the phase: the VMI.
    async fn state(&self, s: &Story) -> Result<Value> {
        s.get("vmi", GUEST).await
    }

    /// Returns true if the change has left the phase before it was observed, so that the row is repeated.
    fn is_missed(&self, _row: Row<Self::Change>, _state: &Value) -> Result<bool> {
        Ok(false)
    }

    /// Takes a missed change back.
    async fn undo(&mut self, _s: &Story) -> Result<()> {
        Ok(())
    }

    /// Kills the victim. Returns false if it was missed.
    async fn kill(&mut self, ends: &Ends<'_>, row: Row<Self::Change>, state: &Value) -> Result<bool> {
        ends.kill(row.victim, state).await.map(|()| true)
    }

    /// Checks the state after the kill.
    fn check(&self, row: Row<Self::Change>, _before: &Value, after: &Value) -> Result<()> {
        let is_held = row.is_held(after);
        eprintln!("{row}, the change is {}", if is_held { "held" } else { "under way" });
        ensure!(is_held || row.may_leave(), "the kill missed");
        Ok(())
    }

    /// Waits for the end state, in which nothing is left of the fault. `former`: the VMI before the change.
    async fn end(&mut self, ends: &Ends<'_>, row: Row<Self::Change>, former: &Value) -> Result<()>;

    /// Returns true if another guest runs in the end.
    fn is_lost(&self, row: Row<Self::Change>) -> bool {
        row.kills_guest()
    }

    /// Looks at the guest before the change.
    async fn look(&mut self, _guest: &mut Console) -> Result<()> {
        Ok(())
    }

    /// Checks that the guest has gone on since the look.
    async fn goes_on(&mut self, _guest: &mut Console) -> Result<()> {
        Ok(())
    }
}

/// Runs rows on the node with this name one after another.
pub(crate) async fn run_at<F: Faults>(s: &Story, node: &str, rows: Vec<Row<F::Change>>, faults: &mut F) -> Result<()> {
    let node = s.enter_node(node).await?;
    let outcome = run_on(s, &node, rows, faults).await;
    node.leave().await?;
    outcome
}

/// Runs rows as [`run_at`] on a node that was entered.
pub(crate) async fn run_on<F: Faults>(s: &Story, node: &Node, rows: Vec<Row<F::Change>>, faults: &mut F) -> Result<()> {
    for row in rows {
        let outcome = async { run_row(&Ends::of(s, node, node, "").await?, faults, row).await };
        let is_hit = outcome.await.with_context(|| row.to_string())?;
        ensure!(is_hit, "{row}: the phase was missed");
    }
    Ok(())
}

/// Runs a row. Returns false if the phase was missed and nothing was killed.
async fn run_row<F: Faults>(ends: &Ends<'_>, faults: &mut F, row: Row<F::Change>) -> Result<bool> {
    let s = ends.story;
    let former = s.get("vmi", GUEST).await?;
    let mut guest = console(s, GUEST).await?;
    let boot = run(&mut guest, BOOT).await?;
    faults.look(&mut guest).await?;
    guest.leave().await?;
    faults.prepare(s, row).await?;
    let killed = killed(ends, faults, row).await;
    let victim = matches!(killed, Ok(true)).then_some(row.victim);
    let released = ends.release(row.phase.holder, victim).await;
    let is_killed = killed?;
    released?;
    if !is_killed {
        eprintln!("{row}: missed");
        faults.undo(s).await?;
        return Ok(false);
    }
    faults.end(ends, row, &former).await?;
    let mut guest = console(s, GUEST).await?;
    let (is_restarted, is_lost) = (run(&mut guest, BOOT).await? != boot, faults.is_lost(row));
    ensure!(is_restarted == is_lost, "the guest was restarted: {is_restarted}");
    if !is_lost {
        faults.goes_on(&mut guest).await?;
    }
    guest.leave().await?;
    Ok(true)
}

/// Begins the change, waits for its phase and kills the victim. Returns false if the phase was missed.
async fn killed<F: Faults>(ends: &Ends<'_>, faults: &mut F, row: Row<F::Change>) -> Result<bool> {
    let (s, phase) = (ends.story, row.phase);
    ends.hold(phase.holder).await?;
    faults.change(s, phase.change).await?;
    let deadline = Instant::now() + MINUTES;
    loop {
        let seen = faults.state(s).await?;
        if (phase.is_held)(&seen) {
            break;
        }
        if faults.is_missed(row, &seen)? {
            return Ok(false);
        }
        ensure!(Instant::now() < deadline, "it is not in the phase within {MINUTES:?}; status: {}", seen["status"]);
        sleep(Duration::from_millis(250)).await;
    }
    let before = faults.state(s).await?;
    ensure!((phase.is_held)(&before), "the kill missed; status: {}", before["status"]);
    let is_hit = faults.kill(ends, row, &before).await?;
    if is_hit {
        faults.check(row, &before, &faults.state(s).await?)?;
    }
    Ok(is_hit)
}

/// Shows the identifier that the guest's kernel generates at each boot.
const BOOT: &str = "cat /proc/sys/kernel/random/boot_id";

/// Waits until the VM has started a new VMI after the end of the former one.
pub(crate) async fn started_again(s: &Story, former: &Value) -> Result<()> {
    started_again_within(s, former, MINUTES).await
}

async fn started_again_within(s: &Story, former: &Value, within: Duration) -> Result<()> {
    let uid = &former["metadata"]["uid"];
    let is_new = |vmi: &Value| vmi["metadata"]["uid"] != *uid && vmi["status"]["phase"] == "Running";
    s.wait("vmi", GUEST, "be started again", within, is_new).await.map(drop)
}

/// Returns the UID of an object.
pub(crate) fn uid(object: &Value) -> Result<String> {
    object["metadata"]["uid"].as_str().map(str::to_owned).context("object without UID")
}

/// Runs a command that must succeed in the guest and returns its output.
pub(crate) async fn in_guest(s: &Story, command: &str) -> Result<String> {
    let mut guest = console(s, GUEST).await?;
    let output = run(&mut guest, command).await?;
    guest.leave().await?;
    Ok(output)
}
