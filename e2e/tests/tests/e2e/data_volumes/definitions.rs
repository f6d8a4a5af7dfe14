//! A cluster that loses the definitions of DataVolumes, and gets them back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::{MINUTES, TINY, TINY_SIZE, storage, vm, wait_phase, with_driver};

const DEFINITIONS: [&str; 2] = ["datavolumes.cdi.kubevirt.io", "datasources.cdi.kubevirt.io"];

#[test]
fn vm_waits_for_the_definition_of_data_volumes() {
    story_alone("dv-definitions", async |s| with_driver(s, waits).await);
}

async fn waits(s: &Story) -> Result<()> {
    let api = s.cluster_api("CustomResourceDefinition");
    let mut saved = Vec::new();
    for name in DEFINITIONS {
        let definition = serde_json::to_value(api.get(name).await?)?;
        let metadata = json!({"name": name, "labels": definition["metadata"]["labels"],
            "annotations": definition["metadata"]["annotations"]});
        saved.push(json!({"apiVersion": definition["apiVersion"], "kind": definition["kind"], "metadata": metadata,
            "spec": definition["spec"]}));
    }
    let outcome = without(s).await;
    // Later stories need them, also after a failure.
    for definition in &saved {
        let name = definition["metadata"]["name"].as_str().context("definition without name")?;
        let params = PatchParams::apply("e2e").force();
        api.patch(name, &params, &Patch::Apply(definition)).await.with_context(|| format!("restore {name}"))?;
    }
    outcome?;
    let is_running = |vm: &Value| vm["status"]["printableStatus"] == "Running";
    s.wait("vm", "early", "run", MINUTES, is_running).await?;
    let vm = s.get("vm", "early").await?;
    ensure!(!names_definition(&vm), "{}", vm["status"]["conditions"]);
    wait_phase(s, "early-root", "Succeeded").await.map(drop)
}

/// Removes the definitions and creates a VM that needs them.
async fn without(s: &Story) -> Result<()> {
    let api = s.cluster_api("CustomResourceDefinition");
    // Without it an admission policy refuses the deletion.
    let confirm = Patch::Merge(json!({"metadata": {"annotations": {"ferrovirt.io/confirm-deletion": "true"}}}));
    for name in DEFINITIONS {
        api.patch_metadata(name, &PatchParams::default(), &confirm).await?;
        api.delete(name, &DeleteParams::background()).await.with_context(|| format!("delete {name}"))?;
        let deadline = std::time::Instant::now() + MINUTES;
        while api.get_opt(name).await?.is_some() {
            ensure!(std::time::Instant::now() < deadline, "{name} is not deleted");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
    // A VM without DataVolumes is started meanwhile.
    s.apply(&crate::manifests::kernel_vm("plain", "Always")).await?;
    s.wait_running("plain").await?;
    let fields = format!("source: {{{TINY}}}, storage: {}", storage("csi", "Block", TINY_SIZE));
    let (accepted, output) = s.command_line("kubectl apply -f -", &vm("early", "Always", &fields)).await?;
    ensure!(accepted && output.contains("Warning:"), "{output}");
    s.wait("vm", "early", "name the missing definition", MINUTES, names_definition).await.map(drop)
}

fn names_definition(vm: &Value) -> bool {
    vm["status"]["conditions"].to_string().contains(DEFINITIONS[0])
}
