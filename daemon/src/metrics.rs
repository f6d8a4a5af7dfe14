//! Metrics that a registry contains as soon as they exist.

use prometheus::{
    Error, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    core::Collector,
};

/// Creates metrics in a registry. Each call fails when the metric is invalid or registered already.
pub trait Metrics {
    /// Registers a metric.
    fn add<C: Collector + Clone + 'static>(&self, metric: Result<C, Error>) -> Result<C, Error>;

    /// Creates a gauge.
    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, Error> {
        self.add(IntGauge::new(name, help))
    }

    /// Creates gauges with these labels.
    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, Error> {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// Creates a counter.
    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, Error> {
        self.add(IntCounter::new(name, help))
    }

    /// Creates counters with these labels.
    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, Error> {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    /// Creates histograms with these labels and buckets.
    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> Result<HistogramVec, Error> {
        self.add(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
    }
}

impl Metrics for Registry {
    fn add<C: Collector + Clone + 'static>(&self, metric: Result<C, Error>) -> Result<C, Error> {
        let metric = metric?;
        self.register(Box::new(metric.clone()))?;
        Ok(metric)
    }
}
