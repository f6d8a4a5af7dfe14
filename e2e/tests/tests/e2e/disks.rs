//! Disks of every kind in the guest, and data that outlives a VMI.

use std::time::Duration;

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Story,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story,
};
use serde_json::Value;

use crate::{hotplug::run, manifests};

const MINUTES: Duration = Duration::from_secs(240);
const MEBIBYTE: u64 = 1024 * 1024;

/// Functions for the guest's shell: the device with a serial number, and a file of the file system on it.
const HELPERS: &str = "disk() { for d in /sys/block/vd*; do [ \"$(cat $d/serial)\" = $1 ] && echo /dev/${d##*/}; done; }; \
     show() { mount -r -t iso9660 $(disk $1) /mnt && cat /mnt/$2; umount /mnt; }";

fn vm_with_disks(claim: &str) -> String {
    format!(
        "
apiVersion: v1
kind: ConfigMap
metadata: {{name: settings}}
data: {{color: blue, a-rather-long.name_of-a-key: long}}
---
apiVersion: v1
kind: Secret
metadata: {{name: key}}
stringData: {{password: s3cret}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: answers}}
data: {{autounattend.xml: <unattend/>}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: robot}}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: box}}
spec:
  runStrategy: Always
  template:
    metadata: {{labels: {{app: box, team: blue}}}}
    spec:
      terminationGracePeriodSeconds: 20
      domain:
        memory: {{guest: 128Mi}}
        firmware:
          kernelBoot:
            kernelArgs: console=ttyS0 quiet
            container: {{image: 'ferrovirt.io/guests/tiny-kernel:devel', kernelPath: /boot/vmlinuz, initrdPath: /boot/initrd}}
        devices:
          disks:
          - {{name: data, serial: DATA, disk: {{bus: virtio}}}}
          - {{name: scratch, serial: SCRATCH, disk: {{bus: virtio}}, blockSize: {{matchVolume: {{}}}}}}
          - {{name: settings, serial: SETTINGS, disk: {{bus: virtio}}}}
          - {{name: key, serial: KEY, disk: {{bus: virtio}}}}
          - {{name: about, serial: ABOUT, disk: {{bus: virtio}}}}
          - {{name: account, serial: ACCOUNT, disk: {{bus: virtio}}}}
          - {{name: seed, serial: SEED, disk: {{bus: virtio}}}}
          - {{name: answers, cdrom: {{bus: sata}}}}
          interfaces: [{{name: default, masquerade: {{}}, tag: uplink}}]
      networks: [{{name: default, pod: {{}}}}]
      volumes:
      - {{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}
      - {{name: scratch, emptyDisk: {{capacity: 8Mi}}}}
      - {{name: settings, configMap: {{name: settings}}}}
      - {{name: key, secret: {{secretName: key}}}}
      - name: about
        downwardAPI:
          fields: [{{path: labels, fieldRef: {{fieldPath: metadata.labels}}}}]
      - {{name: account, serviceAccount: {{serviceAccountName: robot}}}}
      - name: seed
        cloudInitConfigDrive:
          userData: |
            #cloud-config
            password: story
            hostname: from-config-drive
      - {{name: answers, sysprep: {{configMap: {{name: answers}}}}}}
"
    )
}

#[test]
fn guest_sees_disks_of_every_kind_and_its_claim_outlives_it() {
    story("disks", async |s| {
        let storage = Storage::make(s, "data", Backing::Directory).await?;
        let result = disks(s, &storage).await;
        // VMIs are removed before their storage.
        let gone = delete_vmis_after(s, &result).await;
        storage.remove(s).await?;
        result.and(gone)
    });
}

async fn disks(s: &Story, storage: &Storage) -> Result<()> {
    s.apply(&vm_with_disks("data")).await?;
    s.wait_running("box").await?;
    let shows_volumes = |vmi: &Value| {
        let all = vmi["status"]["volumeStatus"].as_array().cloned().unwrap_or_default();
        let volume = |name: &str| all.iter().find(|volume| volume["name"] == name).cloned().unwrap_or_default();
        let claim = volume("data");
        claim["target"] == "vda"
            && claim["persistentVolumeClaimInfo"]["requests"]["storage"] == "16Mi"
            && volume("settings")["size"].as_u64().is_some_and(|size| size > 0)
    };
    let first = s.wait("vmi", "box", "show its claim and the size of an image that was made", MINUTES, shows_volumes);
    let first = first.await?;

    let mut console = s.console("box")?;
    console.login("root", "story").await?;
    run(&mut console, HELPERS).await?;
    let hostname = run(&mut console, "hostname").await?;
    ensure!(hostname == "from-config-drive", "hostname from the config drive, not {hostname:?}");
    // The image has the requested size, though the volume is larger.
    for (serial, size) in [("DATA", 16), ("SCRATCH", 8)] {
        let sectors = run(&mut console, &format!("cat /sys/block/$(basename $(disk {serial}))/size")).await?;
        ensure!(sectors.parse() == Ok(size * MEBIBYTE / 512), "{serial} has {sectors} sectors");
    }
    // File systems of nodes have larger blocks than the 512 bytes of other disks.
    let block = run(&mut console, "cat /sys/block/$(basename $(disk SCRATCH))/queue/logical_block_size").await?;
    ensure!(block.parse::<u64>().is_ok_and(|size| size > 512), "the blocks of SCRATCH have {block} bytes");
    for (serial, file, expected) in [
        ("SETTINGS", "color", "blue"),
        ("SETTINGS", "a-rather-long.name_of-a-key", "long"),
        ("KEY", "password", "s3cret"),
        ("ABOUT", "labels", "team=\"blue\""),
        ("ACCOUNT", "namespace", s.namespace.as_str()),
        ("SEED", "openstack/latest/meta_data.json", "\"hostname\":\"box\""),
        ("SEED", "openstack/latest/meta_data.json", "\"tags\":[\"uplink\"]"),
    ] {
        let content = run(&mut console, &format!("show {serial} {file}")).await?;
        ensure!(content.contains(expected), "{file} of {serial} says {content:?}");
    }
    let token = run(&mut console, "show ACCOUNT token").await?;
    ensure!(token.split('.').count() == 3, "the service account's token is {} characters long", token.len());
    // The driver of SATA disks is loaded in the background.
    run(&mut console, "for i in $(seq 100); do test -b /dev/sr0 && break; sleep 1; done").await?;
    let answers = "mount -r -t iso9660 /dev/sr0 /mnt && cat /mnt/autounattend.xml; umount /mnt";
    let answers = run(&mut console, answers).await?;
    ensure!(answers.contains("<unattend/>"), "{answers:?}");

    for serial in ["DATA", "SCRATCH"] {
        let write = format!("echo kept-$((40+2)) | dd of=$(disk {serial}) bs=512 conv=sync,fsync");
        run(&mut console, &write).await?;
    }
    let read = "head -c 7 $(disk DATA) $(disk SCRATCH) | tr '\\0' .";
    let written = run(&mut console, read).await?;
    ensure!(written.matches("kept-42").count() == 2, "{written:?}");
    console.leave().await?;

    s.virt(&["restart", "box"]).await?;
    let uid = first["metadata"]["uid"].clone();
    s.wait("vmi", "box", "be Running anew", MINUTES, |vmi| {
        vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running"
    })
    .await?;
    let mut console = s.console("box")?;
    console.login("root", "story").await?;
    run(&mut console, HELPERS).await?;
    let claimed = run(&mut console, "head -c 7 $(disk DATA)").await?;
    ensure!(claimed == "kept-42", "the claim does not hold what was written, but {claimed:?}");
    let scratch = run(&mut console, "head -c 7 $(disk SCRATCH) | tr '\\0' .").await?;
    ensure!(scratch == ".......", "the empty disk is not empty: {scratch:?}");
    console.leave().await?;
    s.virt(&["stop", "box"]).await?;
    s.wait_gone("vmi", "box", MINUTES).await?;

    // An ephemeral disk writes to an overlay of the claim's image.
    let before = checksum(s, storage).await?;
    s.apply(
        &manifests::kernel_vmi("guest")
            .replace("devices: {}\n", "devices: {disks: [{name: base, serial: BASE, disk: {bus: virtio}}]}\n")
            .replace(
                "spec:\n",
                "spec:\n  volumes: [{name: base, ephemeral: {persistentVolumeClaim: {claimName: data}}}]\n",
            ),
    )
    .await?;
    s.wait_running("guest").await?;
    let mut console = s.console("guest")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    let base = run(&mut console, "head -c 7 $(disk BASE)").await?;
    ensure!(base == "kept-42", "the base does not hold what was written, but {base:?}");
    run(&mut console, "echo thrown-away | dd of=$(disk BASE) bs=512 conv=sync,fsync").await?;
    let layer = run(&mut console, "head -c 11 $(disk BASE)").await?;
    ensure!(layer == "thrown-away", "{layer:?}");
    console.leave().await?;
    ensure!(checksum(s, storage).await? == before, "the claim's image was written to");
    Ok(())
}

async fn checksum(s: &Story, storage: &Storage) -> Result<String> {
    s.on_node(&storage.node, &format!("sha256sum /host{}/disk.img", storage.directory)).await
}

#[test]
fn claim_of_block_mode_is_a_device_of_the_guest() {
    story("block", async |s| {
        let storage = Storage::make(s, "raw", Backing::Device).await?;
        let result = block(s, &storage).await;
        let gone = delete_vmis_after(s, &result).await;
        storage.remove(s).await?;
        result.and(gone)
    });
}

async fn block(s: &Story, storage: &Storage) -> Result<()> {
    s.apply(
        &manifests::kernel_vmi("guest")
            .replace("devices: {}\n", "devices: {disks: [{name: raw, serial: RAW, disk: {bus: virtio}}]}\n")
            .replace("spec:\n", "spec:\n  volumes: [{name: raw, persistentVolumeClaim: {claimName: raw}}]\n"),
    )
    .await?;
    s.wait_running("guest").await?;
    let mut console = s.console("guest")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    let sectors = run(&mut console, "cat /sys/block/$(basename $(disk RAW))/size").await?;
    ensure!(sectors.parse() == Ok(16 * MEBIBYTE / 512), "the device has {sectors} sectors");
    run(&mut console, "echo on-the-device | dd of=$(disk RAW) bs=512 conv=sync,fsync").await?;
    console.leave().await?;
    let device = on_host(s, &storage.node, &format!("sync; head -c 13 {}/backing", storage.directory)).await?;
    ensure!(device == "on-the-device", "the device holds {device:?}");
    Ok(())
}
