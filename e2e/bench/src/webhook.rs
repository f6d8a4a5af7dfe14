//! Latency of admission reviews.
//!
//! Reviews go to a pod of virt-api as kube-apiserver sends them: from the API server's network namespace to the pod's
//! address, HTTP/1.1 over TLS, one review at a time on a connection, connections kept open. The latency of a review is measured
//! from the start of sending to the end of the answer, on open connections and with serialized requests. Load generator and
//! server share the CPUs. The reviews are creations of a VM of 1.5 KiB, mutating and validating in turn.
//!
//! There are two loads:
//!
//! - `webhook_p99_ms`: [`PACED`] reviews over [`LANES`] connections, [`LANES`] at a time. This is the latency for a user.
//! - `webhook_1000_at_once_p99_ms`: [`FLOOD`] reviews at the same moment, each on its own connection. The 99th percentile is
//!   the duration of the flood, `0.99 * N / webhook_reviews_per_s`: it measures throughput, not latency.
//!
//! `webhook_attacked_p99_ms` is the paced load during an attack ([`Flood`](ferrovirt_e2e_tests::Flood): a thousand silent
//! connections to each port, 16 stalled reviews to each virt-api), `webhook_attacked_over_quiet` its ratio to the quiet load.
//! The attacker shares the CPUs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story,
    webhook::{Direct, Endpoint},
};
use futures::{
    StreamExt, TryStreamExt,
    stream::{self, FuturesUnordered},
};
use serde_json::{Value, json};
use tokio::{sync::Barrier, time::timeout};

use crate::{Figures, lane::Lane, percentile};

/// Reviews of the paced load. A stall of the host stops all lanes, which would be more than a hundredth of a thousand reviews
/// and determine the percentile.
const PACED: usize = 10_000;
/// Concurrent reviews.
const FLOOD: usize = 1000;
/// Connections of the paced load: more than kube-apiserver uses when several users write.
const LANES: usize = 16;
/// Time from the start of the attack to the load.
const ATTACK_BEGINS: Duration = Duration::from_secs(5);
/// Time limit for connecting, and for a load.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Measures both loads. There are no figures without a direct connection to the pod (another cluster).
pub(crate) async fn measure(endpoint: &Endpoint, figures: &mut Figures) -> Result<()> {
    if !endpoint.is_direct() {
        println!("virt-api is reached by forwarded ports only: reviews are not measured");
        return Ok(());
    }
    let load = paced(endpoint).await?;
    figures.insert("webhook_p50_ms".into(), percentile(&load.times, 50).context("no review")?);
    figures.insert("webhook_p99_ms".into(), percentile(&load.times, 99).context("no review")?);

    let mut lanes = connect(endpoint, FLOOD).await?;
    rounds(endpoint, &mut lanes, 1).await?;
    let load = rounds(endpoint, &mut lanes, 1).await?;
    figures.insert("webhook_1000_at_once_p99_ms".into(), percentile(&load.times, 99).context("no review")?);
    figures.insert("webhook_reviews_per_s".into(), load.times.len() as f64 / load.took.as_secs_f64());
    Ok(())
}

/// Measures the paced load while the installation is attacked, after [`measure`].
pub(crate) async fn measure_attacked(story: &Story, endpoint: &Endpoint, figures: &mut Figures) -> Result<()> {
    if !figures.contains_key("webhook_p99_ms") {
        return Ok(());
    }
    let Some(flood) = story.flood("attacker").await? else { return Ok(()) };
    // The attack opens all its connections.
    tokio::time::sleep(ATTACK_BEGINS).await;
    let load = paced(endpoint).await;
    flood.stop()?.check()?;
    let attacked = percentile(&load?.times, 99).context("no review")?;
    figures.insert("webhook_attacked_p99_ms".into(), attacked);
    Ok(())
}

/// Runs the paced load.
async fn paced(endpoint: &Endpoint) -> Result<Load> {
    let mut lanes = connect(endpoint, LANES).await?;
    // Warm up caches and connections.
    rounds(endpoint, &mut lanes, 5).await?;
    rounds(endpoint, &mut lanes, PACED / LANES).await
}

/// A measurement.
struct Load {
    /// Time of each review in milliseconds.
    times: Vec<f64>,
    /// Time from the first request to the last answer.
    took: Duration,
}

/// Opens this many connections, some at a time.
async fn connect(endpoint: &Endpoint, count: usize) -> Result<Vec<Lane<Direct>>> {
    let opened = stream::iter(0..count).map(|_| endpoint.direct()).buffer_unordered(LANES).map_ok(Lane::new);
    timeout(TIMEOUT, opened.try_collect()).await.context("the server did not let us connect in time")?
}

/// Sends `count` reviews on every connection, concurrently.
async fn rounds(endpoint: &Endpoint, lanes: &mut [Lane<Direct>], count: usize) -> Result<Load> {
    let start = Barrier::new(lanes.len());
    let asking = lanes.iter_mut().enumerate().map(|(index, lane)| {
        let start = &start;
        async move {
            let requests: Vec<_> = (0..count).map(|round| request(endpoint, index * count + round)).collect();
            start.wait().await;
            let mut asked = Vec::with_capacity(count);
            for request in requests {
                let sent = Instant::now();
                let answer = lane.exchange(&request).await?;
                asked.push((sent, Instant::now(), answer));
            }
            Ok::<_, anyhow::Error>(asked)
        }
    });
    // Unlike a join of futures, this polls only lanes with data.
    let asking = asking.collect::<FuturesUnordered<_>>().try_collect::<Vec<_>>();
    let asked = timeout(TIMEOUT, asking).await.context("the reviews were not answered in time")??.concat();
    let first = asked.iter().map(|(sent, ..)| *sent).min().context("no review")?;
    let last = asked.iter().map(|(_, answered, _)| *answered).max().context("no review")?;
    // Answers are parsed afterwards, so that the client does not use a core that the server needs.
    for (_, _, answer) in &asked {
        ensure!(answer.status == 200, "HTTP status {}", answer.status);
        let review: Value = serde_json::from_slice(&answer.body)?;
        ensure!(review["response"]["allowed"] == true, "refused: {review}");
    }
    let times = asked.iter().map(|(sent, answered, _)| (*answered - *sent).as_secs_f64() * 1000.0).collect();
    Ok(Load { times, took: last - first })
}

fn request(endpoint: &Endpoint, index: usize) -> Vec<u8> {
    let (path, review) = question(index);
    endpoint.encode_review(path, &review)
}

/// A path and the review for it.
fn question(index: usize) -> (&'static str, String) {
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": format!("vm-{index}"), "namespace": "default", "creationTimestamp": "2026-01-02T03:04:05Z"},
        "spec": {"runStrategy": "Always", "template": {"metadata": {"labels": {"app": "web"}}, "spec": {
            "terminationGracePeriodSeconds": 30,
            "domain": {
                "cpu": {"cores": 2}, "memory": {"guest": "2Gi"}, "resources": {"requests": {"memory": "2Gi"}},
                "devices": {
                    "disks": [
                        {"name": "root", "bootOrder": 1, "disk": {"bus": "virtio"}},
                        {"name": "seed", "disk": {"bus": "virtio"}},
                    ],
                    "interfaces": [{"name": "default", "masquerade": {}, "ports": [{"name": "http", "port": 80}]}],
                    "rng": {},
                },
            },
            "readinessProbe": {"httpGet": {"port": 80}, "periodSeconds": 5},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [
                {"name": "root", "containerDisk": {"image": "registry.example/web:1"}},
                {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config\nhostname: web\npassword: secret\n"}},
            ],
        }}},
    });
    let path = if index.is_multiple_of(2) { "/virtualmachines-mutate" } else { "/virtualmachines-validate" };
    let kind = json!({"group": "kubevirt.io", "version": "v1", "kind": "VirtualMachine"});
    let resource = json!({"group": "kubevirt.io", "version": "v1", "resource": "virtualmachines"});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": format!("6a6b1d6c-0b5e-4c43-9d5c-{index:012x}"),
            "kind": kind, "resource": resource, "requestKind": kind, "requestResource": resource,
            "name": "vm", "namespace": "default", "operation": "CREATE",
            "userInfo": {"username": "jane", "groups": ["system:authenticated"]},
            "object": vm, "oldObject": null, "dryRun": true,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    });
    (path, review.to_string())
}

#[cfg(test)]
mod tests {
    use super::question;

    #[test]
    fn questions_are_of_the_size_told() {
        let size = question(1).1.len();
        assert!((1400..2400).contains(&size), "{size}");
    }
}
