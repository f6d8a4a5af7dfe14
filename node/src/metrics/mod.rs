//! Metrics of virt-handler: of its tasks ([`vmis`]), its streams, the channels of migrations ([`migration`]), and of the domains
//! of this node ([`domains`]).

pub(crate) mod domains;
mod migration;
mod panics;
mod vmis;

pub(crate) use self::{
    migration::{MigrationMetrics, OpenChannel},
    vmis::VmiMetrics,
};
use daemon::{metrics::Metrics as _, quota::Exceeded};
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

/// All metrics of virt-handler.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub registry: Registry,
    /// Tasks of VMIs.
    pub vmis: VmiMetrics,
    /// Writes to the API server, by object and outcome.
    pub writes: IntCounterVec,
    /// Events dropped because the queue was full.
    pub events_dropped: IntCounter,
    /// 1 while virt-handler is ready.
    pub ready: IntGauge,
    /// Machine types of the node that a later release of QEMU will not have.
    pub deprecated_machine_types: IntGaugeVec,
    pub streams: StreamMetrics,
    /// Channels of migrations.
    pub migration: MigrationMetrics,
}

impl Metrics {
    /// Registers all metrics.
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let vmis = VmiMetrics::new(&registry)?;
        let writes = registry.counters(
            "ferrovirt_handler_writes_total",
            "Writes to the API server by object and outcome",
            &["object", "outcome"],
        )?;
        let events_dropped =
            registry.counter("ferrovirt_handler_events_dropped_total", "Events dropped because the queue was full")?;
        let ready = registry.gauge("kubevirt_virt_handler_ready_status", "1 while virt-handler is ready")?;
        let info = registry.gauges("kubevirt_info", "Version of virt-handler", &["goversion", "kubeversion"])?;
        // The label goversion is empty: dashboards join by the other one.
        info.with_label_values(&["", concat!("v", env!("CARGO_PKG_VERSION"))]).set(1);
        let deprecated_machine_types = registry.gauges(
            "kubevirt_node_deprecated_machine_types",
            "Machine types of the node that a later release of QEMU will not have",
            &["machine_type", "node"],
        )?;
        let streams = StreamMetrics::new(&registry)?;
        let migration = MigrationMetrics::new(&registry)?;
        Ok(Self { registry, vmis, writes, events_dropped, ready, deprecated_machine_types, streams, migration })
    }
}

/// Kind of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// The serial console.
    Console,
    /// The display.
    Vnc,
    /// A USB redirection channel.
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

/// Direction of bytes, seen from the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Direction {
    /// To the guest.
    Input,
    /// From the guest.
    Output,
}

/// Metrics of streams.
#[derive(Clone)]
pub(crate) struct StreamMetrics {
    open: IntGaugeVec,
    ended: IntCounterVec,
    refused: IntCounterVec,
    bytes: IntCounterVec,
}

/// An open stream. Dropping it ends the count.
pub(crate) struct OpenStream {
    kind: StreamKind,
    metrics: StreamMetrics,
}

impl StreamMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let open = registry.gauges("ferrovirt_handler_streams", "Open streams", &["kind"])?;
        let ended = registry.counters(
            "ferrovirt_handler_streams_ended_total",
            "Streams that ended, by the side that ended them",
            &["kind", "by"],
        )?;
        let refused = registry.counters(
            "ferrovirt_handler_streams_refused_total",
            "Streams refused, by the limit that was reached",
            &["kind", "full"],
        )?;
        let bytes = registry.counters(
            "ferrovirt_handler_stream_bytes_total",
            "Bytes transferred by streams",
            &["kind", "direction"],
        )?;
        Ok(Self { open, ended, refused, bytes })
    }

    /// Counts a stream as open until the returned value is dropped.
    #[must_use]
    pub(crate) fn open(&self, kind: StreamKind) -> OpenStream {
        self.open.with_label_values(&[kind.word()]).inc();
        OpenStream { kind, metrics: self.clone() }
    }

    /// Counts a refused stream.
    pub(crate) fn refuse(&self, kind: StreamKind, full: Exceeded) {
        self.refused.with_label_values(&[kind.word(), full.label()]).inc();
    }

    /// Counts transferred bytes.
    pub(crate) fn count(&self, kind: StreamKind, direction: Direction, bytes: usize) {
        let direction = match direction {
            Direction::Input => "input",
            Direction::Output => "output",
        };
        self.bytes.with_label_values(&[kind.word(), direction]).inc_by(bytes as u64);
    }
}

#[cfg(test)]
impl StreamMetrics {
    pub(crate) fn open_now(&self, kind: StreamKind) -> i64 {
        self.open.with_label_values(&[kind.word()]).get()
    }

    pub(crate) fn refused_so_far(&self, kind: StreamKind, full: Exceeded) -> u64 {
        self.refused.with_label_values(&[kind.word(), full.label()]).get()
    }
}

impl OpenStream {
    /// Counts the end, by the side that ended the stream.
    pub(crate) fn end(self, by: &'static str) {
        self.metrics.ended.with_label_values(&[self.kind.word(), by]).inc();
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.metrics.open.with_label_values(&[self.kind.word()]).dec();
    }
}
