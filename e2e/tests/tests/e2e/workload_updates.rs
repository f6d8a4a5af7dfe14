//! VMs that follow an upgrade to another launcher, or a change, without a restart, and updates without effect.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, is_true, skip, storage::delete_vmis_after, story_alone};
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    installation::{
        COUNT, OUTDATED, choose_debug_image, debug_image_is_used, helm, installation, revision, set_update,
    },
    live_resize::condition,
    moves::{MINUTES, alone, console, is_long, two_nodes, vm, vm_with_lan},
    networks,
    nics::{is_plugged, lan, set},
    witness::Witness,
};

#[test]
fn vms_move_to_the_new_launcher() {
    story_alone("workload-updates", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        // The new launcher makes all VMIs outdated.
        if !s.cluster_api("vmi").list(&ListParams::default()).await?.items.is_empty() {
            return skip("no other VMI");
        }
        let strategy = installation(s).await?["spec"]["workloadUpdateStrategy"].clone();
        let result = updated(s).await;
        // Later stories need the default image and strategy, also after a failure.
        set_update(s, &strategy).await?;
        match result {
            // The rollback has selected it.
            Ok(()) => debug_image_is_used(s, false).await,
            failed => choose_debug_image(s, false).await.and(failed),
        }
    });
}

async fn updated(s: &Story) -> Result<()> {
    let names: Vec<String> = (0..if is_long() { 4 } else { 2 }).map(|number| format!("box-{number}")).collect();
    for name in &names {
        s.apply(&vm(name, "Always")).await?;
    }
    let mut guests = vec![];
    for name in &names {
        let vmi = s.wait_running(name).await?;
        let mut guest = console(s, name).await?;
        guests.push((name.clone(), vmi, Witness::start(&mut guest).await?));
        guest.leave().await?;
    }
    set_update(s, &json!({"workloadUpdateMethods": ["LiveMigrate"]})).await?;
    let former = revision().await?;
    choose_debug_image(s, true).await?;
    follow(s, &guests, true).await.context("after helm upgrade")?;
    let (back, said) = helm(&["rollback", "ferrovirt", &former, "-n", "kubevirt", "--timeout", "6m"]).await?;
    ensure!(back, "helm rollback: {said}");
    follow(s, &guests, false).await.context("after helm rollback")
}

/// Waits until the guests go on in pods of the launcher, and none is counted as outdated.
async fn follow(s: &Story, guests: &[(String, Value, Witness)], debug: bool) -> Result<()> {
    for (name, before, witness) in guests {
        let follows = |vmi: &Value| {
            let image = vmi["status"]["launcherContainerImageVersion"].as_str().unwrap_or_default();
            !image.is_empty() && image.ends_with("-debug") == debug && vmi["metadata"]["labels"][OUTDATED].is_null()
        };
        let vmi = s.wait("vmi", name, "have the new launcher", MINUTES, follows).await?;
        ensure!(vmi["metadata"]["uid"] == before["metadata"]["uid"], "{name} was recreated");
        let pod = alone(s, name).await?;
        let image = pod["spec"]["containers"][0]["image"].as_str().unwrap_or_default();
        ensure!(image.ends_with("-debug") == debug, "{name} runs in {image}");
        let mut guest = console(s, name).await?;
        Witness::goes_on(&mut guest, witness).await.with_context(|| name.clone())?;
        guest.leave().await?;
    }
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let count = installation(s).await?["status"][COUNT].clone();
        if count == 0 {
            break;
        }
        ensure!(Instant::now() < deadline, "{count} VMIs are counted as outdated");
        sleep(Duration::from_millis(500)).await;
    }
    let migrations = s.list("vmim", "").await?;
    let updates = |vmim: &Value| !vmim["metadata"]["annotations"]["kubevirt.io/workloadUpdateMigration"].is_null();
    ensure!(!migrations.is_empty() && migrations.iter().all(updates), "{migrations:?}");
    Ok(())
}

/// Time in which a second migration or eviction would follow: condition MigrationRequired is due after 15 seconds.
const QUIET: Duration = Duration::from_secs(40);

/// Runs a body with a strategy of updates, and restores the former one.
async fn with_update(s: &Story, strategy: Value, body: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let before = installation(s).await?["spec"]["workloadUpdateStrategy"].clone();
    set_update(s, &strategy).await?;
    let result = body().await;
    set_update(s, &before).await?;
    result
}

#[test]
fn last_interface_that_leaves_by_a_migration_migrates_the_vm_once() {
    story_alone("last-interface", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        if !networks::are_there(s).await? {
            return skip("Multus");
        }
        let network = networks::define(s).await?;
        let result =
            with_update(s, json!({"workloadUpdateMethods": ["LiveMigrate"]}), async || unplugged(s).await).await;
        let gone = delete_vmis_after(s, &result).await;
        let mut left = String::new();
        for node in &nodes {
            left += &networks::left(s, node, &network, "none").await?;
        }
        result.and(gone)?;
        ensure!(left.is_empty(), "links or addresses are left on the nodes: {left}");
        Ok(())
    });
}

async fn unplugged(s: &Story) -> Result<()> {
    s.apply(&vm_with_lan("box", "Always")).await?;
    s.wait_running("box").await?;
    let movable = |vmi: &Value| is_plugged(vmi) && is_true(vmi, "LiveMigratable");
    let before = s.wait("vmi", "box", "have the interface and be migratable", MINUTES, movable).await?;
    // No program changes the networks of the pod, so that the link leaves by a migration.
    set(s, "box", "absent").await?;
    let is_gone = |vmi: &Value| {
        lan(vmi).is_null()
            && !vmi["spec"].to_string().contains("\"lan\"")
            && condition(vmi, "MigrationRequired").is_none()
            && vmi["status"]["nodeName"] != before["status"]["nodeName"]
    };
    s.wait("vmi", "box", "be without the interface", MINUTES, is_gone).await?;
    alone(s, "box").await?;
    sleep(QUIET).await;
    let migrations = s.list("vmim", "").await?;
    let [migration] = &migrations[..] else { anyhow::bail!("{migrations:?}") };
    ensure!(migration["status"]["phase"] == "Succeeded", "{migration}");
    let vmi = s.get("vmi", "box").await?;
    ensure!(
        vmi["metadata"]["uid"] == before["metadata"]["uid"] && condition(&vmi, "MigrationRequired").is_none(),
        "{vmi}"
    );
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", MINUTES).await
}

#[test]
fn vm_whose_launcher_image_is_replaced_is_neither_migrated_nor_evicted() {
    story_alone("replaced-image", async |s| {
        if !s.cluster_api("vmi").list(&ListParams::default()).await?.items.is_empty() {
            return skip("no other VMI");
        }
        let strategy = |method: &str| json!({"workloadUpdateMethods": [method], "batchEvictionSize": 10, "batchEvictionInterval": "1s"});
        with_replaced_image(s, async || {
            with_update(s, strategy("Evict"), async || stays(s).await).await.context("Evict")?;
            with_update(s, strategy("LiveMigrate"), async || stays(s).await).await.context("LiveMigrate")
        })
        .await
    });
}

/// Runs a body while an admission policy gives launcher pods of the story another image than virt-controller.
async fn with_replaced_image(s: &Story, body: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let name = format!("{}-image", s.namespace);
    let expression = "[JSONPatch{op: \"replace\", path: \"/spec/containers/0/image\", \
                      value: object.spec.containers[0].image + \"-debug\"}]";
    let api = "admissionregistration.k8s.io/v1";
    let policy = json!({
        "apiVersion": api, "kind": "MutatingAdmissionPolicy", "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail", "reinvocationPolicy": "Never",
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": s.namespace}},
                "objectSelector": {"matchLabels": {"kubevirt.io": "virt-launcher"}},
                "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            },
            "matchConditions": [{"name": "launcher", "expression": "object.spec.containers[0].name == 'compute'"}],
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
        },
    });
    let binding = json!({
        "apiVersion": api, "kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": name},
        "spec": {"policyName": name},
    });
    let kinds = ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"];
    for (kind, object) in kinds.into_iter().zip([policy, binding]) {
        let object = serde_json::from_value(object)?;
        s.cluster_api(kind).create(&PostParams::default(), &object).await.with_context(|| format!("create {kind}"))?;
    }
    let result = match replaces_images(s).await {
        Ok(()) => body().await,
        Err(error) => Err(error),
    };
    for kind in kinds {
        s.cluster_api(kind).delete(&name, &DeleteParams::default()).await.with_context(|| format!("delete {kind}"))?;
    }
    result
}

/// Waits until the API server follows the policy.
async fn replaces_images(s: &Story) -> Result<()> {
    let restricted = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trial", "labels": {"kubevirt.io": "virt-launcher"}},
    "spec": {
        "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "compute", "image": "x", "securityContext": restricted}],
    }})
    .to_string();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let image = s.dry_run(&pod).await?["spec"]["containers"][0]["image"].clone();
        if image == "x-debug" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the policy leaves image {image}");
        sleep(Duration::from_millis(500)).await;
    }
}

async fn stays(s: &Story) -> Result<()> {
    s.apply(&vm("box", "Always")).await?;
    let before = s.wait_running("box").await?;
    let image = &s.launcher_pod("box").await?["spec"]["containers"][0]["image"];
    ensure!(image.as_str().is_some_and(|image| image.ends_with("-debug")), "the pod has image {image}");
    let says = |vmi: &Value| {
        let shown = condition(vmi, "WorkloadUpdateIneffective");
        shown.is_some_and(|shown| shown["reason"] == "LauncherImageReplaced")
    };
    s.wait("vmi", "box", "say why it keeps its launcher", MINUTES, says).await?;
    s.wait_event("box", "WorkloadUpdateIneffective", TIMEOUT).await?;
    sleep(QUIET).await;
    let vmi = s.get("vmi", "box").await?;
    ensure!(vmi["metadata"]["uid"] == before["metadata"]["uid"], "it was evicted");
    ensure!(vmi["status"]["phase"] == "Running" && says(&vmi), "{vmi}");
    ensure!(s.list("vmim", "").await?.is_empty(), "it was migrated");
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", MINUTES).await
}
