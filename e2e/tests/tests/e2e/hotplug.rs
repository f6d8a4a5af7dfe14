//! Volumes that are plugged into a running VM and taken from it.

use std::time::Duration;

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Console, Story,
    storage::{Backing, Storage, on_host},
    story,
};
use http::Method;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{controller_rights::send, live_resize::condition, manifests};

const MINUTES: Duration = Duration::from_secs(240);

/// Functions for the guest's shell: the disk with a serial number, and a wait for it (or for its end). SCSI disks have the
/// number behind the header of a page. The guest loads only the drivers of devices that it has at its boot.
pub(crate) const HELPERS: &str = "dmesg -n 1; modprobe -qa virtio_blk virtio_scsi sd_mod sg; \
     disk() { for d in /sys/block/vd* /sys/block/sd*; do [ -e $d ] || continue; \
     s=$(cat $d/serial 2>/dev/null || tail -c +5 $d/device/vpd_pg80 2>/dev/null); \
     [ \"$s\" = $1 ] && echo /dev/${d##*/}; done; }; \
     comes() { for i in $(seq 100); do [ -n \"$(disk $1)\" ] && return; sleep 1; done; return 1; }; \
     goes() { for i in $(seq 100); do [ -z \"$(disk $1)\" ] && return; sleep 1; done; return 1; }";

/// Returns the output of a command that must succeed.
pub(crate) async fn run(console: &mut Console, command: &str) -> Result<String> {
    console.output(command).await
}

/// Returns the status entry of a volume.
fn entry(vmi: &Value, volume: &str) -> Option<Value> {
    let entries = vmi["status"]["volumeStatus"].as_array()?;
    entries.iter().find(|entry| entry["name"] == volume).cloned()
}

pub(crate) async fn wait_phase(s: &Story, volume: &str, phase: &str) -> Result<Value> {
    let vmi = s
        .wait("vmi", "box", &format!("have volume {volume} in phase {phase}"), MINUTES, |vmi| {
            entry(vmi, volume).is_some_and(|entry| entry["phase"] == phase)
        })
        .await?;
    Ok(entry(&vmi, volume).unwrap_or_default())
}

async fn wait_no_entry(s: &Story, volume: &str) -> Result<()> {
    let what = format!("have no volume {volume}");
    s.wait("vmi", "box", &what, MINUTES, |vmi| entry(vmi, volume).is_none()).await?;
    Ok(())
}

/// Changes the volumes and disks in the template of the VM.
async fn edit(s: &Story, volumes: Value, disks: Value) -> Result<()> {
    let patch = json!({"spec": {"template": {"spec": {"volumes": volumes, "domain": {"devices": {"disks": disks}}}}}});
    s.api("VirtualMachine").patch("box", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

async fn ensure_no_restart_is_required(s: &Story) -> Result<()> {
    let vm = s.get("vm", "box").await?;
    let conditions = vm["status"]["conditions"].to_string();
    ensure!(!conditions.contains("RestartRequired") && !conditions.contains("\"Failure\""), "{conditions}");
    Ok(())
}

/// Waits until the VM has no attachment pods.
async fn wait_no_attachments(s: &Story) -> Result<()> {
    for pod in s.list("pod", "kubevirt.io=hotplug-disk").await? {
        s.wait_gone("pod", pod["metadata"]["name"].as_str().unwrap_or_default(), MINUTES).await?;
    }
    Ok(())
}

/// A disk image in a claim with a file system, as an administrator prepares it.
async fn add_image(s: &Story, storage: &Storage) -> Result<()> {
    let directory = &storage.directory;
    on_host(s, &storage.node, &format!("truncate -s 8M {directory}/disk.img && chown 107:107 {directory}/disk.img"))
        .await?;
    Ok(())
}

#[test]
fn volumes_are_plugged_into_a_running_vm_and_keep_their_data() {
    story("hotplug", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        let body = async |_: &Storage| {
            let files = Storage::make(s, "files", Backing::Directory).await?;
            let body = async |files: &Storage| {
                add_image(s, files).await?;
                plugged(s, &files.hostname).await
            };
            files.lend(s, body).await
        };
        block.lend(s, body).await
    });
}

async fn plugged(s: &Story, hostname: &str) -> Result<()> {
    s.apply(&manifests::kernel_vm_on(hostname, "box")).await?;
    s.wait_running("box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;

    // A dry run changes nothing. A claim of a VMI of a VM is plugged through the VM.
    s.virt(&["addvolume", "box", "--volume-name=block", "--dry-run"]).await?;
    ensure!(s.get("vm", "box").await?["spec"]["template"]["spec"]["volumes"].is_null(), "a dry run changed the VM");
    let volume = json!({"name": "block", "disk": {"disk": {"bus": "virtio"}},
        "volumeSource": {"persistentVolumeClaim": {"claimName": "block"}}});
    let vmi = "virtualmachineinstances/box";
    let (code, text) = s.call_subresource(&Method::PUT, vmi, "addvolume", &volume).await?;
    ensure!(code == 400 && text.contains("is owned by a VM"), "{code} {text}");

    // Both kinds of claims on both buses, by the command.
    s.virt(&["addvolume", "box", "--volume-name=block", "--bus=virtio", "--serial=BLOCK"]).await?;
    s.virt(&["addvolume", "box", "--volume-name=files", "--serial=FILES"]).await?;
    for (name, serial) in [("block", "BLOCK"), ("files", "FILES")] {
        let ready = wait_phase(s, name, "Ready").await?;
        ensure!(ready["target"].as_str().is_some_and(|target| !target.is_empty()), "{ready}");
        let attachment = ready["hotplugVolume"]["attachPodName"].as_str().unwrap_or_default();
        let pod = s.get("pod", attachment).await?;
        ensure!(pod["metadata"]["uid"] == ready["hotplugVolume"]["attachPodUID"], "{ready}");
        run(&mut console, &format!("comes {serial}")).await?;
        run(&mut console, &format!("echo kept-$((40+2)) | dd of=$(disk {serial}) bs=512 conv=sync,fsync")).await?;
    }
    // The SCSI disk takes commands of its kind.
    let generic = "d=$(disk FILES); cat /sys/block/${d##*/}/device/scsi_generic/sg*/device/vendor";
    let vendor = run(&mut console, generic).await?;
    ensure!(vendor == "QEMU", "the generic SCSI device is of {vendor:?}");
    ensure_no_restart_is_required(s).await?;
    let launcher = s.launcher_pod("box").await?;
    ensure!(
        !launcher["spec"]["volumes"].to_string().contains("persistentVolumeClaim"),
        "the launcher pod was replaced"
    );

    // Taken away and plugged in again by an edit of the template.
    s.virt(&["removevolume", "box", "--volume-name=block"]).await?;
    run(&mut console, "goes BLOCK").await?;
    wait_no_entry(s, "block").await?;
    run(&mut console, "test -n \"$(disk FILES)\"").await?;
    let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name, "hotpluggable": true}});
    let disk = |name: &str, bus: &str, serial: &str| json!({"name": name, "serial": serial, "disk": {"bus": bus}});
    let disks = json!([disk("files", "scsi", "FILES"), disk("block", "virtio", "AGAIN")]);
    edit(s, json!([claim("files"), claim("block")]), disks).await?;
    wait_phase(s, "block", "Ready").await?;
    run(&mut console, "comes AGAIN").await?;
    let data = run(&mut console, "head -c 7 $(disk AGAIN)").await?;
    ensure!(data == "kept-42", "the block claim holds {data:?}");
    ensure_no_restart_is_required(s).await?;
    console.leave().await?;

    // A start has the volumes of the template.
    s.virt(&["stop", "box"]).await?;
    s.wait_gone("vmi", "box", MINUTES).await?;
    wait_no_attachments(s).await?;
    s.virt(&["start", "box"]).await?;
    s.wait_running("box").await?;
    for name in ["block", "files"] {
        wait_phase(s, name, "Ready").await?;
    }
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    for serial in ["AGAIN", "FILES"] {
        run(&mut console, &format!("comes {serial}")).await?;
        let data = run(&mut console, &format!("head -c 7 $(disk {serial})")).await?;
        ensure!(data == "kept-42", "{serial} holds {data:?} after a start");
    }

    // Everything is taken away.
    s.virt(&["removevolume", "box", "--volume-name=files"]).await?;
    s.virt(&["removevolume", "box", "--volume-name=block"]).await?;
    for (name, serial) in [("files", "FILES"), ("block", "AGAIN")] {
        run(&mut console, &format!("goes {serial}")).await?;
        wait_no_entry(s, name).await?;
    }
    console.leave().await?;
    wait_no_attachments(s).await
}

#[test]
fn volume_leaves_before_its_pod_and_another_claim_takes_its_name() {
    story("hotplug-again", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        let body = async |_: &Storage| {
            let files = Storage::make(s, "files", Backing::Directory).await?;
            let body = async |files: &Storage| {
                add_image(s, files).await?;
                exchanged(s, &files.hostname).await
            };
            files.lend(s, body).await
        };
        block.lend(s, body).await
    });
}

async fn exchanged(s: &Story, hostname: &str) -> Result<()> {
    s.apply(&manifests::kernel_vm_on(hostname, "box")).await?;
    s.wait_running("box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    let claim =
        |claim: &str| json!({"name": "data", "persistentVolumeClaim": {"claimName": claim, "hotpluggable": true}});
    let disk = |claim: &str| json!({"name": "data", "serial": claim, "disk": {"bus": "virtio"}});
    for (round, name) in ["block", "files", "block"].into_iter().enumerate() {
        edit(s, json!([claim(name)]), json!([disk(name)])).await?;
        let is_ready = |vmi: &Value| {
            entry(vmi, "data").is_some_and(|entry| {
                entry["phase"] == "Ready" && entry["persistentVolumeClaimInfo"]["claimName"] == name
            })
        };
        s.wait("vmi", "box", &format!("have the disk of claim {name}"), MINUTES, is_ready).await?;
        run(&mut console, &format!("comes {name}")).await?;
        if round < 2 {
            let write = format!("echo of-{name} | dd of=$(disk {name}) bs=512 conv=sync,fsync");
            run(&mut console, &write).await?;
        }
        let data = run(&mut console, &format!("head -c 8 $(disk {name})")).await?;
        ensure!(data == format!("of-{name}"), "round {round}: the disk of claim {name} holds {data:?}");
    }

    // The same claim again, whose pod is about to end.
    edit(s, json!(null), json!(null)).await?;
    wait_no_entry(s, "data").await?;
    run(&mut console, "test -z \"$(disk block)\"").await?;
    edit(s, json!([claim("block")]), json!([disk("block")])).await?;
    wait_phase(s, "data", "Ready").await?;
    run(&mut console, "comes block").await?;
    let data = run(&mut console, "head -c 8 $(disk block)").await?;
    ensure!(data == "of-block", "the disk holds {data:?}");

    // A claim that is deleted at once goes with its pod, and nothing is left.
    edit(s, json!(null), json!(null)).await?;
    wait_no_entry(s, "data").await?;
    console.leave().await?;
    s.delete("PersistentVolumeClaim", "block").await?;
    s.wait_gone("PersistentVolumeClaim", "block", MINUTES).await?;
    wait_no_attachments(s).await?;
    ensure_no_restart_is_required(s).await
}

#[test]
fn missing_claim_delays_no_other_volume() {
    story("hotplug-missing", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        block.lend(s, async |block| missing(s, &block.hostname).await).await
    });
}

async fn missing(s: &Story, hostname: &str) -> Result<()> {
    s.apply(&manifests::kernel_vm_on(hostname, "box")).await?;
    s.wait_running("box").await?;
    let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name, "hotpluggable": true}});
    let disk = |name: &str| json!({"name": name, "serial": name, "disk": {"bus": "virtio"}});
    edit(s, json!([claim("absent"), claim("block")]), json!([disk("absent"), disk("block")])).await?;
    wait_phase(s, "block", "Ready").await?;
    let absent = wait_phase(s, "absent", "Pending").await?;
    ensure!(absent["reason"] == "FailedPvcNotFound" && absent["message"] == "PVC absent not found", "{absent}");
    s.wait_event("box", "FailedPvcNotFound", MINUTES).await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    run(&mut console, "comes block").await?;

    // The lost pod of a volume is replaced, and the guest keeps its disk.
    let before = wait_phase(s, "block", "Ready").await?["hotplugVolume"]["attachPodUID"].clone();
    let pods = s.list("pod", "kubevirt.io=hotplug-disk").await?;
    ensure!(pods.len() == 1, "{} attachment pods", pods.len());
    s.delete("pod", pods[0]["metadata"]["name"].as_str().unwrap_or_default()).await?;
    s.wait("vmi", "box", "have another attachment pod", MINUTES, |vmi| {
        entry(vmi, "block").is_some_and(|entry| {
            let uid = &entry["hotplugVolume"]["attachPodUID"];
            uid.is_string() && *uid != before && entry["phase"] == "Ready"
        })
    })
    .await?;
    run(&mut console, "dd if=/dev/zero of=$(disk block) bs=512 count=1 conv=fsync").await?;

    // A volume that was never attached leaves at once.
    edit(s, json!([claim("block")]), json!([disk("block")])).await?;
    wait_no_entry(s, "absent").await?;
    run(&mut console, "test -n \"$(disk block)\"").await?;
    console.leave().await
}

#[test]
fn status_that_names_the_attachment_pod_of_another_vmi_gets_no_volume_of_it() {
    story("hotplug-forged", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        block.lend(s, async |block| forged(s, &block.hostname).await).await
    });
}

async fn forged(s: &Story, hostname: &str) -> Result<()> {
    for name in ["box", "victim"] {
        s.apply(&manifests::kernel_vm_on(hostname, name)).await?;
    }
    for name in ["box", "victim"] {
        s.wait_running(name).await?;
    }
    s.virt(&["addvolume", "victim", "--volume-name=block"]).await?;
    let is_ready = |vmi: &Value| entry(vmi, "block").is_some_and(|entry| entry["phase"] == "Ready");
    let victim = s.wait("vmi", "victim", "have its volume", MINUTES, is_ready).await?;
    let attachment = entry(&victim, "block").unwrap_or_default()["hotplugVolume"].clone();
    ensure!(attachment["attachPodUID"].is_string(), "{attachment}");
    // A volume of the same name, which has no pod of its own.
    let volume = json!([{"name": "block", "persistentVolumeClaim": {"claimName": "absent", "hotpluggable": true}}]);
    edit(s, volume, json!([{"name": "block", "disk": {"bus": "virtio"}}])).await?;
    wait_phase(s, "block", "Pending").await?;
    let vmi_path = format!("/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances/box", s.namespace);
    let mut refusal = None;
    // virt-controller restores the field at once.
    for _ in 0..60 {
        let vmi = s.get("vmi", "box").await?;
        let Some(mut forged) = entry(&vmi, "block") else { continue };
        ensure!(matches!(forged["phase"].as_str(), Some("Pending" | "Bound")), "the volume was handed over: {forged}");
        forged["hotplugVolume"] = attachment.clone();
        forged["persistentVolumeClaimInfo"] = json!({"claimName": "absent", "volumeMode": "Block"});
        let patch = json!({"status": {"volumeStatus": [forged]}});
        // Users cannot change the status.
        let answer = send(s, &Method::PATCH, &vmi_path, &patch).await?;
        ensure!(answer.is_none(), "the status cannot be changed: {answer:?}");
        if let Ok(message) = s.wait_event("box", "HotplugFailed", Duration::from_secs(2)).await {
            refusal = Some(message);
            break;
        }
    }
    let message = refusal.unwrap_or_default();
    ensure!(message.contains("does not hold this volume"), "{message:?}");
    let left = wait_phase(s, "block", "Pending").await?;
    ensure!(left["target"] == "", "{left}");
    // The owner of the claim is not affected.
    ensure!(is_ready(&s.get("vmi", "victim").await?), "the other VMI has lost its volume");
    edit(s, json!(null), json!(null)).await?;
    wait_no_entry(s, "block").await
}

#[test]
fn volume_without_a_free_port_says_so_and_delays_no_other() {
    story("hotplug-ports", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        let body = async |_: &Storage| {
            let files = Storage::make(s, "files", Backing::Directory).await?;
            let body = async |files: &Storage| {
                add_image(s, files).await?;
                without_ports(s, &files.hostname).await
            };
            files.lend(s, body).await
        };
        block.lend(s, body).await
    });
}

async fn without_ports(s: &Story, hostname: &str) -> Result<()> {
    s.apply(&manifests::kernel_vm_on(hostname, "box")).await?;
    s.wait_running("box").await?;
    // A guest that looks for its devices while five come has stood still once.
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    let volume = |name: &str, claim: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": claim, "hotpluggable": true}});
    // More disks than a small guest has ports: one image, read by all of them.
    let names: Vec<String> = (0..10).map(|index| format!("port-{index}")).collect();
    let (scsi, on_scsi) =
        (volume("block", "block"), json!({"name": "block", "serial": "block", "disk": {"bus": "scsi"}}));
    let volumes = names.iter().map(|name| volume(name, "files")).chain([scsi.clone()]).collect();
    let disk = |name: &String| json!({"name": name, "disk": {"bus": "virtio", "readonly": true}});
    let disks = names.iter().map(disk).chain([on_scsi.clone()]).collect();
    edit(s, volumes, disks).await?;
    wait_phase(s, "block", "Ready").await?;
    let is_full = |vmi: &Value| {
        let in_phase = |phase: &str| {
            names.iter().filter(|name| entry(vmi, name).is_some_and(|entry| entry["phase"] == phase)).count()
        };
        let message = condition(vmi, "Synchronized").and_then(|shown| shown["message"].as_str()).unwrap_or_default();
        let (ready, waiting) = (in_phase("Ready"), in_phase("MountedToPod"));
        ready >= 3 && waiting >= 1 && ready + waiting == names.len() && message.contains("No more available PCI slots")
    };
    s.wait("vmi", "box", "say that no port is left", MINUTES, is_full).await?;
    run(&mut console, "comes block").await?;

    edit(s, json!([scsi]), json!([on_scsi])).await?;
    for name in &names {
        wait_no_entry(s, name).await?;
    }
    let is_in_line = |vmi: &Value| condition(vmi, "Synchronized").is_none() && vmi["status"]["phase"] == "Running";
    s.wait("vmi", "box", "be in line again", MINUTES, is_in_line).await?;
    run(&mut console, "test -n \"$(disk block)\"").await?;
    console.leave().await
}

#[test]
fn medium_of_a_drive_is_inserted_and_ejected() {
    story("hotplug-cd", async |s| {
        let files = Storage::make(s, "files", Backing::Directory).await?;
        let body = async |files: &Storage| {
            add_image(s, files).await?;
            media(s, files).await
        };
        files.lend(s, body).await
    });
}

async fn media(s: &Story, files: &Storage) -> Result<()> {
    on_host(
        s,
        &files.node,
        &format!("echo on-the-medium | dd of={}/disk.img conv=notrunc 2>/dev/null", files.directory),
    )
    .await?;
    let drive = "devices: {disks: [{name: cd, cdrom: {bus: sata}}]}\n";
    s.apply(&manifests::kernel_vm_on(&files.hostname, "box").replace("devices: {}\n", drive)).await?;
    s.wait_running("box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    // Errors of reads without a medium would be between the output of commands.
    run(&mut console, "dmesg -n 1").await?;
    run(&mut console, "for i in $(seq 100); do test -b /dev/sr0 && break; sleep 1; done; test -b /dev/sr0").await?;
    ensure!(console.run("head -c 13 /dev/sr0").await?.1 != 0, "the empty drive has a medium");

    let volume = json!([{"name": "cd", "persistentVolumeClaim": {"claimName": "files", "hotpluggable": true}}]);
    let disks = json!([{"name": "cd", "cdrom": {"bus": "sata"}}]);
    for round in 0..2 {
        edit(s, volume.clone(), disks.clone()).await?;
        wait_phase(s, "cd", "Ready").await?;
        let read = "for i in $(seq 60); do head -c 13 /dev/sr0 2>/dev/null | grep -q on-the-medium && break; sleep 1; done; \
                    head -c 13 /dev/sr0";
        let content = run(&mut console, read).await?;
        ensure!(content == "on-the-medium", "round {round}: the drive holds {content:?}");
        ensure_no_restart_is_required(s).await?;

        edit(s, json!(null), disks.clone()).await?;
        wait_no_entry(s, "cd").await?;
        let gone = "for i in $(seq 60); do head -c 1 /dev/sr0 >/dev/null 2>&1 || break; sleep 1; done; \
                    head -c 1 /dev/sr0 >/dev/null 2>&1; echo code-$?";
        ensure!(run(&mut console, gone).await? != "code-0", "round {round}: the medium stays");
    }
    console.leave().await?;
    wait_no_attachments(s).await
}
