//! Disks that are files of the node (`hostDisk`).

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, signal,
    storage::{delete_vmis_after, on_host},
    story_alone,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    kills::{MINUTES, in_guest},
    manifests,
};

/// Directory on the node.
const DIRECTORY: &str = "/var/tmp/ferrovirt-host-disks";

#[test]
fn guest_keeps_its_data_in_a_file_of_the_node_and_files_that_exist_are_left_as_they_are() {
    story_alone("host-disks", async |s| {
        let (node, hostname) = s.one_node().await?;
        let refused = s.refused(&vmi("guest", &hostname, "{path: /var/tmp/a.img, type: Disk}")).await?;
        ensure!(refused.contains("HostDisk feature gate is not enabled"), "{refused}");
        set_gate(s, &json!(["HostDisk"])).await?;
        let outcome = host_disks(s, &node, &hostname).await;
        let gone = delete_vmis_after(s, &outcome).await;
        set_gate(s, &Value::Null).await?;
        on_host(s, &node, &format!("rm -rf {DIRECTORY}")).await?;
        outcome.and(gone)
    });
}

async fn host_disks(s: &Story, node: &str, hostname: &str) -> Result<()> {
    let created = format!("{{path: {DIRECTORY}/made/data.img, type: DiskOrCreate, capacity: 24Mi}}");
    // The namespace permits no directory of the node: Kubernetes refuses the pod, not Ferrovirt.
    s.apply_when_accepted(&vmi("guest", hostname, &created)).await?;
    let is_refused = |vmi: &Value| vmi["status"]["conditions"].to_string().contains("violates PodSecurity");
    s.wait("vmi", "guest", "report that its pod is refused", MINUTES, is_refused).await?;
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}});
    s.cluster_api("Namespace").patch(&s.namespace, &PatchParams::default(), &Patch::Merge(label)).await?;
    s.wait_running("guest").await?;
    let made = on_host(s, node, &format!("stat -c \"%s %u %a\" {DIRECTORY}/made/data.img")).await?;
    ensure!(made.trim() == "25165824 107 600", "the file was made as {made:?}");
    let written = in_guest(s, "cat /sys/block/vda/size; echo from-the-guest >/dev/vda; sync").await?;
    ensure!(written.trim() == "49152", "the disk of the guest has {written:?} sectors");

    // A new virt-handler, and a new VMI, use the file that exists.
    let entered = s.enter_node(node).await?;
    entered.run(&signal("virt-handler", "", "KILL")).await.context("kill virt-handler")?;
    entered.leave().await?;
    s.delete("vmi", "guest").await?;
    s.wait_gone("vmi", "guest", MINUTES).await?;
    s.apply(&vmi("guest", hostname, &created.replace("24Mi", "64Mi"))).await?;
    s.wait_running("guest").await?;
    let kept = in_guest(s, "cat /sys/block/vda/size; head -n 1 /dev/vda").await?;
    ensure!(kept.contains("49152") && kept.contains("from-the-guest"), "the disk has lost its content: {kept:?}");
    s.delete("vmi", "guest").await?;
    s.wait_gone("vmi", "guest", MINUTES).await?;

    // A file of root and a link are neither used nor changed.
    let prepare = format!(
        "cd {DIRECTORY}; echo kept >secret; chmod 600 secret; ln -s secret link.img; cp secret root.img; stat -c %u:%a:%s \
         secret root.img"
    );
    let before = on_host(s, node, &prepare).await?;
    for (file, reason) in [("root.img", "root.img"), ("link.img", "secret"), ("absent/../x.img", "absolute path")] {
        let source = format!("{{path: {DIRECTORY}/{file}, type: DiskOrCreate, capacity: 24Mi}}");
        if file.contains("..") {
            let refused = s.refused(&vmi("guest", hostname, &source)).await?;
            ensure!(refused.contains(reason), "{refused}");
            continue;
        }
        s.apply(&vmi("guest", hostname, &source)).await?;
        let is_named = |vmi: &Value| vmi["status"]["conditions"].to_string().contains(reason);
        s.wait("vmi", "guest", "name the file that it cannot use", MINUTES, is_named).await?;
        s.delete("vmi", "guest").await?;
        s.wait_gone("vmi", "guest", MINUTES).await?;
    }
    let after = on_host(s, node, &format!("cd {DIRECTORY}; stat -c %u:%a:%s secret root.img")).await?;
    ensure!(after == before, "files of the node were changed from {before} to {after}");
    Ok(())
}

fn vmi(name: &str, hostname: &str, source: &str) -> String {
    manifests::kernel_vmi_on(hostname, name)
        .replace("devices: {}", "devices: {disks: [{name: data, disk: {bus: virtio}}]}")
        .trim_end()
        .to_owned()
        + &format!("\n  volumes:\n  - {{name: data, hostDisk: {source}}}\n")
}

async fn set_gate(s: &Story, gates: &Value) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}
