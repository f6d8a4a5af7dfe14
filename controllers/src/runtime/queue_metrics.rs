//! Metrics of the queues of controllers, with the names of the reference.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use daemon::{lock, metrics::Metrics as _};
use prometheus::{
    GaugeVec, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::queue::Queue;
use crate::cache::Key;

/// Prefix of the names of queues. Dashboards use it.
const PREFIX: &str = "virt-controller-";
const LABELS: &[&str] = &["name"];

/// Metrics of queues. Cheap to clone.
#[derive(Clone)]
pub(super) struct QueueMetrics {
    waits: HistogramVec,
    works: HistogramVec,
    queues: Arc<Mutex<Vec<Named>>>,
}

/// A queue and its name in metrics.
struct Named {
    name: String,
    queue: Arc<Queue<Key>>,
}

/// Metrics that are computed from the queues when they are read.
struct Computed {
    queues: Arc<Mutex<Vec<Named>>>,
    depth: IntGaugeVec,
    adds: IntCounterVec,
    retries: IntCounterVec,
    longest: GaugeVec,
    unfinished: GaugeVec,
}

impl QueueMetrics {
    /// Registers the metrics.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let buckets = prometheus::exponential_buckets(1e-8, 10.0, 10)?;
        let histogram = |name: &str, help: &str| registry.histograms(name, help, LABELS, &buckets);
        let queues = Arc::default();
        let metrics = Self {
            waits: histogram("kubevirt_workqueue_queue_duration_seconds", "Time for which keys waited")?,
            works: histogram("kubevirt_workqueue_work_duration_seconds", "Time taken by the work on keys")?,
            queues: Arc::clone(&queues),
        };
        let computed = Computed {
            queues,
            depth: IntGaugeVec::new(Opts::new("kubevirt_workqueue_depth", "Keys waiting"), LABELS)?,
            adds: IntCounterVec::new(Opts::new("kubevirt_workqueue_adds_total", "Keys queued"), LABELS)?,
            retries: IntCounterVec::new(
                Opts::new(
                    "kubevirt_workqueue_retries_total",
                    "Keys queued with a delay, after a failure or for a later time",
                ),
                LABELS,
            )?,
            longest: GaugeVec::new(
                Opts::new(
                    "kubevirt_workqueue_longest_running_processor_seconds",
                    "Time since the start of the work that has lasted longest",
                ),
                LABELS,
            )?,
            unfinished: GaugeVec::new(
                Opts::new(
                    "kubevirt_workqueue_unfinished_work_seconds",
                    "Sum of the times since the start of the work in progress",
                ),
                LABELS,
            )?,
        };
        registry.register(Box::new(computed))?;
        Ok(metrics)
    }

    /// Adds the queue of a controller.
    pub(super) fn add(&self, controller: &str, queue: &Arc<Queue<Key>>) {
        let named = Named { name: name(controller), queue: queue.clone() };
        lock(&self.queues).push(named);
    }

    /// Records how long a key was due.
    pub(super) fn waited(&self, controller: &str, duration: Duration) {
        self.waits.with_label_values(&[name(controller)]).observe(duration.as_secs_f64());
    }

    /// Records how long the work on a key took.
    pub(super) fn worked(&self, controller: &str, duration: Duration) {
        self.works.with_label_values(&[name(controller)]).observe(duration.as_secs_f64());
    }
}

/// Returns the name of the queue of a controller. Some names of the reference are not those of its controllers.
fn name(controller: &str) -> String {
    let name = match controller {
        "vm-snapshot" => "snapshot-vmsnapshot",
        "vm-snapshot-content" => "snapshot-vmsnapshotcontent",
        "restore" => "restore-vmrestore",
        "clone" => "vmclone",
        other => other,
    };
    format!("{PREFIX}{name}")
}

impl Collector for Computed {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(|collector| collector.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // Held to the end: two scrapes at a time must not add to the same counters.
        let queues = lock(&self.queues);
        for Named { name, queue } in queues.iter() {
            let (stats, labels) = (queue.stats(), [name.as_str()]);
            self.depth.with_label_values(&labels).set(i64::try_from(stats.depth).unwrap_or(i64::MAX));
            for (counters, value) in [(&self.adds, stats.adds), (&self.retries, stats.retries)] {
                let counter = counters.with_label_values(&labels);
                counter.inc_by(value.saturating_sub(counter.get()));
            }
            self.longest.with_label_values(&labels).set(stats.longest.as_secs_f64());
            self.unfinished.with_label_values(&labels).set(stats.unfinished.as_secs_f64());
        }
        self.all().into_iter().flat_map(|collector| collector.collect()).collect()
    }
}

impl Computed {
    fn all(&self) -> [&dyn Collector; 5] {
        [&self.depth, &self.adds, &self.retries, &self.longest, &self.unfinished]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_have_the_names_of_the_reference() {
        for (controller, expected) in [
            ("vmi", "virt-controller-vmi"),
            ("replicaset", "virt-controller-replicaset"),
            ("workload-update", "virt-controller-workload-update"),
            ("vm-snapshot", "virt-controller-snapshot-vmsnapshot"),
            ("vm-snapshot-content", "virt-controller-snapshot-vmsnapshotcontent"),
            ("restore", "virt-controller-restore-vmrestore"),
            ("clone", "virt-controller-vmclone"),
        ] {
            assert_eq!(name(controller), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn queues_are_shown_under_the_names_of_their_controllers() {
        let registry = Registry::new();
        let metrics = QueueMetrics::new(&registry).unwrap();
        let queue = Arc::new(Queue::default());
        queue.open();
        metrics.add("vmi", &queue);
        for name in ["a", "b", "a"] {
            queue.add(Key::new("ns", name));
        }
        queue.add_after(Key::new("ns", "c"), Duration::from_secs(60));
        let text = || String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        text();
        tokio::time::advance(Duration::from_secs(5)).await;
        metrics.waited("vmi", queue.next().await.waited);
        metrics.worked("vmi", Duration::from_millis(250));
        tokio::time::advance(Duration::from_secs(3)).await;
        let text = text();
        for (metric, value) in [
            ("kubevirt_workqueue_depth", "1"),
            ("kubevirt_workqueue_adds_total", "2"),
            ("kubevirt_workqueue_retries_total", "1"),
            ("kubevirt_workqueue_longest_running_processor_seconds", "3"),
            ("kubevirt_workqueue_unfinished_work_seconds", "3"),
            ("kubevirt_workqueue_queue_duration_seconds_sum", "5"),
            ("kubevirt_workqueue_work_duration_seconds_sum", "0.25"),
        ] {
            let line = format!(r#"{metric}{{name="virt-controller-vmi"}} {value}"#);
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
    }
}
