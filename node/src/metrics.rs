//! What the agent counts.

use process::shares::Full;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// All metrics of the agent.
#[derive(Clone)]
pub struct Metrics {
    /// Where they are registered.
    pub registry: Registry,
    /// Machines with a task.
    pub machines: IntGauge,
    /// Calls that change something, by object and outcome.
    pub writes: IntCounterVec,
    /// Events dropped because too many waited.
    pub events_dropped: IntCounter,
    /// 1 while the agent serves.
    pub ready: IntGauge,
    /// Consoles and displays.
    pub streams: StreamMetrics,
}

impl Metrics {
    /// Registers all metrics.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let machines = IntGauge::new("ferrovirt_handler_machines", "Machines that this agent looks after")?;
        let writes = IntCounterVec::new(
            Opts::new("ferrovirt_handler_writes_total", "Writes to the API server by object and outcome"),
            &["object", "outcome"],
        )?;
        let events_dropped =
            IntCounter::new("ferrovirt_handler_events_dropped_total", "Events dropped because too many waited")?;
        let ready = IntGauge::new("kubevirt_virt_handler_ready_status", "1 while virt-handler is ready")?;
        let info = IntGaugeVec::new(Opts::new("kubevirt_info", "Version of the agent"), &["goversion", "kubeversion"])?;
        // Not written in Go; dashboards join by the other label.
        info.with_label_values(&["", concat!("v", env!("CARGO_PKG_VERSION"))]).set(1);
        registry.register(Box::new(info))?;
        registry.register(Box::new(machines.clone()))?;
        registry.register(Box::new(writes.clone()))?;
        registry.register(Box::new(events_dropped.clone()))?;
        registry.register(Box::new(ready.clone()))?;
        let streams = StreamMetrics::new(&registry)?;
        Ok(Self { registry, machines, writes, events_dropped, ready, streams })
    }
}

/// Kind of a stream.
#[derive(Clone, Copy, Debug)]
pub enum StreamKind {
    /// The serial console.
    Console,
    /// The display.
    Vnc,
    /// A channel for USB redirection.
    UsbRedirection,
    /// A connection to a VSOCK port.
    Vsock,
}

impl StreamKind {
    fn word(self) -> &'static str {
        match self {
            Self::Console => "console",
            Self::Vnc => "vnc",
            Self::UsbRedirection => "usbredir",
            Self::Vsock => "vsock",
        }
    }
}

/// Direction of bytes, as the guest sees it.
#[derive(Clone, Copy, Debug)]
pub enum Direction {
    /// To the guest.
    Input,
    /// From the guest.
    Output,
}

/// What is counted of streams.
#[derive(Clone)]
pub struct StreamMetrics {
    open: IntGaugeVec,
    ended: IntCounterVec,
    refused: IntCounterVec,
    bytes: IntCounterVec,
}

/// A stream that counts as open.
pub struct OpenStream {
    kind: StreamKind,
    metrics: StreamMetrics,
}

impl StreamMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let open = IntGaugeVec::new(Opts::new("ferrovirt_handler_streams", "Open streams"), &["kind"])?;
        let ended = IntCounterVec::new(
            Opts::new("ferrovirt_handler_streams_ended_total", "Streams that have ended, by who ended them"),
            &["kind", "by"],
        )?;
        let refused = IntCounterVec::new(
            Opts::new(
                "ferrovirt_handler_streams_refused_total",
                "Streams for which there was no place, by what was full",
            ),
            &["kind", "full"],
        )?;
        let bytes = IntCounterVec::new(
            Opts::new("ferrovirt_handler_stream_bytes_total", "Bytes passed on by streams"),
            &["kind", "direction"],
        )?;
        registry.register(Box::new(open.clone()))?;
        registry.register(Box::new(ended.clone()))?;
        registry.register(Box::new(refused.clone()))?;
        registry.register(Box::new(bytes.clone()))?;
        Ok(Self { open, ended, refused, bytes })
    }

    /// A stream was opened; it counts until the returned value is dropped.
    #[must_use]
    pub fn open(&self, kind: StreamKind) -> OpenStream {
        self.open.with_label_values(&[kind.word()]).inc();
        OpenStream { kind, metrics: self.clone() }
    }

    /// There was no place for a stream.
    pub fn refuse(&self, kind: StreamKind, full: Full) {
        self.refused.with_label_values(&[kind.word(), full.label()]).inc();
    }

    /// Bytes were passed on.
    pub fn count(&self, kind: StreamKind, direction: Direction, bytes: usize) {
        let direction = match direction {
            Direction::Input => "input",
            Direction::Output => "output",
        };
        self.bytes.with_label_values(&[kind.word(), direction]).inc_by(bytes as u64);
    }
}

#[cfg(test)]
impl StreamMetrics {
    /// Streams of a kind that are open now.
    pub(crate) fn open_now(&self, kind: StreamKind) -> i64 {
        self.open.with_label_values(&[kind.word()]).get()
    }

    /// Streams of a kind that were refused.
    pub(crate) fn refused_so_far(&self, kind: StreamKind, full: Full) -> u64 {
        self.refused.with_label_values(&[kind.word(), full.label()]).get()
    }
}

impl OpenStream {
    /// Says who ended it.
    pub fn end(self, by: &'static str) {
        self.metrics.ended.with_label_values(&[self.kind.word(), by]).inc();
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.metrics.open.with_label_values(&[self.kind.word()]).dec();
    }
}
