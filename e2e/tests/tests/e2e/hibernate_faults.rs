//! Faults while the memory of a guest is saved: see [`kills`](crate::kills). The guest continues in the end.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, storage::Storage, story_alone};
use serde_json::{Value, json};

use crate::{
    hibernate::{hibernation, wait_over},
    kills::{
        Ends, Faults, GUEST, Holder, MINUTES, Phase, Process, Row, VICTIMS_OF_ATTACHMENTS, Victim, all, run_at,
        started_again,
    },
    memory_dump::vm,
    rows::chosen,
};

/// Claim and volume.
const NAME: &str = "memory";
/// A sample has every so many rows of the table.
const SAMPLE: usize = 5;

/// A step of a hibernation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// The claim is attached to the node.
    Attach,
    /// The launcher is to save the memory.
    Save,
    /// The file is complete, and QEMU has ended. libvirt has not said why.
    End,
}

const PHASES: &[Phase<During>] = &[
    Phase::new("Attach", Holder::VirtHandler, During::Attach, |vmi| is_in(vmi, "AttachedToNode")),
    Phase::new("Save", Holder::Libvirtd, During::Save, is_saving),
    Phase::new("End", Holder::Nothing, During::End, is_saving),
];

fn is_saving(vmi: &Value) -> bool {
    vmi["status"]["hibernation"]["phase"] == "Saving" && is_in(vmi, "MountedToPod")
}

/// Returns each phase with each victim whose end can concern it.
fn rows() -> Vec<Row<During>> {
    let mut rows = all(PHASES, VICTIMS_OF_ATTACHMENTS);
    rows.retain(|row| row.phase.change != During::End || process(row).is_some());
    rows
}

/// Returns the process that is killed at the end of QEMU.
fn process(row: &Row<During>) -> Option<Process> {
    match row.victim {
        Victim::Source(process @ (Process::Worker | Process::Libvirtd)) => Some(process),
        _ => None,
    }
}

#[test]
fn table_has_sixteen_rows() {
    assert_eq!(rows().len(), 16);
}

fn is_in(vmi: &Value, phase: &str) -> bool {
    let entries = vmi["status"]["volumeStatus"].as_array();
    entries.into_iter().flatten().any(|entry| entry["name"] == NAME && entry["phase"] == phase)
}

fn claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": NAME},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}

#[test]
fn guest_continues_whatever_is_killed_while_it_is_saved() {
    story_alone("hibernate-faults", async |s| {
        let storage = Storage::for_claim(s, NAME, &claim()["spec"]).await?;
        let rows = async |storage: &Storage| {
            s.apply(&claim().to_string()).await?;
            s.apply(&vm(GUEST, storage)).await?;
            s.wait_running(GUEST).await?;
            run_at(s, &storage.node, chosen(rows(), SAMPLE)?, &mut Hibernations).await
        };
        storage.lend(s, rows).await
    });
}

struct Hibernations;

impl Faults for Hibernations {
    type Change = During;

    async fn change(&mut self, s: &Story, _: During) -> Result<()> {
        s.virt(&["hibernate", GUEST, &format!("--claim={NAME}")]).await.map(drop)
    }

    async fn kill(&mut self, ends: &Ends<'_>, row: Row<During>, state: &Value) -> Result<bool> {
        match row.phase.change {
            During::End => ends.kill_after_qemu(process(&row)).await,
            During::Attach | During::Save => ends.kill(row.victim, state).await.map(|()| true),
        }
    }

    fn check(&self, row: Row<During>, _: &Value, after: &Value) -> Result<()> {
        eprintln!("{row}, the memory is {}", after["status"]["hibernation"]["phase"]);
        // The kill has followed the end of QEMU at once.
        let may_leave = row.phase.change == During::End || row.may_leave();
        ensure!(may_leave || row.is_held(after), "the kill missed");
        Ok(())
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<During>, former: &Value) -> Result<()> {
        let s = ends.story;
        if row.kills_guest() {
            // The memory is gone, and the VM says so.
            started_again(s, former).await?;
            s.wait("vm", GUEST, "fail to hibernate", MINUTES, |vm| hibernation(vm)["phase"] == "Failed").await?;
            return Ok(());
        }
        s.wait("vm", GUEST, "be hibernated", MINUTES, |vm| hibernation(vm)["phase"] == "Hibernated").await?;
        s.wait_gone("vmi", GUEST, MINUTES).await?;
        s.virt(&["start", GUEST]).await?;
        s.wait_running(GUEST).await?;
        wait_over(s, GUEST).await
    }
}
