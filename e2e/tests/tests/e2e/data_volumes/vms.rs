//! VMs with DataVolumes.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, story};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{
    MINUTES, SIZE, TINY, TINY_SIZE, condition, contents, data_volume, http, kernel_vm, release, server, storage, vm,
    wait_nothing_left, wait_phase, wait_served, with_driver,
};
use crate::{
    hotplug::{HELPERS, run},
    manifests,
};

/// Waits until a VM has a printable status.
async fn wait_status(s: &Story, name: &str, status: &str) -> Result<Value> {
    let has_status = |vm: &Value| vm["status"]["printableStatus"] == status;
    s.wait("vm", name, &format!("have status {status}"), MINUTES, has_status).await
}

/// Starts a stopped VM and waits until it runs.
async fn start(s: &Story, name: &str) -> Result<()> {
    s.virt(&["start", name]).await?;
    wait_status(s, name, "Running").await.map(drop)
}

async fn stop(s: &Story, name: &str) -> Result<()> {
    s.virt(&["stop", name]).await?;
    s.wait_gone("vmi", name, MINUTES).await
}

async fn console(s: &Story, name: &str) -> Result<Console> {
    s.reopen_console(name, "root", "story").await
}

/// Logs in to the guest of [`kernel_vm`].
async fn kernel_console(s: &Story, name: &str) -> Result<Console> {
    let mut console = s.reopen_console(name, "root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    Ok(console)
}

#[test]
fn vm_boots_from_an_imported_container_disk_and_keeps_it_until_it_is_deleted() {
    story("dv-registry", async |s| with_driver(s, lasting).await);
}

async fn lasting(s: &Story) -> Result<()> {
    s.apply(
        "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: small}
spec: {cpu: {guest: 1}, memory: {guest: 128Mi}}
",
    )
    .await?;
    // The default class, and no access mode: as people write it.
    let fields = format!("source: {{{TINY}}}, storage: {{resources: {{requests: {{storage: {TINY_SIZE}Mi}}}}}}");
    let manifest = vm("lasting", "Always", &fields)
        .replace("      domain:\n        memory: {guest: 128Mi}\n", "      domain:\n")
        .replace("  runStrategy:", "  instancetype: {kind: VirtualMachineInstancetype, name: small}\n  runStrategy:");
    s.apply(&manifest).await?;
    wait_status(s, "lasting", "Running").await?;
    let volume = wait_phase(s, "lasting-root", "Succeeded").await?;
    ensure!(volume["status"]["progress"] == "100.0%", "{}", volume["status"]);
    ensure!(condition(&volume, "Ready")["status"] == "True", "{}", volume["status"]);
    let owner = &volume["metadata"]["ownerReferences"][0];
    ensure!(owner["kind"] == "VirtualMachine" && owner["name"] == "lasting", "{owner}");
    let vmi = s.get("vmi", "lasting").await?;
    ensure!(condition(&vmi, "DataVolumesReady")["status"] == "True", "{}", vmi["status"]["conditions"]);
    let claim = s.get("PersistentVolumeClaim", "lasting-root").await?;
    let owner = &claim["metadata"]["ownerReferences"][0];
    ensure!(owner["kind"] == "DataVolume" && owner["controller"] == true, "{owner}");

    let mut guest = console(s, "lasting").await?;
    let root = run(&mut guest, "grep ' /disk ' /proc/mounts").await?;
    ensure!(root.starts_with("/dev/vda"), "the guest's disk is {root}");
    run(&mut guest, "echo kept-$((40+2)) >/disk/kept && sync").await?;
    guest.leave().await?;
    stop(s, "lasting").await?;
    start(s, "lasting").await?;
    let mut guest = console(s, "lasting").await?;
    let kept = run(&mut guest, "cat /disk/kept").await?;
    ensure!(kept == "kept-42", "the disk has lost data: {kept:?}");
    guest.leave().await?;

    s.delete("vm", "lasting").await?;
    s.wait_gone("vm", "lasting", MINUTES).await?;
    wait_nothing_left(s).await
}

#[test]
fn vm_boots_from_a_served_image_on_a_claim_that_waits_for_its_first_pod() {
    story("dv-http", async |s| with_driver(s, served).await);
}

async fn served(s: &Story) -> Result<()> {
    server(s).await?;
    let fields = format!("{}, storage: {}", http("tiny.qcow2", ""), storage("csi-late", "Block", TINY_SIZE));
    s.apply(&vm("late", "Halted", &fields)).await?;
    // Another VM makes its DataVolume at its first start only.
    let postponed = vm("postponed", "Halted", &fields).replace(
        "metadata: {name: postponed}",
        "metadata: {name: postponed, annotations: {kubevirt.io/immediate-data-volume-creation: 'false'}}",
    );
    s.apply(&postponed).await?;
    wait_phase(s, "late-root", "WaitForFirstConsumer").await?;
    wait_status(s, "late", "Stopped").await?;
    ensure!(s.api("DataVolume").get_opt("postponed-root").await?.is_none(), "a DataVolume was not postponed");
    for name in ["late", "postponed"] {
        start(s, name).await?;
        wait_phase(s, &format!("{name}-root"), "Succeeded").await?;
        let mut guest = console(s, name).await?;
        let hostname = run(&mut guest, "hostname").await?;
        ensure!(hostname == format!("{name}-guest"), "{hostname:?}");
        guest.leave().await?;
        stop(s, name).await?;
    }
    Ok(())
}

#[test]
fn data_volumes_are_plugged_into_a_running_vm() {
    story("dv-hotplug", async |s| with_driver(s, plugged).await);
}

async fn plugged(s: &Story) -> Result<()> {
    server(s).await?;
    s.apply(&manifests::kernel_vm("box", "Always")).await?;
    s.wait_running("box").await?;
    let mut guest = kernel_console(s, "box").await?;
    for (name, class, file) in [("ready", "csi", "disk.raw"), ("late", "csi-late", "disk.qcow2")] {
        s.apply(&data_volume(name, &format!("{}, storage: {}", http(file, ""), storage(class, "Block", 16)))).await?;
    }
    s.apply(&data_volume("empty", &format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Filesystem", 16))))
        .await?;
    // One is plugged in while it is imported, another one binds its claim so.
    let names = ["ready", "late", "empty"];
    let volumes: Vec<Value> =
        names.iter().map(|name| json!({"name": name, "dataVolume": {"name": name, "hotpluggable": true}})).collect();
    let disks: Vec<Value> =
        names.iter().map(|name| json!({"name": name, "serial": name, "disk": {"bus": "scsi"}})).collect();
    let patch = json!({"spec": {"template": {"spec": {"volumes": volumes, "domain": {"devices": {"disks": disks}}}}}});
    s.api("vm").patch("box", &PatchParams::default(), &Patch::Merge(patch)).await?;
    for name in names {
        crate::hotplug::wait_phase(s, name, "Ready").await?;
        run(&mut guest, &format!("comes {name}")).await?;
    }
    for name in ["ready", "late"] {
        let last = run(&mut guest, &format!("dd if=$(disk {name}) bs=1M skip=15 2>/dev/null | head -c 8")).await?;
        ensure!(last == "block 15", "disk {name} has {last:?}");
    }
    let size = run(&mut guest, "d=$(disk empty); cat /sys/block/${d##*/}/size").await?;
    let sectors: u64 = size.parse()?;
    ensure!((SIZE / 512..SIZE / 256).contains(&sectors), "the empty disk has {sectors} sectors");
    guest.leave().await
}

#[test]
fn existing_claim_of_the_name_of_a_template_is_used_as_it_is() {
    story("dv-adopted", async |s| with_driver(s, adopted).await);
}

async fn adopted(s: &Story) -> Result<()> {
    s.apply(
        "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: old-root}
spec:
  storageClassName: csi
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 16Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 107, runAsGroup: 107, fsGroup: 107, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: writer
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sh, -ec, 'cd /claim; printf mine >disk.img; truncate -s 8M disk.img']
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: claim, mountPath: /claim}]
  volumes: [{name: claim, persistentVolumeClaim: {claimName: old-root}}]
",
    )
    .await?;
    s.wait("Pod", "writer", "write", MINUTES, |pod| pod["status"]["phase"] == "Succeeded").await?;
    s.delete("Pod", "writer").await?;
    let before = s.get("PersistentVolumeClaim", "old-root").await?;
    let fields = format!("source: {{{TINY}}}, storage: {}", storage("csi", "Filesystem", TINY_SIZE));
    s.apply(&kernel_vm("old", "Always", &fields)).await?;
    s.wait_running("old").await?;
    let mut guest = kernel_console(s, "old").await?;
    let data = run(&mut guest, "head -c 4 $(disk DATA)").await?;
    ensure!(data == "mine", "the claim was filled anew: {data:?}");
    guest.leave().await?;
    wait_phase(s, "old-root", "Succeeded").await?;
    let after = s.get("PersistentVolumeClaim", "old-root").await?;
    ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the claim was made anew");
    ensure!(after["metadata"]["ownerReferences"][0]["kind"] == "DataVolume", "{}", after["metadata"]);
    Ok(())
}

#[test]
fn vm_waits_for_its_import_also_for_one_that_was_deleted_meanwhile() {
    story("dv-deleted", async |s| with_driver(s, deleted).await);
}

async fn deleted(s: &Story) -> Result<()> {
    server(s).await?;
    let fields = format!("{}, storage: {}", http("disk.raw?hold=50", ""), storage("csi", "Filesystem", 32));
    s.apply(&kernel_vm("waits", "Always", &fields)).await?;
    wait_served(s, "held /disk.raw?hold=50").await?;
    let former = wait_phase(s, "waits-root", "ImportInProgress").await?;
    wait_status(s, "waits", "Provisioning").await?;
    let has_half = |volume: &Value| volume["status"]["progress"].as_str().is_some_and(is_half);
    s.wait("DataVolume", "waits-root", "show its progress", MINUTES, has_half).await?;

    s.delete("DataVolume", "waits-root").await?;
    let is_another = |volume: &Value| {
        volume["metadata"]["uid"] != former["metadata"]["uid"] && volume["status"]["phase"] == "ImportInProgress"
    };
    s.wait("DataVolume", "waits-root", "be made anew", MINUTES, is_another).await?;
    ensure!(
        s.api("vmi").get_opt("waits").await?.is_none_or(|vmi| vmi.data["status"]["phase"] != "Running"),
        "too early"
    );
    release(s).await?;
    s.wait_running("waits").await?;
    let mut guest = kernel_console(s, "waits").await?;
    let last = run(&mut guest, "dd if=$(disk DATA) bs=1M skip=15 2>/dev/null | head -c 8").await?;
    ensure!(last == "block 15", "{last:?}");
    guest.leave().await?;
    stop(s, "waits").await?;
    let content = contents(s, &["waits-root"]).await?;
    ensure!(content.iter().all(|content| content.sum == super::SHA256), "{content:?}");
    Ok(())
}

/// Returns true for the progress of half an import.
fn is_half(progress: &str) -> bool {
    progress
        .strip_suffix('%')
        .and_then(|number| number.parse::<f64>().ok())
        .is_some_and(|percent| (20.0..80.0).contains(&percent))
}

#[test]
fn failed_import_of_a_vm_is_shown_by_its_status_and_an_edit_is_not_needed_when_the_source_appears() {
    story("dv-source-appears", async |s| with_driver(s, appears).await);
}

async fn appears(s: &Story) -> Result<()> {
    server(s).await?;
    let fields = format!("{}, storage: {}", http("later.raw", ""), storage("csi", "Block", 16));
    s.apply(&kernel_vm("hopes", "Always", &fields)).await?;
    let is_named =
        |volume: &Value| condition(volume, "Running")["message"].as_str().is_some_and(|text| text.contains("404"));
    s.wait("DataVolume", "hopes-root", "name the error", MINUTES, is_named).await?;
    let shows_error = |vm: &Value| {
        vm["status"]["printableStatus"] == "DataVolumeError" && vm["status"]["conditions"].to_string().contains("404")
    };
    s.wait("vm", "hopes", "show the error", MINUTES, shows_error).await?;
    s.exec("images", &["cp", "/images/disk.raw", "/images/later.raw"]).await?;
    s.wait("vmi", "hopes", "run", MINUTES, |vmi| vmi["status"]["phase"] == "Running").await.map(drop)
}
