//! Metrics of the tasks of VMIs.

use std::time::Duration;

use daemon::metrics::Metrics as _;
use prometheus::{HistogramVec, IntCounter, IntGauge, Registry};

use super::panics::GuestPanics;

/// Metrics of the tasks of VMIs.
#[derive(Clone)]
pub(crate) struct VmiMetrics {
    /// VMIs with a task.
    pub(crate) count: IntGauge,
    /// Panics of tasks.
    pub(crate) panics: IntCounter,
    pub(crate) guest_panics: GuestPanics,
    effects: HistogramVec,
}

impl VmiMetrics {
    /// Registers the metrics.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let count = registry.gauge("ferrovirt_handler_vmis", "VMIs that this virt-handler manages")?;
        let panics = registry.counter("ferrovirt_handler_vmi_panics_total", "Panics in tasks of VMIs")?;
        let buckets = [0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];
        let labels = ["effect", "in_time"];
        let effects =
            registry.histograms("ferrovirt_handler_effect_seconds", "Duration of calls for VMIs", &labels, &buckets)?;
        Ok(Self { count, panics, guest_panics: GuestPanics::new(registry)?, effects })
    }

    /// Counts a call; `in_time` is false if its time limit ended it.
    pub(crate) fn observe_effect(&self, effect: &str, took: Duration, in_time: bool) {
        let in_time = if in_time { "true" } else { "false" };
        self.effects.with_label_values(&[effect, in_time]).observe(took.as_secs_f64());
    }
}
