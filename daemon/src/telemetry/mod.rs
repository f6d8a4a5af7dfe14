//! Traces: finished spans of the starts of VMs, and their export by OTLP over gRPC.
//!
//! Start with [`Traces`]. Without `OTEL_EXPORTER_OTLP_ENDPOINT` ([`settings`]) it records nothing. [`export`] sends spans from a
//! bounded queue. A span that finds the queue full, or that the collector does not accept in time, is dropped and counted: a
//! collector that is away delays nothing.

mod export;
mod settings;

use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};

use api::traceparent::TraceParent;
use prometheus::{IntCounterVec, Opts, Registry};
use tokio::sync::mpsc;
use uuid::Uuid;

use self::settings::Settings;
use crate::tasks::Spawner;

/// Spans that wait for export.
const QUEUE: usize = 2048;
/// Longest text of an attribute, in characters.
const TEXT_LIMIT: usize = 256;
/// Longest error message of a span, in characters.
const ERROR_LIMIT: usize = 1024;

/// Outcomes in the metric of spans.
mod outcome {
    /// The collector has accepted the span.
    pub(super) const EXPORTED: &str = "exported";
    /// The queue was full.
    pub(super) const QUEUE_FULL: &str = "queue_full";
    /// The collector did not accept the span.
    pub(super) const REFUSED: &str = "refused";
}

/// A finished span.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The process that the span is about, if it is not the one that records it.
    pub service: Option<&'static str>,
    /// Its name.
    pub name: &'static str,
    /// Its identity.
    pub context: TraceParent,
    /// Its parent; `None` for the first span of a trace.
    pub parent: Option<[u8; 8]>,
    /// Its start.
    pub start: SystemTime,
    /// Its end.
    pub end: SystemTime,
    /// Its attributes.
    pub attributes: Vec<(&'static str, String)>,
    /// The error with which it ended.
    pub error: Option<String>,
}

/// Records spans of sampled traces. Cheap to clone. The default records nothing.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Recorder>>);

struct Recorder {
    queue: mpsc::Sender<Span>,
    ratio: f64,
    spans: IntCounterVec,
}

impl Traces {
    /// Reads the settings of the process, and starts the export if traces are on. `service`: name of the process. Settings that
    /// cannot be used are logged, and traces stay off: VMs start without them.
    ///
    /// # Errors
    /// When the metric of spans is registered already.
    pub fn start(service: &'static str, registry: &Registry, tasks: &Spawner) -> Result<Self, prometheus::Error> {
        match Settings::from_env() {
            Ok(Some(settings)) => Self::export(service, settings, registry, tasks),
            Ok(None) => Ok(Self::default()),
            Err(error) => {
                tracing::error!(%error, "traces are off");
                Ok(Self::default())
            }
        }
    }

    fn export(
        service: &'static str,
        settings: Settings,
        registry: &Registry,
        tasks: &Spawner,
    ) -> Result<Self, prometheus::Error> {
        let spans = spans_total()?;
        registry.register(Box::new(spans.clone()))?;
        let (queue, waiting) = mpsc::channel(QUEUE);
        tracing::info!(endpoint = settings.endpoint, ratio = settings.ratio, "traces are on");
        tasks.spawn("traces", export::run(settings.endpoint, service, waiting, spans.clone()));
        Ok(Self(Some(Arc::new(Recorder { queue, ratio: settings.ratio, spans }))))
    }

    /// Returns traces whose spans are received instead of exported, for tests.
    ///
    /// # Errors
    /// Never: the name of the metric is valid.
    pub fn to_receiver(ratio: f64) -> Result<(Self, mpsc::Receiver<Span>), prometheus::Error> {
        let (queue, waiting) = mpsc::channel(QUEUE);
        Ok((Self(Some(Arc::new(Recorder { queue, ratio, spans: spans_total()? }))), waiting))
    }

    /// Returns true if traces are on.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the first span of a new trace, sampled by the configured share. `None` if traces are off.
    #[must_use]
    pub fn root(&self) -> Option<TraceParent> {
        let recorder = self.0.as_ref()?;
        let trace_id = Uuid::new_v4().into_bytes();
        let [.., a, b, c, d] = trace_id;
        // The end of a UUID is random.
        let share = f64::from(u32::from_be_bytes([a, b, c, d])) / f64::from(u32::MAX);
        let sampled = recorder.ratio >= 1.0 || share < recorder.ratio;
        Some(TraceParent { trace_id, span_id: span_id(), sampled })
    }

    /// Returns the identity of a new span beneath `parent`.
    #[must_use]
    pub fn identity(parent: &TraceParent) -> TraceParent {
        TraceParent { span_id: span_id(), ..*parent }
    }

    /// Opens a span beneath `parent` that begins now. `None` if it would not be exported.
    #[must_use]
    pub fn child(&self, name: &'static str, parent: &TraceParent) -> Option<OpenSpan> {
        self.open(name, Self::identity(parent), Some(parent.span_id))
    }

    /// Opens a span of this identity that begins now. `None` if it would not be exported.
    #[must_use]
    pub fn open(&self, name: &'static str, context: TraceParent, parent: Option<[u8; 8]>) -> Option<OpenSpan> {
        if !context.sampled || !self.is_on() {
            return None;
        }
        let now = SystemTime::now();
        let span =
            Span { service: None, name, context, parent, start: now, end: now, attributes: Vec::new(), error: None };
        Some(OpenSpan { traces: self.clone(), began: Instant::now(), span })
    }

    /// Records a finished span. Never waits.
    pub fn record(&self, span: Span) {
        let Some(recorder) = self.0.as_ref().filter(|_| span.context.sampled) else { return };
        if recorder.queue.try_send(span).is_err() {
            recorder.spans.with_label_values(&[outcome::QUEUE_FULL]).inc();
        }
    }
}

/// A span that has begun. Dropped without an end it is recorded as ended: its task was cancelled.
pub struct OpenSpan {
    traces: Traces,
    began: Instant,
    span: Span,
}

impl OpenSpan {
    /// Returns the identity, for spans beneath it.
    #[must_use]
    pub fn context(&self) -> &TraceParent {
        &self.span.context
    }

    /// Sets an earlier begin.
    #[must_use]
    pub fn began(mut self, began: Instant) -> Self {
        self.span.start = self.span.start.checked_sub(self.began - began).unwrap_or(self.span.start);
        self.began = began;
        self
    }

    /// Adds an attribute. A long text is cut.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl AsRef<str>) -> Self {
        self.set(name, value);
        self
    }

    /// Adds an attribute to a span that has begun.
    pub fn set(&mut self, name: &'static str, value: impl AsRef<str>) {
        self.span.attributes.push((name, cut(value.as_ref(), TEXT_LIMIT)));
    }

    /// Records the error with which the work ended.
    pub fn fail(&mut self, error: impl AsRef<str>) {
        self.span.error = Some(cut(error.as_ref(), ERROR_LIMIT));
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let began = self.span.start;
        // By the clock that is not set, so that a span cannot end before its begin.
        self.span.end = began.checked_add(self.began.elapsed()).unwrap_or(began);
        self.traces.record(self.span.clone());
    }
}

fn span_id() -> [u8; 8] {
    let [.., a, b, c, d, e, f, g, h] = Uuid::new_v4().into_bytes();
    // Never zero: two bits of this half are the variant of the UUID.
    [a, b, c, d, e, f, g, h]
}

fn cut(text: &str, limit: usize) -> String {
    text.chars().take(limit).collect()
}

fn spans_total() -> Result<IntCounterVec, prometheus::Error> {
    let options =
        Opts::new("ferrovirt_trace_spans_total", "Spans of traces by outcome: exported, queue_full or refused");
    IntCounterVec::new(options, &["outcome"])
}

#[cfg(test)]
mod tests;
