//! Faults while the memory of a guest is saved: see [`kills`](crate::kills). The guest continues in the end.

use anyhow::Result;
use ferrovirt_e2e_tests::{Story, storage::Storage, story_alone};
use serde_json::{Value, json};

use crate::{
    hibernate::{hibernation, wait_over},
    kills::{Ends, Faults, GUEST, Holder, MINUTES, Phase, Row, VICTIMS_OF_ATTACHMENTS, run_at, started_again, table},
    memory_dump::vm,
};

/// Claim and volume.
const NAME: &str = "memory";

const PHASES: &[Phase<()>] = &[
    // The claim is attached to the node.
    Phase::new("Attach", Holder::VirtHandler, (), |vmi| is_in(vmi, "AttachedToNode")),
    // The launcher is to save the memory.
    Phase::new("Save", Holder::Libvirtd, (), |vmi| {
        vmi["status"]["hibernation"]["phase"] == "Saving" && is_in(vmi, "MountedToPod")
    }),
];

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
            run_at(s, &storage.node, table(PHASES, VICTIMS_OF_ATTACHMENTS)?, &mut Hibernations).await
        };
        storage.lend(s, rows).await
    });
}

struct Hibernations;

impl Faults for Hibernations {
    type Change = ();

    async fn change(&mut self, s: &Story, (): ()) -> Result<()> {
        s.virt(&["hibernate", GUEST, &format!("--claim={NAME}")]).await.map(drop)
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<()>, former: &Value) -> Result<()> {
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
