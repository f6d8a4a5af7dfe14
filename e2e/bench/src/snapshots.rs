//! Measures the longest stall of a guest's writes by an online snapshot, against a freeze and thaw by virsh in the launcher pod of the same
//! guest. The guest is Debian with its guest agent; it writes and syncs one byte of a file system on a claim every 10 ms.
//!
//! Both stalls begin and end in the guest, so that the time of the guest agent under emulation is in both. The storage takes its snapshot
//! within the freeze: the floor of the stall is a freeze and thaw, and the time of a VolumeSnapshot of the claim, which is measured while
//! the guest is not frozen.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, is_true, own_cluster};
use serde_json::Value;
use tokio::time::Instant;

use crate::{Figures, add_medians};

/// Rounds of each kind: the guest takes minutes to boot, a snapshot seconds.
const ROUNDS: usize = 5;
/// Time limit of the boot of a distribution under emulation.
const BOOT: Duration = Duration::from_secs(900);
const MINUTES: Duration = Duration::from_secs(180);
const SNAPSHOT: &str = "VirtualMachineSnapshot";
/// Time between two reads of a VolumeSnapshot and its content.
const POLL: Duration = Duration::from_millis(10);

const VM: &str = "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteOnce], volumeMode: Block, resources: {requests: {storage: 64Mi}}}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: writer}
spec:
  runStrategy: Always
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {guest: 512Mi}
        devices:
          disks:
          - {name: root, disk: {bus: virtio}}
          - {name: data, serial: DATA, disk: {bus: virtio}}
      volumes:
      - {name: root, containerDisk: {image: 'ferrovirt.io/guests/debian:devel', imagePullPolicy: IfNotPresent}}
      - {name: data, persistentVolumeClaim: {claimName: data}}
";

const PREPARE: &str =
    "mkdir -p /data; mkfs.ext4 -q /dev/disk/by-id/virtio-DATA && mount /dev/disk/by-id/virtio-DATA /data";
/// Writes until the file `stop` exists, and then the longest time between two writes to the file `most`.
const WRITER: &str = "rm -f /run/stop /run/most; cat >/run/writer.py <<'END'
import os, time
file, last, most = os.open('/data/file', os.O_CREAT | os.O_WRONLY), time.monotonic(), 0.0
while not os.path.exists('/run/stop'):
    os.pwrite(file, b'x', 0)
    os.fsync(file)
    now = time.monotonic()
    most, last = max(most, now - last), now
    time.sleep(0.01)
with open('/run/most.part', 'w') as out:
    out.write(f'{most:.3f}')
os.rename('/run/most.part', '/run/most')
END
(python3 /run/writer.py &) >/dev/null 2>&1; sleep 2";
const STALL: &str = "touch /run/stop; while [ ! -e /run/most ]; do sleep 0.1; done; cat /run/most";

/// Measures both and reports the medians. Does nothing on other clusters than the test cluster, whose default class has snapshots.
pub(crate) async fn measure(s: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    if own_cluster()?.is_none() {
        return Ok(());
    }
    let measured = measure_all(s, rounds.min(ROUNDS), figures).await;
    for kind in [SNAPSHOT, "VolumeSnapshot", "vm", "PersistentVolumeClaim"] {
        s.api(kind).delete_collection(&Default::default(), &Default::default()).await?;
    }
    measured
}

async fn measure_all(s: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    s.apply(VM).await?;
    s.wait("vmi", "writer", "connect its guest agent", BOOT, |vmi| is_true(vmi, "AgentConnected")).await?;
    let mut console = s.console("writer")?;
    console.login("root", "ferrovirt").await?;
    console.output(PREPARE).await?;
    let (mut plain, mut snapshots, mut volumes) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        volumes.push(volume_snapshot(s, &format!("volume-{round}")).await?);
        console.output(WRITER).await?;
        freeze_and_thaw(s).await?;
        plain.push(stall(&mut console).await?);
        console.output(WRITER).await?;
        snapshot(s, &format!("round-{round}")).await?;
        snapshots.push(stall(&mut console).await?);
    }
    console.leave().await?;
    let measured = [("freeze_and_thaw_stall_s", plain), ("snapshot_stall_s", snapshots), ("csi_snapshot_s", volumes)];
    add_medians(figures, measured)
}

async fn stall(console: &mut Console) -> Result<f64> {
    let found = console.output(STALL).await?;
    // The shell reports the end of the writer as well.
    let time = found.lines().find_map(|line| line.trim().parse().ok());
    time.with_context(|| format!("no time in {found:?}"))
}

/// Freezes and thaws the guest by libvirt alone.
async fn freeze_and_thaw(s: &Story) -> Result<()> {
    let pod = s.launcher_pod("writer").await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
    let domain = format!("{}_writer", s.namespace);
    let uri = "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock";
    let commands = format!("domfsfreeze {domain}; domfsthaw {domain}");
    let said = s.exec_in(pod, "compute", &["virsh", "-c", uri, &commands]).await?;
    ensure!(said.contains("Froze") && said.contains("Thawed"), "{said}");
    Ok(())
}

/// Takes a snapshot of the running guest.
async fn snapshot(s: &Story, name: &str) -> Result<()> {
    s.apply(&format!(
        "{{apiVersion: snapshot.kubevirt.io/v1beta1, kind: {SNAPSHOT}, metadata: {{name: {name}}}, \
         spec: {{source: {{apiGroup: kubevirt.io, kind: VirtualMachine, name: writer}}}}}}"
    ))
    .await?;
    let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
    let done = s.wait(SNAPSHOT, name, "be ready", MINUTES, is_ready).await?;
    let indications = done["status"]["indications"].to_string();
    ensure!(indications.contains("GuestAgent") && !indications.contains("NoGuestAgent"), "{indications}");
    s.delete(SNAPSHOT, name).await?;
    s.wait_gone(SNAPSHOT, name, MINUTES).await
}

/// Takes a VolumeSnapshot of the claim. Returns the seconds from its creation until its content is taken.
async fn volume_snapshot(s: &Story, name: &str) -> Result<f64> {
    let (snapshots, contents) = (s.api("VolumeSnapshot"), s.cluster_api("VolumeSnapshotContent"));
    let created = Instant::now();
    s.apply(&format!(
        "{{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {{name: {name}}}, \
         spec: {{source: {{persistentVolumeClaimName: data}}}}}}"
    ))
    .await?;
    loop {
        let snapshot = snapshots.get(name).await?;
        if let Some(content) = snapshot.data["status"]["boundVolumeSnapshotContentName"].as_str()
            && contents.get(content).await?.data["status"]["creationTime"].is_number()
        {
            break;
        }
        ensure!(created.elapsed() < MINUTES, "VolumeSnapshot {name} is not taken: {}", snapshot.data["status"]);
        tokio::time::sleep(POLL).await;
    }
    let time = created.elapsed().as_secs_f64();
    // external-snapshotter 8.7 forgets deletions before that (issue 1388 there).
    let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
    s.wait("VolumeSnapshot", name, "be ready", MINUTES, is_ready).await?;
    s.delete("VolumeSnapshot", name).await?;
    s.wait_gone("VolumeSnapshot", name, MINUTES).await?;
    Ok(time)
}
