//! Storage that changes under a running guest.

use std::time::Duration;

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Story,
    storage::{Backing, Storage, on_host},
    story,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::manifests;

const MINUTES: Duration = Duration::from_secs(150);

#[test]
fn disk_grows_with_its_claim_and_a_full_file_system_halts_the_guest_until_there_is_space() {
    story("claims", async |s| {
        let storage = Storage::make(s, "data", Backing::Small).await?;
        storage.lend(s, async |storage| changes(s, storage).await).await
    });
}

async fn changes(s: &Story, storage: &Storage) -> Result<()> {
    s.apply(
        &manifests::kernel_vmi("guest")
            .replace("devices: {}\n", "devices: {disks: [{name: data, disk: {bus: virtio}}]}\n")
            .replace("spec:\n", "spec:\n  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]\n"),
    )
    .await?;
    s.wait_running("guest").await?;
    let mut console = s.console("guest")?;
    console.login("root", "ferrovirt").await?;
    let (size, _) = console.run("cat /sys/block/vda/size").await?;
    ensure!(size.trim() == "32768", "16 MiB were asked for, the disk has {size} sectors");

    // A larger request within the capacity: 30 of 32 MiB, the rest is the overhead of a file system.
    let more = json!({"spec": {"resources": {"requests": {"storage": "32Mi"}}}});
    s.api("PersistentVolumeClaim").patch("data", &PatchParams::default(), &Patch::Merge(more)).await?;
    let grown = "for i in $(seq 40); do [ $(cat /sys/block/vda/size) = 61440 ] && break; sleep 1; done; \
                 cat /sys/block/vda/size";
    let (size, _) = console.run(grown).await?;
    ensure!(size.trim() == "61440", "the disk has {size} sectors after its claim has grown");

    // The volume is filled, then the guest writes.
    let directory = &storage.directory;
    on_host(s, &storage.node, &format!("dd if=/dev/zero of={directory}/filler bs=1M 2>/dev/null; true")).await?;
    let write = "{ (sleep 1; dd if=/dev/zero of=/dev/vda bs=1M count=8 conv=fsync; echo code-$? >/tmp/written) \
                 >/dev/null 2>&1 & }";
    console.run(write).await?;
    console.leave().await?;
    let halted = s.wait("vmi", "guest", "stand still", MINUTES, |vmi| paused(vmi).is_some()).await?;
    let condition = paused(&halted).unwrap_or_default();
    ensure!(condition["reason"] == "PausedIOError", "{condition}");
    let message = s.wait_event("guest", "IOerror", MINUTES).await?;
    ensure!(message.contains("data"), "the event does not name the volume: {message:?}");

    // The guest resumes without a user.
    on_host(s, &storage.node, &format!("rm {directory}/filler")).await?;
    s.wait("vmi", "guest", "go on", MINUTES, |vmi| paused(vmi).is_none()).await?;
    let mut console = s.reopen_console("guest", "root", "ferrovirt").await?;
    let (written, _) =
        console.run("for i in $(seq 40); do test -s /tmp/written && break; sleep 1; done; cat /tmp/written").await?;
    ensure!(written.trim() == "code-0", "what the guest wrote meanwhile ended with {written:?}");
    console.leave().await
}

/// Returns the condition Paused, if present.
fn paused(vmi: &Value) -> Option<Value> {
    let mut conditions = vmi["status"]["conditions"].as_array()?.iter();
    conditions.find(|condition| condition["type"] == "Paused" && condition["status"] == "True").cloned()
}
