//! Utility volumes: claims that a component adds to a running VMI, as directories of its launcher.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT, signal,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story_alone,
};
use http::Method;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    controller_rights::send,
    kills::{MINUTES, in_guest, uid},
    manifests,
};

#[test]
fn components_hand_a_directory_to_the_launcher_of_a_running_guest() {
    story_alone("utility-volumes", async |s| {
        let files = Storage::make(s, "files", Backing::Directory).await?;
        let raw = Storage::make(s, "raw", Backing::Device).await?;
        let outcome = utility_volumes(s, &files).await;
        let gone = delete_vmis_after(s, &outcome).await;
        set_gate(s, &Value::Null).await?;
        files.remove(s).await?;
        raw.remove(s).await?;
        outcome.and(gone)
    });
}

async fn utility_volumes(s: &Story, files: &Storage) -> Result<()> {
    s.apply(&manifests::kernel_vmi_on(&files.hostname, "guest")).await?;
    s.wait_running("guest").await?;
    let boot = in_guest(s, "cat /proc/sys/kernel/random/boot_id").await?;
    let wanted = json!([
        {"name": "notes", "claimName": "files", "type": "Backup"},
        {"name": "device", "claimName": "raw"},
    ]);
    let refused = request(s, &wanted).await?.context("added without the gate")?;
    ensure!(refused.contains("UtilityVolumes feature gate is not enabled"), "{refused}");
    set_gate(s, &json!(["UtilityVolumes"])).await?;
    // virt-api sees the new configuration with a delay.
    let deadline = Instant::now() + TIMEOUT;
    while let Some(refused) = request(s, &wanted).await? {
        ensure!(Instant::now() < deadline, "refused with the gate: {refused}");
        sleep(Duration::from_millis(250)).await;
    }
    let by_user = s.api("vmi").patch("guest", &PatchParams::default(), &Patch::Merge(spec(&json!([])))).await;
    let by_user = by_user.err().context("changed by a user")?.to_string();
    ensure!(by_user.contains("update of VMI object is restricted"), "{by_user}");

    let is_there = |vmi: &Value| entry(vmi, "notes")["phase"] == "MountedToPod" && !entry(vmi, "device").is_null();
    let vmi = s.wait("vmi", "guest", "have the utility volume", MINUTES, is_there).await?;
    let device = entry(&vmi, "device");
    let message = "Utility volume PVC raw must be filesystem mode, not block mode";
    ensure!(
        device["phase"] == "Pending" && device["reason"] == "PVCNotReady" && device["message"] == message,
        "{device}"
    );
    ensure!(entry(&vmi, "notes")["target"] == "", "the volume is a disk: {}", entry(&vmi, "notes"));

    // virt-launcher has the directory of the claim.
    let node = s.enter_node(&s.node_of("guest").await?).await?;
    let directory = format!(
        "p=$(for p in /proc/[0-9]*; do grep -qs -e {} $p/cgroup && grep -qsx virt-launcher $p/comm && echo $p && break; \
         done); d=$p/root/run/kubevirt/hotplug-disks/notes",
        uid(&s.launcher_pod("guest").await?)?
    );
    let found = node.run(&format!("{directory}; echo from-the-launcher > $d/note; stat -c %g $d")).await?;
    ensure!(found.trim() == "107", "the directory is of group {found}");
    let note = on_host(s, &files.node, &format!("cat {}/note", files.directory)).await?;
    ensure!(note.trim() == "from-the-launcher", "the claim has {note:?}");

    // A new virt-handler finds the volume, and takes it back.
    node.run(&signal("virt-handler", "", "KILL")).await.context("kill virt-handler")?;
    let refused = request(s, &json!([])).await?;
    ensure!(refused.is_none(), "{refused:?}");
    let is_gone = |vmi: &Value| entry(vmi, "notes").is_null() && entry(vmi, "device").is_null();
    s.wait("vmi", "guest", "have no utility volume", MINUTES, is_gone).await?;
    let left = node.run(&format!("{directory}; ls $p/root/run/kubevirt/hotplug-disks")).await?;
    node.leave().await?;
    ensure!(left.trim().is_empty(), "virt-launcher still has {left}");
    let note = on_host(s, &files.node, &format!("cat {}/note", files.directory)).await?;
    ensure!(note.trim() == "from-the-launcher", "the claim has lost its content: {note:?}");
    ensure!(in_guest(s, "cat /proc/sys/kernel/random/boot_id").await? == boot, "the guest was restarted");
    Ok(())
}

fn spec(volumes: &Value) -> Value {
    json!({"spec": {"utilityVolumes": volumes}})
}

/// Sets the utility volumes of the VMI as a component, and returns the error if it is refused.
async fn request(s: &Story, volumes: &Value) -> Result<Option<String>> {
    let path = format!("/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances/guest", s.namespace);
    send(s, &Method::PATCH, &path, &spec(volumes)).await
}

async fn set_gate(s: &Story, gates: &Value) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

fn entry<'a>(vmi: &'a Value, volume: &str) -> &'a Value {
    let entries = vmi["status"]["volumeStatus"].as_array();
    entries.into_iter().flatten().find(|entry| entry["name"] == volume).unwrap_or(&Value::Null)
}
