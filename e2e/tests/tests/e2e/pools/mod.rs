//! Pools of VMs.
//!
//! VMs without a running guest suffice for most rules of pools. `updates` and `autoscaling` run guests, `claims` has disks.

mod autoscaling;
pub(crate) mod claims;
mod updates;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use http::Method;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{data_volumes::condition, manifests};

/// Time for a change of a pool.
pub(crate) const MINUTES: Duration = Duration::from_secs(300);
/// Longer than the controller takes to notice a change.
const A_WHILE: Duration = Duration::from_secs(5);
/// The finalizer of pools and their VMs.
const FINALIZER: &str = "pool.kubevirt.io/finalizer";

/// Returns a pool of VMs of [`manifests::kernel_vm`]. `fields` are merged into its spec.
pub(crate) fn pool(name: &str, run_strategy: &str, fields: &Value) -> Result<Value> {
    let mut vm: Value = serde_saphyr::from_str(&manifests::kernel_vm(name, run_strategy))?;
    let labels = json!({"app": name});
    let mut pool = json!({
        "apiVersion": "pool.kubevirt.io/v1beta1", "kind": "VirtualMachinePool", "metadata": {"name": name},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": labels},
            "virtualMachineTemplate": {"metadata": {"labels": labels}, "spec": vm["spec"].take()},
        },
    });
    json_patch::merge(&mut pool["spec"], fields);
    Ok(pool)
}

/// Merges fields into the spec of a pool.
pub(crate) async fn change(s: &Story, name: &str, fields: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": fields}));
    let changed = s.api("vmpool").patch(name, &PatchParams::default(), &patch).await;
    changed.map(drop).with_context(|| format!("change pool {name}"))
}

/// Sets the number of VMs by the subresource.
pub(crate) async fn scale(s: &Story, name: &str, replicas: u32) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    let scaled = s.api("vmpool").patch_scale(name, &PatchParams::default(), &patch).await;
    scaled.map(drop).with_context(|| format!("scale pool {name}"))
}

/// Returns the VMs of a pool, by name.
pub(crate) async fn vms(s: &Story, pool: &str) -> Result<Vec<Value>> {
    let mut vms = s.list("vm", &format!("app={pool}")).await?;
    vms.sort_by_key(|vm| name(vm).to_owned());
    Ok(vms)
}

/// Returns the name of an object.
pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// Waits until a condition holds for the VMs of a pool, and returns them.
pub(crate) async fn wait_vms(s: &Story, pool: &str, what: &str, done: impl Fn(&[Value]) -> bool) -> Result<Vec<Value>> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let now = vms(s, pool).await?;
        if done(&now) {
            return Ok(now);
        }
        if Instant::now() > deadline {
            let names: Vec<_> = now.iter().map(name).collect();
            let status = s.get("vmpool", pool).await.map(|pool| pool["status"].clone()).unwrap_or_default();
            anyhow::bail!("the VMs of pool {pool} do not {what} within {MINUTES:?}: {names:?}; status: {status}");
        }
        sleep(Duration::from_millis(250)).await;
    }
}

/// Waits until the VMs of a pool are those with these numbers, and the status counts them.
pub(crate) async fn wait_numbers(s: &Story, pool: &str, numbers: &[u32]) -> Result<()> {
    let names: Vec<String> = numbers.iter().map(|number| format!("{pool}-{number}")).collect();
    wait_vms(s, pool, &format!("become {names:?}"), |vms| vms.iter().map(name).eq(names.iter())).await?;
    wait_count(s, pool, names.len()).await
}

/// Waits until the status of a pool has this number of VMs.
pub(crate) async fn wait_count(s: &Story, pool: &str, count: usize) -> Result<()> {
    let has = |pool: &Value| pool["status"]["replicas"].as_u64().unwrap_or_default() == count as u64;
    s.wait("vmpool", pool, &format!("have {count} VMs"), MINUTES, has).await.map(drop)
}

/// Judges the numbers of the VMs that are left.
type IsLeft = fn(&[u32]) -> bool;

/// Selection policies, and the numbers of the VMs that they leave: of five, of which the first two are older, to two.
const POLICIES: [(&str, IsLeft); 5] = [
    ("AscendingOrder", |left| left == [3, 4]),
    ("DescendingOrder", |left| left == [0, 1]),
    ("Newest", |left| left == [0, 1]),
    ("Oldest", |left| left.iter().all(|number| *number >= 2)),
    ("Random", |_| true),
];

#[test]
fn pool_is_scaled_up_and_down_with_each_selection_policy() {
    story("pools", async |s| {
        for (policy, _) in POLICIES {
            let fields = json!({"scaleInStrategy": {"proactive": {"selectionPolicy": {"sortPolicy": policy}}}});
            s.apply(&pool(&policy.to_lowercase(), "Halted", &fields)?.to_string()).await?;
        }
        let pools = POLICIES.map(|(policy, _)| policy.to_lowercase());
        for pool in &pools {
            scale(s, pool, 2).await?;
        }
        for pool in &pools {
            wait_numbers(s, pool, &[0, 1]).await?;
        }
        // Times of creation have seconds.
        sleep(Duration::from_millis(1100)).await;
        for pool in &pools {
            scale(s, pool, 5).await?;
        }
        for pool in &pools {
            wait_numbers(s, pool, &[0, 1, 2, 3, 4]).await?;
            scale(s, pool, 2).await?;
        }
        for ((policy, leaves), pool) in POLICIES.iter().zip(&pools) {
            let left = wait_vms(s, pool, "become two", |vms| vms.len() == 2).await?;
            let numbers: Vec<u32> = left.iter().filter_map(|vm| name(vm).rsplit('-').next()?.parse().ok()).collect();
            ensure!(leaves(&numbers), "{policy} leaves {numbers:?}");
            wait_count(s, pool, 2).await?;
            let status = s.get("vmpool", pool).await?["status"].clone();
            ensure!(status["labelSelector"] == format!("app={pool}"), "{status}");
        }
        s.wait_event("random", "SuccessfulCreate", MINUTES).await?;
        s.wait_event("random", "SuccessfulDelete", MINUTES).await?;
        for pool in &pools {
            s.delete("vmpool", pool).await?;
        }
        for pool in &pools {
            wait_vms(s, pool, "be deleted", <[Value]>::is_empty).await?;
            s.wait_gone("vmpool", pool, MINUTES).await?;
        }
        Ok(())
    });
}

#[test]
fn pool_deletes_only_the_vms_that_its_selectors_match() {
    story("pool-selectors", async |s| {
        let selectors = json!({"labelSelector": {"matchLabels": {"tier": "low"}}});
        let strategy = json!({"proactive": {"selectionPolicy": {"selectors": selectors}}});
        s.apply(&pool("box", "Halted", &json!({"replicas": 5, "scaleInStrategy": strategy}))?.to_string()).await?;
        wait_numbers(s, "box", &[0, 1, 2, 3, 4]).await?;
        let labels = json!({"labels": {"tier": "low"}});
        for vm in ["box-1", "box-3"] {
            let patch = json!({"metadata": labels, "spec": {"template": {"metadata": labels}}});
            s.api("vm").patch(vm, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        }
        // Three are too many, two of them may be deleted.
        scale(s, "box", 2).await?;
        wait_numbers(s, "box", &[0, 2, 4]).await?;
        sleep(A_WHILE).await;
        wait_numbers(s, "box", &[0, 2, 4]).await?;
        scale(s, "box", 4).await?;
        wait_numbers(s, "box", &[0, 1, 2, 4]).await
    });
}

#[test]
fn pool_of_the_older_version_is_scaled_by_those_who_may_edit() {
    story("pool-rights", async |s| {
        let mut object = pool("box", "Halted", &json!({"replicas": 1, "scaleInStrategy": {"unmanaged": {}}}))?;
        object["apiVersion"] = json!("pool.kubevirt.io/v1alpha1");
        let path = format!("/apis/pool.kubevirt.io/v1alpha1/namespaces/{}/virtualmachinepools", s.namespace);
        let answer = s.call(&Method::POST, &path, &object).await?;
        ensure!(answer.code == 201, "{}: {}", answer.code, answer.message());
        let mut wrong = object.clone();
        wrong["metadata"]["name"] = json!("wrong");
        wrong["spec"]["maxUnavailable"] = json!(0);
        let answer = s.call(&Method::POST, &path, &wrong).await?;
        ensure!(answer.message().contains("maxUnavailable must be greater than 0"), "{}", answer.message());
        wait_numbers(s, "box", &[0]).await?;
        let read = s.call(&Method::GET, &format!("{path}/box"), &Value::Null).await?.json();
        ensure!(read["apiVersion"] == object["apiVersion"] && read["status"]["replicas"] == 1, "{read}");
        for role in ["edit", "view"] {
            s.apply(&format!(
                "{{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {{name: {role}}}, \
                 roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {role}}}, \
                 subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {role}}}]}}"
            ))
            .await?;
        }
        let deadline = Instant::now() + MINUTES;
        // The API server caches bindings.
        while let Err(error) = s.kubectl(&["scale", "vmpool/box", "--replicas=3", "--as=edit"]).await {
            ensure!(Instant::now() < deadline, "an editor cannot scale: {error:#}");
            sleep(Duration::from_millis(500)).await;
        }
        wait_numbers(s, "box", &[0, 1, 2]).await?;
        let refused = s.kubectl(&["scale", "vmpool/box", "--replicas=1", "--as=view"]).await;
        ensure!(refused.is_err(), "a viewer scales");
        s.virt(&["expose", "vmpool", "box", "--name=boxes", "--port=80"]).await?;
        let service = s.get("Service", "boxes").await?;
        ensure!(service["spec"]["selector"] == json!({"app": "box"}), "{service}");
        // The strategy lets the pool delete nothing.
        scale(s, "box", 1).await?;
        sleep(A_WHILE).await;
        wait_numbers(s, "box", &[0, 1, 2]).await?;
        s.delete("vmpool", "box").await?;
        s.wait_gone("vmpool", "box", MINUTES).await?;
        wait_vms(s, "box", "be deleted", <[Value]>::is_empty).await?;
        s.wait_gone("Service", "boxes", MINUTES).await
    });
}

#[test]
fn paused_pool_changes_nothing_until_it_is_resumed() {
    story("pool-pause", async |s| {
        s.apply(&pool("box", "Halted", &json!({"replicas": 1}))?.to_string()).await?;
        wait_numbers(s, "box", &[0]).await?;
        change(s, "box", json!({"paused": true})).await?;
        let is_paused = |pool: &Value| condition(pool, "ReplicaPaused")["status"] == "True";
        s.wait("vmpool", "box", "be paused", MINUTES, is_paused).await?;
        s.wait_event("box", "SuccessfulPaused", MINUTES).await?;
        scale(s, "box", 3).await?;
        sleep(A_WHILE).await;
        wait_numbers(s, "box", &[0]).await?;
        change(s, "box", json!({"paused": false})).await?;
        wait_numbers(s, "box", &[0, 1, 2]).await?;
        let is_resumed = |pool: &Value| condition(pool, "ReplicaPaused").is_null();
        s.wait("vmpool", "box", "be resumed", MINUTES, is_resumed).await?;
        s.wait_event("box", "SuccessfulResume", MINUTES).await.map(drop)
    });
}

/// A container disk that does not exist keeps VMs from starting.
pub(crate) fn failing(name: &str, fields: &Value) -> Result<Value> {
    let mut pool = pool(name, "Always", fields)?;
    let spec = pool.pointer_mut("/spec/virtualMachineTemplate/spec/template/spec").context("no template")?;
    spec["domain"]["devices"] = json!({"disks": [{"name": "root", "disk": {"bus": "virtio"}}]});
    spec["volumes"] = json!([{"name": "root", "containerDisk": {"image": "ferrovirt.io/guests/nothing:devel"}}]);
    Ok(pool)
}

#[test]
fn vm_of_a_pool_that_fails_to_start_is_replaced_and_no_other() {
    story("pool-healing", async |s| {
        let healing = json!({"replicas": 1, "autohealing": {"minFailingToStartDuration": "5s"}});
        let failing = failing("box", &healing)?;
        // A VM of the user with the same labels and the same fault.
        let template = &failing["spec"]["virtualMachineTemplate"];
        let mut other = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "spec": template["spec"]});
        other["metadata"] = json!({"name": "other", "labels": template["metadata"]["labels"]});
        s.apply(&other.to_string()).await?;
        s.apply(&failing.to_string()).await?;
        let first = s.wait("vm", "box-0", "exist", MINUTES, |_| true).await?;
        let uid = &first["metadata"]["uid"];
        s.wait("vm", "box-0", "be replaced", MINUTES, |vm| vm["metadata"]["uid"] != *uid).await?;
        let foreign = s.get("vm", "other").await?;
        ensure!(foreign["metadata"]["deletionTimestamp"].is_null(), "a foreign VM is deleted");
        ensure!(foreign["metadata"]["ownerReferences"].is_null(), "a foreign VM is adopted");
        ensure!(s.get("vmpool", "box").await?["status"]["replicas"] == 1, "a foreign VM is counted");
        s.delete("vmpool", "box").await?;
        s.wait_gone("vm", "box-0", MINUTES).await?;
        s.wait_gone("vmpool", "box", MINUTES).await
    });
}

#[test]
fn deleted_pool_leaves_no_finalizer_and_its_orphans_live() {
    story("pool-deletion", async |s| {
        let kept = "story.ferrovirt.io/kept";
        let mut object = pool("box", "Halted", &json!({"replicas": 2}))?;
        object["metadata"]["finalizers"] = json!([kept]);
        s.apply(&object.to_string()).await?;
        wait_numbers(s, "box", &[0, 1]).await?;
        let finalizers = s.get("vmpool", "box").await?["metadata"]["finalizers"].clone();
        ensure!(finalizers.as_array().is_some_and(|all| all.contains(&json!(kept))), "{finalizers}");
        s.delete("vmpool", "box").await?;
        let is_left = |pool: &Value| pool["metadata"]["finalizers"] == json!([kept]);
        s.wait("vmpool", "box", "have only the finalizer of others", MINUTES, is_left).await?;
        let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        s.api("vmpool").patch("box", &PatchParams::default(), &patch).await?;
        s.wait_gone("vmpool", "box", MINUTES).await?;
        wait_vms(s, "box", "be deleted", <[Value]>::is_empty).await?;

        s.apply(&pool("orphans", "Halted", &json!({"replicas": 2}))?.to_string()).await?;
        wait_numbers(s, "orphans", &[0, 1]).await?;
        s.api("vmpool").delete("orphans", &DeleteParams::orphan()).await?;
        s.wait_gone("vmpool", "orphans", MINUTES).await?;
        let is_free = |vm: &Value| {
            let finalizers = vm["metadata"]["finalizers"].as_array();
            vm["metadata"]["ownerReferences"].is_null() && finalizers.is_none_or(|all| !all.contains(&json!(FINALIZER)))
        };
        wait_vms(s, "orphans", "be free", |vms| vms.len() == 2 && vms.iter().all(is_free)).await?;
        for vm in ["orphans-0", "orphans-1"] {
            s.delete("vm", vm).await?;
            s.wait_gone("vm", vm, MINUTES).await?;
        }
        Ok(())
    });
}
