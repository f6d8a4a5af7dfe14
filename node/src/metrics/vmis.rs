//! Metrics of the tasks of VMIs.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntGauge, Registry};

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
        let count = IntGauge::new("ferrovirt_handler_vmis", "VMIs that this virt-handler manages")?;
        let panics = IntCounter::new("ferrovirt_handler_vmi_panics_total", "Panics in tasks of VMIs")?;
        let buckets = vec![0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];
        let effects = HistogramVec::new(
            HistogramOpts::new("ferrovirt_handler_effect_seconds", "Duration of calls for VMIs").buckets(buckets),
            &["effect", "in_time"],
        )?;
        registry.register(Box::new(count.clone()))?;
        registry.register(Box::new(panics.clone()))?;
        registry.register(Box::new(effects.clone()))?;
        Ok(Self { count, panics, guest_panics: GuestPanics::new(registry)?, effects })
    }

    /// Counts a call; `in_time` is false if its time limit ended it.
    pub(crate) fn observe_effect(&self, effect: &str, took: Duration, in_time: bool) {
        let in_time = if in_time { "true" } else { "false" };
        self.effects.with_label_values(&[effect, in_time]).observe(took.as_secs_f64());
    }
}
