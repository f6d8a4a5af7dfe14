//! Manifests in the form in which others write them: `shapes.yaml` has their fields with values of our own.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::Value;

use super::{MINUTES, data_volume, http, server, storage, wait_phase, with_driver};

const SHAPES: &str = include_str!("shapes.yaml");
/// VMs whose guests are booted, a few at a time.
const RUN: [&[&str]; 2] =
    [&["capk-machine", "cozystack", "virtctl"], &["kkp-machine", "hypershift-node", "console-vm"]];

/// Returns the manifests, one document each.
fn shapes() -> Result<Vec<Value>> {
    serde_saphyr::from_multiple(SHAPES).context("shapes.yaml is not YAML")
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

#[test]
fn manifests_of_publishers_are_accepted_and_run() {
    story("dv-shapes", async |s| with_driver(s, accepted).await);
}

async fn accepted(s: &Story) -> Result<()> {
    server(s).await?;
    // The claim that shapes clone.
    let fields = format!("{}, storage: {}", http("tiny.qcow2", ""), storage("csi", "Filesystem", 96));
    s.apply(&data_volume("golden", &fields)).await?;
    wait_phase(s, "golden", "Succeeded").await?;
    let shapes = shapes()?;
    let runs = |shape: &Value| RUN.concat().into_iter().any(|vm| is_vm(shape, vm));
    for shape in shapes.iter().filter(|shape| !runs(shape)) {
        let options = if shape["kind"] == "VirtualMachine" { "--dry-run=server" } else { "" };
        apply(s, shape, options).await?;
    }
    for vms in RUN {
        for vm in vms {
            let shape = shapes.iter().find(|shape| is_vm(shape, vm)).with_context(|| format!("no {vm}"))?;
            apply(s, shape, "").await?;
        }
        for vm in vms {
            boots(s, vm).await?;
        }
        for vm in vms {
            s.delete("vm", vm).await?;
        }
        for vm in vms {
            s.wait_gone("vmi", vm, MINUTES).await?;
        }
    }
    Ok(())
}

fn is_vm(shape: &Value, vm: &str) -> bool {
    shape["kind"] == "VirtualMachine" && name(shape) == vm
}

async fn apply(s: &Story, shape: &Value, options: &str) -> Result<()> {
    let text = shape.to_string().replace("$NAMESPACE", &s.namespace);
    let line = format!("kubectl apply {options} --validate=strict -f -");
    let (is_accepted, output) = s.command_line(&line, &text).await?;
    ensure!(is_accepted, "{} {}: {output}", shape["kind"], name(shape));
    Ok(())
}

async fn boots(s: &Story, vm: &str) -> Result<()> {
    s.wait("vmi", vm, "run", MINUTES, |vmi| vmi["status"]["phase"] == "Running").await?;
    let pod = s.launcher_pod(vm).await?;
    let pod = name(&pod).to_owned();
    let deadline = std::time::Instant::now() + MINUTES;
    while !s.log(&pod, "compute").await?.contains("tiny: up") {
        ensure!(std::time::Instant::now() < deadline, "the guest of {vm} does not boot");
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
    Ok(())
}

#[test]
fn shapes_have_what_runs() -> Result<()> {
    let shapes = shapes()?;
    for vm in RUN.concat() {
        ensure!(shapes.iter().any(|shape| is_vm(shape, vm)), "no {vm}");
    }
    Ok(())
}
