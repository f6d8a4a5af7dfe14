//! What virt-api counts.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use process::shares::Full;
use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Most machines whose last connection is remembered.
const MAX_LAST_CONNECTIONS: usize = 1024;

/// Kinds of streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamKind {
    /// Serial console.
    Console,
    /// Graphical console.
    Vnc,
    /// USB device of the client.
    UsbRedir,
    /// VSOCK port.
    Vsock,
    /// Port of the guest.
    PortForward,
}

impl StreamKind {
    const ALL: [Self; 5] = [Self::Console, Self::Vnc, Self::UsbRedir, Self::Vsock, Self::PortForward];

    /// A label for metrics and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Console => "console",
            Self::Vnc => "vnc",
            Self::UsbRedir => "usbredir",
            Self::Vsock => "vsock",
            Self::PortForward => "portforward",
        }
    }

    /// Name and help of the gauge of streams open now. Names are the reference system's.
    const fn gauge(self) -> (&'static str, &'static str) {
        match self {
            Self::Console => ("kubevirt_console_active_connections", "Console connections open now"),
            Self::Vnc => ("kubevirt_vnc_active_connections", "VNC connections open now"),
            Self::UsbRedir => ("kubevirt_usbredir_active_connections", "USB redirections open now"),
            Self::Vsock => ("kubevirt_vsock_active_connections", "VSOCK connections open now"),
            Self::PortForward => ("kubevirt_portforward_active_tunnels", "Forwarded connections open now"),
        }
    }
}

type Key = (StreamKind, String, String);

/// Streams open now, and which machine was last connected to when.
#[derive(Default)]
struct Streams {
    open: HashMap<Key, i64>,
    /// Machines with a time of last connection, the one that goes first at the front.
    recent: VecDeque<(String, String)>,
}

/// Counters of this process.
#[derive(Clone)]
pub struct Metrics {
    /// Subresource requests by subresource and status code.
    pub requests: IntCounterVec,
    /// Time until a subresource request was answered; for streams until they were open.
    pub request_seconds: HistogramVec,
    /// Webhook calls by path and outcome.
    pub reviews: IntCounterVec,
    /// Time of webhook calls by path.
    pub review_seconds: HistogramVec,
    /// Whether the process takes requests.
    pub ready: IntGauge,
    open_streams: IntGauge,
    ended_streams: IntCounterVec,
    refused_streams: IntCounterVec,
    active: HashMap<StreamKind, IntGaugeVec>,
    last_connection: GaugeVec,
    streams: Arc<Mutex<Streams>>,
}

impl Metrics {
    /// Registers all of them.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let buckets = || vec![0.001, 0.005, 0.02, 0.1, 0.5, 2.0];
        let machine = ["namespace", "vmi"];
        let mut active = HashMap::new();
        for kind in StreamKind::ALL {
            let (name, help) = kind.gauge();
            active.insert(kind, IntGaugeVec::new(Opts::new(name, help), &machine)?);
        }
        let metrics = Self {
            requests: IntCounterVec::new(
                Opts::new("kubevirt_api_subresource_requests_total", "Subresource requests"),
                &["subresource", "code"],
            )?,
            request_seconds: HistogramVec::new(
                HistogramOpts::new("kubevirt_api_subresource_request_seconds", "Time of subresource requests")
                    .buckets([buckets(), vec![10.0]].concat()),
                &["subresource"],
            )?,
            reviews: IntCounterVec::new(
                Opts::new("kubevirt_api_admission_reviews_total", "Webhook calls"),
                &["path", "outcome"],
            )?,
            review_seconds: HistogramVec::new(
                HistogramOpts::new("kubevirt_api_admission_review_seconds", "Time of webhook calls").buckets(buckets()),
                &["path"],
            )?,
            ready: IntGauge::new("kubevirt_virt_api_ready_status", "1 while virt-api is ready")?,
            open_streams: IntGauge::new("kubevirt_api_open_streams", "Streams open now")?,
            ended_streams: IntCounterVec::new(
                Opts::new("kubevirt_api_ended_streams_total", "Streams that ended"),
                &["kind", "end"],
            )?,
            refused_streams: IntCounterVec::new(
                Opts::new(
                    "kubevirt_api_refused_streams_total",
                    "Streams for which there was no place, by what was full",
                ),
                &["kind", "full"],
            )?,
            active,
            last_connection: GaugeVec::new(
                Opts::new(
                    "kubevirt_vmi_last_api_connection_timestamp_seconds",
                    "When a stream to the machine was last opened",
                ),
                &machine,
            )?,
            streams: Arc::default(),
        };
        registry.register(Box::new(metrics.requests.clone()))?;
        registry.register(Box::new(metrics.request_seconds.clone()))?;
        registry.register(Box::new(metrics.reviews.clone()))?;
        registry.register(Box::new(metrics.review_seconds.clone()))?;
        registry.register(Box::new(metrics.ready.clone()))?;
        registry.register(Box::new(metrics.open_streams.clone()))?;
        registry.register(Box::new(metrics.ended_streams.clone()))?;
        registry.register(Box::new(metrics.refused_streams.clone()))?;
        registry.register(Box::new(metrics.last_connection.clone()))?;
        for gauge in metrics.active.values() {
            registry.register(Box::new(gauge.clone()))?;
        }
        Ok(metrics)
    }

    /// Counts a stream that has been opened, until the returned value is dropped.
    #[must_use]
    pub fn opened(&self, kind: StreamKind, namespace: &str, name: &str) -> OpenStream {
        let key = (kind, namespace.to_owned(), name.to_owned());
        self.open_streams.inc();
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let count = streams.open.entry(key.clone()).or_default();
        *count += 1;
        if let Some(gauge) = self.active.get(&kind) {
            gauge.with_label_values(&[namespace, name]).set(*count);
        }
        let machine = (key.1.clone(), key.2.clone());
        streams.recent.retain(|known| *known != machine);
        if streams.recent.len() >= MAX_LAST_CONNECTIONS
            && let Some((namespace, name)) = streams.recent.pop_front()
        {
            let _ = self.last_connection.remove_label_values(&[&namespace, &name]);
        }
        streams.recent.push_back(machine);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_connection.with_label_values(&[namespace, name]).set(now.as_secs_f64().floor());
        drop(streams);
        OpenStream { metrics: self.clone(), key, end: "aborted" }
    }

    /// There was no place for a stream.
    pub fn refused(&self, kind: StreamKind, full: Full) {
        self.refused_streams.with_label_values(&[kind.label(), full.label()]).inc();
    }

    fn closed(&self, key: &Key, end: &str) {
        let (kind, namespace, name) = key;
        self.open_streams.dec();
        self.ended_streams.with_label_values(&[kind.label(), end]).inc();
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let left = streams.open.get_mut(key).map_or(0, |count| {
            *count -= 1;
            *count
        });
        let Some(gauge) = self.active.get(kind) else { return };
        if left > 0 {
            gauge.with_label_values(&[namespace, name]).set(left);
        } else {
            // Machines come and go; a label that nobody uses is not kept.
            streams.open.remove(key);
            let _ = gauge.remove_label_values(&[namespace, name]);
        }
    }
}

/// A stream that counts as open until this is dropped.
pub struct OpenStream {
    metrics: Metrics,
    key: Key,
    end: &'static str,
}

impl OpenStream {
    /// Says how it ended, and drops it.
    pub fn ended(mut self, end: &'static str) {
        self.end = end;
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.metrics.closed(&self.key, self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(registry: &Registry) -> String {
        String::from_utf8(process::ops::encode(registry).unwrap()).unwrap()
    }

    #[test]
    fn streams_are_counted_by_machine_while_they_are_open() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry).unwrap();
        let first = metrics.opened(StreamKind::Vnc, "ns", "vmi");
        let second = metrics.opened(StreamKind::Vnc, "ns", "vmi");
        let tunnel = metrics.opened(StreamKind::PortForward, "ns", "vmi");
        let open = text(&registry);
        assert!(open.contains(r#"kubevirt_vnc_active_connections{namespace="ns",vmi="vmi"} 2"#), "{open}");
        assert!(open.contains(r#"kubevirt_portforward_active_tunnels{namespace="ns",vmi="vmi"} 1"#));
        assert!(open.contains("kubevirt_api_open_streams 3"));
        assert!(open.contains("kubevirt_virt_api_ready_status 0"));
        assert!(open.contains("kubevirt_vmi_last_api_connection_timestamp_seconds{"));
        first.ended("client_closed");
        drop(second);
        tunnel.ended("guest_closed");
        metrics.refused(StreamKind::Vnc, Full::Share);
        let closed = text(&registry);
        assert!(!closed.contains("kubevirt_vnc_active_connections{"), "{closed}");
        assert!(closed.contains("kubevirt_api_open_streams 0"));
        assert!(closed.contains(r#"kubevirt_api_ended_streams_total{end="client_closed",kind="vnc"} 1"#));
        assert!(closed.contains(r#"kubevirt_api_ended_streams_total{end="aborted",kind="vnc"} 1"#));
        assert!(closed.contains(r#"kubevirt_api_refused_streams_total{full="share",kind="vnc"} 1"#));
    }

    #[test]
    fn machines_of_last_connections_are_bounded() {
        let metrics = Metrics::register(&Registry::new()).unwrap();
        for index in 0..MAX_LAST_CONNECTIONS + 10 {
            drop(metrics.opened(StreamKind::Console, "ns", &index.to_string()));
        }
        let streams = metrics.streams.lock().unwrap();
        assert_eq!((streams.recent.len(), streams.open.len()), (MAX_LAST_CONNECTIONS, 0));
    }
}
