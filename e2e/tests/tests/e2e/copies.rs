//! Restores and clones of VMs.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::{Value, json};

use crate::{
    data_volumes::{MINUTES, kernel_vm, storage, with_driver},
    hotplug::{HELPERS, run},
    live_resize::processors,
};

/// Writes a word to the disk `DATA` of a guest.
async fn write(s: &Story, vm: &str, word: &str) -> Result<()> {
    let mut guest = s.reopen_console(vm, "root", "ferrovirt").await?;
    run(&mut guest, HELPERS).await?;
    run(&mut guest, &format!("printf {word} | dd of=$(disk DATA) conv=notrunc,fsync 2>/dev/null")).await?;
    guest.leave().await
}

/// Checks the word on the disk `DATA` of a guest, and returns MAC address and serial of the guest.
async fn read(s: &Story, vm: &str, word: &str) -> Result<(String, String)> {
    let mut guest = s.reopen_console(vm, "root", "ferrovirt").await?;
    run(&mut guest, HELPERS).await?;
    let found = run(&mut guest, &format!("head -c {} $(disk DATA)", word.len())).await?;
    let mac = run(&mut guest, "cat /sys/class/net/*/address | grep -v 00:00:00:00:00:00 | head -1").await?;
    let serial = run(&mut guest, "cat /sys/class/dmi/id/product_uuid").await?;
    guest.leave().await?;
    ensure!(found == word, "the guest of {vm} reads {found:?} instead of {word:?}");
    Ok((mac, serial))
}

async fn start(s: &Story, vm: &str) -> Result<()> {
    s.virt(&["start", vm]).await?;
    s.wait_running(vm).await.map(drop)
}

async fn stop(s: &Story, vm: &str) -> Result<()> {
    s.virt(&["stop", vm]).await?;
    s.wait_gone("vmi", vm, MINUTES).await
}

/// Makes a snapshot of a stopped VM.
async fn snapshot(s: &Story, vm: &str, name: &str) -> Result<()> {
    s.apply(&format!(
        "
apiVersion: snapshot.kubevirt.io/v1beta1
kind: VirtualMachineSnapshot
metadata: {{name: {name}}}
spec: {{source: {{apiGroup: kubevirt.io, kind: VirtualMachine, name: {vm}}}}}
"
    ))
    .await?;
    let is_ready = |snapshot: &Value| snapshot["status"]["readyToUse"] == true;
    s.wait("VirtualMachineSnapshot", name, "be ready", MINUTES, is_ready).await.map(drop)
}

/// Starts a VM whose disk has a word, stops it and makes snapshot `s` of it.
async fn snapshotted(s: &Story, vm: &str, word: &str) -> Result<()> {
    let fields = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Block", 16));
    s.apply(&kernel_vm(vm, "Manual", &fields)).await?;
    start(s, vm).await?;
    write(s, vm, word).await?;
    stop(s, vm).await?;
    snapshot(s, vm, "s").await
}

/// Deletes what stories of this module leave beside VMs, DataVolumes and claims.
async fn remove(s: &Story) -> Result<()> {
    for kind in ["VirtualMachineClone", "VirtualMachineRestore", "VirtualMachineSnapshot"] {
        for object in s.list(kind, "").await? {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            s.delete(kind, name).await?;
            s.wait_gone(kind, name, MINUTES).await?;
        }
    }
    Ok(())
}

pub(crate) async fn with_snapshots(s: &Story, body: impl AsyncFnOnce(&Story) -> Result<()>) -> Result<()> {
    with_driver(s, async |s| {
        let outcome = body(s).await;
        // A story that failed shows its objects first.
        outcome.and(remove(s).await)
    })
    .await
}

#[test]
fn stopped_vm_gets_back_its_disks_and_another_vm_is_made_from_the_snapshot() {
    story("restore", async |s| with_snapshots(s, restored).await);
}

async fn restored(s: &Story) -> Result<()> {
    snapshotted(s, "box", "before").await?;
    start(s, "box").await?;
    let (mac, uuid) = read(s, "box", "before").await?;
    write(s, "box", "after!").await?;
    // The restore stops the guest.
    let said = s.virt(&["restore", "box", "s", "--name=back", "--stop", "--wait"]).await?;
    ensure!(said.contains("VM box was restored from snapshot s"), "{said}");
    let restore = s.get("VirtualMachineRestore", "back").await?;
    let claim = restore["status"]["restores"][0]["persistentVolumeClaim"].as_str().unwrap_or_default().to_owned();
    ensure!(claim.starts_with("restore-") && claim.ends_with("-data"), "{}", restore["status"]);
    ensure!(restore["status"]["deletedDataVolumes"] == json!(["box-root"]), "{}", restore["status"]);
    s.wait_gone("DataVolume", "box-root", MINUTES).await?;
    s.wait_gone("PersistentVolumeClaim", "box-root", MINUTES).await?;
    let vm = s.get("vm", "box").await?;
    ensure!(vm["status"]["restoreInProgress"].is_null() && vm["status"]["operation"].is_null(), "{}", vm["status"]);
    let uid = &vm["metadata"]["uid"];
    let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "box", "uid": uid}]);
    ensure!(restore["metadata"]["ownerReferences"] == owner, "{}", restore["metadata"]);
    start(s, "box").await?;
    let (_, same) = read(s, "box", "before").await?;
    ensure!(same == uuid, "the UUID of the guest is {same}, and was {uuid}");
    // Its DataVolume owns the claim, and goes with the VM.
    let owner = s.get("PersistentVolumeClaim", &claim).await?["metadata"]["ownerReferences"][0].clone();
    ensure!(owner["kind"] == "DataVolume" && owner["name"] == claim.as_str(), "{owner}");
    stop(s, "box").await?;

    let patch = r#"{"op":"replace","path":"/spec/template/spec/domain/devices/interfaces","value":[{"name":"default","masquerade":{},"macAddress":"02:00:00:00:00:38"}]}"#;
    let network = r#"{"op":"replace","path":"/spec/template/spec/networks","value":[{"name":"default","pod":{}}]}"#;
    s.virt(&["restore", "twin", "s", &format!("--patch={patch}"), &format!("--patch={network}"), "--wait"]).await?;
    ensure!(s.get("vm", "twin").await?["spec"]["runStrategy"] == "Halted", "the new VM runs");
    start(s, "twin").await?;
    let (twin, _) = read(s, "twin", "before").await?;
    ensure!(twin == "02:00:00:00:00:38", "{twin}, source {mac}");
    // The record of a restore outlives its VM.
    s.delete("vm", "box").await?;
    s.wait_gone("vm", "box", MINUTES).await?;
    let record = s.get("VirtualMachineRestore", "back").await?["metadata"].clone();
    ensure!(record["ownerReferences"].is_null() && record["deletionTimestamp"].is_null(), "{record}");
    Ok(())
}

#[test]
fn restore_that_ends_early_leaves_the_vm_as_it_was_and_the_next_one_succeeds() {
    story("restore-fails", async |s| with_snapshots(s, left_alone).await);
}

async fn left_alone(s: &Story) -> Result<()> {
    snapshotted(s, "box", "before").await?;
    start(s, "box").await?;
    write(s, "box", "after!").await?;
    let restore = |name: &str, more: &str| {
        format!(
            "
apiVersion: snapshot.kubevirt.io/v1beta1
kind: VirtualMachineRestore
metadata: {{name: {name}}}
spec:
  target: {{apiGroup: kubevirt.io, kind: VirtualMachine, name: box}}
  virtualMachineSnapshotName: s
{more}"
        )
    };
    // The guest runs.
    s.apply(&restore("at-once", "  targetReadinessPolicy: FailImmediate\n")).await?;
    let has_failed = |restore: &Value| restore["status"].to_string().contains("must be powered off");
    s.wait("VirtualMachineRestore", "at-once", "fail", MINUTES, has_failed).await?;
    // A claim of that name is not the restore's.
    stop(s, "box").await?;
    let claim = "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: taken}
spec: {accessModes: [ReadWriteOnce], storageClassName: csi, resources: {requests: {storage: 16Mi}}}
";
    s.apply(claim).await?;
    s.apply(&restore("taken", "  volumeRestoreOverrides: [{volumeName: data, restoreName: taken}]\n")).await?;
    let has_failed = |restore: &Value| restore["status"].to_string().contains("does not belong to this restore");
    s.wait("VirtualMachineRestore", "taken", "fail", MINUTES, has_failed).await?;
    let vm = s.get("vm", "box").await?;
    ensure!(vm["status"]["restoreInProgress"].is_null(), "{}", vm["status"]);
    start(s, "box").await?;
    read(s, "box", "after!").await?;
    // One that waits is deleted.
    s.apply(&restore("waits", "  targetReadinessPolicy: WaitEventually\n")).await?;
    s.wait_event("waits", "RestoreTargetNotReady", MINUTES).await?;
    s.delete("VirtualMachineRestore", "waits").await?;
    s.wait_gone("VirtualMachineRestore", "waits", MINUTES).await?;
    stop(s, "box").await?;
    s.virt(&["restore", "box", "s", "--volume-restore-policy=InPlace", "--wait"]).await?;
    let vm = s.get("vm", "box").await?;
    let volume = &vm["spec"]["template"]["spec"]["volumes"][0];
    ensure!(volume["dataVolume"]["name"] == "box-root", "{volume}");
    start(s, "box").await?;
    read(s, "box", "before").await.map(drop)
}

#[test]
fn clone_has_the_content_and_hardware_of_its_own() {
    story("vm-clone", async |s| with_snapshots(s, cloned).await);
}

async fn cloned(s: &Story) -> Result<()> {
    snapshotted(s, "box", "before").await?;
    start(s, "box").await?;
    let (_, uuid) = read(s, "box", "before").await?;
    // Of the running VM, whose disk is as it is now.
    write(s, "box", "later!").await?;
    let said = s.virt(&["clone", "box", "copy", "--name=one", "--wait"]).await?;
    ensure!(said.contains("VM copy was cloned from box"), "{said}");
    start(s, "copy").await?;
    let (_, other) = read(s, "copy", "later!").await?;
    ensure!(other != uuid, "both guests have the UUID {uuid}");
    // Nothing temporary is left once the claims are bound.
    let is_clean =
        |clone: &Value| clone["status"]["restoreName"].is_null() && clone["status"]["snapshotName"].is_null();
    s.wait("VirtualMachineClone", "one", "be cleaned up", MINUTES, is_clean).await?;
    let left = s.list("VirtualMachineRestore", "").await?;
    ensure!(left.is_empty(), "{left:?}");
    let claims = s.list("PersistentVolumeClaim", "").await?;
    let is_marked = |claim: &Value| !claim["metadata"]["annotations"]["restore.kubevirt.io/owned-by-vm"].is_null();
    ensure!(!claims.iter().any(is_marked), "{claims:?}");
    // Of the older snapshot.
    s.virt(&["clone", "s", "old", "--snapshot", "--wait"]).await?;
    start(s, "old").await?;
    read(s, "old", "before").await?;
    // A second clone of that name fails, and says so.
    let refused = s.virt(&["clone", "box", "old", "--wait"]).await;
    ensure!(
        refused.is_err_and(|error| format!("{error:#}").contains("target already exists")),
        "a VM was cloned over another"
    );
    s.delete("vm", "copy").await?;
    s.wait_gone("VirtualMachineClone", "one", MINUTES).await
}

#[test]
fn vm_with_plugged_vcpus_starts_after_its_restore() {
    story("restore-vcpus", async |s| with_snapshots(s, plugged).await);
}

async fn plugged(s: &Story) -> Result<()> {
    let fields = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Block", 16));
    let vm = kernel_vm("box", "Manual", &fields);
    s.apply(&vm.replace("        memory: {guest", "        cpu: {sockets: 1, maxSockets: 4}\n        memory: {guest"))
        .await?;
    start(s, "box").await?;
    let mut guest = s.console("box")?;
    guest.login("root", "ferrovirt").await?;
    guest.leave().await?;
    s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
    s.virt(&["snapshot", "box", "s", "--wait"]).await?;
    s.virt(&["restore", "box", "s", "--stop", "--wait"]).await?;
    let cpu = s.get("vm", "box").await?["spec"]["template"]["spec"]["domain"]["cpu"].clone();
    ensure!(cpu["sockets"] == 2 && cpu["maxSockets"] == 4, "the restored VM has {cpu}");
    start(s, "box").await?;
    let mut guest = s.reopen_console("box", "root", "ferrovirt").await?;
    let found = run(&mut guest, &processors(2)).await?;
    ensure!(found == "2", "the guest has {found} processors");
    guest.leave().await
}
