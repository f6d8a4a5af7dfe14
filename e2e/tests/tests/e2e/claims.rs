//! Storage that changes under a running guest.

use std::time::Duration;

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Story, condition, is_true, own_cluster, skip,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story,
};
use kube::api::{Patch, PatchParams};
use serde_json::json;

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
    let grown = "for i in $(seq 120); do [ $(cat /sys/block/vda/size) = 61440 ] && break; sleep 1; done; \
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
    let halted = s.wait("vmi", "guest", "stand still", MINUTES, |vmi| is_true(vmi, "Paused")).await?;
    let is_error = condition(&halted, "Paused").is_some_and(|paused| paused["reason"] == "PausedIOError");
    ensure!(is_error, "{}", halted["status"]);
    let message = s.wait_event("guest", "IOerror", MINUTES).await?;
    ensure!(message.contains("data"), "the event does not name the volume: {message:?}");

    // The guest resumes without a user.
    on_host(s, &storage.node, &format!("rm {directory}/filler")).await?;
    s.wait("vmi", "guest", "go on", MINUTES, |vmi| !is_true(vmi, "Paused")).await?;
    let mut console = s.reopen_console("guest", "root", "ferrovirt").await?;
    let (written, _) =
        console.run("for i in $(seq 120); do test -s /tmp/written && break; sleep 1; done; cat /tmp/written").await?;
    ensure!(written.trim() == "code-0", "what the guest wrote meanwhile ended with {written:?}");
    console.leave().await
}

/// Content of the image that root has written.
const WRITTEN: &str = "written-by-root";

#[test]
fn images_of_root_are_used_by_the_group_of_the_pod_or_named_with_their_owner() {
    story("owned-claims", async |s| {
        let local = Storage::make(s, "local", Backing::Directory).await?;
        local
            .lend(s, async |local| {
                let host = Storage::make(s, "host", Backing::HostPath).await?;
                host.lend(s, async |host| {
                    of_local_volume(s, local).await?;
                    of_host_path(s, host).await
                })
                .await
            })
            .await?;
        if own_cluster()?.is_none() {
            return skip("the test cluster's storage driver");
        }
        let result = of_driver(s).await;
        let gone = delete_vmis_after(s, &result).await;
        result.and(gone)
    });
}

/// Returns a VMI with the image of a claim as disk.
fn vmi_of(claim: &str, disk: &str) -> String {
    manifests::kernel_vmi(claim)
        .replace("devices: {}\n", &format!("devices: {{disks: [{{name: data, disk: {{{disk}}}}}]}}\n"))
        .replace(
            "spec:\n",
            &format!("spec:\n  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]\n"),
        )
}

/// Starts the guest of a claim and reads the image from its disk.
async fn read_in_guest(s: &Story, claim: &str, disk: &str) -> Result<()> {
    s.apply(&vmi_of(claim, disk)).await?;
    found_in_guest(s, claim).await
}

async fn found_in_guest(s: &Story, claim: &str) -> Result<()> {
    s.wait_running(claim).await?;
    let mut console = s.console(claim)?;
    console.login("root", "ferrovirt").await?;
    let (found, _) = console.run(&format!("head -c {} /dev/vda", WRITTEN.len())).await?;
    ensure!(found.trim() == WRITTEN, "the disk of {claim} begins with {found:?}");
    console.leave().await
}

async fn write_as_root(s: &Story, storage: &Storage, mode: &str) -> Result<()> {
    let image = format!("{}/disk.img", storage.directory);
    let write =
        format!("printf {WRITTEN} >{image} && truncate -s 8M {image} && chown 0:0 {image} && chmod {mode} {image}");
    on_host(s, &storage.node, &write).await.map(drop)
}

/// Returns user, group and mode of an image.
async fn owner(s: &Story, storage: &Storage) -> Result<String> {
    Ok(on_host(s, &storage.node, &format!("stat -c %u:%g:%a {}/disk.img", storage.directory)).await?.trim().to_owned())
}

/// kubelet gives what is in a local volume to the group of the pod, also what was written after its directory had that group.
async fn of_local_volume(s: &Story, storage: &Storage) -> Result<()> {
    let directory = &storage.directory;
    on_host(s, &storage.node, &format!("chgrp 107 {directory} && chmod 2775 {directory}")).await?;
    write_as_root(s, storage, "600").await?;
    read_in_guest(s, "local", "bus: virtio").await?;
    let owner = owner(s, storage).await?;
    ensure!(owner.starts_with("0:107:66"), "the image is of {owner}");
    Ok(())
}

/// kubelet changes nothing in a volume of type hostPath.
async fn of_host_path(s: &Story, storage: &Storage) -> Result<()> {
    write_as_root(s, storage, "644").await?;
    read_in_guest(s, "host", "bus: virtio, readonly: true").await?;
    s.delete("vmi", "host").await?;
    s.wait_gone("vmi", "host", MINUTES).await?;

    s.apply(&vmi_of("host", "bus: virtio")).await?;
    let message = s.wait_event("host", "SyncFailed", MINUTES).await?;
    ensure!(message.contains("user 0 and group 0 with mode 0644") && message.contains("chmod g+rw"), "{message:?}");
    let left = owner(s, storage).await?;
    ensure!(left == "0:0:644", "the image is of {left}");
    // The start succeeds once the user has done what the message says.
    let image = format!("{}/disk.img", storage.directory);
    on_host(s, &storage.node, &format!("chgrp 107 {image} && chmod g+rw {image}")).await?;
    found_in_guest(s, "host").await
}

/// A pod of root writes an image into a claim of a driver with fsGroupPolicy File.
async fn of_driver(s: &Story) -> Result<()> {
    // The writer is root.
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    s.cluster_api("Namespace").patch(&s.namespace, &PatchParams::default(), &Patch::Merge(label)).await?;
    s.apply(&format!(
        "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: driver}}
spec:
  storageClassName: csi
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 16Mi}}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: writer}}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  containers:
  - name: writer
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sh, -c, 'printf {WRITTEN} >/claim/disk.img && truncate -s 8M /claim/disk.img && chmod 600 /claim/disk.img']
    volumeMounts: [{{name: claim, mountPath: /claim}}]
  volumes: [{{name: claim, persistentVolumeClaim: {{claimName: driver}}}}]
"
    ))
    .await?;
    s.wait("Pod", "writer", "write the image", MINUTES, |pod| pod["status"]["phase"] == "Succeeded").await?;
    s.delete("Pod", "writer").await?;
    read_in_guest(s, "driver", "bus: virtio").await
}
