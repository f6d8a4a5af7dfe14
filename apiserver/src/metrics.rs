//! Metrics of virt-api.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};

use daemon::{lock, metrics::Metrics as _, quota::Exceeded};
use prometheus::{GaugeVec, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Most VMIs with a time of their last connection.
const MAX_LAST_CONNECTIONS: usize = 1024;
/// Most namespaces with a number of created VMs.
const MAX_NAMESPACES: usize = 1024;

/// A kind of streams.
#[derive(Debug)]
pub struct StreamKind {
    /// Label in metrics and logs.
    pub label: &'static str,
    /// Name of the gauge of open streams, as in the reference.
    pub gauge: &'static str,
    /// Help of the gauge.
    pub help: &'static str,
}

type Key = (&'static str, String, String);

/// Open streams, and the VMIs with a time of their last connection.
#[derive(Default)]
struct Streams {
    open: HashMap<Key, i64>,
    /// VMIs with a time of their last connection, the oldest first.
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
    /// 1 while the process accepts requests.
    pub ready: IntGauge,
    open_streams: IntGauge,
    ended_streams: IntCounterVec,
    refused_streams: IntCounterVec,
    active: HashMap<&'static str, IntGaugeVec>,
    last_connection: GaugeVec,
    streams: Arc<Mutex<Streams>>,
    created: IntCounterVec,
    /// Namespaces with a number of created VMs, the least recent first.
    namespaces: Arc<Mutex<VecDeque<String>>>,
}

impl Metrics {
    /// Registers all metrics. `streams`: the kinds of streams.
    pub fn register(registry: &Registry, streams: &[&'static StreamKind]) -> Result<Self, prometheus::Error> {
        let buckets = || vec![0.001, 0.005, 0.02, 0.1, 0.5, 2.0];
        let vmi = ["namespace", "vmi"];
        let mut active = HashMap::new();
        for kind in streams {
            active.insert(kind.label, registry.gauges(kind.gauge, kind.help, &vmi)?);
        }
        Ok(Self {
            requests: registry.counters(
                "kubevirt_api_subresource_requests_total",
                "Subresource requests",
                &["subresource", "code"],
            )?,
            request_seconds: registry.histograms(
                "kubevirt_api_subresource_request_seconds",
                "Time of subresource requests",
                &["subresource"],
                &[buckets(), vec![10.0]].concat(),
            )?,
            reviews: registry.counters(
                "kubevirt_api_admission_reviews_total",
                "Webhook calls by outcome: allowed, denied, failed, or refused because of their path",
                &["path", "outcome"],
            )?,
            review_seconds: registry.histograms(
                "kubevirt_api_admission_review_seconds",
                "Time of webhook calls",
                &["path"],
                &buckets(),
            )?,
            ready: registry.gauge("kubevirt_virt_api_ready_status", "1 while virt-api is ready")?,
            open_streams: registry.gauge("kubevirt_api_open_streams", "Streams open now")?,
            ended_streams: registry.counters(
                "kubevirt_api_ended_streams_total",
                "Streams that ended",
                &["kind", "end"],
            )?,
            refused_streams: registry.counters(
                "kubevirt_api_refused_streams_total",
                "Streams that exceeded a quota, by the quota",
                &["kind", "full"],
            )?,
            active,
            last_connection: registry.add(GaugeVec::new(
                Opts::new(
                    "kubevirt_vmi_last_api_connection_timestamp_seconds",
                    "When a stream to the VMI was last opened or closed",
                ),
                &vmi,
            ))?,
            streams: Arc::default(),
            created: registry.counters(
                "kubevirt_vm_created_by_pod_total",
                "VMs whose creation this virt-api allowed; deprecated",
                &["namespace"],
            )?,
            namespaces: Arc::default(),
        })
    }

    /// Counts a stream that has been opened, until the returned value is dropped.
    #[must_use]
    pub fn opened(&self, kind: &'static StreamKind, namespace: &str, name: &str) -> OpenStream {
        let key = (kind.label, namespace.to_owned(), name.to_owned());
        self.open_streams.inc();
        let mut streams = lock(&self.streams);
        let count = streams.open.entry(key.clone()).or_default();
        *count += 1;
        if let Some(gauge) = self.active.get(kind.label) {
            gauge.with_label_values(&[namespace, name]).set(*count);
        }
        self.connected(&mut streams, namespace, name);
        drop(streams);
        OpenStream { metrics: self.clone(), key, end: "aborted" }
    }

    /// Counts a VM whose creation is allowed.
    pub fn vm_created(&self, namespace: &str) {
        let mut namespaces = lock(&self.namespaces);
        namespaces.retain(|known| known != namespace);
        if namespaces.len() >= MAX_NAMESPACES
            && let Some(oldest) = namespaces.pop_front()
        {
            let _ = self.created.remove_label_values(&[oldest]);
        }
        namespaces.push_back(namespace.to_owned());
        self.created.with_label_values(&[namespace]).inc();
    }

    /// Sets the time of the last connection of a VMI.
    fn connected(&self, streams: &mut Streams, namespace: &str, name: &str) {
        let vmi = (namespace.to_owned(), name.to_owned());
        streams.recent.retain(|known| *known != vmi);
        if streams.recent.len() >= MAX_LAST_CONNECTIONS
            && let Some((namespace, name)) = streams.recent.pop_front()
        {
            let _ = self.last_connection.remove_label_values(&[&namespace, &name]);
        }
        streams.recent.push_back(vmi);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_connection.with_label_values(&[namespace, name]).set(now.as_secs_f64().floor());
    }

    /// Counts a stream that exceeded a quota.
    pub fn refused(&self, kind: &StreamKind, exceeded: Exceeded) {
        self.refused_streams.with_label_values(&[kind.label, exceeded.label()]).inc();
    }

    fn closed(&self, key: &Key, end: &str) {
        let (kind, namespace, name) = key;
        self.open_streams.dec();
        self.ended_streams.with_label_values(&[kind, end]).inc();
        let mut streams = lock(&self.streams);
        self.connected(&mut streams, namespace, name);
        let left = streams.open.get_mut(key).map_or(0, |count| {
            *count -= 1;
            *count
        });
        let Some(gauge) = self.active.get(kind) else { return };
        if left > 0 {
            gauge.with_label_values(&[namespace, name]).set(left);
        } else {
            // VMIs are short-lived; labels of closed streams are removed.
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
    /// Drops it, with the way in which it ended.
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

    static VNC: StreamKind = StreamKind { label: "vnc", gauge: "kubevirt_vnc_active_connections", help: "h" };
    static PORT_FORWARD: StreamKind =
        StreamKind { label: "portforward", gauge: "kubevirt_portforward_active_tunnels", help: "h" };

    fn text(registry: &Registry) -> String {
        String::from_utf8(daemon::ops::encode(registry).unwrap()).unwrap()
    }

    #[test]
    fn open_streams_are_counted_by_vmi() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry, &[&VNC, &PORT_FORWARD]).unwrap();
        let first = metrics.opened(&VNC, "ns", "vmi");
        let second = metrics.opened(&VNC, "ns", "vmi");
        let tunnel = metrics.opened(&PORT_FORWARD, "ns", "vmi");
        let open = text(&registry);
        assert!(open.contains(r#"kubevirt_vnc_active_connections{namespace="ns",vmi="vmi"} 2"#), "{open}");
        assert!(open.contains(r#"kubevirt_portforward_active_tunnels{namespace="ns",vmi="vmi"} 1"#));
        assert!(open.contains("kubevirt_api_open_streams 3"));
        assert!(open.contains("kubevirt_virt_api_ready_status 0"));
        assert!(open.contains("kubevirt_vmi_last_api_connection_timestamp_seconds{"));
        first.ended("client_closed");
        drop(second);
        tunnel.ended("guest_closed");
        metrics.refused(&VNC, Exceeded::Holder);
        let closed = text(&registry);
        assert!(!closed.contains("kubevirt_vnc_active_connections{"), "{closed}");
        assert!(closed.contains("kubevirt_api_open_streams 0"));
        assert!(closed.contains(r#"kubevirt_api_ended_streams_total{end="client_closed",kind="vnc"} 1"#));
        assert!(closed.contains(r#"kubevirt_api_ended_streams_total{end="aborted",kind="vnc"} 1"#));
        assert!(closed.contains(r#"kubevirt_api_refused_streams_total{full="share",kind="vnc"} 1"#));
    }

    #[test]
    fn vmis_with_a_last_connection_are_bounded() {
        let metrics = Metrics::register(&Registry::new(), &[&VNC]).unwrap();
        for index in 0..MAX_LAST_CONNECTIONS + 10 {
            drop(metrics.opened(&VNC, "ns", &index.to_string()));
        }
        let streams = metrics.streams.lock().unwrap();
        assert_eq!((streams.recent.len(), streams.open.len()), (MAX_LAST_CONNECTIONS, 0));
    }

    #[test]
    fn last_connection_is_that_of_the_end() {
        let metrics = Metrics::register(&Registry::new(), &[&VNC]).unwrap();
        let stream = metrics.opened(&VNC, "ns", "vmi");
        let at = metrics.last_connection.with_label_values(&["ns", "vmi"]);
        at.set(1.0);
        drop(stream);
        assert!(at.get() > 1.0, "{}", at.get());
    }

    #[test]
    fn created_vms_are_counted_by_namespace_within_a_limit() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry, &[]).unwrap();
        metrics.vm_created("first");
        metrics.vm_created("kept");
        for index in 2..=MAX_NAMESPACES {
            metrics.vm_created("kept");
            metrics.vm_created(&index.to_string());
        }
        let text = text(&registry);
        let line = format!(r#"kubevirt_vm_created_by_pod_total{{namespace="kept"}} {MAX_NAMESPACES}"#);
        assert!(text.lines().any(|known| known == line), "{text}");
        assert!(!text.contains("first"), "{text}");
    }
}
