//! Snapshots of VMs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, story, story_large};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{
    data_volumes::{MINUTES, kernel_vm, storage, with_driver},
    guest_agent::{BOOT, is_connected},
    hotplug::run,
    manifests,
};

const KIND: &str = "VirtualMachineSnapshot";
/// Longest pause of the guest's writes: the limit of a freeze, and time for the guest agent under emulation.
const LONGEST_PAUSE: f64 = 90.0;

fn snapshot(name: &str, vm: &str, fields: &str) -> String {
    format!(
        "
apiVersion: snapshot.kubevirt.io/v1beta1
kind: VirtualMachineSnapshot
metadata: {{name: {name}}}
spec: {{source: {{apiGroup: kubevirt.io, kind: VirtualMachine, name: {vm}}}{fields}}}
"
    )
}

async fn wait_ready(s: &Story, name: &str) -> Result<Value> {
    s.wait(KIND, name, "be ready", MINUTES, |snapshot| snapshot["status"]["readyToUse"] == true).await
}

async fn wait_phase(s: &Story, name: &str, phase: &'static str) -> Result<Value> {
    let what = format!("be in phase {phase}");
    s.wait(KIND, name, &what, MINUTES, |snapshot| snapshot["status"]["phase"] == phase).await
}

/// Waits until no operation holds the VM.
async fn wait_free(s: &Story, vm: &str) -> Result<()> {
    let is_free = |vm: &Value| {
        let finalizers = vm["metadata"]["finalizers"].to_string();
        vm["status"]["operation"].is_null()
            && vm["status"]["snapshotInProgress"].is_null()
            && !finalizers.contains("snapshot-source-protection")
    };
    s.wait("vm", vm, "be free", MINUTES, is_free).await.map(drop)
}

async fn remove(s: &Story) -> Result<()> {
    for object in s.list(KIND, "").await? {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        s.delete(KIND, name).await?;
        s.wait_gone(KIND, name, MINUTES).await?;
    }
    // The content and its volume snapshots go with the snapshot.
    for object in s.list("VolumeSnapshot", "").await? {
        remind(s, &object).await?;
        s.wait_gone("VolumeSnapshot", object["metadata"]["name"].as_str().unwrap_or_default(), MINUTES).await?;
    }
    Ok(())
}

/// Changes the content of a volume snapshot that was deleted before it was ready. external-snapshotter 8.7 then forgets the
/// deletion until the content changes (issue 1388 there).
async fn remind(s: &Story, snapshot: &Value) -> Result<()> {
    let Some(content) = snapshot["status"]["boundVolumeSnapshotContentName"].as_str() else { return Ok(()) };
    let contents = s.cluster_api("VolumeSnapshotContent");
    let deadline = tokio::time::Instant::now() + MINUTES;
    while let Some(present) = contents.get_opt(content).await? {
        if present.data["status"]["readyToUse"] == true {
            let seen = json!({"metadata": {"annotations": {"test.ferrovirt.io/seen": "true"}}});
            let changed = contents.patch(content, &PatchParams::default(), &Patch::Merge(seen)).await;
            return match changed {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                changed => Ok(changed.map(drop)?),
            };
        }
        ensure!(tokio::time::Instant::now() < deadline, "{content} is not ready: {}", present.data["status"]);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

async fn with_snapshots(s: &Story, body: impl AsyncFnOnce(&Story) -> Result<()>) -> Result<()> {
    with_driver(s, async |s| {
        let outcome = body(s).await;
        outcome.and(remove(s).await)
    })
    .await
}

/// Runs with a storage class whose snapshots fail.
async fn with_faults(s: &Story, faults: &str, body: impl AsyncFnOnce(&str) -> Result<()>) -> Result<()> {
    let class = format!("{}-faults", s.namespace);
    let object = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": class},
        "provisioner": "csi.test.ferrovirt.io", "volumeBindingMode": "Immediate", "parameters": {"faults": faults},
    });
    s.cluster_api("StorageClass").create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    let outcome = body(&class).await;
    s.cluster_api("StorageClass").delete(&class, &DeleteParams::background()).await?;
    outcome
}

fn blank(class: &str) -> String {
    format!("source: {{blank: {{}}}}, storage: {}", storage(class, "Block", 16))
}

#[test]
fn vm_is_snapshotted_while_it_is_off_and_while_it_runs() {
    story("snapshot", async |s| with_snapshots(s, taken).await);
}

async fn taken(s: &Story) -> Result<()> {
    s.apply(&kernel_vm("box", "Manual", &blank("csi"))).await?;
    let is_supported = |vm: &Value| {
        let volumes = vm["status"]["volumeSnapshotStatuses"].as_array();
        volumes.into_iter().flatten().any(|volume| volume["enabled"] == true)
    };
    s.wait("vm", "box", "support snapshots", MINUTES, is_supported).await?;
    s.virt(&["start", "box"]).await?;
    s.wait_running("box").await?;
    let said = s.virt(&["snapshot", "box", "online", "--wait"]).await?;
    ensure!(said.contains("Snapshot online is ready") && said.contains("Guest agent was not available"), "{said}");
    let online = s.get(KIND, "online").await?;
    ensure!(online["status"]["indications"] == json!(["NoGuestAgent", "Online"]), "{}", online["status"]);
    wait_free(s, "box").await?;
    s.virt(&["stop", "box"]).await?;
    s.wait_gone("vmi", "box", MINUTES).await?;
    s.virt(&["snapshot", "box", "offline", "--wait"]).await?;
    let offline = s.get(KIND, "offline").await?;
    ensure!(offline["status"]["indications"].is_null(), "{}", offline["status"]);
    ensure!(offline["status"]["phase"] == "Succeeded", "{}", offline["status"]);
    let snapshots = s.list("VolumeSnapshot", "snapshot.kubevirt.io/source-vm-name=box").await?;
    ensure!(snapshots.len() == 2, "{snapshots:?}");
    wait_free(s, "box").await?;

    // A kept content has its volume snapshot after its snapshot.
    s.apply(&snapshot("kept", "box", ", deletionPolicy: Retain")).await?;
    let content = wait_ready(s, "kept").await?["status"]["virtualMachineSnapshotContentName"].clone();
    let content = content.as_str().context("a snapshot without content")?.to_owned();
    s.delete(KIND, "kept").await?;
    s.wait_gone(KIND, "kept", MINUTES).await?;
    s.get("VirtualMachineSnapshotContent", &content).await?;
    s.delete("VirtualMachineSnapshotContent", &content).await?;
    s.wait_gone("VirtualMachineSnapshotContent", &content, MINUTES).await
}

#[test]
fn one_operation_at_a_time_holds_a_vm_and_every_end_releases_it() {
    story("snapshot-lease", async |s| {
        with_snapshots(s, async |s| {
            with_faults(s, "snapshot=slow:20", async |class| held(s, class).await).await?;
            with_faults(s, "snapshot=refused", async |class| refused(s, class).await).await
        })
        .await
    });
}

async fn held(s: &Story, class: &str) -> Result<()> {
    s.apply(&kernel_vm("slow", "Manual", &blank(class))).await?;
    s.virt(&["start", "slow"]).await?;
    s.wait_running("slow").await?;
    s.apply(&snapshot("first", "slow", "")).await?;
    let is_held = |vm: &Value| vm["status"]["operation"]["name"] == "first";
    let vm = s.wait("vm", "slow", "be held", MINUTES, is_held).await?;
    ensure!(vm["status"]["snapshotInProgress"] == "first", "{}", vm["status"]);
    let strategy =
        s.kubectl(&["patch", "vm", "slow", "--type=merge", "-p", r#"{"spec":{"runStrategy":"Always"}}"#]).await;
    let text = strategy.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(text.contains("until snapshot \"first\" completes"), "{text}");
    s.apply(&snapshot("second", "slow", "")).await?;
    let waits =
        |snapshot: &Value| snapshot["status"]["conditions"].to_string().contains("snapshot \\\"first\\\" in progress");
    s.wait(KIND, "second", "name the holder", MINUTES, waits).await?;
    // Deletion does not wait for the storage.
    s.delete(KIND, "first").await?;
    s.wait_gone(KIND, "first", MINUTES).await?;
    wait_ready(s, "second").await?;
    wait_free(s, "slow").await?;
    s.delete("vm", "slow").await
}

async fn refused(s: &Story, class: &str) -> Result<()> {
    s.apply(&kernel_vm("poor", "Manual", &blank(class))).await?;
    let is_ready = |volume: &Value| volume["status"]["phase"] == "Succeeded";
    s.wait("DataVolume", "poor-root", "be filled", MINUTES, is_ready).await?;
    s.apply(&snapshot("failed", "poor", ", failureDeadline: 15s")).await?;
    let failed = wait_phase(s, "failed", "Failed").await?;
    ensure!(failed["status"]["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", failed["status"]);
    wait_free(s, "poor").await?;
    s.apply(&snapshot("at-once", "poor", ", failureDeadline: '-1s'")).await?;
    wait_phase(s, "at-once", "Failed").await?;
    s.delete("vm", "poor").await
}

#[test]
fn running_guest_is_frozen_for_its_snapshot_and_thawed_whoever_dies() {
    story_large("snapshot-agent", async |s| {
        with_snapshots(s, async |s| with_faults(s, "snapshot=slow:20", async |class| frozen(s, class).await).await)
            .await
    });
}

const SEED: &str = "          - {name: seed, disk: {bus: virtio}}\n";
/// Writes the time to the disk, many times a second, until the file `stop` exists.
const WRITE: &str = "rm -f /run/stop /data/times; mkdir -p /data; mkfs.ext4 -F -q /dev/disk/by-id/virtio-DATA && \
    mount /dev/disk/by-id/virtio-DATA /data || exit; \
    (while [ ! -e /run/stop ]; do date +%s.%N >>/data/times; sync /data/times; sleep 0.2; done) >/dev/null 2>&1 & true";
/// Prints the longest time between two writes.
const LONGEST: &str = "touch /run/stop; sleep 1; awk 'NR > 1 && $1 - last > most { most = $1 - last } { last = $1 } \
    END { print \"\\nlongest \" most }' /data/times";

async fn frozen(s: &Story, class: &str) -> Result<()> {
    s.apply(&format!(
        "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: data}}
spec: {{storageClassName: {class}, accessModes: [ReadWriteOnce], volumeMode: Block, resources: {{requests: {{storage: 64Mi}}}}}}
"
    ))
    .await?;
    s.apply(
        &manifests::debian("deb", "none")
            .replace(SEED, &format!("{SEED}          - {{name: data, serial: DATA, disk: {{bus: virtio}}}}\n"))
            .replace(
                "      volumes:\n",
                "      volumes:\n      - {name: data, persistentVolumeClaim: {claimName: data}}\n",
            ),
    )
    .await?;
    s.wait("vmi", "deb", "connect its guest agent", BOOT, is_connected).await?;
    for component in ["", "virt-controller", "virt-handler"] {
        let name = format!("agent-{}", if component.is_empty() { "calm" } else { component });
        let mut console = s.reopen_console("deb", "root", "ferrovirt").await?;
        run(&mut console, "umount /data 2>/dev/null; true").await?;
        run(&mut console, WRITE).await?;
        // It would end with virt-handler.
        console.leave().await?;
        s.apply(&snapshot(&name, "deb", "")).await?;
        let is_frozen = |vmi: &Value| vmi["status"]["fsFreezeStatus"] == "frozen";
        s.wait("vmi", "deb", "be frozen", MINUTES, is_frozen).await?;
        if !component.is_empty() {
            s.kill_component(component).await?;
        }
        let done = wait_ready(s, &name).await?;
        ensure!(done["status"]["indications"].to_string().contains("GuestAgent"), "{}", done["status"]);
        s.wait("vmi", "deb", "be thawed", MINUTES, |vmi| vmi["status"]["fsFreezeStatus"] != "frozen").await?;
        let mut console = s.reopen_console("deb", "root", "ferrovirt").await?;
        let pause = longest(&mut console).await?;
        console.leave().await?;
        ensure!(pause > 5.0 && pause < LONGEST_PAUSE, "{name}: the guest wrote nothing for {pause} s");
        wait_free(s, "deb").await?;
    }
    s.virt(&["stop", "deb", "--force", "--grace-period", "0"]).await.map(drop)
}

async fn longest(console: &mut Console) -> Result<f64> {
    tokio::time::sleep(Duration::from_secs(2)).await;
    let found = run(console, LONGEST).await?;
    // The shell reports the end of the writer, too.
    let mut times = found.lines().filter_map(|line| line.strip_prefix("longest ")?.trim().parse().ok());
    times.next().with_context(|| format!("no time in {found:?}"))
}
