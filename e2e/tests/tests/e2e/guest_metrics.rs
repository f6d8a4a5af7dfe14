//! Metrics of the node for the guest, Ignition, and devices on the root complex.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, storage::delete_vmis_after, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{kills::in_guest, manifests};

/// Devices with both ways to read metrics.
const DEVICES: &str = "devices: {downwardMetrics: {}, rng: {}, disks: [{name: metrics, disk: {bus: virtio}}]}";
const IGNITION: &str = "{\"ignition\": {\"version\": \"3.4.0\"}}";

#[test]
fn guest_reads_metrics_of_its_node_and_its_ignition_data_with_their_gates() {
    story_alone("guest-metrics", async |s| {
        let refused = s.refused(&vmi()).await?;
        ensure!(refused.contains("feature gate is not enabled"), "refused without naming a gate: {refused}");
        set_gates(s, &json!(["DownwardMetrics", "ExperimentalIgnitionSupport"])).await?;
        let outcome = metrics(s).await;
        let gone = delete_vmis_after(s, &outcome).await;
        set_gates(s, &Value::Null).await?;
        outcome.and(gone)
    });
}

fn vmi() -> String {
    let annotations =
        format!("{{kubevirt.io/ignitiondata: '{IGNITION}', kubevirt.io/placePCIDevicesOnRootComplex: 'true'}}");
    let vmi = manifests::kernel_vmi("guest").replace("devices: {}", DEVICES);
    let vmi = vmi.replace("{name: guest}", &format!("{{name: guest, annotations: {annotations}}}"));
    format!("{}\n  volumes:\n  - {{name: metrics, downwardMetrics: {{}}}}\n", vmi.trim_end())
}

async fn metrics(s: &Story) -> Result<()> {
    s.apply_when_accepted(&vmi()).await?;
    let running = s.wait_running("guest").await?;
    let node = running["status"]["nodeName"].as_str().context("no node")?;

    // The disk: read-only, with a document that is renewed.
    let disk = "dd if=/dev/vda bs=512 count=16 iflag=direct 2>/dev/null";
    let first = until(s, &format!("{disk} | tr -d '\\000'"), "ResourceProcessorLimit").await?;
    ensure!(first.contains(&format!("<value>{node}</value>")), "the disk names another node than {node}: {first}");
    let form = in_guest(s, &format!("{disk} | head -c 4; cat /sys/block/vda/ro /sys/block/vda/size")).await?;
    ensure!(form.split_whitespace().eq(["mvbd1", "512"]), "the disk with metrics is {form:?}");
    let time = value(&first, "Time").context("no time")?.to_owned();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let second = in_guest(s, &format!("{disk} | tr -d '\\000'")).await?;
        if value(&second, "Time").is_some_and(|later| *later > *time) {
            break;
        }
        ensure!(Instant::now() < deadline, "the metrics stay those of {time}: {second}");
        sleep(Duration::from_secs(1)).await;
    }

    // The channel.
    let port = "p=$(grep -l org.github.vhostmd.1 /sys/class/virtio-ports/*/name); p=/dev/$(basename $(dirname $p))";
    let ask = |request: &str| {
        format!(
            "{port}; exec 3<>$p; printf '{request}' >&3; timeout 60 sh -c 'while read -r line; do echo \"$line\"; \
                 case $line in *\"</metrics>\"*|INVALID*) break;; esac; done' <&3; exec 3>&-; sleep 2"
        )
    };
    let answer = in_guest(s, &ask("GET /metrics/XML\\n\\n")).await?;
    for metric in ["HostName", "VirtProductInfo", "TotalCPUTime", "FreePhysicalMemory"] {
        ensure!(value(&answer, metric).is_some(), "the answer lacks {metric}: {answer}");
    }
    let invalid = in_guest(s, &ask("GET /secrets\\n\\n")).await?;
    ensure!(invalid.contains("INVALID REQUEST"), "another request is answered by {invalid:?}");

    let key = "/sys/firmware/qemu_fw_cfg/by_name/opt/com.coreos/config/raw";
    let data = in_guest(s, &format!("modprobe qemu_fw_cfg; cat {key}")).await?;
    ensure!(data.trim() == IGNITION, "the guest has the Ignition data {data:?}");
    let devices = in_guest(s, "ls /sys/bus/pci/devices").await?;
    ensure!(
        devices.split_whitespace().all(|address| address.starts_with("0000:00:")),
        "devices are behind root ports: {devices}"
    );
    Ok(())
}

/// Runs a command in the guest until its output contains a text.
async fn until(s: &Story, command: &str, text: &str) -> Result<String> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let output = in_guest(s, command).await?;
        if output.contains(text) {
            return Ok(output);
        }
        ensure!(Instant::now() < deadline, "no {text} in {output}");
        sleep(Duration::from_secs(1)).await;
    }
}

/// Returns the value of the first metric with this name.
fn value<'a>(document: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(&format!("<name>{name}</name>"))?;
    let (_, value) = rest.split_once("<value>")?;
    value.split_once("</value>").map(|(value, _)| value)
}

async fn set_gates(s: &Story, gates: &Value) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}
