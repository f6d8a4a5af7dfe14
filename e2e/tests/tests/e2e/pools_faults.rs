//! Pools whose changes are held while the leading virt-controller is killed.
//!
//! ```text
//! begin ── change is held ── leader is killed ── another one leads, change is still held ── release ── end
//! ```

use std::fmt::{self, Display};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use crate::{
    data_volumes::{condition, with_driver},
    kills::kill_leader,
    pools::{
        MINUTES, change,
        claims::{claim, replaced, with_claims},
        failing, name, pool, scale, vms, wait_count, wait_numbers, wait_vms,
    },
    rows::chosen,
};

/// Pool of the rows.
const POOL: &str = "box";
/// Finalizer that holds VMs.
const HOLD: &str = "story.ferrovirt.io/hold";
/// Another leader takes over within this time.
const TAKE_OVER: Duration = Duration::from_secs(20);
/// A sample has every so many rows.
const SAMPLE: usize = 3;

/// A change in which the leader is killed, and the hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// A quota refuses all VMs but one.
    ScaleOut,
    /// A finalizer keeps VMs that are deleted.
    ScaleIn,
    /// The first VM that is restarted finds no node.
    Update,
    /// A finalizer keeps a VM whose claim is preserved.
    Preservation,
    /// A VM fails to start, and is replaced again and again.
    Healing,
    /// The pool is paused.
    Pause,
    /// A finalizer keeps the VMs of a deleted pool.
    Deletion,
}

const ROWS: [During; 7] = [
    During::ScaleOut,
    During::ScaleIn,
    During::Update,
    During::Preservation,
    During::Healing,
    During::Pause,
    During::Deletion,
];

impl Display for During {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "leader killed during {self:?}")
    }
}

#[test]
fn pools_finish_each_change_whose_leader_is_killed() {
    story_alone("pools-faults", async |s| {
        with_driver(s, async |s| {
            for row in chosen(ROWS.to_vec(), SAMPLE)? {
                eprintln!("{row}");
                run(s, row).await.with_context(|| row.to_string())?;
            }
            Ok(())
        })
        .await
    });
}

async fn run(s: &Story, row: During) -> Result<()> {
    let kept = begin(s, row).await?;
    kill_leader(s).await?;
    sleep(TAKE_OVER).await;
    ensure_held(s, row).await?;
    finish(s, row, &kept).await?;
    if row != During::Deletion {
        s.delete("vmpool", POOL).await?;
    }
    s.wait_gone("vmpool", POOL, MINUTES).await?;
    let deadline = Instant::now() + MINUTES;
    while !vms(s, POOL).await?.is_empty() {
        ensure!(Instant::now() < deadline, "VMs of the deleted pool are left: {:?}", vms(s, POOL).await?);
        sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

/// Adds the finalizer to a VM, or removes it.
async fn hold(s: &Story, vm: &str, is_held: bool) -> Result<()> {
    let mut finalizers = s.get("vm", vm).await?["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    finalizers.retain(|known| known != HOLD);
    if is_held {
        finalizers.push(json!(HOLD));
    }
    let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
    s.api("vm").patch(vm, &PatchParams::default(), &patch).await.map(drop).with_context(|| format!("hold {vm}"))
}

async fn start(s: &Story, run_strategy: &str, fields: Value) -> Result<()> {
    s.apply(&pool(POOL, run_strategy, &fields)?.to_string()).await
}

/// Begins a change and waits until it is held. Returns the UID of the claim or VM that it is about.
async fn begin(s: &Story, row: During) -> Result<Value> {
    let numbered = async |replicas: u32| {
        start(s, "Halted", json!({"replicas": replicas})).await?;
        wait_numbers(s, POOL, &(0..replicas).collect::<Vec<_>>()).await
    };
    match row {
        During::ScaleOut => {
            s.apply(
                "{apiVersion: v1, kind: ResourceQuota, metadata: {name: vms}, \
                 spec: {hard: {count/virtualmachines.kubevirt.io: 1}}}",
            )
            .await?;
            let counts = |quota: &Value| quota["status"]["hard"].is_object();
            s.wait("ResourceQuota", "vms", "be in force", MINUTES, counts).await?;
            start(s, "Halted", json!({"replicas": 3})).await?;
            let is_refused = |pool: &Value| condition(pool, "ReplicaFailure")["reason"] == "FailedScaleOut";
            s.wait("vmpool", POOL, "report the quota", MINUTES, is_refused).await?;
            wait_numbers(s, POOL, &[0]).await?;
        }
        During::ScaleIn => {
            numbered(3).await?;
            for vm in vms(s, POOL).await? {
                hold(s, name(&vm), true).await?;
            }
            scale(s, POOL, 1).await?;
            wait_vms(s, POOL, "be deleted but one", |vms| deleted(vms) == 2).await?;
        }
        During::Update => {
            start(s, "Always", json!({"replicas": 2, "maxUnavailable": 1})).await?;
            s.wait("vmpool", POOL, "be ready", MINUTES, |pool| pool["status"]["readyReplicas"] == 2).await?;
            placed(s, json!({"story.ferrovirt.io/nowhere": "x"})).await?;
            let is_held = |vms: &[Value]| vms.iter().any(is_unschedulable);
            wait_vms(s, POOL, "be held", is_held).await?;
        }
        During::Preservation => {
            let strategy = json!({"proactive": {"statePreservation": "Offline"}});
            s.apply(&with_claims(POOL, &json!({"replicas": 1, "scaleInStrategy": strategy}))?.to_string()).await?;
            wait_numbers(s, POOL, &[0]).await?;
            let uid = claim(s, "data-0").await?;
            hold(s, "box-0", true).await?;
            s.delete("vm", "box-0").await?;
            return Ok(uid);
        }
        During::Healing => {
            let healing = json!({"replicas": 1, "autohealing": {"minFailingToStartDuration": "5s"}});
            s.apply(&failing(POOL, &healing)?.to_string()).await?;
            let vm = s.wait("vm", "box-0", "exist", MINUTES, |_| true).await?;
            return Ok(vm["metadata"]["uid"].clone());
        }
        During::Pause => {
            numbered(1).await?;
            change(s, POOL, json!({"paused": true, "replicas": 3})).await?;
            let is_paused = |pool: &Value| condition(pool, "ReplicaPaused")["status"] == "True";
            s.wait("vmpool", POOL, "be paused", MINUTES, is_paused).await?;
        }
        During::Deletion => {
            numbered(2).await?;
            hold(s, "box-0", true).await?;
            s.delete("vmpool", POOL).await?;
        }
    }
    Ok(Value::Null)
}

fn deleted(vms: &[Value]) -> usize {
    vms.iter().filter(|vm| !vm["metadata"]["deletionTimestamp"].is_null()).count()
}

fn is_unschedulable(vm: &Value) -> bool {
    vm["status"]["printableStatus"] == "ErrorUnschedulable"
}

/// Places the VMs of the pool by labels of nodes.
async fn placed(s: &Story, labels: Value) -> Result<()> {
    change(s, POOL, json!({"virtualMachineTemplate": {"spec": {"template": {"spec": {"nodeSelector": labels}}}}})).await
}

/// Checks that the change is still held under another leader.
async fn ensure_held(s: &Story, row: During) -> Result<()> {
    let now = vms(s, POOL).await?;
    let is_held = match row {
        During::ScaleOut | During::Pause => now.len() == 1,
        During::ScaleIn => now.len() == 3 && deleted(&now) == 2,
        // The second VM runs on.
        During::Update => {
            let ready = now.iter().filter(|vm| condition(vm, "Ready")["status"] == "True").count();
            ready == 1 && now.iter().filter(|vm| is_unschedulable(vm)).count() == 1
        }
        During::Preservation => now.len() == 1 && deleted(&now) == 1,
        During::Healing => return Ok(()),
        During::Deletion => now.len() == 1 && name(&now[0]) == "box-0",
    };
    if is_held { Ok(()) } else { bail!("the change is not held: {}", serde_json::to_string(&now)?) }
}

/// Releases the change and waits for its end.
async fn finish(s: &Story, row: During, kept: &Value) -> Result<()> {
    match row {
        During::ScaleOut => {
            s.delete("ResourceQuota", "vms").await?;
            wait_numbers(s, POOL, &[0, 1, 2]).await
        }
        During::ScaleIn => {
            for vm in vms(s, POOL).await? {
                hold(s, name(&vm), false).await?;
            }
            wait_vms(s, POOL, "become one", |vms| vms.len() == 1 && deleted(vms) == 0).await?;
            wait_count(s, POOL, 1).await
        }
        During::Update => {
            placed(s, Value::Null).await?;
            let is_updated = |vm: &Value| {
                let is_ready = condition(vm, "Ready")["status"] == "True";
                is_ready && vm["spec"]["template"]["spec"]["nodeSelector"].is_null()
            };
            wait_vms(s, POOL, "be updated", |vms| vms.len() == 2 && vms.iter().all(is_updated)).await.map(drop)
        }
        During::Preservation => {
            hold(s, "box-0", false).await?;
            wait_vms(s, POOL, "come back", |vms| vms.len() == 1 && deleted(vms) == 0).await?;
            ensure!(claim(s, "data-0").await? == *kept, "the claim was made anew");
            // The next leader preserves it as well.
            replaced(s, "box-0").await?;
            ensure!(claim(s, "data-0").await? == *kept, "the claim was made anew");
            Ok(())
        }
        During::Healing => {
            let is_another = |vm: &Value| vm["metadata"]["uid"] != *kept;
            s.wait("vm", "box-0", "be replaced", MINUTES, is_another).await.map(drop)
        }
        During::Pause => {
            change(s, POOL, json!({"paused": false})).await?;
            wait_numbers(s, POOL, &[0, 1, 2]).await
        }
        During::Deletion => {
            s.wait_gone("vmpool", POOL, MINUTES).await?;
            hold(s, "box-0", false).await
        }
    }
}
