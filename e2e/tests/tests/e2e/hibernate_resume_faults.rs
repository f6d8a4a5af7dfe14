//! Faults while a guest continues from its saved memory: see [`kills`](crate::kills). It goes on where it was, unless it was killed itself.
//! The guest writes its disk, and reads back what it has written before: disk and memory belong together.

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Console, Node, Story, story_alone};
use serde_json::{Value, json};

use crate::{
    data_volumes::{condition, kernel_vm, storage, with_driver},
    hibernate::{hibernation, wait_over},
    kills::{
        Ends, Faults, GUEST, Holder, MINUTES, Phase, Process, Row, Victim, all, prepare, run_at, started_again, uid,
    },
    moves::{alone, is_long},
    rows::chosen,
    witness::{Witness, written},
};

/// A sample has every so many rows of the table.
const SAMPLE: usize = 5;
const VICTIMS: &[Victim] = &[
    Victim::Source(Process::VirtHandler),
    Victim::Source(Process::Worker),
    Victim::Source(Process::Libvirtd),
    Victim::Leader,
    Victim::Source(Process::Qemu),
];
/// First bytes of a file with saved memory, and of one that is resumed.
const SAVED: &str = "LibvirtQemudSave";
const MARK: &str = "FerrovirtResumed";

/// A step of a resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// The launcher has the file, and libvirt does not restore it yet.
    Prepared,
    /// libvirt restores the memory: QEMU has started.
    Restoring,
    /// The file is marked, and the guest runs. The VMI does not show it yet.
    Marked,
}

const PHASES: &[Phase<During>] = &[
    Phase::new("Prepared", Holder::TargetLibvirtd, During::Prepared, |vmi| is_restoring(vmi, &[SAVED])),
    Phase::new("Restoring", Holder::NextQemu, During::Restoring, |vmi| is_restoring(vmi, &["qemu", SAVED])),
    Phase::new("Marked", Holder::VirtHandlerAtQemu, During::Marked, |vmi| is_restoring(vmi, &["qemu", MARK])),
];

/// Returns true if the VMI is to continue from saved memory, and these words are seen in its launcher pod.
fn is_restoring(vmi: &Value, words: &[&str]) -> bool {
    let seen = vmi["seen"].as_str().unwrap_or_default();
    vmi["status"]["hibernation"]["phase"] == "Restoring" && words.iter().all(|word| seen.contains(word))
}

/// Returns a script that prints `qemu` if it lives in a launcher pod, and the first bytes of the file with the memory.
fn look(pod: &str) -> String {
    format!(
        "for p in /proc/[0-9]*; do grep -qs -e '{pod}' $p/cgroup && case $(cat $p/comm 2>/dev/null) in \
           qemu-system-x86) echo qemu;; \
           virt-launcher-m) head -c 16 $p/root/run/kubevirt/hotplug-disks/*.img 2>/dev/null; echo;; \
         esac; done; true"
    )
}

/// Returns each phase with each victim that exists in it.
fn rows() -> Vec<Row<During>> {
    let mut rows = all(PHASES, VICTIMS);
    rows.retain(|row| row.phase.change != During::Prepared || !row.kills_guest());
    rows
}

#[test]
fn table_has_fourteen_rows() {
    assert_eq!(rows().len(), 14);
}

#[test]
fn guest_continues_or_says_why_not_whatever_is_killed_while_it_is_resumed() {
    story_alone("hibernate-resume-faults", async |s| {
        with_driver(s, async |s| {
            let blank = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Block", 16));
            s.apply(&kernel_vm(GUEST, "Always", &blank)).await?;
            s.wait_running(GUEST).await?;
            prepare(s).await?;
            let name = s.node_of(GUEST).await?;
            let mut faults = Resumes { node: s.enter_node(&name).await?, seen: None, resumed: Value::Null };
            // A resume is short: the other kills can miss their phase on a busy host.
            let is_held = |row: &Row<During>| {
                row.phase.change == During::Prepared && matches!(row.victim, Victim::Source(Process::Worker))
            };
            let rows = if is_long() { chosen(rows(), SAMPLE)? } else { rows().into_iter().filter(is_held).collect() };
            let outcome = run_at(s, &name, rows, &mut faults).await;
            faults.node.leave().await?;
            outcome?;
            s.delete("vm", GUEST).await
        })
        .await
    });
}

struct Resumes {
    node: Node,
    /// The witness, and the number of its records on the disk.
    seen: Option<(Witness, u64)>,
    /// The VMI whose resume was disturbed.
    resumed: Value,
}

impl Resumes {
    /// Returns what is seen in the launcher pod of a VMI; nothing before it runs.
    async fn seen(&self, s: &Story, vmi: &Value) -> Result<String> {
        let pods = s.launcher_pods(vmi).await?;
        let Some(pod) = pods.first() else { return Ok(String::new()) };
        self.node.run(&look(&uid(pod)?)).await
    }
}

/// Returns true if libvirt, which reads the memory, is killed before the guest has it.
fn ends_resume(row: Row<During>) -> bool {
    row.phase.change == During::Restoring && matches!(row.victim, Victim::Source(Process::Libvirtd))
}

/// Waits until the VM is hibernated after a resume that has failed.
async fn not_resumed(s: &Story) -> Result<()> {
    let has_failed = |vm: &Value| {
        hibernation(vm)["phase"] == "Hibernated" && condition(vm, "Hibernated")["reason"] == "ResumeFailed"
    };
    let vm = s.wait("vm", GUEST, "say that it was not resumed", MINUTES, has_failed).await?;
    eprintln!("not resumed: {}", condition(&vm, "Hibernated")["message"]);
    s.wait_gone("vmi", GUEST, MINUTES).await
}

impl Faults for Resumes {
    type Change = During;

    async fn look(&mut self, guest: &mut Console) -> Result<()> {
        self.seen = Some((Witness::look(guest).await?, written(guest, 0).await?));
        Ok(())
    }

    async fn prepare(&mut self, s: &Story, _: Row<During>) -> Result<()> {
        s.virt(&["hibernate", GUEST, "--wait"]).await?;
        s.wait_gone("vmi", GUEST, MINUTES).await
    }

    async fn change(&mut self, s: &Story, _: During) -> Result<()> {
        s.virt(&["start", GUEST]).await.map(drop)
    }

    /// Returns the VMI, with what is seen in its launcher pod as a field.
    async fn state(&self, s: &Story) -> Result<Value> {
        let mut vmi = s.list("vmi", "").await?.pop().unwrap_or_else(|| json!({}));
        if vmi["metadata"]["uid"].is_string() {
            vmi["seen"] = json!(self.seen(s, &vmi).await?);
        }
        Ok(vmi)
    }

    async fn kill(&mut self, ends: &Ends<'_>, row: Row<During>, state: &Value) -> Result<bool> {
        // The launcher pod is another one than before the hibernation.
        self.resumed = state.clone();
        let now = Ends::of(ends.story, ends.source, ends.target, ends.target_name).await?;
        now.kill(row.victim, state).await.map(|()| true)
    }

    fn is_lost(&self, row: Row<During>) -> bool {
        row.kills_guest() && row.phase.change == During::Marked
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<During>, _: &Value) -> Result<()> {
        let s = ends.story;
        if self.is_lost(row) {
            started_again(s, &self.resumed).await?;
        } else if row.kills_guest() || ends_resume(row) {
            not_resumed(s).await?;
            s.virt(&["start", GUEST]).await?;
        }
        let runs = |vmi: &Value| vmi["status"]["phase"] == "Running";
        s.wait("vmi", GUEST, "run", MINUTES, runs).await?;
        wait_over(s, GUEST).await?;
        alone(s, GUEST).await?;
        if self.is_lost(row) { prepare(s).await } else { Ok(()) }
    }

    async fn goes_on(&mut self, guest: &mut Console) -> Result<()> {
        let (witness, records) = self.seen.as_ref().context("the guest was not looked at")?;
        Witness::goes_on(guest, witness).await?;
        written(guest, *records).await.map(drop)
    }
}
