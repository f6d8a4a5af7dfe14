//! Helm and the installation.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, kubeconfig, story_alone};
use tokio::process::Command;

use crate::manifests;

#[test]
fn uninstalling_is_refused_under_a_running_machine_and_tells_the_way_back() {
    story_alone("uninstall", async |s| {
        s.apply(&manifests::kernel_vmi("busy")).await?;
        let before = s.wait_running("busy").await?;

        let refusal = helm(&["uninstall", "ferrovirt", "-n", "kubevirt"]).await;
        let keep = refused(s, refusal).await;
        // Whatever the refusal says, later stories need the installation.
        let back = helm(&["rollback", "ferrovirt", &revision().await?, "-n", "kubevirt"]).await?;
        ensure!(back.0, "helm rollback: {}", back.1);
        let (keep, revision) = (keep?, revision().await?);
        ensure!(keep.starts_with("helm -n kubevirt rollback ferrovirt "), "{keep:?} is not the way back");
        let (_, status) = helm(&["status", "ferrovirt", "-n", "kubevirt"]).await?;
        ensure!(status.contains("STATUS: deployed"), "revision {revision} is not deployed: {status}");

        let after = s.get("vmi", "busy").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the machine is another one");
        ensure!(after["status"]["phase"] == "Running", "the machine is {}", after["status"]["phase"]);
        Ok(())
    });
}

/// The command that the refusal offers.
async fn refused(s: &Story, refusal: Result<(bool, String)>) -> Result<String> {
    let (uninstalled, said) = refusal?;
    ensure!(!uninstalled, "uninstalled under a running machine: {said}");
    ensure!(said.contains(&format!("{}/busy", s.namespace)), "the machine is not named: {said}");
    let keep = said.split("To keep the installation").nth(1).and_then(|rest| rest.split('`').nth(1));
    Ok(keep.with_context(|| format!("no way back in: {said}"))?.to_owned())
}

/// The newest revision of the release.
async fn revision() -> Result<String> {
    let (_, history) = helm(&["history", "ferrovirt", "-n", "kubevirt", "-o", "json"]).await?;
    let history: serde_json::Value = serde_json::from_str(history.trim()).context("helm history is not JSON")?;
    let newest = history.as_array().and_then(|all| all.iter().filter_map(|one| one["revision"].as_u64()).max());
    Ok(newest.context("no revision")?.to_string())
}

/// Whether Helm succeeded, and what it printed.
async fn helm(arguments: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new("helm");
    command.args(arguments).env("KUBECONFIG", kubeconfig()).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.context("cannot run helm: it must be on the PATH")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}
