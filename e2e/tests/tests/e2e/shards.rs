//! Frozen replicas of virt-controller: another one takes their work over, and nothing is started twice when they go on.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Node, Story, repository, signal, story_alone};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::Api;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::installation::helm;

/// VMs that are created at once.
const VMS: usize = 20;
/// Time after the first creation at which the replica is frozen.
const BEFORE: Duration = Duration::from_millis(300);
/// Time limit for the others to take over: longer than a lease and the turns of all replicas.
const LIMIT: Duration = Duration::from_secs(120);
/// Time in which nothing more may be started.
const AFTER: Duration = Duration::from_secs(10);
/// Parts into which the VMs are divided.
const SHARDS: usize = 4;
/// Name of virt-controller's Deployment and program, and of the leader's Lease.
const NAME: &str = "virt-controller";

#[test]
fn frozen_leader_creates_no_second_pod_when_it_goes_on() {
    story_alone("frozen-leader", async |s| storm_with_a_frozen_holder(s, 1).await);
}

#[test]
fn frozen_holder_of_a_shard_creates_no_second_pod_when_it_goes_on() {
    story_alone("frozen-shard", async |s| {
        let result = async {
            upgrade(SHARDS).await?;
            s.components_are_ready().await?;
            storm_with_a_frozen_holder(s, SHARDS).await
        };
        let result = result.await;
        // Later stories need the installation as it was, also after a failure.
        let restored = async {
            upgrade(1).await?;
            s.components_are_ready().await
        };
        let restored = restored.await;
        result?;
        restored
    });
}

/// Freezes the holder of a lease while VMs are created, and lets it go on when another replica has done its work.
async fn storm_with_a_frozen_holder(s: &Story, shards: usize) -> Result<()> {
    let holders = held(s, shards, None).await?;
    let leader = holders.first().context("no leases")?;
    // One that does not lead shows that the shards of the leader go on.
    let victim = holders.iter().find(|holder| *holder != leader).unwrap_or(leader);
    let pods: Api<Pod> = Api::namespaced(s.client.clone(), "kubevirt");
    let pod = pods.get(victim).await.with_context(|| format!("{victim} is no pod"))?;
    let uid = pod.metadata.uid.context("pod without uid")?;
    let on = pod.spec.and_then(|spec| spec.node_name).context("pod without node")?;
    let node = s.enter_node(&on).await?;
    let result = freeze(s, &node, &uid, victim, shards).await;
    // kubelet may have ended it by now.
    let thawed = node.run(&signal(NAME, &uid, "CONT")).await;
    node.leave().await?;
    result?;
    if let Err(error) = thawed {
        eprintln!("{victim} does not go on: {error:#}");
    }
    s.components_are_ready().await?;
    sleep(AFTER).await;
    let started = started(s).await?;
    ensure!(started.len() == VMS, "{} of {VMS} VMs have one launcher pod: {started:?}", started.len());
    Ok(())
}

/// Creates VMs, freezes a replica meanwhile, and waits until all of them have their pods and all leases other holders.
async fn freeze(s: &Story, node: &Node, uid: &str, victim: &str, shards: usize) -> Result<()> {
    let create = async {
        for number in 0..VMS {
            s.apply(&vm(number)).await?;
        }
        anyhow::Ok(())
    };
    let stop = async {
        sleep(BEFORE).await;
        node.run(&signal(NAME, uid, "STOP")).await.map(drop).with_context(|| format!("freeze {victim}"))
    };
    tokio::try_join!(create, stop)?;
    held(s, shards, Some(victim)).await?;
    let deadline = Instant::now() + LIMIT;
    loop {
        let started = started(s).await?;
        if started.len() == VMS {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{} of {VMS} VMs have one launcher pod: {started:?}", started.len());
        sleep(Duration::from_millis(500)).await;
    }
}

/// Returns the VMs whose VMI has exactly one launcher pod.
async fn started(s: &Story) -> Result<BTreeSet<String>> {
    let mut started = BTreeSet::new();
    for vmi in s.list("vmi", "").await? {
        let pods = s.launcher_pods(&vmi).await?;
        let name = vmi["metadata"]["name"].as_str().context("vmi without name")?;
        ensure!(pods.len() < 2, "VMI {name} has {} launcher pods", pods.len());
        started.extend((pods.len() == 1).then(|| name.to_owned()));
    }
    Ok(started)
}

/// Waits until each lease has a holder other than `former`. Returns the holders in the order of the shards.
async fn held(s: &Story, shards: usize, former: Option<&str>) -> Result<Vec<String>> {
    let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kubevirt");
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut holders = Vec::new();
        for shard in 0..shards {
            let name = if shard == 0 { NAME.to_owned() } else { format!("{NAME}-{shard}") };
            let spec = leases.get_opt(&name).await?.and_then(|lease| lease.spec);
            holders.extend(spec.and_then(|spec| spec.holder_identity).filter(|holder| !holder.is_empty()));
        }
        if holders.len() == shards && holders.iter().all(|holder| Some(holder.as_str()) != former) {
            return Ok(holders);
        }
        ensure!(Instant::now() < deadline, "holders of the leases: {holders:?}, without {former:?}");
        sleep(Duration::from_millis(500)).await;
    }
}

/// Returns a VM for which there is no node: its launcher pod is created and waits.
fn vm(number: usize) -> String {
    let devices = json!({"autoattachGraphicsDevice": false, "autoattachPodInterface": false});
    let spec = json!({
        "nodeSelector": {"ferrovirt.io/of-no-node": "true"}, "terminationGracePeriodSeconds": 0,
        "domain": {"memory": {"guest": "32Mi"}, "devices": devices},
    });
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": format!("storm-{number}")},
        "spec": {"runStrategy": "Always", "template": {"spec": spec}},
    });
    vm.to_string()
}

/// Sets the number of shards. Another field manager may have scaled the Deployment.
async fn upgrade(shards: usize) -> Result<()> {
    let chart = repository().join("charts/ferrovirt");
    let chart = chart.to_str().context("the path of the chart is no text")?;
    let value = format!("virtController.shards={shards}");
    let arguments = ["upgrade", "ferrovirt", chart, "-n", "kubevirt", "--reuse-values", "--set", &value];
    let (done, output) = helm(&[&arguments[..], &["--force-conflicts", "--wait", "--timeout", "5m"]].concat()).await?;
    ensure!(done, "helm upgrade: {output}");
    Ok(())
}
