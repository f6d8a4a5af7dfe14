//! Counters of the runtime.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Counters of the runtime. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    writes: IntCounterVec,
    reconciles: HistogramVec,
    depth: IntGaugeVec,
    events: IntCounterVec,
    leading: IntGauge,
    ready: IntGauge,
    /// Time from the creation of a machine to each of its phases.
    pub phase_from_creation: HistogramVec,
}

/// Buckets of phase transition times, in seconds.
const PHASE_BUCKETS: &[f64] =
    &[0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0];

impl Metrics {
    /// Registers all counters.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            writes: IntCounterVec::new(
                Opts::new("ferrovirt_controller_writes_total", "Writes to the API server by their outcome"),
                &["controller", "verb", "resource", "outcome"],
            )?,
            reconciles: HistogramVec::new(
                HistogramOpts::new("kubevirt_workqueue_work_duration_seconds", "Time taken by decisions")
                    .buckets(vec![0.000_1, 0.001, 0.01, 0.1, 1.0]),
                &["name"],
            )?,
            depth: IntGaugeVec::new(Opts::new("kubevirt_workqueue_depth", "Keys waiting"), &["name"])?,
            events: IntCounterVec::new(
                Opts::new("ferrovirt_controller_events_total", "Events by their outcome"),
                &["outcome"],
            )?,
            leading: IntGauge::new("kubevirt_virt_controller_leading_status", "1 on the replica that leads")?,
            ready: IntGauge::new("kubevirt_virt_controller_ready_status", "1 when the replica is ready")?,
            phase_from_creation: HistogramVec::new(
                HistogramOpts::new(
                    "kubevirt_vmi_phase_transition_time_from_creation_seconds",
                    "Time from the creation of a machine to a phase",
                )
                .buckets(PHASE_BUCKETS.to_vec()),
                &["phase"],
            )?,
        };
        registry.register(Box::new(metrics.writes.clone()))?;
        registry.register(Box::new(metrics.reconciles.clone()))?;
        registry.register(Box::new(metrics.depth.clone()))?;
        registry.register(Box::new(metrics.events.clone()))?;
        registry.register(Box::new(metrics.leading.clone()))?;
        registry.register(Box::new(metrics.ready.clone()))?;
        registry.register(Box::new(metrics.phase_from_creation.clone()))?;
        Ok(metrics)
    }

    pub(super) fn wrote(&self, controller: &str, verb: &str, resource: &str, outcome: &str) {
        self.writes.with_label_values(&[controller, verb, resource, outcome]).inc();
    }

    pub(super) fn reconciled(&self, controller: &str, took: Duration) {
        self.reconciles.with_label_values(&[controller]).observe(took.as_secs_f64());
    }

    pub(super) fn queue_depth(&self, controller: &str, depth: usize) {
        self.depth.with_label_values(&[controller]).set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    pub(super) fn event(&self, outcome: &str) {
        self.events.with_label_values(&[outcome]).inc();
    }

    /// Says whether this replica leads.
    pub fn set_leading(&self, leading: bool) {
        self.leading.set(i64::from(leading));
    }

    /// Whether this replica leads.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        self.leading.get() == 1
    }

    /// Says whether this replica is ready.
    pub fn set_ready(&self, ready: bool) {
        self.ready.set(i64::from(ready));
    }
}
