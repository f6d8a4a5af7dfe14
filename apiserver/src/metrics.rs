//! What virt-api counts.

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts, Registry};

/// Counters of this process.
#[derive(Clone)]
pub struct Metrics {
    /// Subresource requests by subresource and status code.
    pub requests: IntCounterVec,
    /// Webhook calls by path and outcome.
    pub reviews: IntCounterVec,
    /// Time of webhook calls by path.
    pub review_seconds: HistogramVec,
    /// Streams open now.
    pub open_streams: IntGauge,
    /// Streams that ended, by kind and how.
    pub ended_streams: IntCounterVec,
}

impl Metrics {
    /// Registers all of them.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            requests: IntCounterVec::new(
                Opts::new("kubevirt_api_subresource_requests_total", "Subresource requests"),
                &["subresource", "code"],
            )?,
            reviews: IntCounterVec::new(
                Opts::new("kubevirt_api_admission_reviews_total", "Webhook calls"),
                &["path", "outcome"],
            )?,
            review_seconds: HistogramVec::new(
                HistogramOpts::new("kubevirt_api_admission_review_seconds", "Time of webhook calls")
                    .buckets(vec![0.001, 0.005, 0.02, 0.1, 0.5, 2.0]),
                &["path"],
            )?,
            open_streams: IntGauge::new("kubevirt_api_open_streams", "Console and VNC streams open now")?,
            ended_streams: IntCounterVec::new(
                Opts::new("kubevirt_api_ended_streams_total", "Console and VNC streams that ended"),
                &["kind", "end"],
            )?,
        };
        registry.register(Box::new(metrics.requests.clone()))?;
        registry.register(Box::new(metrics.reviews.clone()))?;
        registry.register(Box::new(metrics.review_seconds.clone()))?;
        registry.register(Box::new(metrics.open_streams.clone()))?;
        registry.register(Box::new(metrics.ended_streams.clone()))?;
        Ok(metrics)
    }
}
