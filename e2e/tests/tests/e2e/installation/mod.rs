//! Helm, configuration and upgrades of the installation.

mod configuration;

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, kubeconfig, registry, repository, skip, story, story_alone};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{process::Command, time::Instant};

pub(crate) use self::configuration::in_force;
use self::configuration::{followed, message, roles_follow_the_strategy, set_period, settled, without_pods};
use crate::manifests;

#[test]
fn uninstalling_is_refused_while_a_vmi_runs_with_a_command_to_continue() {
    story_alone("uninstall", async |s| {
        s.apply(&manifests::kernel_vmi("busy")).await?;
        let before = s.wait_running("busy").await?;

        let refusal = helm(&["uninstall", "ferrovirt", "-n", "kubevirt"]).await;
        let keep = refused(s, refusal).await;
        // Later stories need the installation, also after a failure.
        let back = helm(&["rollback", "ferrovirt", &revision().await?, "-n", "kubevirt"]).await?;
        ensure!(back.0, "helm rollback: {}", back.1);
        let (keep, revision) = (keep?, revision().await?);
        ensure!(keep.starts_with("helm -n kubevirt rollback ferrovirt "), "{keep:?} is not the way back");
        let (_, status) = helm(&["status", "ferrovirt", "-n", "kubevirt"]).await?;
        ensure!(status.contains("STATUS: deployed"), "revision {revision} is not deployed: {status}");

        let after = s.get("vmi", "busy").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(after["status"]["phase"] == "Running", "the VMI is {}", after["status"]["phase"]);
        Ok(())
    });
}

#[test]
fn helm_test_boots_a_vmi_and_leaves_nothing() {
    story_alone("helm-test", async |s| {
        let (passed, output) = helm(&["test", "ferrovirt", "-n", "kubevirt"]).await?;
        ensure!(passed, "helm test: {output}");
        for step in ["is created", "runs after", "is deleted"] {
            ensure!(output.contains(&format!("VMI kubevirt/ferrovirt-test {step}")), "no step {step:?}: {output}");
        }
        let deadline = Instant::now() + TIMEOUT;
        for kind in ["VirtualMachineInstance", "ServiceAccount", "Role", "RoleBinding", "Job"] {
            while s.installation_api(kind).get_opt("ferrovirt-test").await?.is_some() {
                ensure!(Instant::now() < deadline, "{kind} ferrovirt-test is left");
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        }
        Ok(())
    });
}

#[test]
fn definition_is_deleted_while_ferrovirt_is_installed_only_if_it_says_so() {
    story("definition-protection", async |s| {
        let definitions = s.cluster_api("CustomResourceDefinition");
        let dry = DeleteParams::default().dry_run();
        for name in ["virtualmachines.kubevirt.io", "kubevirts.kubevirt.io"] {
            let refusal = definitions.delete(name, &dry).await.err().map(|error| error.to_string()).unwrap_or_default();
            for part in ["of the cluster", "helm uninstall", &format!("annotate crd {name} {CONFIRM}=true")] {
                ensure!(refusal.contains(part), "{name}: no {part:?} in {refusal:?}");
            }
        }
        // Nothing else in the tests needs this kind.
        let name = "plugins.plugin.kubevirt.io";
        let annotate = async |value: Value| {
            let patch = Patch::Merge(json!({"metadata": {"annotations": {CONFIRM: value}}}));
            definitions.patch_metadata(name, &PatchParams::default(), &patch).await
        };
        annotate(json!("true")).await?;
        let deleted = definitions.delete(name, &dry).await;
        annotate(Value::Null).await?;
        deleted.with_context(|| format!("{name} with {CONFIRM}"))?;
        Ok(())
    });
}

/// Annotation of a definition that may be deleted.
const CONFIRM: &str = "ferrovirt.io/confirm-deletion";

#[test]
fn second_installation_is_refused_and_the_first_one_named() {
    story("second-installation", async |s| {
        let chart = repository().join("charts/ferrovirt");
        let chart = chart.to_str().context("the path of the chart is no text")?;
        for (release, namespace) in [("ferrovirt", s.namespace.as_str()), ("other", "kubevirt")] {
            let (installed, output) =
                helm(&["install", release, chart, "--namespace", namespace, "--dry-run=server"]).await?;
            ensure!(!installed, "{release} in {namespace} would be installed");
            let wanted = "one per cluster: Ferrovirt is installed in this cluster already, by release ferrovirt in namespace kubevirt";
            ensure!(output.contains(wanted), "{release} in {namespace}: {output}");
        }
        Ok(())
    });
}

/// Checks the command in the refusal.
async fn refused(s: &Story, refusal: Result<(bool, String)>) -> Result<String> {
    let (uninstalled, output) = refusal?;
    ensure!(!uninstalled, "uninstalled under a running VMI: {output}");
    ensure!(output.contains(&format!("{}/busy", s.namespace)), "the VMI is not named: {output}");
    let keep = output.split("To keep the installation").nth(1).and_then(|rest| rest.split('`').nth(1));
    Ok(keep.with_context(|| format!("no way back in: {output}"))?.to_owned())
}

/// Returns the newest revision of the release.
pub(crate) async fn revision() -> Result<String> {
    let (_, history) = helm(&["history", "ferrovirt", "-n", "kubevirt", "-o", "json"]).await?;
    let history: serde_json::Value = serde_json::from_str(history.trim()).context("helm history is not JSON")?;
    let newest = history.as_array().and_then(|all| all.iter().filter_map(|one| one["revision"].as_u64()).max());
    Ok(newest.context("no revision")?.to_string())
}

/// Runs Helm and returns success and output.
pub(crate) async fn helm(arguments: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new("helm");
    command.args(arguments).env("KUBECONFIG", kubeconfig()).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.context("cannot run helm: it must be on the PATH")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn deletion_of_the_installation_is_refused_or_removes_all_workloads() {
    story_alone("removal", async |s| {
        // The removal concerns the whole cluster.
        for kind in ["vm", "vmi", "vmirs"] {
            if !s.cluster_api(kind).list(&ListParams::default()).await?.items.is_empty() {
                return skip("no other VMI");
            }
        }
        let removed = removed(s).await;
        // Later stories need the installation, also after a failure.
        let back = helm(&["rollback", "ferrovirt", &revision().await?, "-n", "kubevirt"]).await?;
        set_uninstall(s, &Value::Null).await?;
        removed?;
        ensure!(back.0, "helm rollback: {}", back.1);
        settled(s, "True", "False").await?;
        s.apply(&manifests::kernel_vmi("again")).await?;
        s.wait_running("again").await?;
        Ok(())
    });
}

/// Finalizer of the KubeVirt object while workloads need it.
const FINALIZER: &str = "kubevirt.io/foregroundDeleteKubeVirt";

/// Deletes the KubeVirt object, which is refused at first, and waits until no workload is left.
async fn removed(s: &Story) -> Result<()> {
    held(s, false).await?;
    s.apply(&manifests::kernel_vm("box", "Always")).await?;
    s.apply(&manifests::kernel_vmi("lonely")).await?;
    s.apply(REPLICA_SET).await?;
    s.wait_running("box").await?;
    s.wait_running("lonely").await?;
    held(s, true).await?;
    let message = "Rejecting the uninstall request, since there are still Virtual Machine Instances present. Either delete all \
                   KubeVirt related workloads or change the uninstall strategy before uninstalling KubeVirt.";
    for strategy in [Value::Null, json!("BlockUninstallIfWorkloadsExist")] {
        set_uninstall(s, &strategy).await?;
        let refusal = delete_installation(s).await.err().with_context(|| format!("deleted under {strategy}"))?;
        ensure!(refusal.to_string().contains(message), "{strategy}: {refusal}");
    }
    let namespaces = s.cluster_api("Namespace");
    let refusal = namespaces.delete("kubevirt", &DeleteParams::default().dry_run()).await;
    let refusal = refusal.err().context("the namespace with the installation may be deleted")?.to_string();
    ensure!(refusal.contains("uninstall Ferrovirt first"), "{refusal}");

    set_uninstall(s, &json!("RemoveWorkloads")).await?;
    delete_installation(s).await?;
    let started = Instant::now();
    let mut phase = String::new();
    while let Some(object) = s.installation_api("KubeVirt").get_opt("kubevirt").await? {
        phase = object.data["status"]["phase"].as_str().unwrap_or_default().to_owned();
        ensure!(started.elapsed() < 2 * TIMEOUT, "not removed: {}", serde_json::to_string(&object)?);
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    println!("removed after {} ms", started.elapsed().as_millis());
    ensure!(phase == "Deleting", "the last phase was {phase:?}");
    for kind in ["vm", "vmi", "vmirs", "vmim"] {
        let left = s.cluster_api(kind).list(&ListParams::default()).await?.items;
        ensure!(left.is_empty(), "left: {}", serde_json::to_string(&left)?);
    }
    Ok(())
}

/// A replica set without VMIs.
const REPLICA_SET: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstanceReplicaSet
metadata: {name: pool}
spec:
  replicas: 0
  selector: {matchLabels: {app: pool}}
  template:
    metadata: {labels: {app: pool}}
    spec: {domain: {memory: {guest: 128Mi}, devices: {}}}
";

async fn delete_installation(s: &Story) -> Result<()> {
    s.installation_api("KubeVirt").delete("kubevirt", &DeleteParams::default()).await?;
    Ok(())
}

async fn set_uninstall(s: &Story, strategy: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"uninstallStrategy": strategy}}));
    s.installation_api("KubeVirt")
        .patch("kubevirt", &PatchParams::default(), &patch)
        .await
        .context("set the strategy")?;
    Ok(())
}

/// Waits until the KubeVirt object has the finalizer or not.
async fn held(s: &Story, wanted: bool) -> Result<()> {
    let started = Instant::now();
    while s.installation_api("KubeVirt").get("kubevirt").await?.finalizers().iter().any(|name| name == FINALIZER)
        != wanted
    {
        ensure!(started.elapsed() < TIMEOUT, "finalizer is set: {}", !wanted);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

#[test]
fn components_and_roles_follow_the_configuration_and_the_status_reports_what_is_missing() {
    story_alone("configuration", async |s| {
        let before = installation(s).await?;
        let period = before["spec"]["configuration"]["memBalloonStatsPeriod"].clone();
        let other = if period == 7 { 8 } else { 7 };
        let followed = followed(s, &json!(other)).await;
        let restored = set_period(s, &period).await;
        followed.and(restored.map(|_| ()))?;
        roles_follow_the_strategy(s).await?;

        let other = json!({"hypervisors": [{"name": "hyperv-direct"}]});
        let patch = Patch::Merge(json!({"spec": {"configuration": other}}));
        let trial = s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default().dry_run(), &patch).await;
        let refusal = trial.err().context("an unsupported configuration is accepted")?.to_string();
        ensure!(refusal.contains("hypervisors is not supported yet"), "{refusal}");

        let deployments = s.installation_api("Deployment");
        let replicas = deployments.get("virt-api").await?.data["spec"]["replicas"].clone();
        let scale = async |replicas: &Value| -> Result<()> {
            let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
            deployments.patch("virt-api", &PatchParams::default(), &patch).await.context("scale virt-api")?;
            Ok(())
        };
        scale(&json!(0)).await?;
        let missed = settled(s, "False", "True").await;
        // Pods that end still count as available ones: the number alone would show the old pods as the new ones.
        let ended = without_pods(s, "virt-api").await;
        scale(&replicas).await?;
        let missed = missed?;
        ended?;
        // The controller notices the missing pods, the API services, or both.
        let why = message(&missed, "Available");
        ensure!(why.contains("virt-api") || why.contains("API services"), "{}", missed["status"]);
        ensure!(missed["status"]["phase"] == "Deployed", "phase {}", missed["status"]["phase"]);
        settled(s, "True", "False").await?;
        Ok(())
    });
}

#[test]
fn vmi_with_an_outdated_launcher_is_labelled_and_evicted_if_configured() {
    story_alone("former", async |s| {
        // The new launcher makes all VMIs outdated.
        let vmis = s.cluster_api("vmi").list(&ListParams::default()).await?;
        if !vmis.items.is_empty() {
            return skip("no other VMI");
        }
        s.apply(&manifests::kernel_vm("box", "Manual")).await?;
        s.virt(&["start", "box"]).await?;
        let before = s.wait_running("box").await?;
        ensure!(
            before["metadata"]["labels"][OUTDATED].is_null(),
            "outdated from the beginning: {}",
            before["metadata"]
        );

        let strategy = installation(s).await?["spec"]["workloadUpdateStrategy"].clone();
        let image = before["status"]["launcherContainerImageVersion"].as_str().context("no image in the status")?;
        let result = replace_launcher(s).await;
        // Later stories need an existing launcher image, also after a failure.
        launch_with(s, image).await?;
        set_update(s, &strategy).await?;
        result?;

        s.virt(&["start", "box"]).await?;
        let after = s.wait_running("box").await?;
        let present = &after["status"]["launcherContainerImageVersion"];
        ensure!(present == image, "started with {present}, not with {image}");
        ensure!(after["metadata"]["labels"][OUTDATED].is_null(), "outdated anew: {}", after["metadata"]);
        Ok(())
    });
}

#[test]
fn debug_launcher_has_a_shell_and_tools_and_the_default_one_has_none() {
    story_alone("debug", async |s| {
        let debugged = debugged(s).await;
        // Later stories need the default image, also after a failure.
        choose_debug_image(s, false).await?;
        debugged?;
        s.delete("vmi", "debug").await?;
        s.apply(&manifests::kernel_vmi("plain")).await?;
        let running = s.wait_running("plain").await?;
        let image = running["status"]["launcherContainerImageVersion"].as_str().unwrap_or_default();
        ensure!(!image.ends_with("-debug"), "the VMI runs in {image}");
        let pod = launcher_pod(s, "plain").await?;
        let refused = s.exec_in(&pod, "compute", &["sh", "-c", "true"]).await.err().map(|error| error.to_string());
        ensure!(refused.is_some(), "the default image has a shell");
        Ok(())
    });
}

/// Starts a VMI with the debug image and uses its tools.
async fn debugged(s: &Story) -> Result<()> {
    choose_debug_image(s, true).await?;
    s.apply(&manifests::kernel_vmi("debug")).await?;
    let running = s.wait_running("debug").await?;
    let image = running["status"]["launcherContainerImageVersion"].as_str().unwrap_or_default();
    ensure!(image.ends_with("-debug"), "the VMI runs in {image}");
    let pod = launcher_pod(s, "debug").await?;
    for (command, text) in [
        (&["ls", "-l", "/usr/bin/virt-launcher"][..], "/usr/bin/virt-launcher"),
        (&["ps", "-ef"], "/usr/bin/qemu-system-x86_64"),
        (&["ip", "-o", "link"], "tap0"),
        (&["stat", "-c", "%u", "/proc/1"], "107"),
        (&["sh", "-c", "grep -c PRETTY_NAME /etc/os-release"], "1"),
        (&["bash", "-c", "cat /etc/os-release | tail -n 20 | grep ^ID="], "ID=debian"),
        (&["awk", "BEGIN {print 6 * 7}"], "42"),
        (&["virsh", "--version"], "."),
    ] {
        let output = s.exec_in(&pod, "compute", command).await.with_context(|| format!("{command:?}"))?;
        ensure!(output.contains(text), "{command:?}: {output}");
    }
    Ok(())
}

async fn launcher_pod(s: &Story, vmi: &str) -> Result<String> {
    let pod = s.launcher_pod(vmi).await?;
    Ok(pod["metadata"]["name"].as_str().context("a pod without name")?.to_owned())
}

/// Upgrades the release to the chart of the repository. It keeps its values, except those in the further arguments.
pub(crate) async fn upgrade(arguments: &[&str]) -> Result<()> {
    let chart = repository().join("charts/ferrovirt");
    let chart = chart.to_str().context("the path of the chart is not UTF-8")?;
    let command = ["upgrade", "ferrovirt", chart, "-n", "kubevirt", "--reuse-values", "--timeout", "6m"];
    let (upgraded, output) = helm(&[&command, arguments].concat()).await?;
    ensure!(upgraded, "helm upgrade: {output}");
    Ok(())
}

/// Upgrades the release with this value of `launcherPods.debug`, and waits until all replicas of virt-controller use the image.
pub(crate) async fn choose_debug_image(s: &Story, debug: bool) -> Result<()> {
    upgrade(&["--set", &format!("launcherPods.debug={debug}")]).await?;
    debug_image_is_used(s, debug).await
}

/// Waits until all replicas of virt-controller use the image that the release selects, which has to be this one.
pub(crate) async fn debug_image_is_used(s: &Story, debug: bool) -> Result<()> {
    let deployment = s.installation_api("Deployment").get("virt-controller").await?;
    let args = deployment.data["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    let words = args.as_array().map(Vec::as_slice).unwrap_or_default();
    let image = words.iter().filter_map(Value::as_str).skip_while(|word| *word != "--launcher-image").nth(1);
    ensure!(image.is_some_and(|image| image.ends_with("-debug") == debug), "virt-controller has {args}");
    replaced(s, &args).await
}

/// Label of a VMI with an outdated launcher.
pub(crate) const OUTDATED: &str = "kubevirt.io/outdatedLauncherImage";

/// Sets another launcher image, as an upgrade does. The VMI runs until the strategy is to evict.
async fn replace_launcher(s: &Story) -> Result<()> {
    set_update(s, &json!({"workloadUpdateMethods": []})).await?;
    launch_with(s, &format!("{}/virt-launcher:next", registry())).await?;
    let outdated = |vmi: &Value| vmi["metadata"]["labels"][OUTDATED] == "";
    s.wait("vmi", "box", "be outdated", TIMEOUT, outdated).await?;
    let counted = async || Ok::<_, anyhow::Error>(installation(s).await?["status"][COUNT].clone());
    let started = Instant::now();
    while counted().await? != 1 {
        ensure!(started.elapsed() < TIMEOUT, "{} VMIs are counted as outdated", counted().await?);
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let phase = s.get("vmi", "box").await?["status"]["phase"].clone();
    ensure!(phase == "Running", "the VMI is {phase}, and must not be evicted");

    set_update(s, &json!({"workloadUpdateMethods": ["Evict"], "batchEvictionInterval": "1s"})).await?;
    let output = s.wait_event("box", "SuccessfulEvict", TIMEOUT).await?;
    ensure!(output.contains("as part of automated workload update"), "the message of the eviction is {output:?}");
    s.wait("vm", "box", "be Stopped", TIMEOUT, |vm| vm["status"]["printableStatus"] == "Stopped").await?;
    Ok(())
}

/// Field manager of the changed launcher image. It gives the field up, since an upgrade by Helm refuses to change fields of
/// other managers.
const MANAGER: &str = "ferrovirt-e2e";

/// Sets the launcher image of virt-controller and waits until all replicas use it.
async fn launch_with(s: &Story, image: &str) -> Result<()> {
    let deployments = s.installation_api("Deployment");
    let deployment = deployments.get("virt-controller").await?;
    let mut args = deployment.data["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    let words = args.as_array_mut().context("virt-controller without arguments")?;
    let flag = words.iter().position(|word| word == "--launcher-image").context("virt-controller without image")?;
    *words.get_mut(flag + 1).context("no image after --launcher-image")? = json!(image);
    let containers = json!([{"name": "virt-controller", "args": args}]);
    let patch = Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": containers}}}}));
    let manager = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
    let changed = deployments.patch("virt-controller", &manager, &patch).await.context("change the launcher")?;
    let mut fields = changed.metadata.managed_fields.context("virt-controller without managed fields")?;
    fields.retain(|entry| entry.manager.as_deref() != Some(MANAGER));
    let patch = Patch::Merge(json!({"metadata": {"managedFields": fields}}));
    deployments.patch("virt-controller", &manager, &patch).await.context("give up the fields of virt-controller")?;
    replaced(s, &args).await
}

/// Waits until all replicas of virt-controller have these arguments.
async fn replaced(s: &Story, args: &Value) -> Result<()> {
    let started = Instant::now();
    loop {
        let pods = s.installation_api("Pod").list(&ListParams::default().labels("kubevirt.io=virt-controller")).await?;
        let changed = pods.iter().all(|pod| {
            pod.metadata.deletion_timestamp.is_none()
                && pod.data["spec"]["containers"][0]["args"] == *args
                && pod.data["status"]["containerStatuses"][0]["ready"] == true
        });
        if changed && !pods.items.is_empty() {
            return Ok(());
        }
        ensure!(started.elapsed() < 2 * TIMEOUT, "virt-controller was not replaced");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// JSON pointer to the number of outdated VMIs in the status of the installation.
pub(crate) const COUNT: &str = "outdatedVirtualMachineInstanceWorkloads";

pub(crate) async fn set_update(s: &Story, strategy: &Value) -> Result<()> {
    // Removed first, since a merge keeps fields that the new strategy lacks.
    for strategy in [&Value::Null, strategy] {
        let patch = Patch::Merge(json!({"spec": {"workloadUpdateStrategy": strategy}}));
        let installation = s.installation_api("KubeVirt");
        installation.patch("kubevirt", &PatchParams::default(), &patch).await.context("set the update strategy")?;
    }
    Ok(())
}

pub(crate) async fn installation(s: &Story) -> Result<Value> {
    Ok(serde_json::to_value(s.installation_api("KubeVirt").get("kubevirt").await?)?)
}
