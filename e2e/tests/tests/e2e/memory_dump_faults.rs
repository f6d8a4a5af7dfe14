//! Processes that are killed while the memory of a guest is written to a claim: see [`kills`](crate::kills).
//!
//! The dump is complete in the end.

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{
    Story,
    storage::{Storage, delete_vmis_after},
    story_alone,
};
use serde_json::Value;

use crate::{
    kills::{GUEST, Holder, Kills, MINUTES, Victim, table, vmi_uid},
    memory_dump::{NAME, claim, request, vm},
};

/// The phase in which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// virt-handler is stopped: the claim is attached to the node.
    Attach,
    /// libvirtd is stopped: the launcher is to write the dump.
    Dump,
}

const DURING: [During; 2] = [During::Attach, During::Dump];
const VICTIMS: [Victim; 7] = [
    Victim::VirtHandler,
    Victim::Worker,
    Victim::Libvirtd,
    Victim::AttachmentPod,
    Victim::ControllerLeader,
    Victim::Kubelet,
    Victim::Qemu,
];

impl During {
    /// Returns the process that is stopped, and the phase in which the volume stays.
    const fn held(self) -> (Holder, &'static str) {
        match self {
            Self::Attach => (Holder::VirtHandler, "AttachedToNode"),
            Self::Dump => (Holder::Libvirtd, "MemoryDumpInProgress"),
        }
    }
}

#[test]
fn memory_is_written_whatever_is_killed_meanwhile() {
    story_alone("memory-dump-faults", async |s| {
        let storage = Storage::for_claim(s, NAME, &claim()["spec"]).await?;
        let outcome = rows(s, &storage).await;
        let gone = delete_vmis_after(s, &outcome).await;
        storage.remove(s).await?;
        outcome.and(gone)
    });
}

async fn rows(s: &Story, storage: &Storage) -> Result<()> {
    s.apply(&claim().to_string()).await?;
    s.apply(&vm(GUEST, storage)).await?;
    s.wait_running(GUEST).await?;
    let node = s.enter_node(&storage.node).await?;
    let kills = Kills { story: s, node: &node };
    let mut former = String::new();
    let row = async |during, victim| row(&kills, during, victim, &mut former).await;
    let outcome = kills.rows(&table(&DURING, &VICTIMS)?, row).await;
    node.leave().await?;
    outcome
}

/// Kills a process during a dump. `former`: the file of the last complete dump.
async fn row(kills: &Kills<'_>, during: During, victim: Victim, former: &mut String) -> Result<()> {
    let s = kills.story;
    let (holder, phase) = during.held();
    let uid = vmi_uid(s).await?;
    let ask = async || s.virt(&["memory-dump", "get", GUEST, &format!("--claim-name={NAME}")]).await.map(drop);
    kills.during(&format!("{during:?}"), Some(holder), victim, ask, |vmi| entry(vmi)["phase"] == phase).await?;
    if victim == Victim::Qemu {
        // The memory is gone, and the VM says so. The next dump is one of the new guest.
        kills.started_again(&uid).await?;
        s.wait("vm", GUEST, "have a failed memory dump", MINUTES, |vm| request(vm)["phase"] == "Failed").await?;
        ask().await?;
    }
    let is_done = |vm: &Value| request(vm)["phase"] == "Completed" && request(vm)["fileName"] != former.as_str();
    let vm = s.wait("vm", GUEST, "have a memory dump", MINUTES, is_done).await?;
    *former = request(&vm)["fileName"].as_str().context("a dump without a file")?.to_owned();
    Ok(())
}

fn entry(vmi: &Value) -> &Value {
    let entries = vmi["status"]["volumeStatus"].as_array();
    entries.into_iter().flatten().find(|entry| entry["name"] == NAME).unwrap_or(&Value::Null)
}
