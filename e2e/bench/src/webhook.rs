//! Time of admission reviews.
//!
//! Reviews go to a pod of virt-api as kube-apiserver sends them: from the API server's network namespace to the pod's
//! address, HTTP/1.1 over TLS, one review at a time on a connection, connections kept open. The time of a review is from
//! the start of its sending to the end of its answer; connections are opened before. Load generator and server share the
//! CPUs, and the reviews are creations of a VM of some 1.5 KiB, mutating and validating in turn.
//!
//! Two loads, because they answer two questions:
//!
//! - `webhook_p99_ms`: [`REVIEWS`] reviews over [`LANES`] connections, so [`LANES`] at a time: what a user waits.
//! - `webhook_1000_at_once_p99_ms`: [`REVIEWS`] reviews at the same moment, each on its connection: how long the last of
//!   a flood waits. All reviews but the first wait for others here: with N at once the 99th percentile is the time of the
//!   whole flood, `0.99 * N / webhook_reviews_per_s`. It says how fast the server is, not how long a review takes.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use ferrovirt_e2e_tests::webhook::{Answer, Connection, Endpoint};
use futures::{TryStreamExt, stream::FuturesUnordered};
use serde_json::{Value, json};
use tokio::sync::Barrier;

use crate::Figures;

const REVIEWS: usize = 1000;
/// Connections of the paced load: more than kube-apiserver has busy when several users write.
const LANES: usize = 16;

/// Measures both loads. Without a direct way to the pod (a cluster that is not ours) there are no figures.
pub async fn measure(endpoint: &Endpoint, figures: &mut Figures) -> Result<()> {
    if !endpoint.is_direct() {
        println!("virt-api is reached by forwarded ports only: reviews are not measured");
        return Ok(());
    }
    let mut connections = endpoint.connect_many(LANES).await?;
    // The first answers warm caches and connections, as in a server that has been up for a while.
    rounds(&mut connections, 5).await?;
    let times = rounds(&mut connections, REVIEWS / LANES + 1).await?;
    figures.insert("webhook_p50_ms".into(), percentile(&times, 50).context("no review")?);
    figures.insert("webhook_p99_ms".into(), percentile(&times, 99).context("no review")?);
    drop(connections);

    let mut connections = endpoint.connect_many(REVIEWS).await?;
    rounds(&mut connections, 1).await?;
    let started = Instant::now();
    let times = rounds(&mut connections, 1).await?;
    let took = started.elapsed().as_secs_f64();
    figures.insert("webhook_1000_at_once_p99_ms".into(), percentile(&times, 99).context("no review")?);
    figures.insert("webhook_reviews_per_s".into(), times.len() as f64 / took);
    Ok(())
}

/// Asks `count` times on every connection, all at the same time; the times in milliseconds.
async fn rounds(connections: &mut [Connection], count: usize) -> Result<Vec<f64>> {
    let start = Barrier::new(connections.len());
    let lanes = connections.iter_mut().enumerate().map(|(lane, connection)| {
        let start = &start;
        async move {
            let questions: Vec<_> = (0..count).map(|round| question(lane * count + round)).collect();
            start.wait().await;
            let mut asked = Vec::with_capacity(count);
            for (path, body) in questions {
                let sent = Instant::now();
                let answer = connection.review(path, body).await?;
                asked.push((sent.elapsed().as_secs_f64() * 1000.0, answer));
            }
            Ok::<_, anyhow::Error>(asked)
        }
    });
    // Only lanes that have got something are looked at, unlike in a join of futures.
    let asked: Vec<_> = lanes.collect::<FuturesUnordered<_>>().try_collect().await?;
    // Answers are read when all are there: the server is not to wait for a core that its client reads on.
    let check = |(time, answer): (f64, Answer)| {
        ensure!(answer.status == 200, "HTTP status {}", answer.status);
        let review: Value = serde_json::from_slice(&answer.body)?;
        ensure!(review["response"]["allowed"] == true, "refused: {review}");
        Ok(time)
    };
    asked.into_iter().flatten().map(check).collect()
}

fn question(index: usize) -> (&'static str, Bytes) {
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
    (path, review.to_string().into())
}

/// The value below which so many of a hundred values are (nearest rank).
fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::{percentile, question};

    #[test]
    fn percentile_is_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 99), Some(198.0));
        assert_eq!(percentile(&values, 50), Some(100.0));
        assert_eq!(percentile(&[7.0], 99), Some(7.0));
        assert_eq!(percentile(&[], 99), None);
    }

    #[test]
    fn questions_are_of_the_size_told() {
        let size = question(1).1.len();
        assert!((1400..2400).contains(&size), "{size}");
    }
}
