//! Manifests in the form in which others write them: `shapes.yaml` has their fields with values of our own.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::Value;

use super::{MINUTES, data_volume, http, server, storage, wait_phase, with_driver};

const SHAPES: &str = include_str!("shapes.yaml");
/// VMs whose guests are booted.
const RUN: [&str; 3] = ["capk-machine", "cozystack", "virtctl"];

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
    for shape in shapes()? {
        let text = shape.to_string().replace("$NAMESPACE", &s.namespace);
        let line = match shape["kind"] == "VirtualMachine" && !RUN.contains(&name(&shape)) {
            true => "kubectl apply --dry-run=server --validate=strict -f -",
            false => "kubectl apply --validate=strict -f -",
        };
        let (is_accepted, output) = s.command_line(line, &text).await?;
        ensure!(is_accepted, "{} {}: {output}", shape["kind"], name(&shape));
    }
    for vm in RUN {
        s.wait("vmi", vm, "run", MINUTES, |vmi| vmi["status"]["phase"] == "Running").await?;
        let pod = s.launcher_pod(vm).await?;
        let pod = name(&pod).to_owned();
        let deadline = std::time::Instant::now() + MINUTES;
        while !s.log(&pod, "compute").await?.contains("tiny: up") {
            ensure!(std::time::Instant::now() < deadline, "the guest of {vm} does not boot");
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        }
    }
    Ok(())
}

#[test]
fn shapes_have_what_runs() -> Result<()> {
    let shapes = shapes()?;
    for vm in RUN {
        ensure!(shapes.iter().any(|shape| name(shape) == vm && shape["kind"] == "VirtualMachine"), "no {vm}");
    }
    Ok(())
}
