//! Measures how many VMs a second a pool creates and deletes, beside VMIs of a replica set.
//!
//! Both have [`COUNT`] guests with minimal needs, paused before their first instruction. Up: from the change of the scale until all VMIs
//! are Running. Down: until VMs, VMIs and launcher pods are gone. The replica set comes first and after the pool, and its best time
//! counts, so that the order does not favour the pool.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::Story;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::Figures;

/// Number of guests.
const COUNT: usize = 20;
const TIMEOUT: Duration = Duration::from_secs(600);
/// Label of all guests.
const GUESTS: &str = "app=guests";

/// Kinds with the names of their figures, in the order of measurement.
const KINDS: [(&str, &str); 3] = [("vmirs", "replica_set"), ("vmpool", "pool"), ("vmirs", "replica_set")];

/// Returns a pool or a replica set without guests.
fn manifest(kind: &str) -> Value {
    let labels = json!({"app": "guests"});
    let template = json!({"metadata": {"labels": labels}, "spec": {
        "startStrategy": "Paused", "terminationGracePeriodSeconds": 0,
        "domain": {
            "memory": {"guest": "32Mi"},
            "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "overcommitGuestOverhead": true},
            "devices": {"autoattachGraphicsDevice": false, "autoattachPodInterface": false},
        },
    }});
    let mut object = json!({"metadata": {"name": kind}, "spec": {"replicas": 0, "selector": {"matchLabels": labels}}});
    if kind == "vmpool" {
        object["apiVersion"] = json!("pool.kubevirt.io/v1beta1");
        object["kind"] = json!("VirtualMachinePool");
        let spec = json!({"runStrategy": "Always", "template": template});
        object["spec"]["virtualMachineTemplate"] = json!({"metadata": {"labels": labels}, "spec": spec});
    } else {
        object["apiVersion"] = json!("kubevirt.io/v1");
        object["kind"] = json!("VirtualMachineInstanceReplicaSet");
        object["spec"]["template"] = template;
    }
    object
}

/// Runs the measurement once.
pub(crate) async fn measure(story: &Story, figures: &mut Figures) -> Result<()> {
    for (kind, name) in KINDS {
        story.apply(&manifest(kind).to_string()).await?;
        for (direction, replicas) in [("up", COUNT), ("down", 0)] {
            let per_second = COUNT as f64 / scale(story, kind, replicas).await?;
            let best = figures.entry(format!("{name}_{direction}_per_s")).or_insert(per_second);
            *best = best.max(per_second);
        }
        story.delete(kind, kind).await?;
        story.wait_gone(kind, kind, TIMEOUT).await?;
    }
    Ok(())
}

/// Scales and returns the seconds until the guests have followed.
async fn scale(story: &Story, kind: &str, replicas: usize) -> Result<f64> {
    let begin = Instant::now();
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    story.api(kind).patch_scale(kind, &PatchParams::default(), &patch).await?;
    loop {
        let vmis = story.list("vmi", GUESTS).await?;
        let running = vmis.iter().filter(|vmi| vmi["status"]["phase"] == "Running").count();
        let has_followed = if replicas == 0 {
            vmis.is_empty() && story.list("vm", GUESTS).await?.is_empty() && story.list("Pod", GUESTS).await?.is_empty()
        } else {
            running == replicas
        };
        if has_followed {
            return Ok(begin.elapsed().as_secs_f64());
        }
        ensure!(begin.elapsed() < TIMEOUT, "{kind} does not reach {replicas}: {running} of {} VMIs run", vmis.len());
        sleep(Duration::from_millis(100)).await;
    }
}
