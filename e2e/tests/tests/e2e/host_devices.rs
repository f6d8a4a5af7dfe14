//! Devices of the host. The nodes of a test cluster have none that could be given away, so the story ends with the
//! scheduler, which waits for a node that has.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::manifests;

#[test]
fn a_machine_waits_for_a_device_that_is_permitted() {
    story_alone("hostdev", async |s| {
        let card = json!({"pciVendorSelector": "1AF4:FFFF", "resourceName": "ferrovirt.test/card"});
        let stick =
            json!({"resourceName": "ferrovirt.test/stick", "selectors": [{"vendor": "46f4", "product": "ffff"}]});
        configure(s, &json!(["HostDevices"]), &json!({"pciHostDevices": [card], "usb": [stick]})).await?;
        let told = wait_for_device(s).await;
        configure(s, &Value::Null, &Value::Null).await?;
        told
    });
}

/// Sets feature gates and permitted devices of the installation.
async fn configure(s: &Story, gates: &Value, permitted: &Value) -> Result<()> {
    let configuration = json!({"developerConfiguration": {"featureGates": gates}, "permittedHostDevices": permitted});
    let patch = Patch::Merge(json!({"spec": {"configuration": configuration}}));
    let installation = s.installation_api("KubeVirt");
    installation.patch("kubevirt", &PatchParams::default(), &patch).await.context("permit devices")?;
    Ok(())
}

fn machine(name: &str, resource: &str) -> String {
    let devices = format!("devices: {{hostDevices: [{{name: card, deviceName: {resource}}}]}}");
    manifests::kernel_vm(name, "Always").replace("devices: {}", &devices)
}

async fn wait_for_device(s: &Story) -> Result<()> {
    // Each virt-api hears of the configuration a moment after its administrator.
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(error) = s.apply(&machine("box", "ferrovirt.test/card")).await {
        ensure!(Instant::now() < deadline, "a machine with a permitted device is refused: {error:#}");
        sleep(Duration::from_millis(250)).await;
    }
    loop {
        let said = s.refused(&machine("other", "ferrovirt.test/unknown")).await?;
        if said.contains("spec.template.spec.domain.devices.hostDevices[0].deviceName") {
            break;
        }
        ensure!(Instant::now() < deadline, "a device that is not permitted is refused without naming it: {said}");
        sleep(Duration::from_millis(250)).await;
    }
    let minute = Duration::from_secs(60);
    let unschedulable = |vm: &Value| vm["status"]["printableStatus"] == "ErrorUnschedulable";
    s.wait("vm", "box", "wait for a node with its device", minute, unschedulable).await?;
    let pod = s.launcher_pod("box").await?;
    let said = pod["status"]["conditions"].to_string();
    ensure!(said.contains("Insufficient ferrovirt.test/card"), "the scheduler does not say what is missing: {said}");
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", minute).await
}
