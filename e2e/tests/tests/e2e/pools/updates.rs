//! Updates of the VMs of a pool.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Story, story_large};
use futures::TryStreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout_at};

use super::{A_WHILE, MINUTES, change, name, pool, vms, wait_numbers, wait_vms};
use crate::data_volumes::condition;

type Vmis = BTreeMap<String, Value>;

/// Returns true for a VMI that serves.
fn is_available(vmi: &Value) -> bool {
    let is_deleted = !vmi["metadata"]["deletionTimestamp"].is_null();
    !is_deleted && vmi["status"]["phase"] == "Running" && condition(vmi, "Ready")["status"] == "True"
}

/// Returns a change of the template: its grace period in seconds.
fn grace(seconds: u32) -> Value {
    json!({"virtualMachineTemplate": {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": seconds}}}}})
}

fn has_grace(spec: &Value, seconds: u32) -> bool {
    spec["terminationGracePeriodSeconds"] == seconds
}

/// Changes a pool and watches each change of its VMIs until `done`. Fails if fewer than `least` are available at any time.
/// Returns the names of the VMIs that were deleted, in that order.
async fn watch_change(
    s: &Story,
    pool: &str,
    fields: Value,
    least: usize,
    done: impl Fn(&Vmis) -> bool,
) -> Result<Vec<String>> {
    let (api, labels) = (s.api("vmi"), format!("app={pool}"));
    let listed = api.list(&ListParams::default().labels(&labels)).await?;
    let version = listed.metadata.resource_version.context("list without version")?;
    let mut vmis = Vmis::new();
    for object in listed.items {
        let vmi = serde_json::to_value(object)?;
        vmis.insert(name(&vmi).to_owned(), vmi);
    }
    let mut events = Box::pin(api.watch(&WatchParams::default().labels(&labels).timeout(290), &version).await?);
    change(s, pool, fields).await?;
    let (deadline, mut deleted) = (Instant::now() + MINUTES, vec![]);
    while !done(&vmis) {
        let event = timeout_at(deadline, events.try_next()).await.context("the update does not end")?;
        match event?.context("the watch ended")? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                let vmi = serde_json::to_value(object)?;
                vmis.insert(name(&vmi).to_owned(), vmi);
            }
            WatchEvent::Deleted(object) => {
                let name = object.metadata.name.context("object without name")?;
                vmis.remove(&name);
                deleted.push(name);
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(error) => bail!("the watch failed: {error}"),
        }
        let available = vmis.values().filter(|vmi| is_available(vmi)).count();
        ensure!(available >= least, "only {available} VMs of pool {pool} are available after {deleted:?}");
    }
    Ok(deleted)
}

fn uids(objects: &[Value]) -> Vec<Value> {
    objects.iter().map(|object| object["metadata"]["uid"].clone()).collect()
}

fn template(vm: &Value) -> &Value {
    &vm["spec"]["template"]["spec"]
}

#[test]
fn update_never_has_more_vms_down_than_permitted() {
    story_large("pool-updates", async |s| {
        let strategy = json!({"proactive": {"selectionPolicy": {"sortPolicy": "AscendingOrder"}}});
        let fields = json!({"replicas": 3, "maxUnavailable": 1, "updateStrategy": strategy});
        s.apply(&pool("box", "Always", &fields)?.to_string()).await?;
        wait_numbers(s, "box", &[0, 1, 2]).await?;
        s.wait("vmpool", "box", "be ready", MINUTES, |pool| pool["status"]["readyReplicas"] == 3).await?;
        for vmi in s.list("vmi", "app=box").await? {
            s.wait("vmi", name(&vmi), "be available", MINUTES, is_available).await?;
        }
        let before = vms(s, "box").await?;
        let is_updated = |vmi: &Value| has_grace(&vmi["spec"], 1) && is_available(vmi);
        let done = |vmis: &Vmis| vmis.len() == 3 && vmis.values().all(is_updated);
        let order = watch_change(s, "box", grace(1), 2, done).await?;
        ensure!(order == ["box-0", "box-1", "box-2"], "the order is {order:?}");
        let after = vms(s, "box").await?;
        ensure!(uids(&before) == uids(&after), "VMs were made anew");
        let firmware =
            |vms: &[Value]| vms.iter().map(|vm| template(vm)["domain"]["firmware"]["uuid"].clone()).collect::<Vec<_>>();
        ensure!(firmware(&before) == firmware(&after), "the guests see other hardware");
        revisions_are_pruned(s).await?;
        strategies_that_wait(s).await
    });
}

/// Checks that no revision is left but those of VMs and VMIs.
async fn revisions_are_pruned(s: &Story) -> Result<()> {
    let owner = s.get("vmpool", "box").await?["metadata"]["uid"].clone();
    let deadline = Instant::now() + MINUTES;
    loop {
        let revisions = s.list("ControllerRevision", "").await?;
        let of_pool = revisions.iter().filter(|one| one["metadata"]["ownerReferences"][0]["uid"] == owner);
        let names: Vec<_> = of_pool.map(name).collect();
        if names.len() == 1 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "revisions are left: {names:?}");
        sleep(std::time::Duration::from_millis(500)).await;
    }
}

/// Updates without a restart, and no updates.
async fn strategies_that_wait(s: &Story) -> Result<()> {
    let vmis = uids(&s.list("vmi", "app=box").await?);
    let mut fields = grace(2);
    fields["updateStrategy"] = json!({"proactive": null, "opportunistic": {}});
    change(s, "box", fields).await?;
    let all = |seconds| move |vms: &[Value]| vms.iter().all(|vm| has_grace(template(vm), seconds));
    wait_vms(s, "box", "have the new template", all(2)).await?;
    sleep(A_WHILE).await;
    ensure!(uids(&s.list("vmi", "app=box").await?) == vmis, "a VM was restarted");
    s.virt(&["restart", "box-1", "--wait"]).await?;
    s.wait("vmi", "box-1", "have the new template", MINUTES, |vmi| has_grace(&vmi["spec"], 2)).await?;

    let mut fields = grace(3);
    fields["updateStrategy"] = json!({"opportunistic": null, "unmanaged": {}});
    change(s, "box", fields).await?;
    sleep(A_WHILE).await;
    ensure!(all(2)(&vms(s, "box").await?), "an unmanaged VM was changed");
    Ok(())
}
