//! A database that is written all the time is consistent in each snapshot that freezes its guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, story_large};
use serde_json::{Value, json};

use crate::{
    cve_guest_agent::start_agent,
    data_volumes::{MINUTES, with_driver},
    guest_agent::{BOOT, is_connected},
    hotplug::run,
    manifests,
    moves::is_long,
};

/// Snapshots, and those of `make test-long`.
const REPETITIONS: u32 = 2;
const MANY: u32 = 20;
const CLAIM: &str = "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {storageClassName: csi, accessModes: [ReadWriteOnce], volumeMode: Block, resources: {requests: {storage: 256Mi}}}
";
const SEED: &str = "          - {name: seed, disk: {bus: virtio}}\n";
const MAKE: &str =
    "mkfs.ext4 -q /dev/disk/by-id/virtio-DATA && mkdir -p /data && mount /dev/disk/by-id/virtio-DATA /data";
/// Adds a row and counts it, in one transaction, again and again. The file `committed` has the last row that is on the disk.
const WRITER: &str = "#!/bin/sh
exec python3 -c \"
import os, sqlite3
base = sqlite3.connect('/data/base.db', isolation_level=None)
base.execute('pragma journal_mode=wal')
base.execute('pragma synchronous=full')
base.execute('create table numbers (id integer primary key, text blob)')
base.execute('create table total (number integer)')
base.execute('insert into total values (0)')
number = 0
while True:
    number += 1
    base.execute('begin immediate')
    base.execute('insert into numbers values (?, randomblob(200))', (number,))
    base.execute('update total set number = number + 1')
    base.execute('commit')
    with open('/run/committed.new', 'w') as file:
        file.write(str(number))
    os.rename('/run/committed.new', '/run/committed')
\"
";
/// Prints the result of SQLite's check, the number of rows, the last one and the count.
const CHECK: &str = "mkdir -p /data && mount /dev/disk/by-id/virtio-DATA /data && python3 -c \"import sqlite3; \
     base = sqlite3.connect('/data/base.db'); one = lambda text: base.execute(text).fetchone()[0]; \
     print(one('pragma integrity_check'), one('select count(*) from numbers'), one('select max(id) from numbers'), \
     one('select number from total'))\"";

#[test]
fn database_is_whole_in_each_snapshot_of_a_guest_that_writes_it() {
    story_large("database", async |s| {
        with_driver(s, async |s| {
            let outcome = written(s).await;
            // A story that failed shows its objects first.
            outcome.and(remove(s).await)
        })
        .await
    });
}

/// A snapshot, and the last row that was committed before and after.
struct Snapshot {
    name: String,
    rows: (u64, u64),
}

async fn written(s: &Story) -> Result<()> {
    s.apply(CLAIM).await?;
    let vm = manifests::debian("deb", "none")
        .replace(SEED, &format!("{SEED}          - {{name: data, serial: DATA, disk: {{bus: virtio}}}}\n"))
        .replace(
            "      volumes:\n",
            "      volumes:\n      - {name: data, persistentVolumeClaim: {claimName: data}}\n",
        );
    s.apply(&vm).await?;
    s.wait("vmi", "deb", "connect its guest agent", BOOT, is_connected).await?;
    let mut console = s.console("deb")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, MAKE).await?;
    start_agent(&mut console, WRITER).await?;
    let mut snapshots = Vec::new();
    for number in 0..if is_long() { MANY } else { REPETITIONS } {
        let name = format!("online-{number}");
        let before = committed(&mut console, snapshots.last().map_or(0, |last: &Snapshot| last.rows.1)).await?;
        take(s, &name).await?;
        let after = committed(&mut console, before).await?;
        eprintln!("{name}: rows {before} to {after}");
        snapshots.push(Snapshot { name, rows: (before, after) });
    }
    console.leave().await?;
    s.virt(&["stop", "deb", "--force", "--grace-period", "0"]).await?;
    s.wait_gone("vmi", "deb", MINUTES).await?;
    for snapshot in &snapshots {
        restored(s, snapshot).await.with_context(|| format!("snapshot {}", snapshot.name))?;
    }
    Ok(())
}

/// Waits until the guest has committed more than these rows, and returns their number.
async fn committed(console: &mut Console, before: u64) -> Result<u64> {
    let wait = format!(
        "for i in $(seq 200); do n=$(cat /run/committed 2>/dev/null); [ \"${{n:-0}}\" -gt {before} ] && break; sleep 0.2; done; \
         cat /run/committed /tmp/message"
    );
    let seen = run(console, &wait).await?;
    let number = seen.lines().rev().find_map(|line| line.trim().parse::<u64>().ok());
    let number = number.with_context(|| format!("the writer shows {seen:?}"))?;
    ensure!(number > before, "the guest has committed nothing since row {before}");
    Ok(number)
}

/// Takes a snapshot while the guest is frozen.
async fn take(s: &Story, name: &str) -> Result<()> {
    let source = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "deb"});
    let snapshot = json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshot", "metadata": {"name": name},
        "spec": {"source": source},
    });
    s.apply(&snapshot.to_string()).await?;
    let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
    let ready = s.wait("VirtualMachineSnapshot", name, "be ready", MINUTES, is_ready).await?;
    let indications = &ready["status"]["indications"];
    ensure!(*indications == json!(["GuestAgent", "Online"]), "{name}: {indications}");
    Ok(())
}

/// Restores a snapshot to a new VM, and checks the database in its guest.
async fn restored(s: &Story, snapshot: &Snapshot) -> Result<()> {
    let vm = format!("of-{}", snapshot.name);
    s.virt(&["restore", &vm, &snapshot.name, "--wait", "--timeout=300"]).await?;
    s.virt(&["start", &vm]).await?;
    s.wait_running(&vm).await?;
    let mut console = s.console(&vm)?;
    console.login("root", "ferrovirt").await?;
    let seen = run(&mut console, CHECK).await?;
    console.leave().await?;
    // Messages of the boot may follow.
    let found = seen.lines().find(|line| line.starts_with("ok "));
    let words: Vec<&str> = found.unwrap_or_default().split_whitespace().collect();
    let ["ok", count, last, total] = words.as_slice() else { anyhow::bail!("the database of {vm}: {seen:?}") };
    let last: u64 = last.parse()?;
    // One row more can be on the disk before the writer notes it.
    let (before, after) = (snapshot.rows.0, snapshot.rows.1 + 1);
    ensure!(count == total && count.parse::<u64>()? == last, "{vm}: {seen:?}");
    ensure!((before..=after).contains(&last), "{vm} has {last} rows, the guest had {before} to {after}");
    s.virt(&["stop", &vm, "--force", "--grace-period", "0"]).await?;
    s.delete("vm", &vm).await?;
    s.wait_gone("vm", &vm, Duration::from_secs(120)).await
}

/// Deletes the snapshots and the records of the restores.
async fn remove(s: &Story) -> Result<()> {
    for kind in ["VirtualMachineRestore", "VirtualMachineSnapshot"] {
        for object in s.list(kind, "").await? {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            s.delete(kind, name).await?;
            s.wait_gone(kind, name, MINUTES).await?;
        }
    }
    Ok(())
}
