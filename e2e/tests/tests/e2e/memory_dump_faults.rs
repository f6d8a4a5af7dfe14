//! Faults while the memory of a guest is written to a claim: see [`kills`](crate::kills). The dump is complete in the end.

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, storage::Storage, story_alone};
use serde_json::Value;

use crate::{
    kills::{Ends, Faults, GUEST, Holder, MINUTES, Phase, Row, VICTIMS_OF_ATTACHMENTS, run_at, started_again, table},
    memory_dump::{NAME, claim, request, vm},
};

const PHASES: &[Phase<()>] = &[
    // The claim is attached to the node.
    Phase::new("Attach", Holder::VirtHandler, (), |vmi| is_in(vmi, "AttachedToNode")),
    // The launcher is to write the dump.
    Phase::new("Dump", Holder::Libvirtd, (), |vmi| is_in(vmi, "MemoryDumpInProgress")),
];

fn is_in(vmi: &Value, phase: &str) -> bool {
    let entries = vmi["status"]["volumeStatus"].as_array();
    entries.into_iter().flatten().any(|entry| entry["name"] == NAME && entry["phase"] == phase)
}

#[test]
fn memory_is_written_whatever_is_killed_meanwhile() {
    story_alone("memory-dump-faults", async |s| {
        let storage = Storage::for_claim(s, NAME, &claim()["spec"]).await?;
        let rows = async |storage: &Storage| {
            s.apply(&claim().to_string()).await?;
            s.apply(&vm(GUEST, storage)).await?;
            s.wait_running(GUEST).await?;
            run_at(s, &storage.node, table(PHASES, VICTIMS_OF_ATTACHMENTS)?, &mut Dumps::default()).await
        };
        storage.lend(s, rows).await
    });
}

#[derive(Default)]
struct Dumps {
    /// The file of the last complete dump.
    former: String,
}

impl Faults for Dumps {
    type Change = ();

    async fn change(&mut self, s: &Story, (): ()) -> Result<()> {
        s.virt(&["memory-dump", "get", GUEST, &format!("--claim-name={NAME}")]).await.map(drop)
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<()>, former: &Value) -> Result<()> {
        let s = ends.story;
        if row.kills_guest() {
            // The memory is gone, and the VM says so. The next dump is one of the new guest.
            started_again(s, former).await?;
            s.wait("vm", GUEST, "have a failed memory dump", MINUTES, |vm| request(vm)["phase"] == "Failed").await?;
            self.change(s, ()).await?;
        }
        let is_done =
            |vm: &Value| request(vm)["phase"] == "Completed" && request(vm)["fileName"] != self.former.as_str();
        let vm = s.wait("vm", GUEST, "have a memory dump", MINUTES, is_done).await?;
        self.former = request(&vm)["fileName"].as_str().context("a dump without a file")?.to_owned();
        Ok(())
    }
}
