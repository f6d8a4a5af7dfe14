//! Host devices, GPUs, and VSOCK, which is one. Nodes of the test cluster have none, so the pod stays unschedulable, or gets a GPU
//! without an address.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{DevicePlugin, Story, TIMEOUT, own_cluster, skip, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::manifests;

/// Resource of a GPU, and the ID of one.
const GPU: &str = "ferrovirt.test/gpu";
const GPU_ID: &str = "GPU-e2e0-0001";

#[test]
fn vmi_waits_for_a_permitted_device() {
    story_alone("hostdev", async |s| {
        let card = json!({"pciVendorSelector": "1AF4:FFFF", "resourceName": "ferrovirt.test/card"});
        let stick =
            json!({"resourceName": "ferrovirt.test/stick", "selectors": [{"vendor": "46f4", "product": "ffff"}]});
        let message = s.refused(&talker()).await?;
        ensure!(
            message.contains("VSOCK feature gate is not enabled"),
            "VSOCK is refused without naming its gate: {message}"
        );
        configure(s, &json!(["HostDevices", "VSOCK"]), &json!({"pciHostDevices": [card], "usb": [stick]})).await?;
        let result = async {
            wait_for_device(s).await?;
            wait_for_vsock(s).await
        }
        .await;
        configure(s, &Value::Null, &Value::Null).await?;
        result
    });
}

#[test]
fn gpu_that_kubelet_has_allocated_shows_in_the_metrics() {
    story_alone("gpu", async |s| {
        let Some(plan) = own_cluster()? else {
            return skip("directory of a kubelet on this host");
        };
        let (name, _) = s.one_node().await?;
        let node = plan.node_of_namespace(&format!("{}-{name}", plan.prefix()));
        let plugin = DevicePlugin::offer(&node.context("a node of another cluster")?, GPU, &[GPU_ID]).await?;
        let card = json!({"pciVendorSelector": "1AF4:FFFE", "resourceName": GPU, "externalResourceProvider": true});
        configure(s, &Value::Null, &json!({"pciHostDevices": [card]})).await?;
        let shown = gpu_is_shown(s, &name).await;
        configure(s, &Value::Null, &Value::Null).await?;
        drop(plugin);
        shown
    });
}

/// The plugin gives the container no address, so that the guest does not start and the VMI says why.
async fn gpu_is_shown(s: &Story, node: &str) -> Result<()> {
    let devices = format!("devices: {{gpus: [{{name: card, deviceName: {GPU}}}]}}");
    make(s, &manifests::kernel_vm("box", "Always").replace("devices: {}", &devices)).await?;
    let message = s.wait_event("box", "SyncFailed", TIMEOUT).await?;
    let missing = format!("the pod has no device of resource {GPU} left for GPU card");
    // A node that is a container may not raise the limit that comes first.
    let is_named =
        [missing.as_str(), "cannot raise the limit of locked memory"].iter().any(|text| message.contains(text));
    ensure!(is_named, "the event does not say what is missing: {message}");
    let pod = s.launcher_pod("box").await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without a name")?;
    let labels = [
        ("node", node),
        ("namespace", s.namespace.as_str()),
        ("name", "box"),
        ("pod", pod),
        ("resource", GPU),
        ("uuid", GPU_ID),
    ]
    .map(|(label, value)| format!("{label}=\"{value}\""));
    let is_of_gpu = |line: &&String| line.starts_with("kubevirt_vmi_gpu_info{") && line.contains(&labels[1]);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let lines = s.metrics("virt-handler").await?;
        let found = lines.iter().find(is_of_gpu);
        if found.is_some_and(|line| line.ends_with(" 1") && labels.iter().all(|label| line.contains(label))) {
            break;
        }
        ensure!(Instant::now() < deadline, "no metric with {labels:?}: {found:?}");
        sleep(Duration::from_secs(1)).await;
    }
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", TIMEOUT).await?;
    let deadline = Instant::now() + TIMEOUT;
    while s.metrics("virt-handler").await?.iter().any(|line| is_of_gpu(&line)) {
        ensure!(Instant::now() < deadline, "the metric stays without the VMI");
        sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// Sets feature gates and permitted devices of the installation.
async fn configure(s: &Story, gates: &Value, permitted: &Value) -> Result<()> {
    let configuration = json!({"developerConfiguration": {"featureGates": gates}, "permittedHostDevices": permitted});
    let patch = Patch::Merge(json!({"spec": {"configuration": configuration}}));
    let installation = s.installation_api("KubeVirt");
    installation.patch("kubevirt", &PatchParams::default(), &patch).await.context("permit devices")?;
    Ok(())
}

fn vmi_with_device(name: &str, resource: &str) -> String {
    let devices = format!("devices: {{hostDevices: [{{name: card, deviceName: {resource}}}]}}");
    manifests::kernel_vm(name, "Always").replace("devices: {}", &devices)
}

fn talker() -> String {
    manifests::kernel_vm("talker", "Always").replace("devices: {}", "devices: {autoattachVSOCK: true}")
}

/// Creates a VMI that the new configuration permits.
async fn make(s: &Story, vmi: &str) -> Result<()> {
    // virt-api sees the new configuration with a delay.
    let deadline = Instant::now() + TIMEOUT;
    while let Err(error) = s.apply(vmi).await {
        ensure!(Instant::now() < deadline, "a VMI with a permitted device is refused: {error:#}");
        sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

async fn wait_for_device(s: &Story) -> Result<()> {
    make(s, &vmi_with_device("box", "ferrovirt.test/card")).await?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let message = s.refused(&vmi_with_device("other", "ferrovirt.test/unknown")).await?;
        if message.contains("spec.template.spec.domain.devices.hostDevices[0].deviceName") {
            break;
        }
        ensure!(Instant::now() < deadline, "a device that is not permitted is refused without naming it: {message}");
        sleep(Duration::from_millis(250)).await;
    }
    let unschedulable = |vm: &Value| vm["status"]["printableStatus"] == "ErrorUnschedulable";
    s.wait("vm", "box", "wait for a node with its device", TIMEOUT, unschedulable).await?;
    let pod = s.launcher_pod("box").await?;
    let message = pod["status"]["conditions"].to_string();
    ensure!(
        message.contains("Insufficient ferrovirt.test/card"),
        "the scheduler does not say what is missing: {message}"
    );
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", TIMEOUT).await
}

async fn wait_for_vsock(s: &Story) -> Result<()> {
    make(s, &talker()).await?;
    // Other clusters may have such a device.
    let settled = |vm: &Value| vm["status"]["printableStatus"] == "ErrorUnschedulable" || vm["status"]["ready"] == true;
    s.wait("vm", "talker", "wait for a node with VSOCK, or run on one", TIMEOUT, settled).await?;
    let cid = s.get("vmi", "talker").await?["status"]["VSOCKCID"].clone();
    ensure!(cid.as_u64().is_some_and(|cid| cid >= 3), "the VMI has no CID of a guest: {cid}");
    let pod = s.launcher_pod("talker").await?;
    if pod["spec"]["nodeName"].is_null() {
        let message = pod["status"]["conditions"].to_string();
        let missing = "Insufficient devices.kubevirt.io/vhost-vsock";
        ensure!(message.contains(missing), "the scheduler does not say what is missing: {message}");
    }
    s.delete("vm", "talker").await?;
    s.wait_gone("vmi", "talker", TIMEOUT).await
}
