//! Deletions with a grace period of their own, and of whole namespaces.

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story, story_large};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep};

use crate::{live_resize::condition, manifests};

/// Far less than the grace period of the guests, which is 15 minutes.
const SOON: Duration = Duration::from_secs(240);

/// Creates a VM (or a VMI) whose guest does not react to ACPI: it is paused.
async fn deaf(s: &Story, kind: &str, name: &str) -> Result<()> {
    let vm = manifests::kernel_vm(name, "Always").replace("GracePeriodSeconds: 0", "GracePeriodSeconds: 900");
    let vmi = manifests::kernel_vmi(name).replace("GracePeriodSeconds: 10", "GracePeriodSeconds: 900");
    s.apply(if kind == "vm" { &vm } else { &vmi }).await?;
    s.wait_running(name).await?;
    s.virt(&["pause", "vmi", name]).await?;
    s.wait("vmi", name, "be paused", TIMEOUT, |vmi| condition(vmi, "Paused").is_some()).await.map(drop)
}

/// Deletes an object by kubectl.
async fn delete(s: &Story, kind: &str, name: &str, options: &[&str]) -> Result<()> {
    s.kubectl(&[&["delete", kind, name, "--wait=false"], options].concat()).await.map(drop)
}

/// Fails if the guest does not go on for eight seconds after a plain deletion.
async fn waits(s: &Story, vmi: &str) -> Result<()> {
    sleep(Duration::from_secs(8)).await;
    let vmi = s.get("vmi", vmi).await?;
    ensure!(vmi["status"]["phase"] == "Running" && vmi["metadata"]["deletionTimestamp"].is_string(), "{vmi}");
    ensure!(vmi["spec"]["terminationGracePeriodSeconds"] == 900, "{}", vmi["spec"]);
    Ok(())
}

/// Waits until a VMI, its pod and its processes are gone.
async fn ended(s: &Story, vmi: &Value, pod: &Value) -> Result<()> {
    let name = |object: &Value| object["metadata"]["name"].as_str().map(str::to_owned).context("no name");
    s.wait_gone("vmi", &name(vmi)?, SOON).await?;
    s.wait_gone("Pod", &name(pod)?, SOON).await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?;
    let node = pod["spec"]["nodeName"].as_str().context("pod without node")?;
    let search = format!(
        "for i in $(seq 120); do grep -ls {uid} /proc/[0-9]*/cgroup >/dev/null || exit 0; sleep 1; done; exit 1"
    );
    s.on_node(node, &search).await.map(drop).context("processes of the pod")
}

#[test]
fn deletion_by_force_does_not_wait_for_the_guest() {
    story_large("forced", async |s| {
        let force = ["--force", "--grace-period=0"];
        for (kind, name) in [("vm", "first"), ("vm", "later"), ("vmi", "alone"), ("vmi", "soon")] {
            deaf(s, kind, name).await.with_context(|| name.to_owned())?;
        }
        let mut objects = Vec::new();
        for name in ["first", "later", "alone", "soon"] {
            objects.push((s.get("vmi", name).await?, s.launcher_pod(name).await?));
        }
        // Neither a dry run nor a plain deletion shortens the time of the guest.
        delete(s, "vm", "later", &["--force", "--grace-period=0", "--dry-run=server"]).await?;
        delete(s, "vm", "later", &[]).await?;
        delete(s, "vmi", "alone", &[]).await?;
        waits(s, "later").await?;
        waits(s, "alone").await?;

        delete(s, "vm", "first", &force).await?;
        delete(s, "vm", "later", &force).await?;
        delete(s, "vmi", "alone", &force).await?;
        delete(s, "vmi", "soon", &["--grace-period=3"]).await?;
        for (vmi, pod) in &objects {
            ended(s, vmi, pod).await.with_context(|| vmi["metadata"]["name"].to_string())?;
        }
        for vm in ["first", "later"] {
            s.wait_gone("vm", vm, SOON).await?;
        }
        Ok(())
    });
}

#[test]
fn guest_ends_with_a_launcher_pod_that_is_deleted_by_force() {
    story_large("forced-pod", async |s| {
        for (kind, name) in [("vm", "deleted"), ("vmi", "alone"), ("vmi", "second")] {
            deaf(s, kind, name).await.with_context(|| name.to_owned())?;
        }
        delete(s, "vm", "deleted", &[]).await?;
        waits(s, "deleted").await?;
        for (name, options) in [
            ("deleted", &["--force", "--grace-period=0"][..]),
            ("alone", &["--force", "--grace-period=0"]),
            ("second", &["--grace-period=1"]),
        ] {
            let (vmi, pod) = (s.get("vmi", name).await?, s.launcher_pod(name).await?);
            delete(s, "pod", pod["metadata"]["name"].as_str().context("pod without name")?, options).await?;
            if name != "deleted" {
                s.wait("vmi", name, "fail", SOON, |vmi| vmi["status"]["phase"] == "Failed").await?;
                delete(s, "vmi", name, &[]).await?;
            }
            ended(s, &vmi, &pod).await.with_context(|| name.to_owned())?;
        }
        s.wait_gone("vm", "deleted", SOON).await
    });
}

#[test]
fn vm_is_not_started_in_a_namespace_that_is_being_deleted() {
    story("ending", async |s| {
        let ending = Story::of(s.client.clone(), format!("{}-x", s.namespace));
        let labels = json!({"ferrovirt.io/e2e": "ending"});
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ending.namespace, "labels": labels}});
        s.cluster_api("Namespace").create(&Default::default(), &serde_json::from_value(object)?).await?;
        let outcome = async {
            ending.apply(&manifests::kernel_vm("box", "Halted")).await?;
            let is_stopped = |vm: &Value| vm["status"]["printableStatus"] == "Stopped";
            ending.wait("vm", "box", "be stopped", TIMEOUT, is_stopped).await?;
            // Kubernetes leaves the objects of a deleted namespace alone for five seconds.
            s.cluster_api("Namespace").delete(&ending.namespace, &Default::default()).await?;
            let start = Patch::Merge(json!({"spec": {"runStrategy": "Always"}}));
            ending.api("vm").patch("box", &PatchParams::default(), &start).await?;
            while let Some(vm) = ending.api("vm").get_opt("box").await? {
                let vm = serde_json::to_value(vm)?;
                if let Some(failure) = condition(&vm, "Failure") {
                    bail!("virt-controller attempts to start the VM: {failure}");
                }
                sleep(Duration::from_millis(200)).await;
            }
            Ok(())
        };
        let outcome = outcome.await;
        s.cluster_api("Namespace").delete(&ending.namespace, &Default::default()).await.ok();
        outcome
    });
}
